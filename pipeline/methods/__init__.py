"""Compression stages that a recipe can name: one module each."""
