"""Streams the tokens of a round one by one, as a server without speculation does.

A round gives a request several tokens at once. SGLang decides once per round whether to send them, and sends them together. Its stream
interval, its log probabilities and its tool-call parsers expect one token at a time.

:func:`stream_each_token` repeats SGLang's own streaming step for each new token of a streamed request. In each repetition the request
has the state that it had after that token. So the scheduler sends what stock sends: one message per token position, with the tokens of
all requests that have one there. stream_delivery.py keeps these messages apart in the frontend.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

STREAMED = "kv_streamed"
"""Attribute of a request: output tokens and reasoning tokens that it had when it was last streamed."""


def stream_each_token(
    original: Callable, streamer: "SchedulerOutputStreamer", reqs: "list[Req]", return_logprob: bool, skip_req: "Req | None" = None
) -> None:
    """Hook around ``SchedulerOutputStreamer.stream_output``: stream each new token on its own.

    Args:
        original: SGLang's streaming step. It decides per request whether there is something to send.
        streamer: The scheduler's.
        reqs: Requests to stream. Their new tokens are in ``output_ids``.
        return_logprob: Whether one of them returns log probabilities.
        skip_req: A request of ``reqs`` that is not streamed, or None.
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


def _replay(req: "Req") -> "_Replay | None":
    """Steps of a streamed request before its newest token; None if it has at most one new token."""
    num_streamed, num_reasoning = getattr(req, STREAMED, (0, 0))
    num_tokens = len(req.output_ids_through_stop)
    # A request that is prefilled again lacks its newest token meanwhile, which was streamed (coded_prompts.py:PrefillServer).
    setattr(req, STREAMED, (max(num_streamed, num_tokens), req.reasoning_tokens))
    if not req.stream or num_tokens <= num_streamed + 1 or (req.finished() and req.finished_output):
        return None
    return _Replay(req, num_streamed, num_reasoning, num_tokens - num_streamed - 1)


class _Replay:
    """The states of a request after each of its new tokens but the newest.

    Args:
        req: Has at least two new tokens.
        num_streamed: Output tokens before the new ones.
        num_reasoning: Reasoning tokens before the new ones.
        num_steps: New tokens without the newest.
    """

    def __init__(self, req: "Req", num_streamed: int, num_reasoning: int, num_steps: int) -> None:
        self.req = req
        self.num_steps = num_steps
        self._num_streamed = num_streamed
        self._num_reasoning = num_reasoning
        self._newest = req.output_ids[num_streamed:]
        self._end = (req.finished_reason, req.finished_len)
        self._reasoning_tokens = req.reasoning_tokens
        self._hidden_states = req.hidden_states

    def rewind(self, step: int) -> None:
        """Give the request the state after new token number ``step``, from 0."""
        req, num_kept = self.req, step + 1
        del req.output_ids[self._num_streamed + num_kept :]
        req.finished_reason = req.finished_len = None
        # Reasoning tokens are counted from the first token on, until the reasoning ends.
        req.reasoning_tokens = min(self._reasoning_tokens, self._num_reasoning + num_kept)
        if req.return_hidden_states:
            num_later = len(self._newest) - num_kept
            req.hidden_states = self._hidden_states[: len(self._hidden_states) - num_later]

    def restore(self) -> None:
        """Give the request its newest state again."""
        req = self.req
        req.output_ids.extend(self._newest[len(req.output_ids) - self._num_streamed :])
        req.finished_reason, req.finished_len = self._end
        req.reasoning_tokens = self._reasoning_tokens
        req.hidden_states = self._hidden_states
