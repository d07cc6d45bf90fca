"""KV cache compressors: one file a method, one interface (base.py)."""

from sglang_ext.mem_cache.compressors import expected_attention, kvzap, kvzip, sink_recent, snapkv  # noqa: F401  (they register)
from sglang_ext.mem_cache.compressors.base import Compressor, ContextKV, LayerKV, Part, best, create, kept_count, names

__all__ = ["Compressor", "ContextKV", "LayerKV", "Part", "best", "create", "kept_count", "names"]
