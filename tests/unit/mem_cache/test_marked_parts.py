"""Parts of layers in which tokens are marked while others are read: whose memory is taken when, and what waits for whom."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.device import SideStream
from sglang_ext.layers.kernels import row_exchange, select_tokens
from sglang_ext.layers.kernels.select_tokens import SelectionContexts
from sglang_ext.managers.cache_rank import mapped_exchange_buffer
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import BufferShape
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection import on_gpu
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector, MarkedPart, shares

LAYERS = 12


@pytest.fixture
def log(monkeypatch):
    """What was launched, and what the current stream waited for, in turn."""
    found = []

    def mark(queries, key_table, like, scalings, contexts, layers, requests, coded):
        found.append(("mark", layers.start, layers.stop))
        return f"marks of {layers.start}"

    monkeypatch.setattr(select_tokens, "mark_tokens", mark)
    monkeypatch.setattr(select_tokens, "scratch_bytes", lambda *sizes: 1)
    monkeypatch.setattr(SideStream, "wait", staticmethod(lambda event: found.append(("wait", event))))
    # In the place of a device, what is read of it.
    monkeypatch.setattr(on_gpu, "current_event", lambda told: told)
    return found


def parts(scratch, beside):
    """Of a choice in all layers for one request, in so much memory, of which a layer takes 1."""
    keys = tuple(torch.zeros(8, 1, 4) for _ in range(LAYERS))
    predictor = SimpleNamespace(head_bytes=lambda dim: 0.01, predict=lambda queries, positions, rotary, ahead: queries)
    choice = GpuSelector(predictor, KVBuffers(tuple(range(LAYERS)), (1.0,) * LAYERS, keys, keys), 1, None, scratch)
    contexts, queries = SelectionContexts(torch.zeros(1, 8), torch.zeros(1, 4), (8,), (0, 0)), torch.zeros(1, LAYERS, 1, 4)
    return choice.marked(contexts, lambda requests, layers: queries[requests, layers], torch.zeros(1, 1), beside=beside)


def test_memory_of_a_part_is_taken_again_once_it_was_read_and_no_more_than_two_are_there(log):
    held = []
    for part in parts(100, beside=True):
        log.append(("read", part.layers.start))
        assert part.marked == f"marks of {part.layers.start}"
        part.there = "told"
        part.was_read(f"read of {part.layers.start}")
        held.append(part)
        assert sum(each.marked is not None for each in held) <= 2
    # Told once the next one was launched; the third takes memory of the first.
    assert log == [
        ("mark", 0, 6), ("mark", 6, 9), ("read", 0), ("wait", "read of 0"), ("mark", 9, 11), ("read", 6), ("wait", "read of 6"),
        ("mark", 11, 12), ("read", 9), ("read", 11),
    ]  # fmt: skip


def test_parts_take_as_much_together_as_one_does_alone(log):
    for beside, most in ((False, 4), (True, 2)):
        sizes = [part.layers.stop - part.layers.start for part in parts(4, beside)]
        assert sum(sizes) == LAYERS and max(sizes) == most, (beside, sizes)


def test_where_nothing_is_read_beside_it_a_part_is_read_before_the_next_one_takes_its_memory(log):
    for part in parts(4, beside=False):
        log.append(("read", part.layers.start))
    assert log == [
        ("mark", 0, 4), ("read", 0), ("wait", None), ("mark", 4, 8), ("read", 4), ("wait", None), ("mark", 8, 12), ("read", 8),
    ]  # fmt: skip


def test_a_single_part_is_read_too(log):
    assert [(part.layers.start, part.layers.stop) for part in parts(1000, beside=False)] == [(0, LAYERS)]


def test_finer_shares_have_half_of_the_layers_that_are_left_at_most():
    for layers, pairs in ((6, 100), (36, 7), (1, 1), (5, 2)):
        found = [each for each, _ in shares(layers, 1, pairs, finer=True)]
        assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])] and found[-1].stop == layers
        assert all(each.stop - each.start <= max(1, -(-(layers - each.start) // 2)) for each in found)


class Logged:
    """A stream that notes what is launched in it."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    @contextmanager
    def after(self, reached):
        """As SideStream's."""
        self._log.append((self.name, "after", reached))
        yield
        self._log.append((self.name, "end"))

    def join(self):
        """As SideStream's."""
        self._log.append((self.name, "join"))


def test_rows_are_found_once_they_are_marked_and_sent_once_they_are_found_and_all_is_waited_for(monkeypatch):
    log, shape = [], BufferShape(2, 2, 1, 8, "float32", 1, lanes=1, most=4, places=1, rows=True, fresh=2)
    monkeypatch.setattr(mapped_exchange_buffer, "open_ipc_handle", lambda handle, device: 0)
    arena = MappedExchangeBuffer(shape, torch.device("cpu"), b"", None)
    monkeypatch.setattr(on_gpu, "current_event", lambda device: f"event {len(log)}")
    monkeypatch.setattr(row_exchange, "exchange", lambda marked, records, most, fresh: log.append(("find", marked, most, fresh)) or marked)
    monkeypatch.setattr(row_exchange, "push_rows", lambda *given: log.append(("send", given[2], *given[-2:])))
    held = SimpleNamespace(key_table=None, value_table=None, keys=[None])
    given = [MarkedPart(slice(0, 1), slice(0, 1), "first", "there 0"), MarkedPart(slice(1, 2), slice(0, 1), "second", "there 1")]
    arena.push_rows(None, None, iter(given), torch.zeros(1, 2 * 4), held, (Logged("finding", log), Logged("sending", log)))
    assert log == [
        ("finding", "after", "there 0"), ("find", "first", 4, 2), ("finding", "end"),
        ("sending", "after", given[0].read), ("send", "first", 0, 0), ("sending", "end"),
        ("finding", "after", "there 1"), ("find", "second", 4, 2), ("finding", "end"),
        ("sending", "after", given[1].read), ("send", "second", 1, 0), ("sending", "end"),
        ("finding", "join"), ("sending", "join"),
    ]  # fmt: skip
    assert given[0].read == "event 2" and given[1].read == "event 8"
