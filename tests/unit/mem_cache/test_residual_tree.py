"""Nodes on the host whose residual alone comes back while the segments are there that they were stored with, and all of them after."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from residual_helpers import PAGE, ResidualWorld, numbers_of
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.mem_cache.prefix_cache.host_store import FaultInjector
from sglang_ext.mem_cache.prefix_cache.nodes import path
from sglang_ext.mem_cache.prefix_cache.residency import Residency
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV

A, B = list(range(1, 6 * PAGE + 2)), list(range(1000, 1000 + 6 * PAGE + 2))


def anchored(world, tokens, use=False):
    """A request of ``tokens`` whose prompt is packed, and its segment."""
    req = world.start(tokens)
    return req, world.anchor(req, use=use)


def left(world, tokens):
    """The same, once the request is gone and its prompt is on the host alone."""
    req, segment = anchored(world, tokens)
    world.drop_path(req.last_node)
    world.finish(req)
    return req, segment


def comes_back(world, tokens):
    """How many of ``tokens`` a request finds, whose numbers are theirs."""
    match = world.match(tokens)
    world.cache.inc_lock_ref(match.last_device_node)
    indices, last = world.bring(match)
    world.cache.dec_lock_ref(match.last_device_node)
    assert torch.equal(world.kv[indices], numbers_of(tokens[: len(indices)]))
    assert torch.equal(world.buffers.values[0][indices], -world.kv[indices])
    return last.end


def test_what_a_segment_packs_comes_back_by_its_residual_and_fewer_bytes_travel():
    world = ResidualWorld()
    req, _ = anchored(world, A)
    assert world.drop_path(req.last_node) == 6 * PAGE and world.residual_pages() == 5, "all but the sinks"
    world.finish(req)
    world.check()
    assert comes_back(world, A) == 6 * PAGE
    host = world.cache.host
    assert 0 < host.loaded_bytes < 0.85 * 6 * PAGE * world.buffers.bytes_per_slot
    assert host.link.restored > host.link.bandwidth > 0
    world.empty()


def test_a_node_that_was_stored_whole_is_stored_again_once_there_is_a_segment():
    world = ResidualWorld()
    req = world.start(A)
    host, node = world.cache.host, req.last_node
    host.back_up(node).wait()
    assert world.residual_pages() == 0
    host.store_as_residual(node)
    assert world.residual_pages() == 0
    world.anchor(req)
    pages, before = node.host_value, host.stored_bytes
    host.store_as_residual(node)
    assert world.residual_pages() == 5 and node.host_value is pages and host.stored_bytes > before
    before = host.stored_bytes
    host.store_as_residual(node)
    assert host.stored_bytes == before, "nothing is gained any more"
    world.check()
    world.empty()


def test_nodes_that_are_split_keep_their_anchors():
    world = ResidualWorld()
    req, segment = left(world, A)
    other = A[: 3 * PAGE] + B[: 2 * PAGE]
    split = world.start(other)
    assert len(segment.anchored_nodes) == 2
    world.check()
    assert comes_back(world, A) == 6 * PAGE
    world.finish(split)
    world.check()
    world.empty()


def bytes_of(world, tokens):
    """Bytes that a load of ``tokens`` brings."""
    before = world.cache.host.loaded_bytes
    assert comes_back(world, tokens) == len(tokens) // PAGE * PAGE
    return world.cache.host.loaded_bytes - before


def test_without_its_segment_a_node_comes_back_with_its_anchor():
    world = ResidualWorld()
    req, segment = anchored(world, A)
    node = req.last_node
    world.drop_path(node)
    world.finish(req)
    short = bytes_of(world, A)
    world.cache.host.free_device_slots(node)
    assert bytes_of(world, A) == short
    world.cache.host.free_device_slots(node)
    assert world.cache.segments.free(segment) == len(segment.slots) and node.anchors == ()
    world.check()
    whole = 6 * PAGE * world.buffers.bytes_per_slot
    assert bytes_of(world, A) == short + 5 * world.packing.packed_slots(PAGE) * world.buffers.bytes_per_slot < whole
    # Another one that was packed of the same numbers is none of those that it was stored with.
    req = world.start(A)
    world.anchor(req)
    world.cache.host.free_device_slots(node)
    assert bytes_of(world, A) > short
    world.cache.host.store_as_residual(node)
    node.store.synchronize()
    world.cache.host.free_device_slots(node)
    assert bytes_of(world, A) == short
    world.empty()


class Copies:
    """The copy of one request."""

    def __init__(self, view):
        self.view = view

    @property
    def owned_slot_count(self):
        return len(self.view.own)

    def get(self, row):
        return self.view

    def method(self, row):
        return SimpleNamespace(name="lynx")


def packed_view(world, req, covered):
    """A copy that a request has alone of what it has in the tree up to ``covered``."""
    tokens, packing = covered - PAGE, world.packing
    own, row = world.allocate(PAGE + packing.held_slots(tokens)), world.table.req_to_token[req.req_pool_idx]
    packing.write(world.buffers, torch.arange(tokens)[None, None], row[PAGE:covered].long(), own[PAGE:])
    return CompressedKV(own, covered, sinks=PAGE, own_tokens=tokens, own_packed=packing.packed_slots(tokens))


def test_what_a_copy_packs_of_a_prompt_becomes_a_segment_before_its_full_kv_is_stored():
    world = ResidualWorld()
    req = world.start(A)
    view = packed_view(world, req, 6 * PAGE)
    residency = Residency(world.cache.host, Copies(view), offload_at_once=False)
    world.cache.bind(residency.compressed_kv, residency=residency)
    slots = view.slots.tolist()
    residency.update({req.req_pool_idx: (req.last_node, 4 * PAGE)})
    assert view.slots.tolist() == slots and len(view.own) == PAGE and view.own_packed == 0 and view.shared_len == 6 * PAGE
    (segment,) = req.last_node.segments
    assert (segment.start, segment.end, segment.users, segment.packed) == (PAGE, 6 * PAGE, 1, 50)
    assert req.last_node.host_value is None, "the copy is said to stand for less"
    residency.update({req.req_pool_idx: (req.last_node, 6 * PAGE)})
    assert world.residual_pages() == 5 and req.last_node.segments == [segment]
    world.check()


def test_a_copy_that_stands_for_more_than_the_tree_has_stays_the_requests_own():
    world = ResidualWorld()
    req = world.start(A[: 4 * PAGE + 1])
    req.output_ids.extend(range(2 * PAGE))
    assert world.extend(req, 6 * PAGE)
    view = packed_view(world, req, 6 * PAGE)
    residency = Residency(world.cache.host, Copies(view), offload_at_once=False)
    world.cache.bind(residency.compressed_kv, residency=residency)
    residency.update({req.req_pool_idx: (req.last_node, 6 * PAGE)})
    assert view.own_packed == 50 and req.last_node.segments == [] and world.residual_pages() == 0
    world.check()


def test_nodes_leave_before_the_segments_that_they_are_stored_with():
    world = ResidualWorld()
    for tokens in (A, B):
        req, segment = anchored(world, tokens)
        world.finish(req)
    assert world.cache.evict(EvictParams(num_tokens=6 * PAGE)).num_tokens_evicted == 6 * PAGE
    assert world.residual_pages() == 5 and len(world.cache.segments.unused) == 2
    world.cache.evict(EvictParams(num_tokens=12 * PAGE))
    assert world.residual_pages() == 10 and world.cache.segments.unused == []
    world.check()
    assert comes_back(world, A) == comes_back(world, B) == 6 * PAGE
    world.empty()


def test_a_changed_page_is_lost_and_what_comes_before_it_is_not():
    world = ResidualWorld()
    req, segment = left(world, A)
    world.tier.pool.flip(int(req.last_node.host_value[3]))
    assert comes_back(world, A) == 3 * PAGE
    assert world.cache.host.failed_pages == 1
    world.check()
    world.cache.host.faults = FaultInjector(1)
    world.cache.evict(EvictParams(num_tokens=30 * PAGE))
    assert comes_back(world, A) == 0, "each load finds a changed page"
    world.empty()


PROMPTS = st.tuples(st.sampled_from([0, 1, 3, 4]), st.integers(0, 2), st.integers(2, 6))
STEPS = st.one_of(
    st.tuples(st.just("start"), PROMPTS, st.booleans()),
    st.tuples(st.sampled_from(["finish", "drop", "load", "improve", "flip"]), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("evict"), st.integers(1, 20), st.booleans()),
)


def prompt(shared, kind, pages):
    return A[: shared * PAGE] + [5000 + 100 * kind + i for i in range(pages * PAGE - shared * PAGE + 1)]


@settings(deadline=None, max_examples=60)
@given(st.lists(STEPS, max_size=25), st.integers(6, 20), st.sampled_from([14, 24]))
def test_whatever_happens_nothing_leaks_and_what_is_read_is_right(steps, host_pages, pages):
    world = ResidualWorld(pages, host_pages)
    for what, which, flag in steps:
        running = world.running[which % len(world.running)] if what not in ("start", "evict") and world.running else None
        nodes = list(world.cache.nodes)
        if what == "start" and len(world.running) < 4:
            tokens = prompt(*which)
            if len(tokens) > PAGE and (req := world.start(tokens)) is not None and req.last_node.end > PAGE:
                world.anchor(req, use=flag)
        elif what == "evict":
            world.cache.evict(EvictParams(num_tokens=which * PAGE))
        elif what == "finish" and running is not None:
            world.finish(running)
        elif what == "drop" and running is not None:
            for node in path(running.last_node):
                if node.on_device and (store := world.cache.host.back_up(node)) is not None:
                    store.wait()
                    world.cache.host.free_device_slots(node)
        elif what == "load" and running is not None:
            missing = [node for node in path(running.last_node) if node.value is None and node.host_value is not None]
            if missing and (load := world.cache.host.load_back(missing)) is not None and flag:
                world.cache.host.finish(load)
        elif what == "improve" and nodes:
            node = nodes[which % len(nodes)]
            if node.on_device and node.host_value is not None:
                world.cache.host.store_as_residual(node)
        elif what == "flip" and nodes and flag:
            node = nodes[which % len(nodes)]
            if node.host_value is not None:
                node.store.synchronize()
                world.tier.pool.flip(int(node.host_value[0]))
        world.cache.host.collect_loads()
        world.check()
    for node in list(world.cache.nodes):
        if not node.dropped and not node.is_void:
            comes_back(world, world.tokens_to(node))
            world.check()
    world.empty()
    world.tier.close()
