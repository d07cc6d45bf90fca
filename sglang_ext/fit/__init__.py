"""Networks that belong to a compressor, fitted to a model: ``python -m sglang_ext.fit``."""


class FitError(ValueError):
    """Nothing can be fitted: says what was given, what is allowed, and the remedy."""
