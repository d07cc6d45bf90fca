"""KV cache compressors: one file a method, one interface for those that drop tokens (base.py), one for those that pack them
in few bits (quantizer.py)."""

from sglang_ext.mem_cache.compressors import (  # noqa: F401  (they register)
    expected_attention,
    kivi,
    kvquant,
    kvzap,
    kvzip,
    plain_int,
    rotatekv,
    sink_recent,
    snapkv,
    turboquant,
    verify_guided,
)
from sglang_ext.mem_cache.compressors.base import Compressor, ContextKV, LayerKV, Part, best, create, kept_count, names
from sglang_ext.mem_cache.compressors.method import Method, method
from sglang_ext.mem_cache.compressors.quantizer import Quantizer, quantizer, quantizers

__all__ = [
    *("Compressor", "ContextKV", "LayerKV", "Method", "Part", "Quantizer"),
    *("best", "create", "kept_count", "method", "names", "quantizer", "quantizers"),
]
