"""SGLang's scheduler processes of a round those that answered."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

from sglang_ext.hooks.rounds import count_plain_steps, process_output_tokens, needs_grammar_sync
from sglang_ext.managers.spec_decode.round_result import KVDraftInput, RoundResult


def request(name, grammar=None):
    """One that has put out nothing and ends at token 6."""
    made = SimpleNamespace(
        name=name, grammar=grammar, to_finish=None, is_retracted=False, return_logprob=name == "a", output_ids=[],
        finished_reason=None, finished_len=None,
    )
    made.finished = lambda: made.finished_reason is not None

    def update_finish_state(count):
        made.finished_reason = "end" if 6 in made.output_ids[-count:] else None

    made.update_finish_state = update_finish_state
    return made


def make_result(return_logprob=True):
    """Of three requests, of which the second only drafted: four places each."""
    tokens = torch.tensor([[1, 5, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]])
    output = LogitsProcessorOutput(next_token_logits=None)
    output.next_token_logprobs = -tokens.float()
    for name in ("top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val", "token_ids_logprobs_idx"):
        setattr(output, f"next_token_{name}", [[]] * 12)
    counts = torch.tensor([2, 0, 1])
    batch = SimpleNamespace(return_logprob=return_logprob, reqs=[request(n) for n in "abc"])
    result = RoundResult(
        logits_output=output, next_token_ids=tokens.flatten(), accept_lens=counts, new_seq_lens=counts + 10,
        next_draft_input=KVDraftInput(tokens[:, 0]), speculative_num_draft_tokens=4, can_run_cuda_graph=False,
    )
    return batch, result


class Processor(SimpleNamespace):
    """SGLang's result processor, whose worker counts what it is shown."""

    def __init__(self, **more):
        self.counted = []
        super().__init__(model_worker=SimpleNamespace(account=lambda *seen: self.counted.append(seen)), **more)


def test_a_round_waits_for_the_host_only_where_a_grammar_cannot_be_walked():
    walked, kept = (type("Grammar", (BaseGrammarObject,), {"rollback": lambda self, k: None})(), BaseGrammarObject())
    asked = [True, True, True, False]
    for needs, grammars in zip(asked, ([None, walked], [walked, kept], [kept], [None])):
        batch = SimpleNamespace(reqs=[request("a", each) for each in grammars])
        assert needs_grammar_sync(lambda _, needs=needs: needs, batch) == (kept in grammars)


def test_requests_that_only_drafted_are_left_out_of_processing():
    batch, result = make_result()
    seen = []
    processor = Processor()
    process_output_tokens(lambda _, b, r: seen.append((b.reqs, r)), processor, batch, result)
    assert processor.counted == [(batch, result)]
    ((reqs, part),) = seen
    assert [req.name for req in reqs] == ["a", "c"] and len(batch.reqs) == 3
    assert part.next_token_ids.view(2, 4)[:, 0].tolist() == [1, 3]
    assert part.accept_lens.tolist() == [2, 1]
    assert part.logits_output.next_token_logprobs.shape == (2, 4)
    assert len(part.logits_output.next_token_top_logprobs_val) == 8


def test_what_a_round_gave_after_an_end_is_neither_counted_nor_processed():
    batch, result = make_result()
    result.next_token_ids = torch.tensor([[1, 6, 5, 5], [0, 0, 0, 0], [3, 5, 5, 5]]).flatten()
    result.accept_lens = torch.tensor([4, 0, 4])
    seen, processor = [], Processor()
    process_output_tokens(lambda _, b, r: seen.append(r.accept_lens.tolist()), processor, batch, result)
    ((_, counted),) = processor.counted
    assert (counted.accept_lens.tolist(), counted.finished_early) == ([2, 0, 4], {0})
    assert seen == [[2, 4]]
    assert all(req.output_ids == [] and not req.finished() for req in batch.reqs)


def test_a_grammar_advances_after_the_request_was_processed():
    batch, result = make_result()
    batch.reqs[2].grammar = SimpleNamespace()
    order = []
    processor = Processor(_accept_grammar_tokens=lambda req, row: order.append((req.name, row)))
    process_output_tokens(lambda *_: order.append("processed"), processor, batch, result)
    assert order == ["processed", ("c", [3])]


def test_a_grammar_stays_where_it_is_while_tokens_of_its_retracted_request_are_dropped():
    batch, result = make_result()
    for req in batch.reqs:
        req.grammar = SimpleNamespace()
    batch.reqs[2].is_retracted = True
    advanced = []
    processor = Processor(_accept_grammar_tokens=lambda req, row: advanced.append((req.name, row)))
    process_output_tokens(lambda *_: None, processor, batch, result)
    assert advanced == [("a", [1, 5])]


def test_a_round_of_those_that_still_ran_is_processed_for_them_alone():
    batch, made = make_result()
    result = dataclasses.replace(made, positions=[1, 2, 4])
    batch.reqs = [request(name) for name in "xabyc"]
    seen = []
    processor = Processor()
    process_output_tokens(lambda _, b, r: seen.append(([req.name for req in b.reqs], b.return_logprob)), processor, batch, result)
    assert [[req.name for req in b.reqs] for b, _ in processor.counted] == [["a", "b", "c"]]
    assert seen == [(["a", "c"], True)]


def test_nothing_is_processed_when_all_only_drafted():
    batch, result = make_result(return_logprob=False)
    result.accept_lens = torch.zeros(3, dtype=torch.int64)
    process_output_tokens(lambda *_: 1 / 0, Processor(), batch, result)


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
    process_output_tokens(lambda _, b, r: seen.append([req.name for req in b.reqs]), processor, batch, result)
    assert ended == [0, ("b", 1)] and streamed == [["b"]] and seen == [["a", "c"]]


@pytest.mark.parametrize(
    ("full_kv_reqs", "tokens", "length"),
    [([0, 1], [4, 2], 1.0), ([], [4, 2], 3.0), ([1], [5, 4], 9 / 5), ([0, 1], [0, 3], 1.0)],
    ids=["nobody drafts", "all draft", "one drafts", "one is over"],
)
def test_of_who_does_not_draft_each_token_is_a_forward_in_sglangs_accept_length(full_kv_reqs, tokens, length):
    reporter = SimpleNamespace(
        spec_num_accept_tokens=0, spec_num_forward_ct=0, spec_num_block_accept_tokens=0, spec_num_cap_tokens=0, num_generated_tokens=0
    )
    count_plain_steps(reporter, SimpleNamespace(full_kv_reqs=full_kv_reqs), tokens)
    emitting = [each for each in tokens if each]
    SchedulerMetricsReporter.update_spec_metrics(reporter, len(emitting), sum(emitting) - len(emitting))
    assert reporter.spec_num_accept_tokens / reporter.spec_num_forward_ct == pytest.approx(length)
    # Beside those that SGLang adds of each request: tokens a second stay as they are.
    assert reporter.num_generated_tokens == sum(emitting) - len(emitting)
