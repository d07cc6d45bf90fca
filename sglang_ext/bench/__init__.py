"""Command-line measurements against real SGLang servers: ``python -m sglang_ext.bench``."""


class BenchError(Exception):
    """A measurement could not be made; the message says what was wrong and what to do."""
