"""Runtimes that a recipe can lower to: one module each."""
