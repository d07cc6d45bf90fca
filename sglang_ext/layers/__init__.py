"""Attention over views of the KV cache."""
