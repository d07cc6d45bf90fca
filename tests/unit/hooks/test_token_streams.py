"""Tokens that a round gives together are sent as they are one at a time: the same messages with the same content."""

import copy
import re
from array import array
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer, _GenerationStreamAccumulator
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_finish import LETTERS, TOKENIZER
from test_finish import make_request as bare_request

from sglang_ext.hooks.token_streams import send_unstreamed, stream_each_token

PROMPT = array("q", [3, 2, 1, 0])
PER_REQUEST = ("rids", "output_ids", "finished_reasons", "completion_tokens", "reasoning_tokens", "decode_ids", "output_token_logprobs_val",
               "output_token_logprobs_idx", "output_top_logprobs_idx")  # fmt: skip


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
    """A request with log probabilities that has put out nothing."""
    sampling = SamplingParams(**params)
    sampling.normalize(TOKENIZER)
    req = Req(rid, "", PROMPT, sampling, return_logprob=True, stream=stream, require_reasoning=reasons)
    req.tokenizer, req.vocab_size = TOKENIZER, len(LETTERS)
    return req


def append(req, tokens, ends):
    """What SGLang's scheduler keeps of new tokens; each is its own log probability."""
    req.output_ids.extend(tokens)
    for token in tokens:
        req.logprob.output_token_logprobs_val.append(-float(token))
        req.logprob.output_token_logprobs_idx.append(token)
        req.logprob.output_top_logprobs_val.append([-float(token)])
        req.logprob.output_top_logprobs_idx.append([token])
        req.logprob.output_token_ids_logprobs_val.append(None)
        req.logprob.output_token_ids_logprobs_idx.append(None)
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


FIRST, SECOND = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {"y": 2}}'
TOOL_CALLS = {
    "hermes": f"<tool_call>\n{FIRST}\n</tool_call>\n<tool_call>\n{SECOND}\n</tool_call>",
    "llama3": f"<|python_tag|>{FIRST};{SECOND}".replace("arguments", "parameters"),
    # Of its other form, a list, SGLang's parser misses the second call when the answer comes token by token, too.
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"y": 2}',
}


def parsed(parser, stream):
    """Names and arguments of the tool calls that SGLang's parser finds in a stream of rounds of 32 tokens."""
    words = re.findall(r"\w+|\W", TOOL_CALLS[parser])
    rounds = [[0], *(list(range(i, min(i + 32, len(words)))) for i in range(1, len(words), 32))]
    tools = [Tool(type="function", function=Function(name=name, parameters={})) for name in "fg"]
    found, calls = FunctionCallParser(tools, parser), []
    for (row,) in messages(rounds, stream, max_new_tokens=999):
        calls += found.parse_stream_chunk("".join(words[token] for token in row["output_ids"]))[1]
    return [(name, "".join(call.parameters for call in calls if call.tool_index == i)) for i, name in enumerate(call.name for call in calls if call.name)]


@pytest.mark.parametrize("parser", TOOL_CALLS)
def test_both_tool_calls_of_a_stream_are_found(parser):
    assert parsed(parser, ours) == [("f", '{"x": 1}'), ("g", '{"y": 2}')]


@pytest.mark.parametrize("parser", ["hermes", "llama3"])
def test_tool_calls_are_missing_where_a_round_is_one_message(parser):
    assert parsed(parser, stocks) != parsed(parser, ours)


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
    # A request that is prefilled again lacks its newest token meanwhile (hooks/transfer.py:prefill_again).
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
    req, accumulator = bare_request(**params), Accumulator()
    req.stream, req.send_token_offset = False, 0
    for step in steps:
        req.output_ids.extend(step)
        accept(accumulator, req)
        assert accumulator.default_force_stream_interval == INTERVAL
    return accumulator.sent


def by_rounds(accumulator, req):
    send_unstreamed(Accumulator.accept, accumulator, req=req)


def by_single_tokens(accumulator, req):
    accumulator.accept(req=req)


@pytest.mark.parametrize("together", [1, 3, 7, 16])
def test_the_first_token_is_sent_at_once_and_then_each_interval_that_is_passed(together):
    steps = [[0]] + [[0] * together] * (160 // together)
    sent = lengths(steps, by_rounds, max_new_tokens=1000)
    assert sent[0] == 1
    assert len(sent) == 4 and all(0 <= at - passed < together for at, passed in zip(sent[1:], (50, 100, 150)))
    assert lengths(steps, by_single_tokens, max_new_tokens=1000) != sent, "the rule of one token at a time does not do it"


def test_what_may_begin_a_stop_string_waits_until_it_does_not():
    # The letters a b c; "bc" would end it.
    assert lengths([[1], [0], [1, 0]], by_rounds, stop=["bc"], max_new_tokens=9) == [2]
    assert lengths([[0], [1]], by_rounds, stop=["bc"], max_new_tokens=9) == [1]


def test_answers_that_a_pattern_may_end_are_left_to_sglang():
    steps = [[0]] + [[0] * 7] * 10
    assert lengths(steps, by_rounds, stop_regex=["b+"], max_new_tokens=99) == lengths(steps, by_single_tokens, max_new_tokens=99) == [50]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 51])
def test_of_a_request_that_waits_to_be_prefilled_again_nothing_is_sent_twice(stream, tokens):
    # SGLang's own rules; of what is sent the first fields tell enough.
    req, lists = bare_request(max_new_tokens=60), {name: [] for name in ("rids", "finished_reasons", "output_ids", "prompt_tokens")}
    accumulator = SimpleNamespace(default_force_stream_interval=INTERVAL, default_stream_interval=1, rust_server_mode=True, **lists)
    req.rid, req.origin_input_ids, req.stream, req.finished_output = "mine", [5], stream, False
    req.send_token_offset = req.send_output_token_logprobs_offset = 0

    def accept():
        with suppress(AttributeError):
            # Of what else is sent.
            send_unstreamed(_GenerationStreamAccumulator.accept, accumulator, req=req)

    req.output_ids.extend(range(tokens))
    accept()
    # As hooks/transfer.py:prefill_again, between the launch of a round and its end.
    newest = req.output_ids.pop()
    req.pd_rebootstrap_in_progress = True
    accept()
    req.pd_rebootstrap_in_progress = False
    req.output_ids.extend([newest, 97, 98])
    req.finished_reason = FINISH_LENGTH(length=tokens + 2)
    accept()
    assert [token for part in accumulator.output_ids for token in part] == [*range(tokens), 97, 98]
