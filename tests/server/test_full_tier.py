"""Full KV of running requests in host memory: more of them run than fit on the device, and their answers are stock's.

Their copies are Lynx's anchors, so that the host holds residuals; that it holds full KV as it is, test_tensor_parallel.py has.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import STRICT, VERIFIED, greedy, sampled
from waiting import tries

pytestmark = pytest.mark.server

# Full KV of four prompts of 420 tokens fits, with their copies; every third load finds a changed page.
FLAGS = (
    *("--kv-compressor", "lynx", "--kv-budget", "1", "--page-size", "64"),
    *("--kv-draft-length", "4", "--kv-full-tier", "host", "--kv-host-gb", "0.5"),
    *("--kv-offload-draft-length", "12", "--max-total-tokens", "2304", "--kv-bench-corrupt-loads", "3"),
)


@pytest.fixture
def host(stock, launch):
    """A server whose full KV lies in host memory that loses bits, with strict checks."""
    return launch(*VERIFIED, *FLAGS, env=STRICT)


def test_more_run_at_once_than_fit_and_what_the_host_lost_is_computed_again(stock, host, prompts, token_bytes):
    # Equally long, so that it does not matter which come together.
    asked = [each[:420] for prompt in prompts[1:] for each in (prompt, prompt[::-1])] + [prompts[3][-420:]]
    expected = stock.ask_all(asked, 2, **greedy(20))
    # Now and then none of the looks falls on a moment at which two requests' KV is away, or many wait for room until they are through.
    for _ in tries(4, "of running requests, no more was there than fits on the device"):
        host.flush_cache()
        with sampled(host, "sglang_ext:offloaded_bytes", 0.1) as offloaded:
            found = host.ask_all(asked, 7, cold=False, **greedy(20))
        assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
        if sum(r["meta_info"]["kv_verifies"] > 0 for r in found) >= 5 and max(offloaded) > 400 * token_bytes:
            break
    assert host.metric("sglang_ext:host_failed_pages_total") > 0 < host.metric("sglang_ext:recomputed_requests_total")
    for name in ("host_stored_bytes_total", "host_loaded_bytes_total", "host_load_seconds_total", "reservations_total"):
        assert host.metric(f"sglang_ext:{name}") > 0, name
    assert host.metric("sglang_ext:offloaded_bytes") == 0, "nobody runs"
    loaded, restored = (host.metric(f"sglang_ext:host_{what}_bytes_total") for what in ("loaded", "restored"))
    # A residual has 23 bits of 32; of 420 tokens the first and the last page are whole.
    assert 0.72 * restored < loaded < 0.9 * restored


def test_company_that_cannot_draft_changes_nobodys_answer(stock, host, prompts):
    bodies = [
        greedy(20),
        {"sampling_params": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 5, "max_new_tokens": 20}},
        {**greedy(16), "return_logprob": True, "top_logprobs_num": 2},
        greedy(14, frequency_penalty=0.7),
        {"sampling_params": {"temperature": 0, "regex": "[a-z ]{30}", "max_new_tokens": 12}},
        greedy(20, min_p=0.2),
    ]
    asked = [*prompts, prompts[1][::-1], prompts[2][::-1]]

    def ask(server, workers):
        server.flush_cache()
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda pair: server.ask(input_ids=pair[0], **pair[1]), zip(asked, bodies)))

    expected = ask(stock, 1)
    # Where the pool is full, they may have no copies.
    for _ in tries(3, "penalties and grammars are drafted, too"):
        found = ask(host, 6)
        assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
        values = [[value for value, *_ in r[2]["meta_info"]["output_token_logprobs"]] for r in (found, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)
        assert found[5]["meta_info"]["kv_fallback"] == "min-p"
        if any(r["meta_info"]["kv_drafts"] > 0 for r in found[3:5]):
            break


def test_requests_with_one_beginning_share_its_copy_and_its_loads(stock, host, prompts, token_bytes):
    asked = [prompts[3][:640] + prompts[0][i * 11 : i * 11 + 24] for i in range(6)]
    for server in (stock, host):
        server.flush_cache()
        server.ask(input_ids=prompts[3][:640], **greedy(1))
    expected = [r["output_ids"] for r in stock.ask_all(asked, 6, cold=False, **greedy(12))]
    with sampled(host, "sglang_ext:compressed_bytes") as held:
        found = host.ask_all(asked, 6, cold=False, **greedy(12))
    assert [r["output_ids"] for r in found] == expected
    # Nine blocks once, and of each request the first page.
    assert 0 < max(held) <= (128 + 6 * 64) * token_bytes
