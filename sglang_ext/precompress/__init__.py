"""Computes scores of documents' tokens ahead of the requests that begin with them: ``python -m sglang_ext.precompress``."""
