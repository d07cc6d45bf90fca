"""Penalties are those of SGLang's overlapped scheduler, for a request that was retracted too."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.hooks.penalties import restore_penalties

VOCABULARY = 16
KINDS = (
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
)
TOKENIZER = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0)
PENALTIES = (
    {},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.25},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 3},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.25},
)
# Token that prompts end with.
LAST = 7
requests = st.tuples(st.sampled_from(PENALTIES), st.lists(st.integers(0, VOCABULARY - 1), max_size=5))


class Batch(SimpleNamespace):
    """What penalizers and the hook read of a batch."""

    def __init__(self, asked, overlapped=False):
        reqs = [
            SimpleNamespace(
                sampling_params=SamplingParams(**penalties), output_ids=output, origin_input_ids=[LAST], tokenizer=TOKENIZER
            )
            for penalties, output in asked
        ]
        super().__init__(reqs=reqs, device="cpu", sampling_info=None, enable_overlap=overlapped)


def prefill(batch, kinds=KINDS):
    """SGLang's part of preparing a prefill: penalizers that have seen nothing."""
    fresh = penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, kinds)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=fresh)


def applied(batch, **options):
    """Logits, [requests, vocabulary], after the batch's penalties."""
    logits = torch.linspace(-2, 2, VOCABULARY).repeat(len(batch.reqs), 1)
    batch.sampling_info.penalizer_orchestrator.apply(logits, **options)
    return logits


def never_retracted(penalties, output):
    """The same of a request alone, fed by SGLang token by token as it decodes, and overlapped."""
    batch = Batch([(penalties, output)])
    prefill(batch)
    for token in output:
        batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
    return applied(batch, repeat=1)


@pytest.mark.parametrize("output", [[], [3, 3, 0]])
@pytest.mark.parametrize("kinds", list(permutations(KINDS)), ids=lambda kinds: "")
def test_added_penalties_come_before_scaled_ones_in_any_process(kinds, output):
    asked = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.25}
    batch = Batch([(asked, output)])
    restore_penalties(lambda batch: prefill(batch, kinds), batch)
    fed = batch.sampling_info.penalizer_orchestrator
    if not output:
        fed.cumulate_output_tokens(torch.tensor([3]))
    torch.testing.assert_close(applied(batch), never_retracted(asked, output or [3]))


@settings(deadline=None, max_examples=60)
@given(asked=st.lists(requests, min_size=1, max_size=4), waiting=st.lists(requests, min_size=1, max_size=2))
def test_each_request_of_a_prefill_is_penalized_for_its_whole_output(asked, waiting):
    batch, later = Batch(asked), Batch(waiting)
    restore_penalties(prefill, batch)
    torch.testing.assert_close(applied(batch), torch.cat([never_retracted(*each) for each in asked]))
    restore_penalties(prefill, later)
    merged = batch.sampling_info.penalizer_orchestrator
    merged.merge(later.sampling_info.penalizer_orchestrator)
    batch.reqs += later.reqs
    expected = torch.cat([never_retracted(*each) for each in asked + waiting])
    torch.testing.assert_close(applied(batch), expected)


@pytest.mark.parametrize("output", [[], [3], [3, 3, 0]])
def test_under_the_overlapped_loop_a_retracted_request_is_penalized_as_one_that_ran_on(output):
    penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.25}
    batch = Batch([(penalties, output)], overlapped=True)
    restore_penalties(prefill, batch)
    # SGLang counts the newest token that it knows as it prepares a step: the one before has not been processed yet.
    known = [LAST, *output[:-1]] if output else []
    expected = never_retracted(penalties, known)
    torch.testing.assert_close(applied(batch), expected)


@pytest.mark.parametrize("asked", [[({}, [1, 2])], [({"frequency_penalty": 0.5}, [])]])
def test_nothing_is_rebuilt_where_nothing_was_forgotten(asked):
    batch = Batch(asked)
    seen = []

    def remember(batch):
        prefill(batch)
        seen.append(batch.sampling_info.penalizer_orchestrator)

    restore_penalties(remember, batch)
    assert batch.sampling_info.penalizer_orchestrator is seen[0]
