"""Running requests' full KV leaves the device, and is there again, the same, whenever it is read."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings, strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_helpers import World, kv_of

from sglang_ext.mem_cache.prefix_cache.nodes import path
from sglang_ext.mem_cache.prefix_cache.host_store import FaultInjector
from sglang_ext.mem_cache.prefix_cache.residency import Residency

A = list(range(1, 9))
B = list(range(11, 19))


def world(slots=40, always=False, host_pages=30):
    made = World(slots=slots, host_pages=host_pages)
    compressed_kv = SimpleNamespace(token_table=made.table.req_to_token)
    made.cache.bind(None, residency=Residency(made.cache.host, compressed_kv, always))
    return made, made.cache.residency


def track(made, *reqs, covered=None):
    """These draft on copies of all that they have in the tree, or of ``covered`` tokens."""
    made.cache.host.collect_loads()
    made.cache.residency.update(
        {r.req_pool_idx: (r.last_node, r.cache_protected_len if covered is None else covered) for r in reqs}
    )


def stored(made):
    """Let the stores under way end."""
    for node in made.cache.residency.holders.by_node:
        if node.store is not None:
            node.store.wait()


def load(made, req):
    """Begin a load, and wait for it."""
    if not made.cache.residency.load(req.req_pool_idx):
        return False
    for node in path(req.last_node):
        if node.load is not None:
            node.load.synchronize()
    made.cache.host.collect_loads()
    return made.cache.residency.ready(req.req_pool_idx)


def read(made, req):
    """Full KV of a request, by its row."""
    slots = made.table.req_to_token[req.req_pool_idx, : req.length].long()
    return made.kv[slots, 0, 0]


def exact(made, req):
    return torch.equal(read(made, req), kv_of(req.tokens[: req.length]))


def balanced(made):
    sizes = made.cache.evictable_size(), made.cache.protected_size(), made.cache.session_held_tokens(), made.own_tokens()
    return made.allocator.available_size() + sum(sizes) == made.slots


def test_on_demand_the_largest_leaves_the_device_and_the_sums_stay_right():
    made, residency = world()
    first, second = made.start(A), made.start([*B, 5, 5])
    track(made, first, second)
    stored(made)
    # Room for the longest reload is kept back.
    assert made.cache.evictable_size() == 8 and balanced(made)
    assert made.cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 10
    assert residency.is_offloaded(second.req_pool_idx) and not residency.is_offloaded(first.req_pool_idx)
    assert residency.missing_tokens(second.req_pool_idx) == residency.offloaded_tokens == 10 and balanced(made)
    assert load(made, second)
    residency.restore(second.req_pool_idx)
    assert exact(made, second) and exact(made, first) and balanced(made)


def test_nothing_is_kept_or_counted_of_those_that_are_gone():
    """A server that idles has no next round in which the holders would be told anew."""
    made, residency = world()
    first, second = made.start(A), made.start(B)
    track(made, first, second)
    stored(made)
    made.cache.evict(EvictParams(num_tokens=1000))
    assert residency.offloaded_tokens == 16
    residency.forget(first.req_pool_idx)
    assert residency.offloaded_tokens == 8 and set(residency.holders.by_node) == set(path(second.last_node))
    residency.forget(second.req_pool_idx)
    assert residency.offloaded_tokens == 0 and not residency.holders.by_node and not residency.holders.by_row


def test_always_all_leaves_as_soon_as_it_is_stored_and_what_is_read_stays():
    made, residency = world(always=True)
    req = made.start(A)
    track(made, req)
    stored(made)
    track(made, req)
    assert residency.missing_tokens(req.req_pool_idx) == 8 and residency.droppable_tokens == 0
    assert load(made, req) and not residency.missing_tokens(req.req_pool_idx)
    residency.restore(req.req_pool_idx)
    track(made, req)
    assert exact(made, req) and residency.ready(req.req_pool_idx)
    residency.release(req.req_pool_idx)
    track(made, req)
    assert residency.is_offloaded(req.req_pool_idx)


def test_what_others_need_or_a_copy_does_not_cover_stays():
    made, residency = world()
    one = made.start(A)
    other = made.start([*A, 9, 10])
    track(made, one)
    stored(made)
    assert residency.drop(100) == 0, "the other decodes on it"
    track(made, one, other)
    stored(made)
    assert residency.drop(100) == 10 and residency.is_offloaded(other.req_pool_idx)
    made, residency = world()
    req = made.start(A)
    track(made, req, covered=6)
    stored(made)
    assert residency.drop(100) == 0, "two tokens are not in the copy, and the node has no host copy for that"
    assert req.last_node.host_value is None


def test_what_is_stored_already_stays_too_where_the_copy_does_not_cover_it():
    """An earlier request may have left a host copy of all of the node."""
    made, residency = world()
    made.finish(made.start(A))
    assert made.cache.host.back_up(made.node(A)).wait() is None
    req = made.start([*A, 9, 10])
    track(made, req, covered=6)
    assert made.cache.host.is_stored(made.node(A)) and residency.drop(100) == 0 and balanced(made)
    track(made, req, covered=8)
    assert residency.drop(100) == 8


def test_what_the_host_has_no_room_for_is_not_offered_to_requests_that_wait():
    made, residency = world(host_pages=4)
    first, second, third = made.start(A), made.start(B), made.start([21, 22, 23, 24, 25, 26, 27, 28])
    track(made, first, second, third)
    stored(made)
    on_host = sum(req.last_node.host_value is not None for req in (first, second, third))
    # As much as the longest reload takes is kept back: nothing is left.
    assert on_host == 1 and residency.droppable_tokens == made.cache.evictable_size() == 0 and balanced(made)
    assert residency.drop(100) == 8, "of one request, though two are larger together"


def test_without_room_a_load_is_not_begun_and_nothing_is_lost():
    made, residency = world(slots=16)
    req = made.start(A)
    track(made, req)
    stored(made)
    residency.drop(100)
    held = made.allocator.alloc(16 - 4)
    assert not residency.load(req.req_pool_idx) and not residency.ready(req.req_pool_idx)
    made.allocator.free(held)
    assert load(made, req)


def test_a_load_takes_the_place_of_another_but_not_of_one_that_is_being_read():
    made, residency = world(slots=16)
    first, second = made.start(A), made.start(B)
    track(made, first, second)
    stored(made)
    residency.drop(8)
    gone = first if residency.is_offloaded(first.req_pool_idx) else second
    stays = second if gone is first else first
    filler = made.allocator.alloc(8)
    with residency.pin_while_reading(stays.req_pool_idx):
        assert not residency.load(gone.req_pool_idx)
    assert load(made, gone) and residency.is_offloaded(stays.req_pool_idx)
    made.allocator.free(filler)


def test_pages_that_came_back_changed_make_their_request_lost_and_it_leaves_nothing_behind():
    made, residency = world()
    req, other = made.start(A), made.start(B)
    track(made, req, other)
    stored(made)
    residency.drop(100)
    made.cache.host.faults = FaultInjector(every=2, loads=1)
    assert not load(made, req) and residency.is_lost(req.req_pool_idx)
    assert not residency.load(req.req_pool_idx), "there is nothing to load"
    assert load(made, other) and not residency.is_lost(other.req_pool_idx)
    residency.release(other.req_pool_idx)
    residency.forget(req.req_pool_idx)
    made.finish(req, is_insert=False)
    assert balanced(made) and not residency.is_lost(req.req_pool_idx)
    made.cache.check_integrity()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(["start", "load", "release", "evict", "finish", "round"]), st.integers(0, 5)), max_size=40),
    st.booleans(),
)
def test_whatever_happens_what_is_ready_is_exact_and_the_sums_are_right(steps, always):
    made, residency = world(slots=36, always=always, host_pages=24)
    prompts = [A, [*A, 9, 10], [*A[:4], 7, 7], B, [*B, 5, 5], [3] * 6]
    for what, which in steps:
        running = made.running
        req = running[which % len(running)] if running else None
        if what == "start":
            made.start(prompts[which])
        elif what == "evict":
            made.cache.evict(EvictParams(num_tokens=2 * which))
        elif req is None:
            continue
        elif what == "load":
            track(made, *running)
            if load(made, req):
                residency.restore(req.req_pool_idx)
                assert exact(made, req)
        elif what == "release":
            residency.release(req.req_pool_idx)
        elif what == "finish":
            residency.forget(req.req_pool_idx)
            made.finish(req)
        else:
            track(made, *running)
            stored(made)
        for req in made.running:
            req.stale = set(range(req.cache_protected_len)) if residency.is_offloaded(req.req_pool_idx) else set()
        made.check()
    for req in list(made.running):
        residency.forget(req.req_pool_idx)
    residency.update({})
    made.cache.bind(None)
    for req in made.running:
        req.stale = set()
    made.empty()
