"""Another process chooses tokens while the server computes: answers are stock's, also while that process is killed. In mode lossy it has
the full KV alone: more requests run in one pool, and who loses it is computed again.
"""

import concurrent.futures
import os
import re
import signal
from pathlib import Path

import pytest
from servers import EXPECTED_TOKENS, LOGGED, STRICT, STRIPS_THOUGHTS, greedy, most_running, sampled
from waiting import tries, until

pytestmark = pytest.mark.server

RANKS = (
    *("--kv-mode", "verified", "--kv-compressor", "spade", "--kv-select", "0.125", "--kv-draft-length", "8", "--kv-cache-ranks", "1"),
    *("--kv-sparse-from", "400", "--page-size", "16", "--chunked-prefill-size", "256", "--enable-metrics"),
)
# A pool of little more than three of the contexts that are asked for.
PROMPT, ANSWER, POOL = 400, 40, 1600
LOSSY = (
    *("--kv-mode", "lossy", "--kv-compressor", "spade", "--kv-select", "0.125", "--kv-cache-ranks", "1", "--kv-score-bits", "8"),
    *("--page-size", "16", "--chunked-prefill-size", "256", "--max-total-tokens", str(POOL), "--enable-metrics", *LOGGED),
    *STRIPS_THOUGHTS,
)
MISSED = "missed_selections_total"


@pytest.fixture
def server(launch):
    """A server with one cache rank."""
    return launch(*RANKS, env=STRICT)


def metric(server, name, label=""):
    """Sum of the samples of a metric that have a label."""
    lines = server.request("metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sglang_ext:{name}") and label in line)


def wait_until_ready(server):
    """Until its cache rank serves; ranks are tended in rounds, and where a server is idle."""
    until(lambda: metric(server, "cache_ranks_ready") == 1, "the cache rank is ready", seconds=120, pause=0.2)


def rank_pid(server):
    """The process of its cache rank, of which the log tells the newest."""
    return int(re.findall(r"cache rank \(process (\d+), start \d+\) is ready", Path(server.log).read_text())[-1])


def test_answers_are_stocks_and_drafts_are_accepted(server, prompts, expected):
    # Where cores are busy choices come late, and a rank that hears nothing for seconds is started anew.
    for _ in tries(3, "few drafts were accepted"):
        wait_until_ready(server)
        found = server.ask_all(prompts[:4], 4, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected[:4]
        short, *told = [r["meta_info"] for r in found]
        assert (short["kv_fallback"], short["kv_drafts"]) == ("short-context", 0), "300 tokens are read whole"
        assert metric(server, MISSED, 'reason="wrong"') == 0
        accepted, drafts = (sum(each[name] for each in told) for name in ("kv_accepted", "kv_drafts"))
        if {each["kv_compressor"] for each in told} == {"spade"} and accepted > 0.2 * drafts > 0:
            break
    wait_until_ready(server)
    assert metric(server, "selections_total") > 3
    assert metric(server, "copies_total", "spade") > 3 and metric(server, "cache_rank_tokens") == 0, "all are gone"


def test_a_rank_that_is_killed_changes_no_answer_and_another_takes_its_place(server, prompts, expected):
    prompt, tokens = prompts[3], 56
    whole = server.ask(input_ids=prompt, **greedy(tokens))
    assert whole["output_ids"][:EXPECTED_TOKENS] == expected[3]
    names = (MISSED, 'reason="ended"'), ("fallback_tokens_total", 'reason="no-selection"'), ("cache_rank_starts_total",)
    for _ in tries(3, "it was killed when the answer had ended"):
        wait_until_ready(server)
        before = [metric(server, *name) for name in names]
        server.flush_cache()
        killed, last = False, None
        for last in server.stream("generate", {"input_ids": prompt, "stream": True, **greedy(tokens)}):
            if not killed and last["meta_info"]["completion_tokens"] > 8:
                os.kill(rank_pid(server), signal.SIGKILL)
                killed = True
        assert killed and last["output_ids"] == whole["output_ids"]
        # Ranks are tended in rounds.
        grown = lambda: [metric(server, *name) - earlier for name, earlier in zip(names, before)]
        until(lambda: server.ask(input_ids=prompt, **greedy(4)) and grown()[2] > 0, "another is started", seconds=120, pause=0.5)
        missed, fallbacks, _ = grown()
        if missed > 0 and fallbacks > 8:
            break
    wait_until_ready(server)
    again = server.ask(input_ids=prompt, **greedy(tokens))
    assert again["output_ids"] == whole["output_ids"] and again["meta_info"]["kv_drafts"] > 0


@pytest.fixture
def lossy(launch):
    """A server in mode lossy with one cache rank, a small pool, and strict checks."""
    return launch(*LOSSY, env=STRICT)


@pytest.fixture
def contexts(prompts):
    """Eight, of which the last two begin alike."""
    text = [token for prompt in prompts for token in prompt] * 2
    apart = [[i + 5, *text[i * 200 : i * 200 + PROMPT - 1]] for i in range(6)]
    return [*apart, *([*apart[0][:200], *text[start : start + 200]] for start in (900, 1100))]


def test_in_lossy_more_contexts_run_than_the_pool_holds_in_full(lossy, contexts):
    lossy.flush_cache()
    since = lossy.log.stat().st_size
    with sampled(lossy, "sglang_ext:rank_alone_tokens") as alone:
        found = lossy.ask_all(contexts, len(contexts), **greedy(ANSWER))
    assert all(len(r["output_ids"]) == ANSWER and r["meta_info"]["kv_fallback"] is None for r in found)
    assert {r["meta_info"]["kv_compressor"] for r in found} == {"spade"}
    assert most_running(lossy, since) > POOL // (PROMPT + ANSWER) and max(alone) > POOL
    assert metric(lossy, "selection_rows_total") > 0 and metric(lossy, MISSED, 'reason="wrong"') == 0
    lossy.flush_cache()
    assert metric(lossy, "rank_alone_tokens") == metric(lossy, "compressed_bytes") == metric(lossy, "cache_rank_tokens") == 0


def test_in_lossy_answers_that_leave_the_cache_with_their_thought_leave_no_slot_behind(lossy, contexts):
    lossy.flush_cache()
    # Long enough that full KV of generated tokens is freed before the request ends.
    found = lossy.ask_all(contexts[:2], 2, require_reasoning=True, **greedy(60))
    assert all(r["meta_info"]["reasoning_tokens"] > 0 and len(r["output_ids"]) == 60 for r in found)
    assert {r["meta_info"]["kv_compressor"] for r in found} == {"spade"}
    lossy.flush_cache()
    assert metric(lossy, "rank_alone_tokens") == metric(lossy, "compressed_bytes") == 0 and lossy.alive()


def test_in_lossy_requests_of_a_rank_that_is_killed_are_computed_again(lossy, contexts):
    lossy.flush_cache()
    before = metric(lossy, "recomputed_requests_total")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(lossy.ask, input_ids=ids, rid=f"of-rank-{i}", **greedy(120)) for i, ids in enumerate(contexts[:4])]
        until(lambda: metric(lossy, "rank_alone_tokens") >= 2 * PROMPT, "full KV is given back", seconds=120, pause=0.1)
        lossy.request("abort_request", {"rid": "of-rank-3"})
        os.kill(rank_pid(lossy), signal.SIGKILL)
        found = [each.result() for each in asked]
    assert [len(r["output_ids"]) for r in found[:3]] == [120] * 3
    assert metric(lossy, "recomputed_requests_total") > before and metric(lossy, MISSED, 'reason="ended"') > 0
    lossy.flush_cache()
    assert metric(lossy, "rank_alone_tokens") == 0 and lossy.alive()
