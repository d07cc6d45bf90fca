"""Copies of several methods in one pool: each reads what its own method made, in its own amount, bits and window."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_packed_views import DIM, HEADS, views_of
from tiered_helpers import ROWS, World, done

from sglang_ext.core import RequestState
from sglang_ext.managers.integrity import IntegrityError, check_compressed
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout, Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows, record_queries
from sglang_ext.mem_cache.compressors.catalogue import create, method
from sglang_ext.mem_cache.compressors.attention_scores import SnapKV
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix

PAGE = 2
COMMON = list(range(1, 151))
HALF, EIGHTH, PACKED = range(3)


@pytest.fixture
def world():
    """A prefix tree with copies of a half, of an eighth, and of blocks; requests choose by ``world.asked``, by row."""
    made = World(slots=2400)
    made.table.req_to_token = table = torch.zeros(2 * ROWS, 400, dtype=torch.int32)
    noise = torch.Generator().manual_seed(0)
    buffers = KVBuffers((0,), (1.0,), *((torch.randn(2402, HEADS, DIM, generator=noise),) for _ in "kv"))
    rows, newest = QuantizedLayout.for_table(Packing.for_pool(method("int4").quantizer, buffers, PAGE), table), create("sink-recent")
    made.asked = {}
    methods = (
        CompressionMethod(newest, 0.5, PlainSlots(PAGE), "half"),
        CompressionMethod(newest, 0.125, PlainSlots(PAGE), "eighth", suffix=":0.125"),
        CompressionMethod(method("int4").compressor, 1.0, rows.layout, "int4", "int4"),
    )
    made.cache.bind(CompressedKVCache(
        methods=methods, token_table=table, rows=ROWS, buffers=buffers, allocator=made.allocator, tree_cache=made.cache,
        queries=QueryWindows(0, (0,), 0), layout=rows, min_shared=64,
        state_of=lambda row: RequestState("", row, 0, method=made.asked[row]),
    ))
    return made


def start(world, tokens, place):
    """A request that is drafted on a copy of the method at ``place``; its view."""
    matched = len(world.match(tokens[:-1]).device_indices)
    req = world.start(tokens)
    world.asked[req.req_pool_idx] = place
    prefix = SharedPrefix(req.last_node, matched) if matched else None
    assert world.cache.compressed_kv.compress(req.req_pool_idx, len(tokens), 0, prefix)
    return world.cache.compressed_kv.get(req.req_pool_idx)


def tokens_after(number):
    """What a request has after the beginning that all have."""
    return range(200 + 90 * number, 290 + 90 * number)


def test_requests_share_the_beginning_with_those_of_their_own_method_alone(world):
    done(world, COMMON)
    for number, place in enumerate((HALF, EIGHTH, PACKED, HALF, EIGHTH, PACKED)):
        view = start(world, [*COMMON, *tokens_after(number)], place)
        assert {segment.method for segment in view.segments} == {world.cache.compressed_kv.methods[place].name}
        world.check()
    segments, compressed_kv = list(world.cache.segments), world.cache.compressed_kv
    found = [(s.method, s.end, s.tokens, s.users) for s in segments]
    assert found == [("half", 150, 76, 2), ("eighth", 150, 20, 2), ("int4", 132, 128, 2)]
    for row, place in world.asked.items():
        packed = compressed_kv.layout.counts[compressed_kv.draft_row(row)]
        assert packed == compressed_kv.get(row).num_packed_slots and (packed > 0) == (place == PACKED)
    assert compressed_kv.num_compressions == {"sink-recent": 2, "sink-recent:0.125": 2, "int4": 2}
    check_compressed(compressed_kv)
    world.empty()
    assert not segments[0].users and compressed_kv.owned_slot_count == 0


def test_a_split_leaves_each_methods_segment_where_it_ends_and_all_are_evicted_with_their_node(world):
    done(world, COMMON)
    for place in (HALF, EIGHTH, PACKED):
        start(world, [*COMMON, *tokens_after(place)], place)
    done(world, [*COMMON[:134], *range(900, 920)])
    world.check()
    found = [(s.method, s.node.end) for s in world.cache.segments]
    assert found == [("half", 150), ("eighth", 150), ("int4", 134)]
    later = start(world, [*COMMON[:134], *range(900, 910), *tokens_after(5)], EIGHTH)
    assert later.shared_len == 144 and [s.start for s in later.segments] == [0]
    assert start(world, [*COMMON[:134], *range(900, 910), *tokens_after(6)], PACKED).shared_len == 132
    world.check()
    world.empty()


def test_a_row_that_held_blocks_says_so_no_longer_when_a_request_of_another_method_has_it(world):
    done(world, COMMON)
    compressed_kv = world.cache.compressed_kv
    first = start(world, [*COMMON, *tokens_after(0)], PACKED)
    (row,) = world.asked
    assert compressed_kv.layout.counts[compressed_kv.draft_row(row)] == first.num_packed_slots > 0
    world.finish(world.running[0])
    start(world, [*COMMON, *tokens_after(1)], HALF)
    assert list(world.asked) == [row] and compressed_kv.layout.counts[compressed_kv.draft_row(row)] == 0
    world.empty()


def test_the_share_of_full_kv_is_that_of_the_copies_that_there_are(world):
    done(world, COMMON)
    compressed_kv = world.cache.compressed_kv
    assert compressed_kv.share == 0.5
    covered = [start(world, [*COMMON, *tokens_after(place)], place).covered for place in (EIGHTH, PACKED)]
    expected = sum(compressed_kv.methods[place].share * tokens for place, tokens in zip((EIGHTH, PACKED), covered)) / sum(covered)
    assert covered == [240, 196] and abs(compressed_kv.share - expected) < 1e-12
    world.empty()


@pytest.mark.parametrize("wrong", ["segment", "packed"])
def test_a_copy_of_two_methods_and_a_row_with_other_blocks_are_found(world, wrong):
    done(world, COMMON)
    view, compressed_kv = start(world, [*COMMON, *tokens_after(0)], PACKED), world.cache.compressed_kv
    (row,) = world.asked
    check_compressed(compressed_kv)
    if wrong == "segment":
        view.segments[0].method = "half"
    else:
        compressed_kv.layout.counts[compressed_kv.draft_row(row)] -= 1
    found = {
        "segment": f"row {row} was made by int4; it reads segments of half",
        "packed": f"the compressed KV of draft row {compressed_kv.draft_row(row)} has",
    }
    with pytest.raises(IntegrityError, match=found[wrong]):
        check_compressed(compressed_kv)


def test_each_method_sees_as_many_of_the_newest_queries_as_it_wants_and_one_without_any_covers_what_follows_them():
    seen = []

    class Spy(SnapKV):
        def select(self, context, parts):
            seen.append(context.query_positions.tolist())
            return super().select(context, parts)

    compressed_kv = views_of("snapkv+int8", budget=0.5, compressor=Spy(window=8))
    wide, none = (replace(compressed_kv.methods[0], compressor=each) for each in (Spy(window=32), create("sink-recent")))
    compressed_kv.methods, asked = (*compressed_kv.methods, wide, none), {1: 0}
    compressed_kv.state_of = lambda row: RequestState("", row, 0, method=asked[row])
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM)
    for place, covered in enumerate((260, 260, 388)):
        asked[1] = place
        with compressed_kv.queries.recording((RecordedRows(1, 0, 32, 268),)):
            record_queries(lambda *args: None, None, torch.randn(32, HEADS * DIM), None, None, layer, None)
        assert compressed_kv.compress(1, 400) and compressed_kv.get(1).covered == covered
        compressed_kv.release_compressed_kv(1)
    assert seen == [list(range(292, 300)), list(range(268, 300))]


def test_all_methods_run_before_the_first_request():
    compressed_kv, ran = views_of("int8"), []

    class Spy(SnapKV):
        def select(self, context, parts):
            ran.append((self.window, parts))
            return super().select(context, parts)

    compressed_kv.methods = tuple(replace(compressed_kv.methods[0], compressor=Spy(window=window)) for window in (8, 32))
    compressed_kv.compile_kernels(query_heads=2 * HEADS)
    assert [window for window, _ in ran] == [8, 32]
