"""Ranks that hold some of the heads each make the same rounds, and together the answers of one."""

import os

import pytest

from servers import STRICT, VERIFIED, greedy

pytestmark = pytest.mark.server

# The demo model's nine query and three KV heads divide by three.
RANKS = ("--tp-size", "3", "--kv-draft-length", "auto", "--kv-max-burst", "9")
# SGLang wants a NUMA node for each rank, or to be told its cores.
AVAILABLE = sorted(os.sched_getaffinity(0))
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(AVAILABLE[rank % len(AVAILABLE)]) for rank in range(3)), "OMP_NUM_THREADS": "1"}


def test_three_ranks_give_stocks_answers_and_decide_alike(launch, prompts, expected):
    # In strict mode a round that differs between ranks stops the server.
    ranks = launch(*VERIFIED, *RANKS, env={**STRICT, **CORES})
    found = ranks.ask_all(prompts[:2], **greedy(16))
    assert [r["output_ids"] for r in found] == [ids[:16] for ids in expected[:2]]
    assert sum(r["meta_info"]["kv_drafts"] for r in found) > 0
    counted = ranks.metric("sglang_ext:drafts_total")
    assert counted == sum(r["meta_info"]["kv_drafts"] for r in found), "only one rank counts"


def test_ranks_that_lose_different_pages_in_host_memory_recompute_alike(launch, prompts, expected):
    flags = (
        *("--tp-size", "3", "--kv-draft-length", "auto", "--kv-max-burst", "3", "--kv-full-tier", "host"),
        *("--kv-host-gb", "0.2", "--kv-offload-draft-length", "8", "--max-total-tokens", "1300", "--kv-bench-corrupt-loads", "4"),
    )
    # Full KV of the two needs more than 1,000 of the slots; each rank loses a page in another load.
    ranks = launch(*VERIFIED, *flags, env={**STRICT, **CORES})
    found = ranks.ask_all(prompts[1:3], 2, **greedy(16))
    assert [r["output_ids"] for r in found] == [ids[:16] for ids in expected[1:3]]
    assert ranks.metric("sglang_ext:host_failed_pages_total") > 1
    assert ranks.metric("sglang_ext:host_loaded_bytes_total") > 0
