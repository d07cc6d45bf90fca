"""Scores the tokens of documents in advance: ``python -m sglang_ext.precompress``."""


class PrecompressError(ValueError):
    """Scores cannot be computed. The message says what was given, the allowed values, and the remedy."""
