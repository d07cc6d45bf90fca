"""Prompts that attend to codes: the same outcome cold, warm, beside others and however they are cut, near that of exact prompts."""

import pytest
from servers import STRICT, greedy

pytestmark = pytest.mark.server


def test_what_a_prompt_gives_depends_on_no_company_chunk_or_cached_prefix(launch, prompts, kinds):
    server = launch(
        "--kv-mode", "lossy", "--kv-compressor", "hack", "--kv-prefill", "quantized", "--page-size", "16", "--chunked-prefill-size", "256",
        env=STRICT,
    )  # fmt: skip
    assert server.request("server_info")["kv_prefill"] == "quantized"
    # Steps over copies of a batch are rounded otherwise than those of a request, so the token after the prompt is looked at.
    asked = {"return_logprob": True, **greedy(1)}
    alone, beside = (server.ask_all(prompts, together, **asked) for together in (1, 4))
    warm = server.ask_all(prompts, 2, cold=False, **asked)
    assert [r["meta_info"]["cached_tokens"] for r in warm] == [(len(ids) - 1) // 16 * 16 for ids in prompts]
    for others in (beside, warm):
        assert after_prompts(others) == pytest.approx(after_prompts(alone), abs=1e-4)
    # Of the same tokens as stock, a little more or less likely.
    body, stocks = kinds["log-probabilities"]
    (found,), (exact,) = after_prompts([server.ask(**body)]), after_prompts([stocks])
    assert 1e-4 < abs(found - exact) < 0.3


def after_prompts(answers):
    """Log-probabilities of the first token of each."""
    return [answer["meta_info"]["output_token_logprobs"][0][0] for answer in answers]
