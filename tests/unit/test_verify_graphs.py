"""Which captured verification a batch replays."""

from types import SimpleNamespace

import pytest

from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
from sglang_ext.managers.captured import Captured
from sglang_ext.mem_cache.query_window import QueryWindows


@pytest.mark.parametrize(
    ("requests", "width", "expected"), [(4, 3, 5), (4, 5, 5), (4, 6, 17), (8, 17, 17), (4, 18, None), (9, 3, None)]
)
def test_the_narrowest_that_holds_the_batch_is_taken(requests, width, expected):
    graphs = [SimpleNamespace(width=w, fits=lambda requests: requests <= 8) for w in (17, 5)]
    found = VerifyGraphSet(graphs).fit(requests, width)
    assert (found and found.width) == expected


def test_without_graphs_none_are_captured_and_no_queries_are_expected_of_them():
    windows = QueryWindows(4, (0,), spare=5)
    args = SimpleNamespace(kv_mode="verified", kv_schedule="lockstep")
    assert Captured.of(args, SimpleNamespace(decode_cuda_graph_runner=None), windows, None).sets == []
    # What the worker does once at start, to have it done.
    windows.warm_up()
    assert windows.held_bytes == 0
