"""Host pages: no page has two owners, and requests get few runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.mem_cache.host_tier.host_pool import HostPages, HostPageRun, runs
from sglang_ext.mem_cache.host_tier.page_copies import pieces

COUNT = 24


@given(st.lists(st.tuples(st.booleans(), st.integers(1, COUNT)), max_size=40), st.randoms(use_true_random=False))
def test_pages_are_handed_out_once_and_joined_when_they_come_back(steps, random):
    pool, owned = HostPages(COUNT), []
    for giving_back, size in steps:
        free = sorted(set(range(COUNT)) - set(owned))
        if giving_back:
            given_back = random.sample(owned, min(size, len(owned)))
            pool.free(torch.tensor(given_back, dtype=torch.int64))
            owned = [page for page in owned if page not in given_back]
        elif (pages := pool.allocate(size)) is None:
            assert size > len(free)
        else:
            assert pages.dtype == torch.int64 and len(pages) == size and set(pages.tolist()) <= set(free)
            longest = max(run.count for run in runs(torch.tensor(free)))
            assert (len(runs(pages)) == 1) == (longest >= size)
            owned += pages.tolist()
        assert pool.free_pages == COUNT - len(owned)
    pool.free(torch.tensor(owned, dtype=torch.int64))
    assert pool.allocate(COUNT).tolist() == list(range(COUNT))


def test_the_shortest_run_that_is_long_enough_is_taken():
    pool = HostPages(20)
    pool.allocate(20)
    for first, end in ((0, 8), (10, 13), (15, 20)):
        pool.free(torch.arange(first, end))
    assert pool.allocate(3).tolist() == [10, 11, 12]
    assert pool.allocate(4).tolist() == [15, 16, 17, 18]
    assert pool.allocate(9).tolist() == [*range(8), 19], "split only where no run is long enough"


@pytest.mark.parametrize(
    ("pages", "message"),
    [([3], "are free"), ([0, 1, 3], "are free"), ([0, 0], "freed twice"), ([8], "do not exist"), ([-1], "do not exist")],
)
def test_pages_that_are_not_owned_are_not_freed(pages, message):
    pool = HostPages(8)
    assert pool.allocate(2).tolist() == [0, 1]
    with pytest.raises(ValueError, match=message):
        pool.free(torch.tensor(pages))
    assert pool.free_pages == 6


def test_a_page_is_freed_once():
    pool = HostPages(8)
    pages = pool.allocate(3)
    pool.free(pages)
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] are free"):
        pool.free(pages)
    with pytest.raises(ValueError, match="at least 1"):
        pool.allocate(0)


def test_a_page_of_a_new_owner_holds_nothing():
    pool = HostPages(2)
    pages = pool.allocate(2)
    pool.fill(pages)
    pool.check_filled(pages)
    pool.free(pages)
    with pytest.raises(ValueError, match=r"\[0, 1\] were not stored"):
        pool.check_filled(pool.allocate(2))


def test_runs_are_as_long_as_they_get():
    assert runs(torch.tensor([4, 5, 6, 2, 1, 9, 10])) == (HostPageRun(0, 4, 3), HostPageRun(3, 2, 1), HostPageRun(4, 1, 1), HostPageRun(5, 9, 2))
    assert runs(torch.tensor([], dtype=torch.int64)) == ()


@given(
    st.integers(1, 7), st.lists(st.integers(0, 30), min_size=1, max_size=20, unique=True), st.integers(1, 4), st.integers(1, 50)
)
def test_pieces_hold_each_token_of_each_buffer_once_and_fit(buffers, pages, page_size, room):
    seen = []
    half = torch.zeros(room * page_size, 3)
    for piece in pieces(buffers, torch.tensor(pages), page_size, room):
        tokens = range(piece.tokens.start, piece.tokens.stop)
        assert piece.part(half).shape == (len(piece.buffers), len(tokens), 3), "it fits in the room"
        rows = [(run.place + i, run.first + i) for run in piece.runs for i in range(run.count)]
        assert [place for place, _ in rows] == list(range(len(tokens)))
        seen += [(buffer, tokens[place], row) for buffer in piece.buffers for place, row in rows]
    expected = [page * page_size + i for page in pages for i in range(page_size)]
    assert sorted(seen) == [(b, token, row) for b in range(buffers) for token, row in enumerate(expected)]
