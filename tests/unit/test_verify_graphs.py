"""Which captured verification a batch replays."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
from sglang_ext.managers.worker import KVWorker
from sglang_ext.mem_cache.query_window import QueryWindows, Recorded


@pytest.mark.parametrize(
    ("requests", "width", "expected"), [(4, 3, 5), (4, 5, 5), (4, 6, 17), (8, 17, 17), (4, 18, None), (9, 3, None)]
)
def test_the_narrowest_that_holds_the_batch_is_taken(requests, width, expected):
    graphs = [SimpleNamespace(width=w, fits=lambda requests: requests <= 8) for w in (17, 5)]
    found = VerifyGraphSet(graphs).fit(requests, width)
    assert (found and found.width) == expected


def test_without_graphs_none_are_captured_and_no_queries_are_expected_of_them():
    windows = QueryWindows(4, (0,), spare=5)
    worker = SimpleNamespace(
        lossy=False, queries=windows, server_args=SimpleNamespace(kv_schedule="lockstep"), _read_copies=lambda: None,
        model_runner=SimpleNamespace(
            decode_attention_backend_str="flashinfer", decode_cuda_graph_runner=None, dtype=torch.float32, device="cpu"
        ),
    )  # fmt: skip
    KVWorker.init_cuda_graphs(worker)
    # What the worker does once at start, to have it done.
    windows.keep_replayed((Recorded(0, 0, 5, 0),))
    assert windows.held_bytes == 0
