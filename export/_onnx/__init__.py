"""What the runtimes that lower to ONNX share: building a graph, and one graph of standard operators alone."""
