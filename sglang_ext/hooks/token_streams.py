"""Sends tokens from the scheduler to the frontend when a server without speculation sends them.

A round gives a request several tokens at once. SGLang decides once per round whether to send them, and sends them together. Its stream
interval, its log probabilities and its tool-call parsers expect one token at a time.

*Streams.* :func:`stream_each_token` repeats SGLang's own streaming step for each new token of a streamed request, with the state that the
request had after that token. So the scheduler sends one message per token position, as stock does. stream_delivery.py keeps these
messages apart in the frontend.

*Other answers.* For an answer that is not streamed, SGLang sends tokens to the frontend whenever their number is a multiple of
``SGLANG_FORCE_STREAM_INTERVAL``. The frontend takes the times of ``meta_info`` and ``/metrics`` from these messages. A round may skip the
multiple. :func:`send_unstreamed` sends the first token at once, and then the tokens of each round that passes a multiple.
"""

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer, _GenerationStreamAccumulator

STREAMED = "kv_streamed"
"""Attribute of a request: its numbers of output tokens and reasoning tokens when it was last streamed."""


def stream_each_token(
    original: Callable, streamer: SchedulerOutputStreamer, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None
) -> None:
    """Hook around ``SchedulerOutputStreamer.stream_output``: stream each new token of ``reqs`` on its own.

    SGLang's streaming step, ``original``, decides per request whether there is something to send. ``skip_req`` is not streamed.
    """
    replays = [replay for req in reqs if req is not skip_req and (replay := _replay(req)) is not None]
    for step in range(max((replay.num_steps for replay in replays), default=0)):
        current = [replay for replay in replays if step < replay.num_steps]
        for replay in current:
            replay.rewind(step)
        original(streamer, [replay.req for replay in current], return_logprob)
        for replay in current:
            replay.restore()
    original(streamer, reqs, return_logprob, skip_req)


def _replay(req: Req) -> "_Replay | None":
    """The replay of a streamed request's new tokens except the newest. None if it has at most one new token."""
    num_streamed, num_reasoning = getattr(req, STREAMED, (0, 0))
    num_tokens = len(req.output_ids_through_stop)
    # While a request is prefilled again, it lacks its newest token, which was streamed already (hooks/transfer.py:prefill_again).
    setattr(req, STREAMED, (max(num_streamed, num_tokens), req.reasoning_tokens))
    if not req.stream or num_tokens <= num_streamed + 1 or (req.finished() and req.finished_output):
        return None
    return _Replay(req, num_streamed, num_reasoning, num_tokens - num_streamed - 1)


class _Replay:
    """The states of a request after each of its ``num_steps`` new tokens except the newest."""

    # Hidden states need no replay: a request that returns them gets one token per round.
    def __init__(self, req: Req, num_streamed: int, num_reasoning: int, num_steps: int) -> None:
        self.req = req
        self.num_steps = num_steps
        self._num_streamed = num_streamed
        self._num_reasoning = num_reasoning
        self._newest = req.output_ids[num_streamed:]
        self._end = (req.finished_reason, req.finished_len)
        self._reasoning_tokens = req.reasoning_tokens

    def rewind(self, step: int) -> None:
        """Give the request the state after new token number ``step``, from 0."""
        req, num_kept = self.req, step + 1
        del req.output_ids[self._num_streamed + num_kept :]
        req.finished_reason = req.finished_len = None
        # Reasoning tokens are counted from the first token on, until the reasoning ends.
        req.reasoning_tokens = min(self._reasoning_tokens, self._num_reasoning + num_kept)

    def restore(self) -> None:
        """Give the request its newest state again."""
        req = self.req
        req.output_ids.extend(self._newest[len(req.output_ids) - self._num_streamed :])
        req.finished_reason, req.finished_len = self._end
        req.reasoning_tokens = self._reasoning_tokens


def send_unstreamed(original: Callable, accumulator: _GenerationStreamAccumulator, *, req: Req) -> None:
    """Hook around ``accept``: send the tokens of an answer that is not streamed at its first token and at each interval.

    A request that is prefilled again lacks its newest token until its last round ends (hooks/transfer.py:prefill_again). Until then it
    sends nothing: SGLang would count that token as not sent, and send it twice.
    """
    if getattr(req, "pd_rebootstrap_in_progress", False) and not req.finished():
        return
    interval = accumulator.default_force_stream_interval
    # SGLang cannot check whether the tokens are the beginning of a match of a stop_regex. These requests keep SGLang's rule.
    if req.output_ids and not (req.stream or req.finished() or req.sampling_params.stop_regex_strs):
        num_sent, num_tokens = req.send_token_offset, len(req.output_ids)
        passes = num_sent == 0 or num_tokens // interval > num_sent // interval
        # New tokens wait while they may be the beginning of a stop string, which the answer leaves out.
        is_sent = passes and not req.check_match_stop_str_prefix()
        # An interval of one token sends now. An interval longer than the answer does not.
        accumulator.default_force_stream_interval = 1 if is_sent else num_tokens + 1
    try:
        original(accumulator, req=req)
    finally:
        accumulator.default_force_stream_interval = interval
