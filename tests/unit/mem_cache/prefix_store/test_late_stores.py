"""A store that is late, for one rank or for all, costs requests little time."""

import threading
import time

import pytest
from rank_threads import on_ranks
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_stored_prefixes import OTHER, PROMPT, Store, worlds  # noqa: F401

from sglang_ext.mem_cache.prefix_cache import stored_prefixes


def measure_computing(world, seconds=0.01):
    """Let a world know how long it computes 200 tokens."""
    world.stored.compute.begin("an earlier request")
    time.sleep(seconds)
    world.stored.compute.end("an earlier request", 200)


def test_a_lookup_that_hangs_delays_one_request(worlds, monkeypatch):  # noqa: F811
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    monkeypatch.setattr(stored_prefixes, "LOOKUP_SECONDS", 0.05)
    gate, count_run = threading.Event(), second.backend.count_run
    second.backend.count_run = lambda names: gate.wait(10) and count_run(names)
    assert second.serve(OTHER) == 0
    second.ask(PROMPT)
    assert second.cache.check_prefetch_progress("a request"), "the store is not asked again"
    gate.set()
    second.stored._late.result(10)
    assert second.serve(PROMPT) == 40


@pytest.mark.parametrize("late", [0, 1])
def test_a_store_that_hangs_for_one_rank_is_given_up_by_all(worlds, tmp_path, late):  # noqa: F811
    made = {rank: Store(tmp_path / str(rank)) for rank in (0, 1)}

    def serve(ranks):
        world, backend = worlds(backend=made[ranks.rank], ranks=ranks), made[ranks.rank]
        world.serve(PROMPT)
        world.written()
        world.cache.reset()
        world.allocator.clear()
        measure_computing(world)
        if ranks.rank == late:
            backend.may_read.clear()
        begin = time.monotonic()
        loaded = world.serve(PROMPT)
        seconds = time.monotonic() - begin
        backend.may_read.set()
        return loaded, seconds

    for loaded, seconds in on_ranks(2, serve):
        assert loaded == 0 and seconds < 2


def test_pages_that_the_store_has_are_not_written_again_if_computing_is_faster(worlds):  # noqa: F811
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    measure_computing(second)
    second.backend.seconds = 0.2
    second.serve(PROMPT)
    second.written()
    # Read at last, so that the store is known to be slow.
    time.sleep(0.5)
    second.cache.evict(EvictParams(num_tokens=second.slots))
    second.cache.reset()
    second.allocator.clear()
    names, put = [], second.backend.inner.put
    second.backend.inner.put = lambda name, parts: names.append(name) or put(name, parts)
    assert second.serve(PROMPT) == 0 and second.stored.skipped_slow == 1
    second.written()
    assert not names
