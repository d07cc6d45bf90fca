"""KV cache compressors by family, their interfaces (compressor.py, quantizer.py), their table (registry.py), and the catalogue that reads it
(catalogue.py).

This module exports what a user's own method needs.
"""

from sglang_ext.mem_cache.compressors.compressor import Always, Compressor, ContextKV, LayerKV, Part, kept_count, top_positions
from sglang_ext.mem_cache.compressors.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.registry import register, register_quantizer

__all__ = [
    "Always", "Compressor", "ContextKV", "LayerKV", "Part", "Quantizer", "kept_count", "register", "register_quantizer", "top_positions",
]  # fmt: skip
