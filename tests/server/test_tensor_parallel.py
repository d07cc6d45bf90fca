"""Ranks that hold some of the heads each make the same rounds, and together the answers of one."""

import pytest
from servers import CORES, STRICT, VERIFIED, greedy

pytestmark = pytest.mark.server

# The demo model's nine query and three KV heads divide by three. Full KV of the two prompts needs more than 1,000 slots. With `auto` the
# number of loads would depend on measured times.
RANKS = (
    *("--tp-size", "3", "--kv-draft-length", "8", "--kv-max-burst", "9", "--kv-full-tier", "host", "--kv-host-gb", "0.2"),
    *("--kv-offload-draft-length", "8", "--max-total-tokens", "1300", "--kv-bench-corrupt-loads", "4"),
)


def test_three_ranks_decide_alike_and_recompute_alike_what_one_of_them_lost_with_stocks_answers(launch, prompts, expected):
    # In strict mode a round that differs between ranks stops the server.
    ranks = launch(*VERIFIED, *RANKS, env={**STRICT, **CORES})
    alone = ranks.ask(input_ids=prompts[0], **greedy(16))
    assert alone["output_ids"] == expected[0][:16]
    # Each rank loses a page in another load. How many loads there are depends on the time that they take.
    found = []
    while ranks.metric("sglang_ext:host_failed_pages_total") <= 1:
        assert len(found) < 12
        found += ranks.ask_all(prompts[1:3], 2, **greedy(16))
    assert [r["output_ids"] for r in found] == [ids[:16] for ids in expected[1:3]] * (len(found) // 2)
    assert ranks.metric("sglang_ext:host_loaded_bytes_total") > 0
    drafts, verifies = (sum(r["meta_info"][name] for r in (alone, *found)) for name in ("kv_drafts", "kv_verifies"))
    # Drafts that were lost with a page are those of no answer.
    assert 0 < drafts <= ranks.metric("sglang_ext:drafts_total")
    assert ranks.metric("sglang_ext:verifies_total") == verifies, "only one rank counts"
