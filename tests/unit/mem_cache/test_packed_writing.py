"""How packed copies are written: in pieces, and once before the first request comes."""

from dataclasses import dataclass, field, fields, replace

import pytest
import torch
from test_packed_views import DIM, HEADS, views_of

from sglang_ext.core import RequestState
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.block_layout import as_bytes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import WRITTEN_TOKENS, Packing
from sglang_ext.mem_cache.compressors.catalogue import method


@pytest.mark.parametrize("name", ["kivi", "hack"])
def test_long_contexts_are_packed_in_pieces_to_the_same_bytes(name):
    tokens, quantizer, noise = WRITTEN_TOKENS + 640, method(name).quantizer, torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2 * tokens, 1, DIM, generator=noise) for _ in "kv")
    made = [KVBuffers((0,), (0.125,), (keys.clone(),), (values.clone(),)) for _ in range(2)]
    packing = Packing.for_pool(quantizer, made[0], 1)
    kept, sources, seeds = torch.arange(tokens)[None, None], torch.arange(tokens), torch.arange(tokens, dtype=torch.int32)
    targets, seeds = tokens + torch.arange(packing.held_slots(tokens)), seeds if packing.stochastic else None
    packing.write(made[0], kept, sources, targets, seeds)
    for start in range(0, tokens, 640):
        piece = slice(packing.packed_slots(start), packing.packed_slots(min(start + 640, tokens)))
        packing.write(made[1], kept[..., start : start + 640], sources, targets[piece], seeds)
    for found, expected, before in zip((*made[0].keys, *made[0].values), (*made[1].keys, *made[1].values), (keys, values)):
        assert torch.equal(as_bytes(found), as_bytes(expected)) and not torch.equal(as_bytes(found), as_bytes(before))


@dataclass(frozen=True)
class CountedPacking(Packing):
    """A packing that counts its writes."""

    writes: list = field(default_factory=list)

    def write(self, *args):
        self.writes.append(args)
        super().write(*args)


def test_what_runs_before_the_first_request_writes_to_nobodys_slot():
    for name in ("kivi", "snapkv+int8", "hack"):
        compressed_kv = views_of(name)
        (chosen,) = compressed_kv.methods
        packing = CountedPacking(*(getattr(chosen.packing, each.name) for each in fields(Packing)))
        compressed_kv.methods = (replace(chosen, packing=packing),)
        before = compressed_kv.buffers.keys[0].clone()
        compressed_kv.compile_kernels(query_heads=2 * HEADS)
        assert len(packing.writes) == 1 and torch.equal(compressed_kv.buffers.keys[0][1:], before[1:])
        assert not torch.equal(as_bytes(compressed_kv.buffers.keys[0][0]), as_bytes(before[0]))


def blocks_of(prompt, *lengths):
    """Codes of keys and of values in the copy of a request with such a prompt, which is renewed as the context grows."""
    compressed_kv = views_of("hack")
    compressed_kv.state_of = lambda row: RequestState("", row, 0, prompt=prompt)
    for length in lengths:
        assert compressed_kv.compress(1, length)
    view, packing = compressed_kv.get(1), compressed_kv.methods[0].packing
    kinds = (compressed_kv.buffers.keys[0], packing.keys), (compressed_kv.buffers.values[0], packing.values)
    return [packing.read(kind, layout, view.slots[: view.num_packed_slots]).codes for kind, layout in kinds]


def test_codes_that_are_drawn_follow_from_the_prompt_whenever_and_wherever_they_are():
    prompt = list(range(640))
    expected = blocks_of(prompt, 600)
    for again in (blocks_of(prompt, 600), blocks_of(prompt, 300, 420, 600)):
        assert all(map(torch.equal, again, expected))
    other = blocks_of([1, *prompt], 600)
    # Mostly numbers lie nearer to one of two codes.
    assert all(0.1 < float((found != codes).float().mean()) < 0.5 for found, codes in zip(other, expected))
    # Of the fifth block the last four tokens are of the next page.
    for beginning in (blocks_of(prompt[:320], 600), blocks_of(prompt[:320] + [7] * 320, 600)):
        for found, codes in zip(beginning, expected):
            assert torch.equal(found[:, :4], codes[:, :4]) and not torch.equal(found[:, 5:], codes[:, 5:])
