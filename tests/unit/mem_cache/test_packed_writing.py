"""How packed copies are written: in pieces, and once before the first request comes."""

import pytest
import torch
from test_packed_views import HEADS, views_of

from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import as_bytes


@pytest.mark.parametrize(("name", "covered"), [("kivi", 452), ("hack", 580)])
def test_long_contexts_are_packed_in_pieces_to_the_same_bytes(name, covered, monkeypatch):
    whole = views_of(name)
    whole.compress(1, 600)
    monkeypatch.setattr("sglang_ext.mem_cache.compressed.layouts.quantized_blocks.WRITTEN_TOKENS", 128)
    pieces = views_of(name)
    assert pieces.compress(1, 600) and pieces.get(1).covered == covered
    for found, expected in zip((*pieces.buffers.keys, *pieces.buffers.values), (*whole.buffers.keys, *whole.buffers.values)):
        assert torch.equal(as_bytes(found), as_bytes(expected))


def test_what_runs_before_the_first_request_writes_to_nobodys_slot(monkeypatch):
    for name in ("kivi", "snapkv+int8", "hack"):
        compressed_kv, ran = views_of(name), []
        monkeypatch.setattr(Packing, "write", lambda self, *args, write=Packing.write: ran.append(self) or write(self, *args))
        before = compressed_kv.buffers.keys[0].clone()
        compressed_kv.compile_kernels(query_heads=2 * HEADS)
        assert ran == [compressed_kv.methods[0].packing] and torch.equal(compressed_kv.buffers.keys[0][1:], before[1:])
        assert not torch.equal(as_bytes(compressed_kv.buffers.keys[0][0]), as_bytes(before[0]))
        monkeypatch.undo()


def blocks_of(prompt, *lengths):
    """Codes of keys and of values in the copy of a request with such a prompt, which is renewed as the context grows."""
    compressed_kv = views_of("hack")
    compressed_kv.prompt_of = {1: prompt}.get
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
