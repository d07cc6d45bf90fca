"""Compressed chunks are shared by all requests on their paths, counted once, and freed once."""

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_helpers import PAGE, World, done

from sglang_ext.mem_cache.prefix_cache.segments import Segment

A = list(range(1, 9))


def test_a_split_keeps_the_segments_of_both_halves():
    world = World()
    req = world.start(A + [9, 10, 11, 12])
    node = req.last_node
    early, late, over = world.segment(0, 4), world.segment(4, 12), world.segment(4, 8)
    for segment in (early, late, over):
        world.cache.nodes.attach(node, segment)
        world.cache.segments.use(segment)
    assert world.cache.nodes.segments_to(node, 12) == [early, late], "the one that reaches farthest"
    world.start(A[:6] + [70, 71])
    upper, other = world.node(A[:6]), world.node(A[:6] + [70, 71])
    assert (early.node, late.node, over.node) == (upper, node, node)
    assert world.cache.nodes.segments_to(node, 12) == [early, late]
    assert world.cache.nodes.segments_to(node, 11) == [early, over]
    assert world.cache.nodes.segments_to(other, 8) == [early]
    assert world.cache.nodes.segments_to(other, 3) == []
    for segment in (early, late, over):
        world.cache.segments.release(segment)
    world.check()
    world.empty()


def test_twenty_requests_share_one_set_of_segments():
    world = World(slots=80)
    done(world, A)
    first, second = world.segment(0, 4), world.segment(4, 8)
    for segment in (first, second):
        world.cache.nodes.attach(world.node(A), segment)
    assert world.cache.session_held_tokens() == 0 and world.cache.evictable_size() == 8 + 2 * PAGE
    for number in range(20):
        req = world.start(A + [100 + number])
        req.segments = world.cache.nodes.segments_to(req.last_node, 8)
        for segment in req.segments:
            world.cache.segments.use(segment)
        assert req.segments == [first, second] and world.cache.session_held_tokens() == 2 * PAGE
    world.cache.evict(EvictParams(num_tokens=1000))
    assert first.users == 20 and world.cache.nodes.segments_to(world.node(A), 8) == [first, second]
    world.check()
    for req in list(world.running):
        world.finish(req)
    assert world.cache.session_held_tokens() == 0
    world.check()
    world.empty()


def test_segments_go_with_their_node_unless_somebody_reads_them():
    world = World(host=False)
    done(world, A)
    read, unread = world.segment(0, 4), world.segment(4, 8)
    for segment in (read, unread):
        world.cache.nodes.attach(world.node(A), segment)
    world.cache.segments.use(read)
    world.cache.evict(EvictParams(num_tokens=1000))
    assert not world.cache.root_node.children and read.node is None
    assert world.allocator.available_size() == 40 - PAGE and world.cache.session_held_tokens() == PAGE
    world.check()
    with pytest.raises(ValueError, match=r"\[4, 8\) is not in the tree"):
        world.cache.segments.use(unread)
    world.cache.segments.release(read)
    assert world.allocator.available_size() == 40
    with pytest.raises(ValueError, match=r"\[0, 4\) is not in the tree"):
        world.cache.segments.release(read)
    world.empty()


def test_an_unread_segment_goes_before_the_node_it_hangs_on():
    world = World(host=False)
    done(world, A)
    node, segment = world.node(A), world.segment(0, 8)
    world.cache.nodes.attach(node, segment)
    assert world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == PAGE
    assert node.on_device and node.segments == []
    world.check()
    world.empty()


def test_segments_that_do_not_fit_the_path_are_refused():
    world = World(host=False)
    done(world, A)
    node = world.node(A)
    for start, end, slots, message in (
        (8, 12, PAGE, r"\[8, 12\) is not on a path of 8 tokens"),
        (4, 4, PAGE, "a segment covers whole pages of 2 tokens"),
        (1, 4, PAGE, "a segment covers whole pages of 2 tokens"),
        (0, 4, PAGE - 1, "with 1 slots and 0 users"),
    ):
        with pytest.raises(ValueError, match=message):
            world.cache.nodes.attach(node, Segment(start, end, torch.arange(slots)))
    segment = world.segment(0, 8)
    world.cache.nodes.attach(node, segment)
    with pytest.raises(ValueError, match="is attached already"):
        world.cache.nodes.attach(node, segment)
    with pytest.raises(ValueError, match="more often than it was used"):
        world.cache.segments.release(segment)
    world.cache.evict(EvictParams(num_tokens=1000))
    with pytest.raises(ValueError, match="was dropped from the tree"):
        world.cache.nodes.attach(node, world.segment(0, 8))
