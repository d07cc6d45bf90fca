"""What SGLang's scheduler tells of rounds: when an answer is told to the frontend, and what counts as accepted in its log and metrics.

The frontend takes the times of ``meta_info`` and ``/metrics`` from when an answer that is not streamed is told.

SGLang sends such an answer's tokens where their number is a multiple of ``SGLANG_FORCE_STREAM_INTERVAL``. Tokens that come
several at once step over these numbers: the first that the frontend sees is then the end, which stands for the first token.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    from sglang_ext.managers.spec_decode.round import Round


def count_plain_steps(reporter: "SchedulerMetricsReporter", done: "Round", counts: Sequence[int]) -> None:
    """Count each token that a step gave, of a request that did not draft, as a forward of its own; before SGLang counts the round's.

    SGLang takes all tokens of a round but the first for accepted drafts: a server of mode lossy would log an accept length of 4.

    Args:
        reporter: divides tokens by forwards.
        done: the round.
        counts: tokens of each request of it.
    """
    reporter.spec_num_forward_ct += sum(max(0, counts[i] - 1) for i in done.answering)


def send_what_is_due(original: Callable, accumulator, *, req: "Req") -> None:
    """Hook around ``accept``: send the first token at once, then whenever a multiple of SGLang's interval was reached or passed.

    A request that waits to be prefilled again by another server lacks its newest token meanwhile (coded_prompts.py:PrefillServer), and the
    round that was launched before comes to its end. What was sent would be counted without that token, which would be sent twice.
    """
    if getattr(req, "pd_rebootstrap_in_progress", False) and not req.finished():
        return
    interval = accumulator.default_force_stream_interval
    # Nothing tells whether what there is begins a match of a pattern: these are left to SGLang.
    if req.output_ids and not (req.stream or req.finished() or req.sampling_params.stop_regex_strs):
        # An interval of one token sends now, one longer than the answer does not.
        accumulator.default_force_stream_interval = 1 if _is_due(req, interval) else len(req.output_ids) + 1
    try:
        original(accumulator, req=req)
    finally:
        accumulator.default_force_stream_interval = interval


def _is_due(req: "Req", interval: int) -> bool:
    """Whether tokens are to be sent; not while they may be the beginning of a stop string, which the text leaves out."""
    sent, there = req.send_token_offset, len(req.output_ids)
    due = sent == 0 or there // interval > sent // interval
    return due and not req.check_match_stop_str_prefix()
