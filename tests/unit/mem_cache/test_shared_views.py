"""Requests with one beginning read one compressed copy of it, which the prefix tree keeps."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_helpers import PAGE, ROWS, World, done, kv_of

from sglang_ext.core import FALLBACK_REASONS, RequestState
from sglang_ext.managers.integrity import IntegrityError, check_draft_rows
from sglang_ext.mem_cache.compressed import policy
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressors.catalogue import create
from sglang_ext.mem_cache.compressors.attention_scores import SinkRecent
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix

COMMON = list(range(1, 17))


@pytest.fixture
def world():
    made = World(slots=160)
    made.table.req_to_token = torch.zeros(2 * ROWS, 128, dtype=torch.int32)
    made.cache.bind(CompressedKVCache(
        methods=(CompressionMethod(create("sink-recent"), 0.5, PlainSlots(PAGE)),), token_table=made.table.req_to_token, rows=ROWS,
        buffers=made.buffers, allocator=made.allocator, tree_cache=made.cache, queries=QueryWindows(0, (0,), 0), min_shared=8,
    ))
    return made


def start(world, tokens):
    """A request that is drafted, and what of its beginning the tree had."""
    matched = len(world.match(tokens[:-1]).device_indices)
    req = world.start(tokens)
    prefix = SharedPrefix(req.last_node, matched) if matched else None
    assert world.cache.compressed_kv.compress(req.req_pool_idx, len(tokens), 0, prefix)
    return req


def drafted_on(world, req):
    """The KV that the request's draft row leads to."""
    view = world.cache.compressed_kv.get(req.req_pool_idx)
    return world.kv[world.table.req_to_token[ROWS + req.req_pool_idx, : view.num_slots].long(), 0, 0]


@dataclass(frozen=True)
class Odd(SinkRecent):
    """A method of somebody's own: scores as ``change`` makes them."""

    change: Callable[[torch.Tensor], object] = torch.Tensor.clone
    name = "odd"

    def scores(self, layer):
        return self.change(super().scores(layer))


class ShortContexts(CompressionMethod):
    """A method that also compresses contexts that are too short to pay."""

    min_context = 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (torch.Tensor.half, r"float16 \[1, 24\]"),
        (lambda scores: scores[:, :-1], r"float32 \[1, 23\]"),
        (lambda scores: scores.t(), r"float32 \[24, 1\]"),
        (lambda scores: scores.tolist(), "list"),
    ],
    ids=["dtype", "tokens", "transposed", "list"],
)
def test_scores_that_cannot_be_used_are_named_once_and_requests_served_with_full_kv(world, caplog, change, named):
    compressed_kv = world.cache.compressed_kv
    done(world, COMMON)
    kept = start(world, [*COMMON, *range(90, 98)])
    compressed_kv.methods = (ShortContexts(Odd(change=change), 0.5, PlainSlots(PAGE)),)
    for first in (100, 120):
        tokens = [*COMMON, *range(first, first + 8)]
        matched = len(world.match(tokens[:-1]).device_indices)
        req = world.start(tokens)
        state = RequestState("r", req.req_pool_idx, 0, cached_prompt_len=matched)
        reason = policy.ensure_compressed_kv(compressed_kv, req, state, len(tokens), 0)
        assert FALLBACK_REASONS[reason] == "wrong-scores" and compressed_kv.get(req.req_pool_idx) is None
        world.finish(req)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(f"compressor 'odd' scored a context with .*{named}.*scores are torch.float32 .*correct its", line)
    assert not compressed_kv.compress(kept.req_pool_idx, 24), "nor is a copy renewed"
    assert compressed_kv.get(kept.req_pool_idx) is None and compressed_kv.owned_slot_count == 0
    assert compressed_kv.num_compressions == {"sink-recent": 1}
    world.finish(kept)
    world.check()


def test_a_method_that_fails_when_the_server_tries_it_is_refused_and_named(world, caplog):
    compressed_kv = world.cache.compressed_kv
    compressed_kv.methods = (*compressed_kv.methods, CompressionMethod(Odd(change=torch.Tensor.half), 0.5, PlainSlots(PAGE)))
    compressed_kv.compile_kernels(1)
    assert compressed_kv.refused == {"odd"} and "compressor 'odd'" in caplog.text


def test_what_others_began_with_is_copied_once(world):
    done(world, COMMON)
    requests = [start(world, [*COMMON, *range(100 + 10 * i, 108 + 10 * i)]) for i in range(6)]
    compressed_kv, cache = world.cache.compressed_kv, world.cache
    assert cache.segments.held_tokens == 8 and compressed_kv.owned_slot_count == 6 * 4
    assert compressed_kv.held_bytes() == (8 + 6 * 4) * world.buffers.bytes_per_slot
    for req in requests:
        kept = [0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23]
        assert torch.equal(drafted_on(world, req), kv_of(req.tokens)[kept])
        assert compressed_kv.get(req.req_pool_idx).own.storage_offset() == 0, "a kernel is compiled for aligned slots alone"
    world.check()
    for req in requests[:5]:
        world.finish(req)
    assert cache.segments.held_tokens == 8, "the last one reads it still"
    world.finish(requests[5])
    assert cache.segments.held_tokens == 0 and cache.segments.unused_tokens == 8, "kept for those to come"
    again = start(world, [*COMMON, 7, 7, 7, 7])
    assert len(cache.segments.unused) == 0 and compressed_kv.get(again.req_pool_idx).shared_len == 16
    world.check()
    world.empty()


def test_a_turn_adds_to_what_the_turns_before_share(world):
    history, shared = list(COMMON), []
    done(world, history)
    for turn in range(4):
        history += [50 + turn] * 12
        req = start(world, history)
        shared.append(world.cache.compressed_kv.get(req.req_pool_idx).shared_len)
        world.check()
        world.finish(req)
    assert shared == [16, 28, 40, 52]
    assert [(s.start, s.end) for s in world.cache.segments] == [(0, 16), (16, 28), (28, 40), (40, 52)]
    world.empty()


def test_a_renewal_leaves_what_is_shared_and_covers_what_was_generated(world):
    done(world, COMMON)
    first, second = (start(world, [*COMMON, *[60 + i] * 8]) for i in range(2))
    compressed_kv, before = world.cache.compressed_kv, drafted_on(world, second)
    for token in range(20):
        first.output_ids.append(token)
        world.extend(first, len(first.tokens))
    assert compressed_kv.compress(first.req_pool_idx, first.length)
    view = compressed_kv.get(first.req_pool_idx)
    assert view.covered == 44 and view.shared_len == 16 and len(view.own) == 22 - 8
    kept = [0, 1, 2, 3, 12, 13, 14, 15, *range(30, 44)]
    assert torch.equal(drafted_on(world, first), kv_of(first.tokens)[kept])
    assert torch.equal(drafted_on(world, second), before)
    world.check()
    world.empty()


def test_a_draft_row_follows_its_request_to_the_slots_that_the_tree_has_of_its_prompt(world):
    # As under the overlapped loop: a round is launched, and the tree takes the prompt over afterwards.
    compressed_kv, insert = world.cache.compressed_kv, world.cache.cache_unfinished_req
    tokens = [*COMMON, 71, 72, 73, 74, 75, 76]
    world.cache.cache_unfinished_req = lambda req: None
    late = world.start(tokens)
    assert compressed_kv.compress(late.req_pool_idx, 12)
    view = compressed_kv.get(late.req_pool_idx)
    compressed_kv.write_tail(late.req_pool_idx, len(tokens))
    compressed_kv.mark_tail_written(late.req_pool_idx, len(tokens) + 4)
    world.cache.cache_unfinished_req = insert
    done(world, tokens)
    before = world.table.req_to_token[late.req_pool_idx, : len(tokens)].clone()
    insert(late)
    moved = world.table.req_to_token[late.req_pool_idx, : len(tokens)]
    assert not torch.equal(moved, before), "the tree has slots of its own, and the request's are free"
    with pytest.raises(IntegrityError, match="whose KV the request in row"):
        view.tail_end, written = len(tokens), view.tail_end
        check_draft_rows(compressed_kv)
    view.tail_end = written
    check_draft_rows(compressed_kv)
    compressed_kv.write_tail(late.req_pool_idx, len(tokens))
    tail = world.table.req_to_token[ROWS + late.req_pool_idx, view.num_slots : view.num_slots + len(tokens) - view.covered]
    assert torch.equal(world.kv[tail.long(), 0, 0], kv_of(tokens)[view.covered :])
    check_draft_rows(compressed_kv)
    world.check()
    world.empty()


def test_a_short_beginning_is_not_shared_and_a_full_pool_loses_nothing(world):
    done(world, COMMON[:4])
    short = start(world, [*COMMON[:4], *range(70, 90)])
    assert not list(world.cache.segments) and world.cache.compressed_kv.get(short.req_pool_idx).shared_len == 0
    done(world, [*COMMON, 3, 3])
    one = start(world, [*COMMON, 5, 5, 5, 5])
    world.finish(one)
    unused = world.cache.segments.unused
    rest = world.start([*COMMON, 6, 6, 6, 6])
    prefix = SharedPrefix(rest.last_node, 16)
    assert unused and not world.cache.compressed_kv.compress(rest.req_pool_idx, 20, headroom=1000, prefix=prefix)
    assert world.cache.segments.unused == unused and world.cache.compressed_kv.get(rest.req_pool_idx) is None
    world.check()
    world.empty()


def test_a_copy_that_is_given_back_leaves_its_segments_to_be_evicted(world):
    done(world, COMMON)
    req = start(world, [*COMMON, 5, 5, 5, 5])
    world.cache.evict(EvictParams(num_tokens=1000))
    assert len(list(world.cache.segments)) == 1, "nobody takes what is read"
    world.cache.compressed_kv.release_compressed_kv(req.req_pool_idx)
    world.cache.evict(EvictParams(num_tokens=PAGE))
    assert not list(world.cache.segments)
    world.check()
    world.empty()
