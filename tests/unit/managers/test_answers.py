"""Answers of parts of a batch come to the places of their requests, with their log-probabilities."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.managers.spec_decode.round_result import OutputTokens, PendingDrafts, RoundResult, merge_outputs
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.sampling import SampledTokens


def answers_of(requests, width, logprobs):
    """Token ``10 * request + place``, with a log-probability and a most likely token that are told apart likewise."""
    tokens = torch.tensor([[10 * request + place for place in range(width)] for request in requests])
    rows = tokens.flatten().tolist()
    named = [([float(row)], [row]) for row in rows]
    sampled = SampledTokens(tokens.flatten(), torch.tensor(rows).float() if logprobs else None, named, named)
    return OutputTokens(list(requests), tokens, torch.tensor([1 + request % width for request in requests]), sampled)


@settings(deadline=None)
@given(st.permutations(range(5)), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_parts_of_different_widths_come_to_the_places_of_their_requests(order, cut, narrow, wide, logprobs):
    groups = [(order[:cut], narrow), (order[cut:4], wide)]
    parts = [answers_of(some, width, logprobs) for some, width in groups if some]
    found = merge_outputs(parts, torch.arange(5), logprobs)
    for some, width in groups:
        for request in some:
            expected = [10 * request + place for place in range(width)]
            rows = slice(request * found.width, request * found.width + width)
            assert found.tokens[request, :width].tolist() == expected == found.sampled.tokens[rows].tolist()
            assert found.num_output[request] == 1 + request % width
            if logprobs:
                assert found.sampled.logprobs[rows].tolist() == expected
                assert [ids for _, ids in found.sampled.top_logprobs[rows]] == [[token] for token in expected]
    absent = set(range(5)) - {request for some, _ in groups for request in some}
    assert all(found.num_output[request] == 0 for request in absent)
    assert (found.sampled.logprobs is not None) == logprobs


def test_of_steps_the_tokens_and_log_probabilities_of_some_requests_are_picked():
    nothing = LogitsProcessorOutput(next_token_logits=None)
    steps = [(nothing, answers_of(range(4), 1, logprobs=True).sampled) for _ in range(2)]
    steps[1][1].logprobs.add_(5)
    tokens = torch.stack([sampled.tokens for _, sampled in steps], 1)
    plan = RoundPlan([], len(steps), [], [], [], [], [], full_kv_reqs=[3, 1], remaining=[9, 1, 9, 9])
    found = OutputTokens.from_steps(plan, steps, tokens)
    assert found.tokens.tolist() == [[30, 30], [10, 10]] and found.num_output.tolist() == [2, 1]
    assert found.sampled.logprobs.tolist() == [30, 35, 10, 15] and found.sampled.requested_logprobs[2] == ([10.0], [10])


def test_drafts_of_several_rounds_stand_one_behind_the_other_and_a_row_without_any_goes_on_from_its_bonus():
    pending, rows = PendingDrafts(4, 6, torch.device("cpu")), torch.tensor([3, 1])
    pending.put(rows, torch.tensor([0, 2]), torch.tensor([[5, 6], [7, 8]]))
    pending.put(rows, torch.tensor([2, 4]), torch.tensor([[1, 2], [3, 4]]))
    assert pending.first(torch.tensor([3]), 4).tolist() == [[5, 6, 1, 2]]
    assert pending.first(torch.tensor([1]), 6).tolist() == [[0, 0, 7, 8, 3, 4]]
    assert pending.last_tokens(rows, torch.tensor([4, 0]), torch.tensor([90, 91])).tolist() == [2, 91]


def test_hidden_states_lie_where_sglang_looks_for_those_of_a_requests_first_token():
    """It takes ``speculative_num_draft_tokens`` rows a request; who asks for hidden states answers one token a round."""
    found = answers_of(range(2), 3, logprobs=False)
    batch = SimpleNamespace(return_logprob=False, spec_info=SimpleNamespace(bonus_tokens=torch.tensor([8, 9])))
    runner = SimpleNamespace(decode_cuda_graph_runner=None)
    output = LogitsProcessorOutput(next_token_logits=None, hidden_states=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    result = RoundResult.from_outputs(runner, batch, RoundPlan([], 0, [], [], [], [], [], [], []), found, torch.tensor([5, 6]), output)
    width = result.speculative_num_draft_tokens
    assert width == 3 and len(result.logits_output.hidden_states) == len(result.next_token_ids) == 2 * width
    assert result.logits_output.hidden_states[::width].tolist() == [[1.0, 2.0], [3.0, 4.0]]
