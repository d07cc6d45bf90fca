"""KV cache compressors: one file a method, one catalogue of them (catalogue.py); contracts/ has an interface for those that drop
tokens, and one for those that pack them in few bits. What a method of one's own needs is named here."""

from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV, Part, best, kept_count
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.contracts.registry import register, register_quantizer

__all__ = [
    *("Always", "Compressor", "ContextKV", "LayerKV", "Part", "Quantizer"),
    *("best", "kept_count", "register", "register_quantizer"),
]
