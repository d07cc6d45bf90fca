"""Compressed KV stores the selected tokens in slots of the pool, and frees each slot."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sglang_ext.core import RequestState
from sglang_ext.hooks.rounds import free_compressed_kv_when_full
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows, cap_prefix_match, record_queries, reserve_queries
from sglang_ext.mem_cache.compressors.catalogue import create
from sglang_ext.mem_cache.compressors.kvzip import KVzip

SLOTS, HEADS, DIM, LAYERS = 400, 2, 4, 2


class Allocator:
    """Whole pages from a free list."""

    def __init__(self, page_size):
        self.page_size, self.free_slots = page_size, list(range(200, SLOTS))

    def available_size(self):
        return len(self.free_slots)

    def alloc(self, count):
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots):
        self.free_slots += slots.tolist()


class Tree:
    """A prefix tree with nothing to evict."""

    residency = freed_full_kv = None

    def __init__(self, allocator):
        self.token_to_kv_pool_allocator, self.segments = allocator, SimpleNamespace(held_tokens=0)

    def evictable_size(self):
        return 0

    def is_chunk_cache(self):
        return False


def windows_of(window, layers, spare, rings=4, heads=1, dim=1, **more):
    """Room for the queries of so many requests."""
    windows = QueryWindows(window, layers, spare, **more)
    windows.allocate(rings, heads, dim, torch.empty(0))
    return windows


def make_views(page_size=1, budget=0.25, name="sink-recent", compressor=None):
    """Views of requests in a pool of two layers; ``compressor`` in the place of the one called ``name``."""
    generator = torch.Generator().manual_seed(0)
    buffers = {
        kind: [torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(LAYERS)] for kind in "kv"
    }
    pool = SimpleNamespace(
        get_key_buffer=lambda layer: buffers["k"][layer], get_value_buffer=lambda layer: buffers["v"][layer]
    )
    allocator, table = Allocator(page_size), torch.zeros(8, 300, dtype=torch.int32)
    table[1, :200] = torch.randperm(200, generator=generator)
    layers = {layer: 0.5 for layer in range(LAYERS)}
    windows = windows_of(create(name).window, range(LAYERS), 4, heads=HEADS, dim=DIM)
    kv = KVBuffers.from_pool(pool, layers)
    method = CompressionMethod(compressor or create(name), budget, PlainSlots(page_size))
    return CompressedKVCache(
        methods=(method,), token_table=table, rows=4, buffers=kv, allocator=allocator, tree_cache=Tree(allocator), queries=windows
    )


def test_the_copy_holds_the_kept_tokens_of_each_layer_and_the_draft_row_leads_to_them():
    compressed_kv = make_views()
    assert compressed_kv.compress(1, 100)
    kept = [0, 1, 2, 3, *range(79, 100)]
    source, copy = compressed_kv.token_table[1, kept].long(), compressed_kv.token_table[5, :25].long()
    for layer in range(LAYERS):
        keys = compressed_kv.buffers.keys[layer]
        assert torch.equal(keys[copy], keys[source])
    compressed_kv.write_tail(1, 110)
    assert torch.equal(compressed_kv.token_table[5, 25:35], compressed_kv.token_table[1, 100:110])


def test_the_copy_of_a_prompt_that_begins_with_a_document_keeps_what_its_scores_say():
    prompt = list(range(200))
    wanted = torch.zeros(LAYERS, HEADS, 100).half()
    wanted[..., 30:55] = 1.0
    index = SimpleNamespace(match=lambda tokens: wanted if len(tokens) == 100 else None)
    compressed_kv = make_views(compressor=KVzip(create("sink-recent"), index))
    compressed_kv.state_of = {1: RequestState("1", 1, 0, prompt=prompt), 2: RequestState("2", 2, 0)}.__getitem__
    compressed_kv.token_table[2, :100] = compressed_kv.token_table[1, :100]
    assert compressed_kv.compress(1, 100) and compressed_kv.compress(2, 100)
    assert torch.equal(compressed_kv.buffers.keys[0][compressed_kv.get(1).own], compressed_kv.buffers.keys[0][compressed_kv.token_table[1, 30:55].long()])
    assert [compressed_kv.get(row).method for row in (1, 2)] == ["kvzip", "sink-recent"]
    assert compressed_kv.num_compressions == {"kvzip": 1, "sink-recent": 1}


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["write", "noted", "renew", "skip"])), max_size=15))
@settings(max_examples=30, deadline=None)
def test_the_draft_row_leads_to_the_copy_and_then_to_all_tokens_after_it(steps):
    compressed_kv, length = make_views(), 100
    compressed_kv.compress(1, length)
    for tokens, what in steps:
        length = min(199, length + tokens)
        view = compressed_kv.get(1)
        if what == "renew":
            compressed_kv.compress(1, length)
            view = compressed_kv.get(1)
        elif what == "noted":
            compressed_kv.write_tail(1, length - tokens)
            shift = view.num_slots - view.covered
            compressed_kv.token_table[5, length - tokens + shift : length + shift] = compressed_kv.token_table[1, length - tokens : length]
            compressed_kv.mark_tail_written(1, length)
        if what == "skip":
            continue
        compressed_kv.write_tail(1, length)
        row = torch.cat([view.slots, compressed_kv.token_table[1, view.covered : length].long()])
        assert torch.equal(compressed_kv.token_table[5, : len(row)].long(), row)


@given(st.lists(st.tuples(st.integers(10, 200), st.booleans()), max_size=12), st.sampled_from([1, 16]))
@settings(max_examples=30, deadline=None)
def test_slots_are_conserved_over_growing_renewing_and_releasing(steps, page_size):
    compressed_kv = make_views(page_size)
    before = compressed_kv.allocator.available_size()
    for tokens, release in steps:
        compressed_kv.compress(1, tokens)
        held = compressed_kv.get(1).num_slots if compressed_kv.get(1) else 0
        assert held % page_size == 0 and compressed_kv.owned_slot_count == held
        assert compressed_kv.allocator.available_size() == before - held
        if release:
            compressed_kv.release(1)
    compressed_kv.release(1)
    assert compressed_kv.allocator.available_size() == before and compressed_kv.owned_slot_count == 0


def test_a_full_pool_refuses_and_keeps_the_old_copy():
    compressed_kv = make_views()
    compressed_kv.compress(1, 40)
    old = compressed_kv.get(1)
    assert not compressed_kv.compress(1, 200, headroom=SLOTS)
    assert compressed_kv.get(1) is old


def test_held_bytes_count_keys_and_values_of_all_layers():
    compressed_kv = make_views()
    compressed_kv.compress(1, 100)
    assert compressed_kv.held_bytes() == 25 * HEADS * DIM * 4 * 2 * LAYERS


def test_copies_go_before_a_request_is_retracted(monkeypatch):
    monkeypatch.setattr("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", lambda args: 0)
    compressed_kv = make_views()
    compressed_kv.compress(1, 100)
    batch = SimpleNamespace(tree_cache=SimpleNamespace(compressed_kv=compressed_kv, residency=None, early=None, freed_full_kv=None), reqs=[])
    assert free_compressed_kv_when_full(lambda b, i: compressed_kv.owned_slot_count == 0, batch)
    assert compressed_kv.get(1) is None
    assert not free_compressed_kv_when_full(lambda b, i: False, batch)


@pytest.mark.parametrize("offloads", [False, True])
def test_where_full_kv_leaves_the_device_the_scheduler_looks_for_room_in_each_iteration(offloads, monkeypatch):
    monkeypatch.setattr("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", lambda args: 0)
    residency = SimpleNamespace(is_lost=lambda row: False) if offloads else None
    tree_cache = SimpleNamespace(compressed_kv=make_views(), residency=residency, early=None, freed_full_kv=None)
    batch = SimpleNamespace(tree_cache=tree_cache, batch_is_full=True, reqs=[])
    assert free_compressed_kv_when_full(lambda b, i: True, batch)
    assert batch.batch_is_full == (not offloads)


def run_layer(queries, layer_id=0, heads=1, dim=1):
    layer = SimpleNamespace(layer_id=layer_id, tp_q_head_num=heads, qk_head_dim=dim)
    record_queries(lambda *args, **kwargs: None, None, queries, None, None, layer, None)


def kept(windows, key, end):
    found = windows.get(key, end, windows.window)
    return found and (found[0].flatten().tolist(), found[1].tolist())


def test_windows_keep_the_newest_queries_of_each_request_across_chunks():
    windows = windows_of(3, (0,), spare=2)
    for start in (0, 2, 4):
        rows = (RecordedRows(1, 0, 2, start), RecordedRows(2, 2, 3, start // 2))
        with windows.recording(rows):
            run_layer(torch.tensor([[start], [start + 1], [90 + start]], dtype=torch.float32))
    assert kept(windows, 1, 6) == ([3, 4, 5], [3, 4, 5])
    assert kept(windows, 2, 3) == ([90, 92, 94], [0, 1, 2])
    windows.forget(1)
    assert kept(windows, 1, 6) is None and kept(windows, 2, 3) is not None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_queries_of_rejected_drafts_are_never_seen(data):
    windows, exact, length = windows_of(3, (0,), spare=4), [], 0
    for _ in range(data.draw(st.integers(1, 8))):
        drafted = data.draw(st.integers(1, 4))
        kept_tokens = data.draw(st.integers(1, drafted))
        values = [length * 10 + i + data.draw(st.integers(0, 5)) for i in range(drafted)]
        with windows.recording((RecordedRows(1, 0, drafted, length),)):
            run_layer(torch.tensor(values, dtype=torch.float32)[:, None])
        exact += values[:kept_tokens]
        length += kept_tokens
        assert kept(windows, 1, length) == (exact[-3:], list(range(max(0, length - 3), length)))


def replay(windows, rows, queries):
    """What a captured graph of one layer does with a table that was set for ``rows``."""
    windows.set_targets(rows)
    with windows.capturing(len(queries)):
        run_layer(queries)


def test_nothing_is_kept_of_requests_that_are_not_named():
    windows = windows_of(3, (0,), spare=2)
    with windows.recording((RecordedRows(1, 0, 2, 0),)):
        run_layer(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    assert kept(windows, 1, 2) == ([1, 2], [0, 1]) and kept(windows, 2, 9) is None
    with windows.recording(()):
        run_layer(torch.tensor([[5.0], [6.0]]))
    with windows.capturing(4):
        run_layer(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    replay(windows, (RecordedRows(1, 2, 4, 2),), torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    assert kept(windows, 1, 4) == ([2, 3, 4], [1, 2, 3]) and windows.newest(2) is None
    assert windows.taken == 1 and windows.held_bytes == (1 + 4 * 5) * 4 + 4 * 8, "rings, and what tells graphs their places"


def test_of_more_requests_than_rings_the_queries_of_some_are_not_kept_until_a_ring_is_given_back():
    windows = windows_of(2, (0,), spare=1, rings=2)
    rows = tuple(RecordedRows(key, key - 1, key, 5) for key in (1, 2, 3))
    for _ in range(2):
        with windows.recording(rows):
            run_layer(torch.tensor([[1.0], [2.0], [3.0]]))
    assert [kept(windows, key, 6) for key in (1, 2, 3)] == [([1], [5]), ([2], [5]), None]
    assert windows.taken == 2 and windows.used_bytes == 2 * 3 * 4
    assert [windows.can_record(key) for key in (1, 2, 3)] == [True, True, False]
    windows.drop_rejected(3, 0)
    windows.forget(3)
    windows.forget(1)
    windows.forget(1)
    assert windows.can_record(3)
    with windows.recording(rows[1:]):
        run_layer(torch.tensor([[1.0], [7.0], [8.0]]))
    assert [kept(windows, key, 6) for key in (1, 2, 3)] == [None, ([7], [5]), ([8], [5])]
    windows.clear()
    assert windows.taken == 0 and kept(windows, 2, 6) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["record", "forget"])), max_size=40))
@settings(max_examples=60, deadline=None)
def test_requests_never_share_a_place_and_no_ring_is_lost(steps):
    windows, length = windows_of(2, (0,), spare=1, rings=3), dict.fromkeys(range(1, 6), 0)
    known = {}
    for number, (key, what) in enumerate(steps):
        if what == "forget":
            windows.forget(key)
            known.pop(key, None)
            continue
        with windows.recording((RecordedRows(key, 0, 1, length[key]),)):
            run_layer(torch.tensor([[float(number)]]))
        if key in known or len(known) < 3:
            known.setdefault(key, []).append(number)
        length[key] += 1
        for other, numbers in known.items():
            assert kept(windows, other, length[other])[0] == numbers[-2:]
        assert windows.taken == len(known)


def test_a_forward_that_replays_a_graph_draws_no_ring_and_leaves_the_queries_that_there_are():
    windows = windows_of(2, (0,), spare=1, rings=1)
    for key in (1, 1, 2):
        with windows.recording((RecordedRows(key, 0, 1, 3),)):
            pass
    assert windows.taken == 0
    with windows.recording((RecordedRows(1, 0, 2, 3),)):
        run_layer(torch.tensor([[1.0], [2.0]]))
    with windows.recording((RecordedRows(1, 0, 1, 5),)):
        pass
    assert kept(windows, 1, 9) == ([1, 2], [3, 4])
    assert [windows.has_enough(1, count) for count in (0, 2, 3)] == [True, True, False] and not windows.has_enough(2, 1)


def test_without_room_nothing_is_kept_and_nothing_fails():
    for windows in (QueryWindows(3, (0,), 2), windows_of(3, (0,), 2, rings=0), windows_of(0, (0,), 2)):
        with windows.capturing(4), windows.recording((RecordedRows(1, 0, 1, 0),)):
            run_layer(torch.ones(1, 1))
        windows.set_targets((RecordedRows(1, 0, 1, 0),))
        windows.warm_up()
        assert windows.newest(1) is None and windows.held_bytes == 0 and not windows.can_record(1)


def test_a_window_reaches_over_a_gap():
    windows = windows_of(3, (0,), spare=2)
    for position in (0, 5):
        with windows.recording((RecordedRows(1, 0, 2, position),)):
            run_layer(torch.tensor([[position], [position + 1]], dtype=torch.float32))
    assert kept(windows, 1, 7) == ([1, 5, 6], [1, 5, 6])
    assert kept(windows, 1, 5) == ([0, 1], [0, 1])
    assert windows.newest(1) == 7 and windows.newest(2) is None


def test_queries_of_rejected_drafts_do_not_outlive_plain_steps():
    windows = windows_of(3, (0,), spare=3)
    with windows.recording((RecordedRows(1, 0, 4, 0),)):
        run_layer(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
    windows.drop_rejected(1, 2)
    windows.drop_rejected(2, 2)
    assert kept(windows, 1, 9) == ([0, 1], [0, 1]) and windows.newest(1) == 2


def test_a_graph_leaves_the_queries_of_those_it_was_aimed_at_and_of_nobody_else():
    windows = windows_of(2, (0,), spare=2)
    queries = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    with windows.capturing(6):
        run_layer(queries)
    replay(windows, (RecordedRows(1, 0, 2, 5), RecordedRows(2, 2, 4, 7)), queries)
    assert kept(windows, 1, 7) == ([1, 2], [5, 6]) and kept(windows, 2, 9) == ([3, 4], [7, 8])
    replay(windows, (RecordedRows(2, 0, 2, 9),), queries * 10)
    assert kept(windows, 1, 7) == ([1, 2], [5, 6]) and kept(windows, 2, 11) == ([10, 20], [9, 10])
    replay(windows, (), queries * 100)
    windows.warm_up()
    assert kept(windows, 1, 7) == ([1, 2], [5, 6]) and kept(windows, 2, 11) == ([10, 20], [9, 10])


def test_a_copy_covers_no_more_than_what_queries_were_kept_for():
    compressed_kv = make_views(name="snapkv")
    count = compressed_kv.methods[0].compressor.window
    assert compressed_kv.max_covered(1, 100) == 100, "without any, the compressor says what it does"
    queries = torch.randn(count, HEADS * DIM)
    with compressed_kv.queries.recording((RecordedRows(1, 0, count, 80 - count),)):
        for layer in range(LAYERS):
            run_layer(queries, layer, HEADS, DIM)
    assert (compressed_kv.max_covered(1, 70), compressed_kv.max_covered(1, 100)) == (70, 80)
    assert compressed_kv.compress(1, 100)
    view = compressed_kv.get(1)
    assert (view.covered, view.num_slots, view.tail_end) == (80, 20, 80)
    compressed_kv.write_tail(1, 100)
    assert torch.equal(compressed_kv.token_table[5, 20:40], compressed_kv.token_table[1, 80:100]), "the rest is exact"


def test_a_ring_is_given_back_once_the_copy_is_made_and_what_is_left_of_it_when_the_request_ends():
    compressed_kv = make_views(name="snapkv")
    count = compressed_kv.methods[0].compressor.window

    def keep(row, end):
        with compressed_kv.queries.recording((RecordedRows(row, 0, count, end - count),)):
            for layer in range(LAYERS):
                run_layer(torch.randn(count, HEADS * DIM), layer, HEADS, DIM)

    assert not compressed_kv.has_queries(1)
    keep(1, 100)
    keep(2, 60)
    assert compressed_kv.has_queries(1) and compressed_kv.queries.taken == 2
    assert compressed_kv.compress(1, 100)
    assert compressed_kv.queries.taken == 1 and not compressed_kv.has_queries(1)
    assert not compressed_kv.compress(2, 60, headroom=SLOTS) and compressed_kv.has_queries(2), "for a later round"
    compressed_kv.release(2)
    compressed_kv.release(1)
    assert compressed_kv.queries.taken == 0


def test_no_queries_are_kept_outside_a_recording():
    windows = windows_of(3, (0,), spare=2)
    run_layer(torch.ones(2, 1))
    assert windows.get(1, 2, 3) is None


def test_windows_under_tensor_outputs_do_not_alias_the_forward():
    windows, queries = windows_of(4, (0,), spare=2), torch.ones(2, 1)
    with windows.recording((RecordedRows(1, 0, 2, 0),)):
        run_layer(queries)
    queries.zero_()
    assert windows.get(1, 2, 4)[0].sum() == 2


@pytest.mark.parametrize(("reserve", "expected"), [(0, 99), (32, 68), (200, 0)])
def test_a_prefix_hit_leaves_the_query_window_to_compute(reserve, expected):
    reserve_queries(reserve)
    try:
        assert cap_prefix_match(lambda req, length: length - 1, None, 100) == expected
    finally:
        reserve_queries(0)
