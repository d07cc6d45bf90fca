"""Command-line measurements against real SGLang servers: ``python -m sglang_ext.bench``."""

ROLES = ("prefill", "decode")
"""Of servers that prompts and answers are computed on apart."""


class BenchError(Exception):
    """A measurement could not be made; the message says what was wrong and what to do."""
