"""Of answers that are not streamed the frontend hears at their first token, and each time that they pass SGLang's interval."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from test_finish import make_request

from sglang_ext.hooks.reporting import count_plain_steps, send_what_is_due

INTERVAL = 50


class Accumulator:
    """SGLang's rule for answers that are not streamed: which were sent, and after how many tokens."""

    def __init__(self) -> None:
        self.default_force_stream_interval = INTERVAL
        self.sent: list[int] = []

    def accept(self, *, req) -> None:
        if req.finished() or len(req.output_ids) % self.default_force_stream_interval == 0:
            self.sent.append(len(req.output_ids))
            req.send_token_offset = len(req.output_ids)


def lengths(steps, accept, **params):
    """After how many tokens an answer of ``steps``, tokens that come at once, is sent."""
    req, accumulator = make_request(**params), Accumulator()
    req.stream, req.send_token_offset = False, 0
    for step in steps:
        req.output_ids.extend(step)
        accept(accumulator, req)
        assert accumulator.default_force_stream_interval == INTERVAL
    return accumulator.sent


def ours(accumulator, req):
    send_what_is_due(Accumulator.accept, accumulator, req=req)


def stocks(accumulator, req):
    accumulator.accept(req=req)


@pytest.mark.parametrize("together", [1, 3, 7, 16])
def test_the_first_token_is_sent_at_once_and_then_each_interval_that_is_passed(together):
    steps = [[0]] + [[0] * together] * (160 // together)
    sent = lengths(steps, ours, max_new_tokens=1000)
    assert sent[0] == 1
    assert len(sent) == 4 and all(0 <= at - passed < together for at, passed in zip(sent[1:], (50, 100, 150)))
    assert lengths(steps, stocks, max_new_tokens=1000) != sent, "the rule of one token at a time does not do it"


def test_what_may_begin_a_stop_string_waits_until_it_does_not():
    # The letters a b c; "bc" would end it.
    assert lengths([[1], [0], [1, 0]], ours, stop=["bc"], max_new_tokens=9) == [2]
    assert lengths([[0], [1]], ours, stop=["bc"], max_new_tokens=9) == [1]


def test_answers_that_a_pattern_may_end_are_left_to_sglang():
    steps = [[0]] + [[0] * 7] * 10
    assert lengths(steps, ours, stop_regex=["b+"], max_new_tokens=99) == lengths(steps, stocks, max_new_tokens=99) == [50]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 51])
def test_of_a_request_that_waits_to_be_prefilled_again_nothing_is_sent_twice(stream, tokens):
    # SGLang's own rules; of what is sent the first fields tell enough.
    req, lists = make_request(max_new_tokens=60), {name: [] for name in ("rids", "finished_reasons", "output_ids", "prompt_tokens")}
    accumulator = SimpleNamespace(default_force_stream_interval=INTERVAL, default_stream_interval=1, rust_server_mode=True, **lists)
    req.rid, req.origin_input_ids, req.stream, req.finished_output = "mine", [5], stream, False
    req.send_token_offset = req.send_output_token_logprobs_offset = 0

    def accept():
        with suppress(AttributeError):
            # Of what else is sent.
            send_what_is_due(_GenerationStreamAccumulator.accept, accumulator, req=req)

    req.output_ids.extend(range(tokens))
    accept()
    # As coded_prompts.py, between the launch of a round and its end.
    newest = req.output_ids.pop()
    req.pd_rebootstrap_in_progress = True
    accept()
    req.pd_rebootstrap_in_progress = False
    req.output_ids.extend([newest, 97, 98])
    req.finished_reason = FINISH_LENGTH(length=tokens + 2)
    accept()
    assert [token for part in accumulator.output_ids for token in part] == [*range(tokens), 97, 98]


@pytest.mark.parametrize(
    ("answering", "tokens", "length"),
    [([0, 1], [4, 2], 1.0), ([], [4, 2], 3.0), ([1], [5, 4], 9 / 5), ([0, 1], [0, 3], 1.0)],
    ids=["nobody drafts", "all draft", "one drafts", "one is over"],
)
def test_of_who_does_not_draft_each_token_is_a_forward_in_sglangs_accept_length(answering, tokens, length):
    reporter = SimpleNamespace(
        spec_num_accept_tokens=0, spec_num_forward_ct=0, spec_num_block_accept_tokens=0, spec_num_cap_tokens=0, num_generated_tokens=0
    )
    count_plain_steps(reporter, SimpleNamespace(answering=answering), tokens)
    emitting = [each for each in tokens if each]
    SchedulerMetricsReporter.update_spec_metrics(reporter, len(emitting), sum(emitting) - len(emitting))
    assert reporter.spec_num_accept_tokens / reporter.spec_num_forward_ct == pytest.approx(length)
    # Beside those that SGLang adds of each request: tokens a second stay as they are.
    assert reporter.num_generated_tokens == sum(emitting) - len(emitting)
