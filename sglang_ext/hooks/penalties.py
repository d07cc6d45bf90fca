"""Penalties that do not depend on the process, nor on whether a request was retracted.

*Order.* Added penalties (frequency, presence, minimum length) and scaled ones (repetition) do not commute.
SGLang's overlapped scheduler adds, then scales; its plain one takes them as they come out of a set of classes, in an order of
that process alone.

*Retraction.* SGLang counts an answer's tokens as they come, in its penalizers, and starts them from nothing
when it prefills a retracted request again: from there on the answer is another. Whether a request is
retracted depends on its neighbours and on the memory that compressed copies take, so the answer would too.
Under its overlapped scheduler penalties lag a token behind the output, as a step is prepared before the token of the one
before is known, and begin with the last token of the prompt. What is counted again lags alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class Part:
    """The requests behind penalizers in the making, as a batch is asked for them."""

    reqs: list["Req"]
    device: str


def restore_penalties(original: Callable, batch: "ScheduleBatch") -> None:
    """Hook around ``prepare_for_extend``: penalizers that have seen each request's output, adders first."""
    original(batch)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if orchestrator.is_required and any(req.output_ids for req in batch.reqs):
        orchestrator = replayed(orchestrator, batch)
    orchestrator.penalizers = adders_first(orchestrator.penalizers)
    batch.sampling_info.penalizer_orchestrator = orchestrator


def counted(req: "Req", overlapped: bool) -> list[int]:
    """Tokens of a request that SGLang has counted when it draws the one after its output, had it never been retracted."""
    output = list(req.output_ids)
    return [req.origin_input_ids[-1], *output[:-1]] if overlapped and output else output


def adders_first(penalizers: dict[type, Any]) -> dict[type, Any]:
    """Those that add to logits before those that scale them, as in SGLang's overlapped scheduler."""
    return dict(sorted(penalizers.items(), key=lambda entry: (entry[1].is_multiplicative, entry[0].__name__)))


def replayed(orchestrator: BatchedPenalizerOrchestrator, batch: "ScheduleBatch") -> BatchedPenalizerOrchestrator:
    """Penalizers of the batch, of the same kinds, that were fed the outputs of its requests.

    SGLang feeds a batch one token of each request at a time. Outputs differ in length, so each request
    is fed on its own, and then merged.
    """
    parts = [Part([req], batch.device) for req in batch.reqs]
    kinds = set(orchestrator.penalizers)
    fed = [BatchedPenalizerOrchestrator(orchestrator.vocab_size, part, kinds) for part in parts]
    for part, penalizers in zip(parts, fed):
        for token in counted(part.reqs[0], batch.enable_overlap):
            penalizers.cumulate_output_tokens(torch.tensor([token], device=batch.device))
    first, whole = parts[0], fed[0]
    for part, penalizers in zip(parts[1:], fed[1:]):
        whole.merge(penalizers)
        first.reqs += part.reqs  # after the merge, which may still prepare penalties for those before
    whole.batch = batch
    return whole
