"""Acceptance keeps exactly what the full KV would have given, and reports it in SGLang's shape."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.core import RequestState, Step
from sglang_ext.managers import meta_info
from sglang_ext.managers.results import accept, batch_result, process_emitted
from sglang_ext.managers.round_result import RoundResult
from sglang_ext.managers.sampling import Sampled
from sglang_ext.options import COMPRESSORS

tokens = st.lists(st.integers(0, 3), max_size=12)


def step(tokens, emits=True, row=1):
    state = RequestState(rid="r", row=row, seed=0, bonus=tokens[0], drafts=list(tokens[1:]))
    return Step(state=state, tokens=list(tokens), position=9, row=row, length=10, emits=emits)


def sampled(values):
    empty = [(torch.empty(0), [])] * len(values)
    tokens = torch.tensor(values)
    return Sampled(tokens, -tokens.float(), empty, empty)


@given(drafts=tokens, answers=st.lists(st.integers(0, 3), min_size=13, max_size=13))
def test_accepted_tokens_are_those_of_one_by_one_decoding(drafts, answers):
    one = step([7, *drafts])
    outcome = accept(one, 0, answers)
    expected = []
    for i, answer in enumerate(answers[: len(drafts) + 1]):
        expected.append(answer)
        if i == len(drafts) or drafts[i] != answer:
            break
    assert outcome.tokens == expected
    assert one.state.bonus == expected[-1] and one.state.drafts == []
    assert one.state.accepted == (len(expected) - 1 if drafts else 0)


def test_a_draft_is_kept_and_emits_nothing():
    one = step([7], emits=False)
    assert accept(one, 2, [0, 0, 5]).tokens == []
    assert one.state.drafts == [5]


def request(name, grammar=None):
    return SimpleNamespace(
        name=name, grammar=grammar, finished=lambda: False, to_finish=None, is_retracted=False, return_logprob=name == "a"
    )


def make_result(return_logprob=True):
    steps = [step([7, 1, 2], row=1), step([8], emits=False, row=2), step([9], row=3)]
    rows = sampled([1, 5, 6, 4, 3])
    outcomes = [accept(s, first, rows.tokens.tolist()) for s, first in zip(steps, (0, 3, 4))]
    batch = SimpleNamespace(
        return_logprob=return_logprob, seq_lens=torch.tensor([10, 20, 30]), reqs=[request(n) for n in "abc"]
    )
    forward = LogitsProcessorOutput(next_token_logits=None, hidden_states=torch.arange(5.0)[:, None])
    return batch, batch_result(batch, outcomes, rows, forward, stride=4)


def test_result_fills_a_stride_of_places_and_advances_the_lengths():
    _, result = make_result()
    assert result.next_token_ids.view(3, 4).tolist() == [[1, 5, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert result.accept_lens.tolist() == [2, 0, 1]
    assert result.new_seq_lens.tolist() == [12, 20, 31]
    assert result.logits_output.next_token_logprobs[0, :2].tolist() == [-1.0, -5.0]
    assert result.logits_output.hidden_states.view(3, 4)[0, :2].tolist() == [0.0, 1.0]


class Processor(SimpleNamespace):
    """SGLang's result processor, whose worker counts what it is shown."""

    def __init__(self, **more):
        self.counted = []
        super().__init__(model_worker=SimpleNamespace(account=lambda *seen: self.counted.append(seen)), **more)


def test_requests_that_only_drafted_are_left_out_of_processing():
    batch, result = make_result()
    seen = []
    processor = Processor()
    process_emitted(lambda _, b, r: seen.append((b.reqs, r)), processor, batch, result)
    assert processor.counted == [(batch, result)]
    ((reqs, part),) = seen
    assert [req.name for req in reqs] == ["a", "c"] and len(batch.reqs) == 3
    assert part.next_token_ids.view(2, 4)[:, 0].tolist() == [1, 3]
    assert part.accept_lens.tolist() == [2, 1]
    assert part.logits_output.next_token_logprobs.shape == (2, 4)
    assert len(part.logits_output.next_token_top_logprobs_val) == 8


def test_a_grammar_advances_after_the_request_was_processed():
    batch, result = make_result()
    batch.reqs[2].grammar = SimpleNamespace()
    order = []
    processor = Processor(_accept_grammar_tokens=lambda req, row: order.append((req.name, row)))
    process_emitted(lambda *_: order.append("processed"), processor, batch, result)
    assert order == ["processed", ("c", [3])]


def test_a_grammar_stays_where_it_is_while_tokens_of_its_retracted_request_are_dropped():
    batch, result = make_result()
    for req in batch.reqs:
        req.grammar = SimpleNamespace()
    batch.reqs[2].is_retracted = True
    advanced = []
    processor = Processor(_accept_grammar_tokens=lambda req, row: advanced.append((req.name, row)))
    process_emitted(lambda *_: None, processor, batch, result)
    assert advanced == [("a", [1, 5])]


def test_a_round_of_those_that_still_ran_is_processed_for_them_alone():
    batch, made = make_result()
    result = RoundResult(**{**vars(made), "requests": [1, 2, 4]})
    batch.reqs = [request(name) for name in "xabyc"]
    seen = []
    processor = Processor()
    process_emitted(lambda _, b, r: seen.append(([req.name for req in b.reqs], b.return_logprob)), processor, batch, result)
    assert [[req.name for req in b.reqs] for b, _ in processor.counted] == [["a", "b", "c"]]
    assert seen == [(["a", "c"], True)]


def test_nothing_is_processed_when_all_only_drafted():
    batch, result = make_result(return_logprob=False)
    result.accept_lens = torch.zeros(3, dtype=torch.int64)
    process_emitted(lambda *_: 1 / 0, Processor(), batch, result)


def test_an_aborted_request_finishes_without_a_new_token():
    batch, result = make_result(return_logprob=False)
    aborted, ended, streamed = batch.reqs[1], [], []
    aborted.to_finish = batch.reqs[0].to_finish = "abort"
    aborted.update_finish_state = ended.append
    processor = Processor(
        _handle_finish_state_updated_req=lambda req, b, r, i, output: ended.append((req.name, i)),
        output_streamer=SimpleNamespace(stream_output=lambda reqs, logprobs: streamed.append([req.name for req in reqs])),
    )
    seen = []
    process_emitted(lambda _, b, r: seen.append([req.name for req in b.reqs]), processor, batch, result)
    assert ended == [0, ("b", 1)] and streamed == [["b"]] and seen == [["a", "c"]]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=10),
    st.integers(0, 7),
    st.sampled_from(("", *COMPRESSORS)),
)
def test_meta_info_survives_the_trip_through_sglangs_counters(verifies, fallback, compressor):
    state = RequestState(rid="r", row=1, seed=0, bonus=0, fallback=fallback)
    for offered, accepted in verifies:
        state.count_verify(offered, min(offered, accepted))
    state.compressor = compressor
    req = SimpleNamespace(spec_cap_lens_histogram=[])
    meta_info.fill(req, state)
    fields = meta_info.describe(req.spec_cap_lens_histogram)
    assert fields["kv_verifies"] == len(verifies) == sum(fields["kv_accept_histogram"])
    assert fields["kv_drafts"] == sum(k * n for k, n in enumerate(fields["kv_offer_histogram"]))
    assert fields["kv_accepted"] == sum(k * n for k, n in enumerate(fields["kv_accept_histogram"]))
    assert fields["kv_compressor"] == (compressor or None)
    resumed = RequestState(rid="r", row=2, seed=0, bonus=0)
    meta_info.resume(req, resumed)
    assert resumed.offer_histogram == state.offer_histogram and resumed.accepted == state.accepted
