"""A retracted request's penalties see its whole output again.

SGLang counts an answer's tokens as they come, in its penalizers, and starts them from nothing when it
prefills a retracted request again: from there on the answer is another. Whether a request is retracted
depends on its neighbours and on the memory that compressed copies take, so the answer would too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """Hook around ``prepare_for_extend``: penalizers that have seen what each request has put out."""
    original(batch)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if orchestrator.is_required and any(req.output_ids for req in batch.reqs):
        batch.sampling_info.penalizer_orchestrator = replayed(orchestrator, batch)


def replayed(
    orchestrator: BatchedPenalizerOrchestrator, batch: "ScheduleBatch"
) -> BatchedPenalizerOrchestrator:
    """Penalizers of the batch, of the same kinds, that were fed the outputs of its requests.

    SGLang feeds a batch one token of each request at a time. Outputs differ in length, so each request
    is fed on its own, and then merged.
    """
    parts = [Part([req], batch.device) for req in batch.reqs]
    kinds = set(orchestrator.penalizers)
    fed = [BatchedPenalizerOrchestrator(orchestrator.vocab_size, part, kinds) for part in parts]
    for part, penalizers in zip(parts, fed):
        for token in part.reqs[0].output_ids:
            penalizers.cumulate_output_tokens(torch.tensor([token], device=batch.device))
    first, whole = parts[0], fed[0]
    for part, penalizers in zip(parts[1:], fed[1:]):
        whole.merge(penalizers)
        first.reqs += part.reqs  # after the merge, which may still prepare penalties for those before
    whole.batch = batch
    return whole
