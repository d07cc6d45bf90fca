"""Lanes wait for each other wherever one writes what another reads: told by vector clocks, since a CPU has one lane."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings, strategies as st

from sglang_ext.device import Mark
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.transfers import LastTransfers, DoubleBuffer
from sglang_ext.mem_cache.host_tier.page_copies import LayerCopies
from sglang_ext.mem_cache.host_tier.tier import HostTier


@dataclass(frozen=True)
class TracedMark:
    clock: Counter
    reached: bool = False
    event: None = None


@dataclass
class Trace:
    """Who touched what, and what each lane knew then."""

    lane: "TracedLane | None" = None
    seen: dict = field(default_factory=dict)
    races: list = field(default_factory=list)

    def touch(self, what, writes):
        lane = self.lane
        lane.clock[lane.name] += 1
        for name, time, wrote in self.seen.setdefault(what, []):
            if (wrote or writes) and lane.clock[name] < time:
                self.races.append((what, name, lane.name))
        self.seen[what].append((lane.name, lane.clock[lane.name], writes))


class TracedLane:
    """A lane that runs nothing out of order, and notes what orders it."""

    def __init__(self, name, trace):
        self.name, self.trace, self.clock = name, trace, Counter()

    @contextmanager
    def running(self):
        before, self.trace.lane = self.trace.lane, self
        yield
        self.trace.lane = before

    def mark(self):
        return TracedMark(self.clock.copy())

    def after(self, mark):
        if mark is not None and not isinstance(mark, Mark):
            self.clock |= mark.clock

    def uses(self, *tensors):
        pass


def traced_pipe(name, trace, pages=4):
    return DoubleBuffer(torch.zeros(2, pages * 2, 4, dtype=torch.int64), *(TracedLane(f"{name} {end}", trace) for end in ("in", "out")))


@given(st.integers(1, 9))
def test_a_buffer_is_never_filled_while_it_is_emptied(times):
    trace = Trace()
    pipe = traced_pipe("pipe", trace)
    for _ in range(times):
        pipe.move(lambda half: trace.touch(half.data_ptr(), True), lambda half: trace.touch(half.data_ptr(), False))
    assert not trace.races and len(trace.seen) == min(times, 2), "both in turn"


def test_the_check_sees_a_missing_wait():
    trace = Trace()
    one, other = TracedLane("one", trace), TracedLane("other", trace)
    for lane in (one, other):
        with lane.running():
            trace.touch("half", True)
    assert trace.races == [("half", "one", "other")]


def test_the_last_use_of_any_page_is_waited_for():
    last = LastTransfers(8)
    first, second = TracedMark(Counter()), TracedMark(Counter(a=1))
    last.note(torch.tensor([0, 1]), first)
    last.note(torch.tensor([1, 2]), second)
    assert last.end(torch.tensor([3])) is None
    assert last.end(torch.tensor([0, 3])) is first
    assert last.end(torch.tensor([0, 2])) is second
    ended = TracedMark(Counter(), reached=True)
    last.note(torch.tensor([2]), ended)
    assert last.end(torch.tensor([2])) is ended, "those before it still run"
    only = LastTransfers(8)
    only.note(torch.tensor([2]), ended)
    assert only.end(torch.tensor([2])) is None


def test_of_transfers_that_ended_nothing_is_remembered_though_nobody_asks():
    last = LastTransfers(8)
    for index in range(1000):
        last.note(torch.tensor([index % 8]), TracedMark(Counter(), reached=True))
    assert len(last.running) == 1, "the newest, which had not been seen to end"
    for _ in range(3):
        last.note(torch.tensor([0]), TracedMark(Counter()))
    last.note(torch.tensor([0]), TracedMark(Counter(), reached=True))
    assert len(last.running) == 4, "those that run, and what came after them"


@dataclass(frozen=True)
class TracedCopies(LayerCopies):
    """Copies that note their reads and writes."""

    trace: Trace

    def gather(self, piece, slots, half):
        self.trace.touch(half.data_ptr(), True)

    def scatter(self, piece, slots, half):
        self.trace.touch(half.data_ptr(), False)

    def _blocks(self, piece, half):
        storing = "store" in self.trace.lane.name
        self.trace.touch(half.data_ptr(), not storing)
        for run in piece.runs:
            for row in range(run.first, run.first + run.count, self.pool.page_size):
                self.trace.touch(("page", piece.buffers.start, row), storing)
        return ()


class Forgotten(LastTransfers):
    """Names no transfer to wait for."""

    def end(self, pages):
        return None


class TracedTier(HostTier):
    """A tier whose copies are traced."""

    def __init__(self, buffers, pool, trace, last):
        super().__init__(buffers, pool)
        self._stored, self._loaded = last(pool.pages.count), last(pool.pages.count)
        self._copies = TracedCopies(self._copies.rows, pool, 2 * pool.page_bytes, trace)
        self._stores, self._loads = traced_pipe("store", trace), traced_pipe("load", trace)


def races(transfers, last=LastTransfers):
    """Unordered accesses of a tier that stores all pages and then does these."""
    buffers = KVBuffers((0,), (1.0,), (torch.zeros(32, 1, 8),), (torch.zeros(32, 1, 8),))
    trace = Trace()
    pool = HostPool.create(buffers, 2, 8 * 2 * buffers.bytes_per_slot)
    tier = TracedTier(buffers, pool, trace, last)
    tier.store(torch.arange(16), pool.pages.allocate(8)).wait()
    for storing, pages in transfers:
        pages, slots = torch.tensor(sorted(pages)), torch.arange(2 * len(pages))
        (tier.store(slots, pages) if storing else tier.load(pages, slots)).wait()
    tier.close()
    return trace.races


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 7), min_size=1)), max_size=12))
def test_transfers_of_the_same_pages_wait_for_each_other(transfers):
    assert not races(transfers)


def test_a_tier_that_does_not_wait_is_found_out():
    assert races([(False, {3})], Forgotten), "a load behind its store"
    assert [race for race in races([(False, {3}), (True, {3})], Forgotten) if race[1:] == ("load in", "store out")], "a store behind a load"
