"""sglang-ext: serve SGLang from a compressed KV cache without changing its answers."""

__version__ = "0.1.0"
