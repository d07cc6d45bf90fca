"""Scores the tokens of documents ahead: ``python -m sglang_ext.precompress``."""
