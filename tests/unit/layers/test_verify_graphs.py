"""Which captured verification a batch replays."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.layers.attention import verify_attention, verify_graphs
from sglang_ext.layers.attention.verify_flashinfer import VerifyFlashInfer
from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
from sglang_ext.managers import graph_capture
from sglang_ext.mem_cache.compressed.queries import QueryWindows


@pytest.mark.parametrize(
    ("requests", "width", "expected"), [(4, 3, 5), (4, 5, 5), (4, 6, 17), (8, 17, 17), (4, 18, None), (9, 3, None)]
)
def test_the_narrowest_that_holds_the_batch_is_taken(requests, width, expected):
    graphs = [SimpleNamespace(width=w, max_bs=8) for w in (17, 5)]
    found = VerifyGraphSet(graphs).fit(requests, width)
    assert (found and found.width) == expected


@pytest.mark.parametrize(
    ("heads", "width", "mib", "expected"),
    [((32, 8, 128), 17, 512, [1, 64, 128]), ((32, 8, 128), 17, 1024, [1, 64, 128, 193]), ((32, 8, 128), 65, 512, [1, 64]), ((71, 1, 64), 17, 384, [1])],
)
def test_batches_whose_parts_are_more_than_flashinfers_workspace_have_no_graph(monkeypatch, caplog, heads, width, mib, expected):
    """A decode server of an 8B model on an H100 began with 193 requests: 590 MiB, and FlashInfer refused the plan."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    attention = object.__new__(VerifyFlashInfer)
    attention.workspace_buffer = torch.empty(mib << 20, dtype=torch.uint8, device="meta")
    attention.indices_updater_prefill = SimpleNamespace(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    sizes = [1, 64, 128, 193]
    with caplog.at_level("INFO"):
        assert verify_graphs.capturable_sizes(attention, sizes, width) == expected
    assert ("without graphs" in caplog.text) == (expected != sizes)
    assert verify_graphs.capturable_sizes(SimpleNamespace(), sizes, width) == sizes


def windows_with_rings():
    windows = QueryWindows(4, (0,), extra_queries=5)
    windows.allocate(2, 1, 1, torch.empty(0))
    return windows


RINGS = (1 + 2 * 9) * 4


def test_without_graphs_none_are_captured_and_no_queries_are_expected_of_them():
    windows = windows_with_rings()
    args = SimpleNamespace(kv_mode="verified")
    assert graph_capture.capture_verify_graphs(args, SimpleNamespace(decode_cuda_graph_runner=None), windows, None) is None
    # What the worker does once at start, to have it done.
    windows.warm_up()
    assert windows.held_bytes == RINGS


HOST = {"kv_full_tier": "host", "kv_host_gb": 1, "speculative_num_draft_tokens": 65}


@pytest.mark.parametrize(
    ("flags", "backend", "full", "tokens"),
    [
        ({}, "flashinfer", [(17, None, None)], 8 * 17),
        ({}, "triton", [(17, "verifier", None)], 8 * 17),
        ({"kv_draft_length": "auto"}, "fa3", [(5, None, None), (16, None, None)], 8 * 16),
        (HOST, "flashinfer", [(17, None, None), (65, None, 2)], 8 * 17),
        (HOST | {"bs": [1, 2]}, "flashinfer", [(17, None, None), (65, None, 2)], 2 * 65),
        ({"bs": [1, 64]}, "flashinfer", [(17, None, None)], 20 * 17),
    ],
)
def test_what_is_captured_follows_from_flags_and_backend(monkeypatch, flags, backend, full, tokens):
    """Of each: tokens of a request, what attends where it is not the model's own backend, and requests at most."""
    bs = flags.get("bs", [1, 8])
    args = SimpleNamespace(
        **{
            "kv_mode": "verified", "kv_draft_length": 16, "kv_max_burst": None,
            "kv_full_tier": "device", "kv_host_gb": 0, "kv_compressor": "snapkv", "disable_radix_cache": False,
            "kv_offload_draft_length": 64, "speculative_num_draft_tokens": 17, "disaggregation_mode": "null",
            "kv_store": None,
        } | flags,
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=bs)),
    )  # fmt: skip
    model = SimpleNamespace(
        decode_cuda_graph_runner="graphs", decode_attention_backend_str=backend, dtype=torch.float32, device="cpu", model=None
    )
    model.req_to_token_pool, model.graph_shared_output = SimpleNamespace(size=20), None
    monkeypatch.setattr(graph_capture, "get_batch_sizes_to_capture", lambda model, width: ([n for n in bs if n <= 20], []))
    monkeypatch.setattr(verify_attention, "VerifyAttention", lambda model: "verifier")
    monkeypatch.setattr(
        graph_capture, "capture", lambda model, width, own, most=None: SimpleNamespace(width=width, found=(width, own, most))
    )
    windows = windows_with_rings()
    found = graph_capture.capture_verify_graphs(args, model, windows, graph_capture.create_verify_attention(args, model))
    assert [graph.found for graph in found.graphs] == full
    assert windows.held_bytes == RINGS + tokens * 8, "places for the queries of the largest"
    assert model.graph_shared_output.max_rows == tokens, "and logits of as many"
    before = model.graph_shared_output
    verify_graphs.reserve_logits_buffer(model, tokens)
    assert model.graph_shared_output is before
    assert graph_capture.create_verify_attention(SimpleNamespace(kv_mode="lossy"), model) is None
