"""Metrics that a recipe can name: one module each."""
