"""What cannot be drafted is served with full KV, says so, and its neighbours draft again when it is done."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, assert_same_answers, greedy
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

pytestmark = pytest.mark.server

# Hidden states pass through all layers; the batch's shape changes how their products round.
HIDDEN_TOLERANCE = 1e-3


def test_min_p_gives_stocks_answer_with_full_kv_beside_one_that_drafts(stock, verified, prompts, expected):
    body = {"input_ids": prompts[1], **greedy(20, min_p=0.2)}
    found, neighbour = verified.ask_beside({"input_ids": prompts[0], **greedy(60)}, **body)
    assert_same_answers(stock.ask(**body), found, "min-p")
    assert neighbour["output_ids"][:EXPECTED_TOKENS] == expected[0]
    # It drafts again when the other is done.
    assert neighbour["meta_info"]["kv_drafts"] > 0


def test_min_p_of_one_leaves_the_best_token_of_full_kv(paged, prompts, expected):
    # SGLang has no seeded min_p, so the sampled one is shown where it has no choice.
    params = {"temperature": 2.0, "min_p": 1.0, "max_new_tokens": EXPECTED_TOKENS, "ignore_eos": True}
    found = paged.ask_all(prompts[:2], sampling_params=params)
    assert [r["output_ids"] for r in found] == expected[:2]
    assert {r["meta_info"]["kv_fallback"] for r in found} == {"min-p"}


def test_a_logit_processor_acts_on_its_request_and_not_on_one_that_drafts(stock, verified, prompts, expected):
    disallowed = expected[1][:8]
    body = {
        "input_ids": prompts[1],
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        **greedy(24, custom_params={"token_ids": disallowed}),
    }
    with ThreadPoolExecutor(2) as pool:
        drafting = pool.submit(verified.ask, input_ids=prompts[0], **greedy(40))
        found = verified.ask(**body)
    assert_same_answers(stock.ask(**body), found, "custom-logit-processor")
    assert not set(found["output_ids"]) & set(disallowed)
    assert drafting.result()["output_ids"][:EXPECTED_TOKENS] == expected[0]
    assert drafting.result()["meta_info"]["kv_drafts"] > 0


@pytest.mark.parametrize("kind", [True, "last"])
def test_hidden_states_are_stocks_beside_a_request_that_drafts(stock, verified, prompts, expected, kind):
    body = {"input_ids": prompts[1][:160], "return_hidden_states": kind, **greedy(12)}
    for server in (stock, verified):
        server.flush_cache()
    with ThreadPoolExecutor(2) as pool:
        drafting = pool.submit(verified.ask, input_ids=prompts[0], **greedy(40))
        found = verified.ask(**body)
    answer = stock.ask(**body)
    assert_same_answers(answer, found, "hidden-states")
    left, right = (flatten(r["meta_info"]["hidden_states"]) for r in (answer, found))
    assert len(left) == len(right) > 500
    assert max(abs(a - b) for a, b in zip(left, right)) < HIDDEN_TOLERANCE
    assert drafting.result()["output_ids"][:EXPECTED_TOKENS] == expected[0]
    assert drafting.result()["meta_info"]["kv_drafts"] > 0


def test_every_reason_for_full_kv_beside_drafts_of_all_kinds_in_one_batch(stock, verified, prompts):
    sampled = {"max_new_tokens": 16, "temperature": 0.8, "top_k": 20, "sampling_seed": 7, "ignore_eos": True}
    disallowing = DisallowedTokensLogitsProcessor.to_str()
    kinds = {
        "greedy": (None, greedy(16)),
        "seeded": (None, {"sampling_params": sampled}),
        "grammar": (None, greedy(16, regex=r"(yes|no)( and (yes|no)){5}", ignore_eos=False)),
        "short": ("short-context", greedy(16)),
        "penalty": (None, greedy(16, frequency_penalty=0.6, presence_penalty=0.2)),
        "seeded penalty": (None, {"sampling_params": {**sampled, "repetition_penalty": 1.2}}),
        "short penalty": ("short-context", greedy(16, presence_penalty=0.8)),
        "penalty and processor": (
            "custom-logit-processor",
            {**greedy(16, frequency_penalty=0.4, custom_params={"token_ids": [28, 198]}), "custom_logit_processor": disallowing},
        ),
        "min-p": ("min-p", greedy(16, min_p=0.2)),
        "processor": ("custom-logit-processor", {**greedy(16, custom_params={"token_ids": [28, 198]}), "custom_logit_processor": disallowing}),
        "hidden": ("hidden-states", {**greedy(12), "return_hidden_states": True}),
    }
    bodies = [
        {"input_ids": prompts[place % 4][: 20 if "short" in kind else 190 + place], **more}
        for place, (kind, (_, more)) in enumerate(kinds.items())
    ]
    expected = [stock.ask(**body) for body in bodies]
    names = ("input_ids", "sampling_params", "return_hidden_states", "custom_logit_processor")
    together = {name: [body.get(name, False if name == "return_hidden_states" else None) for body in bodies] for name in names}
    verified.flush_cache()
    found = verified.ask(**together)
    for (kind, (reason, _)), theirs, ours in zip(kinds.items(), expected, found):
        assert ours["output_ids"] == theirs["output_ids"], kind
        assert ours["meta_info"]["kv_fallback"] == reason, kind
        assert (ours["meta_info"]["kv_drafts"] > 0) == (reason is None), kind
    # Of the answer alone: how much of a prompt is computed depends on what is cached.
    left, right = (flatten(answers[-1]["meta_info"]["hidden_states"][1:]) for answers in (expected, found))
    assert len(left) == len(right) > 500
    assert max(abs(a - b) for a, b in zip(left, right)) < HIDDEN_TOLERANCE


def flatten(values: list) -> list[float]:
    """The numbers of nested lists, in order."""
    return [x for v in values for x in (flatten(v) if isinstance(v, list) else [v])]
