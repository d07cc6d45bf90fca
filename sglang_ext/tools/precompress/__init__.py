"""Scores the tokens of documents in advance: ``python -m sglang_ext.precompress``."""
