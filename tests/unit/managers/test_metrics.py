"""Counters are on the page from the start, at 0, for the labels that are known."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import prometheus_client

from sglang_ext.managers.feature import load_features
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.prefix_storage import PrefixStorage

# A user's own, which goes by its class.
OWN = f"{Path(__file__).parents[3]}/examples/key_norm.py:KeyNorm"


def first_page(mode: str = "verified") -> str:
    """The metrics page of a server that has served nothing."""
    args = SimpleNamespace(
        served_model_name="m", model_path="p", enable_metrics=True, speculative_num_draft_tokens=3, kv_host_gb=1, kv_store="file:/store", kv_cache_ranks=1,
        kv_prefill="exact", kv_mode=mode, disaggregation_mode="null",
        kv_compressor="snapkv", kv_budget=0.25, kv_more_compressors=f"kivi,snapkv:0.125,{OWN}:0.5",
    )  # fmt: skip
    KVMetrics.create(args, sources=[PrefixStorage(args)] if mode == "full" else load_features(args))
    return prometheus_client.generate_latest().decode()


def test_series_begin_at_zero() -> None:
    # The registry is the process's, so a fork creates the metrics.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as apart:
        page = apart.submit(first_page).result()
    found = set(page.splitlines())
    for name in ("drafts", "verifies", "accepted_drafts", "host_loads", "store_hit_pages"):
        assert f'sglang_ext:{name}_total{{model_name="m"}} 0.0' in found
    for compressor in ("snapkv", "kivi", "snapkv:0.125", "KeyNorm:0.5"):
        assert f'sglang_ext:copies_total{{compressor="{compressor}",model_name="m"}} 0.0' in found
    assert "key_norm.py" not in page
    assert 'sglang_ext:fallback_tokens_total{model_name="m",reason="short-context"} 0.0' in found
    assert 'sglang_ext:missed_selections_total{model_name="m",reason="late"} 0.0' in found
    assert 'sglang_ext:accept_length_count{model_name="m"} 0.0' in found


def test_in_mode_full_there_are_the_metrics_of_sources_alone():
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as apart:
        page = apart.submit(first_page, "full").result()
    assert 'sglang_ext:store_hit_pages_total{model_name="m"} 0.0' in page.splitlines()
    assert not [name for name in ("drafts_total", "compressed_bytes", "accept_length", "copies_total") if f"sglang_ext:{name}" in page]
