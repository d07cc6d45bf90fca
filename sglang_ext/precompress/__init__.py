"""Scores of documents' tokens, computed ahead of the requests that begin with them: ``python -m sglang_ext.precompress``."""


class PrecompressError(ValueError):
    """Scores cannot be computed: says what was given, what is allowed, and the remedy."""
