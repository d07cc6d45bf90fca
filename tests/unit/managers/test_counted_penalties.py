"""Penalties along drafts: each row of logits is penalized as SGLang's own penalizers do it where a request is alone."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings, strategies as st
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.core import RequestState
from sglang_ext.managers.spec_decode.penalties import ROWS, Penalties, Penalty
from sglang_ext.managers.spec_decode.round_result import OutputTokens, PendingDrafts
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.sampling import SampledTokens

VOCABULARY, ROUNDS = 13, 4


class Part(SimpleNamespace):
    """What penalizers read of a batch, and hold weakly."""


KINDS = {
    getattr(penaltylib, f"Batched{name}Penalizer") for name in ("Frequency", "MinNewTokens", "Presence", "Repetition")
}
PARAMS = st.builds(
    lambda **params: SamplingParams(**params),
    frequency_penalty=st.sampled_from((0.0, 0.4, -1.5)),
    presence_penalty=st.sampled_from((0.0, 0.7)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.5)),
    min_new_tokens=st.sampled_from((0, 0, 5)),
    stop_token_ids=st.sampled_from((None, [2, 5])),
    max_new_tokens=st.just(64),
)


def asked(params, prompt=(4, 7, 7)):
    tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None)
    return SimpleNamespace(sampling_params=params, tokenizer=tokenizer, origin_input_ids=list(prompt), output_ids=[])


def stock(req, output, overlapped, logits):
    """The logits after ``output`` of a request alone, as SGLang penalizes them in its decode steps."""
    batch = Part(reqs=[req], device="cpu")
    penalizers = BatchedPenalizerOrchestrator(VOCABULARY, batch, KINDS)
    for token in [req.origin_input_ids[-1], *output[:-1]] if overlapped else output:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    logits = logits[None].clone()
    # What adds first, as in the overlapped loop; in the plain one SGLang takes them in an order of the process.
    penalizers.apply(logits, repeat=1)
    return logits[0]


def plan(states, reqs, outputs, steps, gathered):
    lengths = [len(req.origin_input_ids) + len(output) - 1 for req, output in zip(reqs, outputs)]
    rows = [state.row for state in states]
    return RoundPlan(states, steps, lengths, gathered, rows, [*lengths], [0] * len(rows), [], [64] * len(rows))


@settings(deadline=None, max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.booleans(), st.data())
def test_rows_of_steps_and_of_verifications_are_penalized_as_stock_penalizes_them_alone(params, overlapped, data):
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def some(*shape):
        return torch.randint(0, VOCABULARY, shape, generator=noise)

    reqs = [asked(each) for each in params]
    states = [RequestState(rid=str(i), row=i + 1, seed=0) for i in range(len(reqs))]
    penalties, kept = Penalties(torch.device("cpu")), PendingDrafts(len(reqs) + 1, 9, torch.device("cpu"))
    outputs = [some(1).tolist() for _ in reqs]
    for _ in range(ROUNDS):
        steps, count = data.draw(st.integers(1, 3)), len(reqs)
        gathered = [data.draw(st.integers(0, 3)) for _ in reqs]
        kept.tokens = some(*kept.tokens.shape)
        round_ = plan(states, reqs, outputs, steps, gathered)
        rows, newest = torch.tensor(round_.rows), torch.tensor([output[-1] for output in outputs])
        batch = SimpleNamespace(reqs=reqs, enable_overlap=overlapped, sampling_info=SimpleNamespace(vocab_size=VOCABULARY))
        penalized = penalties.for_round(batch, round_)
        along = [[*output, *kept.tokens[row, :held].tolist()] for output, row, held in zip(outputs, round_.rows, gathered)]
        if penalized is None:
            assert not any(map(Penalty.of, reqs))
            continue
        penalized.begin_steps(newest, kept, rows)
        for index in range(steps):
            logits = torch.randn(count, VOCABULARY, generator=noise)
            expected = torch.stack([stock(*each) for each in zip(reqs, along, [overlapped] * count, logits)])
            penalized.penalize_step(index, torch.tensor([tokens[-1] for tokens in along]), logits)
            torch.testing.assert_close(logits, expected, rtol=0, atol=0)
            along = [[*tokens, int(some(1))] for tokens in along]
        # Of some of them, as wide as a graph is.
        due = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
        drafts, wide = some(len(due), 4), 6
        logits = torch.randn(len(due), wide, VOCABULARY, generator=noise)
        tokens = torch.cat([newest[due, None], drafts], 1)
        expected = torch.stack(
            [
                stock(reqs[i], [*outputs[i], *drafts[k, :j].tolist()], overlapped, logits[k, j])
                for k, i in enumerate(due)
                for j in range(5)
            ]
        )
        penalized.penalize_verify(due, tokens, logits.view(-1, VOCABULARY))
        torch.testing.assert_close(logits[:, :5].reshape(-1, VOCABULARY), expected, rtol=0, atol=0)
        accepted = torch.tensor([data.draw(st.integers(0, 5)) for _ in reqs])
        answers = some(count, 5)
        penalized.count_output(newest, OutputTokens(list(range(count)), answers, accepted, SampledTokens(answers.flatten(), None, [], [])))
        outputs = [[*output, *row[:taken]] for output, row, taken in zip(outputs, answers.tolist(), accepted.tolist())]
        if data.draw(st.booleans()):
            # It was retracted: it has what was put into its output, and a new state.
            again = data.draw(st.integers(0, count - 1))
            penalties.forget(states[again].row)
            reqs[again].output_ids = outputs[again][:-1]
            states[again] = RequestState(rid="again", row=states[again].row, seed=0)


@settings(deadline=None, max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.booleans(), st.data())
def test_the_token_after_a_prompt_and_after_a_retracted_output_is_penalized_as_one_that_ran_on(params, overlapped, data):
    reqs = [asked(each) for each in params]
    for req in reqs:
        req.output_ids = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=5))
    logits = torch.linspace(-2, 2, VOCABULARY).repeat(len(reqs), 1)
    # Of a prompt's first token nothing was counted.
    expected = [stock(req, req.output_ids, overlapped and bool(req.output_ids), row) for req, row in zip(reqs, logits)]
    Penalties(torch.device("cpu")).penalize_prefill(SimpleNamespace(reqs=reqs, enable_overlap=overlapped), logits)
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=0)


def test_a_round_without_penalties_has_nothing_to_count():
    reqs = [asked(SamplingParams(max_new_tokens=4, stop_token_ids=[3])) for _ in range(2)]
    states = [RequestState(rid=str(i), row=i + 1, seed=0) for i in range(2)]
    penalties = Penalties(torch.device("cpu"))
    found = penalties.for_round(SimpleNamespace(reqs=reqs), plan(states, reqs, [[3], [4]], 2, [0, 0]))
    assert found is None and not len(penalties.counts)


def test_a_row_that_another_request_took_over_begins_anew_and_places_are_used_again():
    params = SamplingParams(frequency_penalty=1.0)
    penalties, reqs = Penalties(torch.device("cpu")), [asked(params)]
    batch = SimpleNamespace(reqs=reqs, enable_overlap=False, sampling_info=SimpleNamespace(vocab_size=VOCABULARY))

    def begun(rid):
        return penalties.for_round(batch, plan([RequestState(rid=rid, row=1, seed=0)], reqs, [[5]], 1, [0]))

    answers = OutputTokens([0], torch.tensor([[6, 8]]), torch.tensor([2]), SampledTokens(torch.tensor([6, 8]), None, [], []))
    begun("first").count_output(torch.tensor([5]), answers)
    assert penalties.counts[0].nonzero().flatten().tolist() == [5, 6]
    # Nobody said that the first is gone.
    begun("second")
    assert not penalties.counts[0].any()
    for _ in range(20):
        penalties.forget(1)
        assert not len(penalties.counts), "nobody has one"
        begun("next")
    assert len(penalties.counts) <= 2


def test_a_stop_of_the_tokenizers_beyond_the_vocabulary_is_none():
    req = asked(SamplingParams(min_new_tokens=3))
    req.tokenizer.eos_token_id = VOCABULARY
    logits = torch.zeros(1, VOCABULARY)
    Penalties(torch.device("cpu")).penalize_prefill(SimpleNamespace(reqs=[req], enable_overlap=True), logits)
    assert not logits.any()


def test_a_token_that_comes_often_is_penalized_to_the_last_bit_as_in_stock():
    req = asked(SamplingParams(frequency_penalty=0.05, presence_penalty=0.1))
    for count in range(1, 120):
        req.output_ids = [6] * count
        logits = torch.linspace(-2, 2, VOCABULARY)[None]
        expected = stock(req, req.output_ids, False, logits[0])
        Penalties(torch.device("cpu")).penalize_prefill(SimpleNamespace(reqs=[req], enable_overlap=False), logits)
        assert torch.equal(logits[0], expected)


def test_more_rows_than_are_penalized_at_once():
    params = SamplingParams(presence_penalty=2.0)
    count, width = ROWS // 4, 16
    reqs = [asked(params) for _ in range(count)]
    states = [RequestState(rid=str(i), row=i + 1, seed=0) for i in range(count)]
    batch = SimpleNamespace(reqs=reqs, enable_overlap=True, sampling_info=SimpleNamespace(vocab_size=VOCABULARY))
    penalized = Penalties(torch.device("cpu")).for_round(batch, plan(states, reqs, [[3]] * count, 1, [0] * count))
    logits = torch.zeros(count * width, VOCABULARY)
    penalized.penalize_verify(list(range(count)), torch.full((count, width), 9), logits)
    rows = logits.view(count, width, VOCABULARY)
    # Under the overlapped loop the prompt's last token is counted, and each row lags behind its own input.
    assert (rows[:, :, 7] == -2.0).all() and (rows[:, 0, 9] == 0).all() and (rows[:, 1:, 9] == -2.0).all()


def test_what_a_request_asks_for():
    assert Penalty.of(asked(SamplingParams(stop_token_ids=[3]))) is None
    found = Penalty.of(asked(SamplingParams(min_new_tokens=4, stop_token_ids=[9, 3])))
    assert found == Penalty((0.0, 0.0, 1.0), 4, (1, 3, 9))
    without = asked(SamplingParams(min_new_tokens=4))
    without.tokenizer = None
    assert Penalty.of(without).stop_token_ids == ()
