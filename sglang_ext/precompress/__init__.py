"""Computes scores of documents' tokens ahead of the requests that begin with them: ``python -m sglang_ext.precompress``."""


class PrecompressError(ValueError):
    """Scores cannot be computed. The message says what was given, the allowed values, and the remedy."""
