"""Fits the predictor of KVzap to a model: ``python -m sglang_ext.fit``."""
