"""Fits the predictor of KVzap to a model: ``python -m sglang_ext.fit``."""


class FitError(ValueError):
    """Nothing can be fitted. The message says what was given, the allowed values, and the remedy."""
