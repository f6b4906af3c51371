"""Compress, lower, measure and gate transformer language models by recipe."""
