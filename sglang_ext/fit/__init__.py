"""Fits the network of a compressor to a model: ``python -m sglang_ext.fit``."""
