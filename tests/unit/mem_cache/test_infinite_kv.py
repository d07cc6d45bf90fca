"""Keys and values that are infinite, as of a model that overflows: what is kept, and what packed copies hold of them."""

import pytest
import torch
from packed_helpers import KINDS, frequencies

from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.compressors.compressor import ContextKV, Part
from sglang_ext.mem_cache.compressors.attention_scores import ExpectedAttention, SinkRecent, SnapKV, VerifyGuided

INFINITE = [(kind, sign * float("inf")) for kind in ("keys", "values") for sign in (1, -1)]


def overflown(kind, number):
    """A pool of one layer with one infinite number, of the token in slot 70."""
    noise = torch.Generator().manual_seed(0)
    buffers = KVBuffers((0,), (0.1,), *((torch.randn(400, 1, 64, generator=noise),) for _ in "kv"))
    getattr(buffers, kind)[0][70, 0, 5] = number
    return buffers


@pytest.mark.parametrize(("kind", "number"), INFINITE)
@pytest.mark.parametrize("method", [SnapKV(), VerifyGuided(), SinkRecent(), ExpectedAttention()], ids=lambda m: type(m).__name__)
def test_as_many_tokens_are_kept_as_ever(method, kind, number):
    queries = torch.randn(1, 32, 2, 64, generator=torch.Generator().manual_seed(1))
    where = torch.arange(256), queries, torch.arange(224, 256)
    (kept,) = method.select(ContextKV(overflown(kind, number), *where, Rotary(frequencies(64))), [Part(0, 256, 64)])
    assert len(kept[0, 0].unique()) == 64 and 0 <= int(kept.min()) and int(kept.max()) < 256


@pytest.mark.parametrize(("kind", "number"), INFINITE)
@pytest.mark.parametrize(("name", "bits"), KINDS)
def test_packed_copies_hold_the_largest_float16_instead(name, bits, kind, number):
    buffers = overflown(kind, number)
    packing = Packing.for_pool(quantizer(name, bits), buffers, 1, Rotary(frequencies(64)))
    slots, packed = torch.arange(256, 256 + packing.held_slots(128)), packing.packed_slots(128)
    packing.write(buffers, torch.arange(128).expand(1, 1, -1), torch.arange(128), slots)
    row = torch.cat([slots[:packed], torch.arange(128, 140)])
    queries = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(2))
    found = packed_attention(packing, queries, buffers.keys[0], buffers.values[0], row, packed, 0.1)
    assert found.isfinite().all() and float(found.abs().max()) < 4 * 65504
