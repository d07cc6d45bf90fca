"""Ranks that are done with their transfers at different times, and lose different pages, go on with the same tree."""

import time
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from rank_threads import on_ranks
from tiered_helpers import World, kv_of

from sglang_ext.device import Mark
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import LaunchedTransfer, Transfer, TransferError, TransferTracker
from sglang_ext.mem_cache.prefix_cache.host_store import FaultInjector
from sglang_ext.mem_cache.prefix_cache.nodes import path

A = list(range(1, 13))


def transfer(seconds=None, wrong=(), size=8):
    """A load of pages 10 to 13: done after ``seconds``, ``wrong`` of them changed; None for one under way."""
    launched = Future()
    if seconds is not None:
        found = torch.tensor([page in wrong for page in range(10, 14)])
        launched.set_result(LaunchedTransfer(Mark(seconds=1.0), Mark(seconds=1.0 + seconds), found, size))
    return Transfer(8, torch.arange(10, 14), launched)


def test_done_is_what_all_ranks_said_and_the_worst_of_it_counts():
    def work(ranks):
        arrivals, first = TransferTracker(ranks), ranks.first
        both, one, none = transfer(2.0, {11}, 7) if first else transfer(3.0, {13}, 5), transfer(1.0 if first else None), transfer()
        before = arrivals.done(both)
        arrivals.update([both, one, none, both])
        return before, [arrivals.done(each) for each in (both, one, none)], arrivals.outcome(both)

    for before, done, outcome in on_ranks(2, work):
        assert not before, "nobody asked the others yet"
        assert done == [True, False, False]
        assert outcome == (3.0, [11, 13], 7)


def test_one_rank_alone_looks_for_itself():
    arrivals, load = TransferTracker(), transfer(1.0, {12})
    assert arrivals.done(load) and arrivals.outcome(load) == (1.0, [12], 8)
    with pytest.raises(TransferError, match="8 bytes is still in progress"):
        arrivals.outcome(transfer())


@dataclass
class Late:
    """Blocks of pages whose slots are known late."""

    seconds: float

    @property
    def slots(self):
        time.sleep(self.seconds)
        return torch.zeros(0, dtype=torch.int64)


class SlowTier(HostTier):
    """Each transfer begins late."""

    seconds = 0.0

    def store(self, slots, pages, blocks=None):
        return super().store(slots, pages, Late(self.seconds))

    def load(self, pages, slots, blocks=None):
        return super().load(pages, slots, Late(self.seconds))


def test_trees_of_slow_and_fast_ranks_stay_alike_whatever_each_loses():
    def work(ranks):
        world, seen = World(host=False), []
        world.tier = SlowTier(world.buffers, world.tier.pool)
        world.tier.seconds = 0.02 * ranks.rank
        world.cache.use_host(world.tier, ranks=ranks, faults=FaultInjector(3, loads=ranks.rank))
        for turn in range(6):
            tokens = [*A, 20 + turn, 40 + turn]
            req = world.start(tokens)
            leaf = req.last_node
            world.finish(req)
            for node in path(leaf):
                world.cache.host.back_up(node)
            freed = []
            while sum(freed) < leaf.end:
                world.cache.host.collect_loads(node.store for node in path(leaf) if node.store is not None)
                freed.append(sum(world.cache.host.free_device_slots(node) for node in path(leaf)))
            indices, last = world.bring(world.match(tokens))
            assert torch.equal(world.kv[indices, 0, 0], kv_of(tokens)[: last.end])
            seen.append((freed, last.end, sorted(world.tiers().items())))
        return seen, world.cache.host.failed_pages, world.cache.host.faults.loads

    one, other = on_ranks(2, work)
    assert one[0] == other[0]
    assert one[1] == other[1] > 1, "each rank lost a page that the other had"
    assert one[2] != other[2]
