"""The requests of a batch that still run, where others finished after SGLang had built it.

Under the overlapped loop SGLang builds a batch before it has the result of the last one. Where a request has a grammar it then
processes that result before it launches the batch: who finishes in it is in the batch still, but its row and its slots are
free. A round of the others is run, and what SGLang relays from round to round is made as long as the batch again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.device import to_device
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.layers.forward import of_requests
from sglang_ext.managers.spec_decode.result import RoundResult
from sglang_ext.managers.spec_decode.sampling import pick_requests

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

Publish = Callable[[torch.Tensor], None]
Decode = Callable[["ScheduleBatch", Publish | None], RoundResult]


def decode_running(decode: Decode, batch: "ScheduleBatch", on_publish: Publish | None) -> RoundResult:
    """What ``decode`` gives for the requests of ``batch`` that did not finish; the result says which they are.

    Args:
        decode: runs a round of all requests of a batch.
        batch: SGLang's, in decode mode.
        on_publish: as of the worker's ``forward_batch_generation``.
    """
    running = [i for i, req in enumerate(batch.reqs) if not req.finished()]
    if len(running) == len(batch.reqs):
        return decode(batch, on_publish)
    where = to_device(running, batch.seq_lens.device)

    def publish(lengths: torch.Tensor) -> None:
        on_publish(batch.seq_lens.index_copy(0, where, lengths))

    if not running:
        result = RoundResult.of_nobody(batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
    else:
        result = decode(part_of(batch, running, where), publish if on_publish is not None else None)
    newest = result.next_draft_input.bonus_tokens
    result.next_draft_input = BetweenSteps(newest.new_zeros(len(batch.reqs)).index_copy(0, where, newest))
    result.requests = running
    return result


def part_of(batch: "ScheduleBatch", requests: list[int], where: torch.Tensor) -> "ScheduleBatch":
    """A batch of some requests of another one: what rounds read of it. The other stays as it is.

    Args:
        requests: their places.
        where: the same, int64 on the device.
    """
    part = of_requests(batch, requests, where)
    part.seq_lens_cpu = batch.seq_lens_cpu[requests]
    part.spec_info = BetweenSteps(batch.spec_info.bonus_tokens[where])
    part.sampling_info = pick_requests(batch.sampling_info, requests, where.device)
    part.return_logprob = any(req.return_logprob for req in part.reqs)
    if part.return_logprob:
        part.top_logprobs_nums = [batch.top_logprobs_nums[i] for i in requests]
        part.token_ids_logprobs = [batch.token_ids_logprobs[i] for i in requests]
    part.return_hidden_states = any(req.return_hidden_states for req in part.reqs)
    return part
