"""How packed copies are written: in pieces, and once before the first request comes."""

import torch
from test_packed_views import HEADS, views_of

from sglang_ext.mem_cache.compressed.formats.packing import Packing, as_bytes


def test_long_contexts_are_packed_in_pieces_to_the_same_bytes(monkeypatch):
    whole = views_of("kivi")
    whole.compress(1, 600)
    monkeypatch.setattr("sglang_ext.mem_cache.compressed.formats.packing.WRITTEN_TOKENS", 128)
    pieces = views_of("kivi")
    assert pieces.compress(1, 600) and pieces.get(1).covered == 452
    for found, expected in zip((*pieces.buffers.keys, *pieces.buffers.values), (*whole.buffers.keys, *whole.buffers.values)):
        assert torch.equal(as_bytes(found), as_bytes(expected))


def test_what_runs_before_the_first_request_writes_to_nobodys_slot(monkeypatch):
    for name in ("kivi", "snapkv+int8"):
        views, ran = views_of(name), []
        monkeypatch.setattr(Packing, "write", lambda self, *args, write=Packing.write: ran.append(self) or write(self, *args))
        before = views.buffers.keys[0].clone()
        views.compile_kernels(query_heads=2 * HEADS)
        assert ran == [views.methods[0].packing] and torch.equal(views.buffers.keys[0][1:], before[1:])
        assert not torch.equal(as_bytes(views.buffers.keys[0][0]), as_bytes(before[0]))
        monkeypatch.undo()
