"""Token batches from text, and layer-by-layer capture of activations."""
