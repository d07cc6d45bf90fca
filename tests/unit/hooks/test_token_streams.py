"""Tokens that a round gives together are streamed as they are one at a time: the same messages with the same content."""

import copy
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_finish import LETTERS, TOKENIZER

from sglang_ext.hooks.token_streams import stream_each_token

PROMPT = array("q", [3, 2, 1, 0])
PER_REQUEST = ("rids", "output_ids", "finished_reasons", "completion_tokens", "reasoning_tokens", "decode_ids", "output_token_logprobs_val",
               "output_token_logprobs_idx", "output_top_logprobs_idx", "output_hidden_states")  # fmt: skip


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    """What SGLang reads of a server's flags."""
    monkeypatch.setattr(output_streamer, "get_serving", lambda: SimpleNamespace(stream_interval=1))
    monkeypatch.setattr(output_streamer, "get_observability", lambda: SimpleNamespace(enable_request_time_stats_logging=False))


class Sender:
    """SGLang's scheduler as far as it streams; keeps each message, and its requests, as they are at that time."""

    def __init__(self):
        self.messages = []
        self.streamer = SchedulerOutputStreamer(
            send_to_detokenizer=SimpleNamespace(send_output=self._keep), tree_cache=None, ps=SimpleNamespace(dp_rank=None, attn_tp_rank=0),
            server_args=None, is_generation=True, spec_algorithm=SpeculativeAlgorithm.NONE, disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )  # fmt: skip

    def _keep(self, message):
        rows = range(len(message.rids))
        self.messages.append(
            [{name: copy.deepcopy(value[i]) if (value := getattr(message, name)) else None for name in PER_REQUEST} for i in rows]
        )

    def sent(self, rid):
        """What was sent of one request, in order."""
        return [row for message in self.messages for row in message if row["rids"] == rid]


def make_request(rid, stream=True, reasons=False, **params):
    """A request with log probabilities and hidden states that has put out nothing."""
    sampling = SamplingParams(**params)
    sampling.normalize(TOKENIZER)
    req = Req(rid, "", PROMPT, sampling, return_logprob=True, stream=stream, require_reasoning=reasons, return_hidden_states=True)
    req.tokenizer, req.vocab_size = TOKENIZER, len(LETTERS)
    req.hidden_states = [["prompt"]]
    return req


def append(req, tokens, ends):
    """What SGLang's scheduler keeps of new tokens; each is its own log probability and hidden state."""
    req.output_ids.extend(tokens)
    for token in tokens:
        req.logprob.output_token_logprobs_val.append(-float(token))
        req.logprob.output_token_logprobs_idx.append(token)
        req.logprob.output_top_logprobs_val.append([-float(token)])
        req.logprob.output_top_logprobs_idx.append([token])
        req.logprob.output_token_ids_logprobs_val.append(None)
        req.logprob.output_token_ids_logprobs_idx.append(None)
    first = len(req.output_ids) == len(tokens)
    req.hidden_states.extend([token] for token in tokens[1 if first else 0 :])
    if req.require_reasoning:
        req.update_reasoning_tokens(list(tokens), [1])
    if ends:
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))


def messages(rounds, stream, **params):
    """What a request sends whose rounds give these tokens, the first the prefill's."""
    sender, req = Sender(), make_request("r", **params)
    for number, tokens in enumerate(rounds):
        append(req, tokens, number == len(rounds) - 1)
        stream(sender.streamer, [req], True)
    return sender.messages


def ours(streamer, reqs, return_logprob):
    stream_each_token(SchedulerOutputStreamer.stream_output, streamer, reqs, return_logprob)


def stocks(streamer, reqs, return_logprob):
    streamer.stream_output(reqs, return_logprob)


ROUNDS = st.lists(st.lists(st.integers(0, len(LETTERS) - 1), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(deadline=None)
@given(ROUNDS, st.sampled_from([{}, {"stream_interval": 4}, {"stop": ["bcd"]}, {"stop": ["ab"], "stream_interval": 3}]), st.booleans())
def test_a_round_streams_what_its_tokens_stream_one_at_a_time(rounds, params, reasons):
    rounds = [rounds[0][:1], *rounds]
    single = [[token] for tokens in rounds for token in tokens]
    expected = messages(single, stocks, reasons=reasons, max_new_tokens=99, **params)
    assert messages(rounds, ours, reasons=reasons, max_new_tokens=99, **params) == expected


def test_without_the_hook_a_round_is_one_message():
    assert len(messages([[0], [1, 2, 3]], stocks, max_new_tokens=9)) == 2
    assert len(messages([[0], [1, 2, 3]], ours, max_new_tokens=9)) == 4


def test_requests_of_a_batch_share_messages_as_in_steps_of_one_token():
    sender, reqs = Sender(), [make_request(rid, max_new_tokens=9) for rid in "abc"]
    for req, tokens in zip(reqs, ([0, 1, 2], [3, 2], [1])):
        append(req, tokens, ends=False)
    ours(sender.streamer, reqs, True)
    assert len(sender.messages) == 3
    assert [[row["output_ids"].tolist() for row in sender.sent(rid)] for rid in "abc"] == [[[0], [1], [2]], [[3], [2]], [[1]]]


def test_an_answer_that_is_not_streamed_is_sent_once():
    sender, req = Sender(), make_request("r", stream=False, max_new_tokens=9)
    append(req, [0, 1, 2], ends=True)
    ours(sender.streamer, [req], True)
    assert [row["output_ids"].tolist() for row in sender.sent("r")] == [[0, 1, 2]]


def test_a_token_that_is_decoded_again_is_streamed_once():
    # A request that is prefilled again lacks its newest token meanwhile (coded_prompts.py:PrefillServer).
    sender, req = Sender(), make_request("r", max_new_tokens=9)
    append(req, [0, 1], ends=False)
    ours(sender.streamer, [req], True)
    newest = req.output_ids.pop()
    req.pd_rebootstrap_in_progress = True
    stream_each_token(lambda *given: None, sender.streamer, [req], True)
    req.output_ids.append(newest)
    append(req, [2, 3], ends=True)
    ours(sender.streamer, [req], True)
    assert [row["output_ids"].tolist() for row in sender.sent("r")] == [[0], [1], [2], [3]]
