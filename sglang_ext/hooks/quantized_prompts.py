"""Requests whose prompts travel as codes. A decode server admits them as their copies need, and gives no slots to their full KV; a prefill
server packs them ahead where no decode server has room.

SGLang counts and takes slots for each token of a prompt. What is planned of one stands at its request until it has them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.managers.kv_transfer.quantized.decode_side import QuantizedPromptAllocator

logger = logging.getLogger(__name__)

# The attribute of SGLang's request that holds its QuantizedPrompt, from when it is planned until it has slots.
PLANNED = "kv_coded_prompt"


@dataclass(frozen=True)
class RecomputeQueue:
    """Computes prompts once more for one decode server's queue."""

    queue: "DecodePreallocQueue"

    def prefill_again(self, req: "Req") -> None:
        """Let it compute a request that gave its slots back, as SGLang does with requests that it retracts to change weights.

        The first token, which the client may have, is kept.
        """
        req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
        req.time_stats.set_retract_time()
        self.queue.add(req, is_rebootstrap=True)


def expect_quantized(queue: "DecodePreallocQueue", req: "Req", receiver: Any, is_rebootstrap: bool) -> None:
    """Plan how a request's prompt comes, and let its receiver know where to."""
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver

    prompts = _prompts(queue) if isinstance(receiver, ProgressiveReceiver) else None
    if prompts is None:
        return
    planned = prompts.plan(req, len(req.origin_input_ids) + len(req.output_ids) * is_rebootstrap)
    if planned is not None:
        setattr(req, PLANNED, planned)
        receiver.expect_quantized(lambda: prompts.slots(req, planned))


def count_prompt_slots(original: Callable, req: "Req") -> int:
    """Hook around ``DecodePreallocQueue._pre_alloc_fill_len`` and ``_rebootstrap_prefill_len``, by which requests are admitted: the slots
    that a prompt takes which comes as codes."""
    planned = getattr(req, PLANNED, None)
    return original(req) if planned is None else planned.slots


def pre_alloc(
    original: Callable,
    queue: "DecodePreallocQueue",
    req: "Req",
    prefix_indices: torch.Tensor | None = None,
    prefix_len: int | None = None,
    total_prefix_len: int | None = None,
) -> torch.Tensor:
    """Hook around ``DecodePreallocQueue._pre_alloc``: what a copy stands for is to SGLang a prefix that is there, in its padding page."""
    prompts, planned = _prompts(queue), getattr(req, PLANNED, None)
    if planned is None:
        slots = original(queue, req, prefix_indices, prefix_len, total_prefix_len)
    else:
        # From here on it has as many tokens as it says.
        delattr(req, PLANNED)
        slots = prompts.allocate(req, planned, lambda padding, covered: original(queue, req, padding, covered, covered))
    if prompts is not None:
        prompts.enable_recompute(req, RecomputeQueue(queue))
    return slots


def pack_ahead(original: Callable, scheduler: "Scheduler", rids_to_check: list[str] | None = None) -> "list[Req]":
    """Hook around ``process_disagg_prefill_inflight_queue``: prompts that were computed before a decode server has room for them
    (``--optimistic-prefill-attempts``) wait packed in host memory, and their full KV may go."""
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
    from sglang_ext.managers.worker import KVWorker

    worker = scheduler.draft_worker
    packs = isinstance(worker, KVWorker) and not scheduler.tree_cache.disable
    for req in scheduler.disagg_prefill_inflight_queue if packs else ():
        # Equal on all ranks, unlike what their senders have heard.
        sender = req.disagg_kv_sender
        if not req.pending_bootstrap or not isinstance(sender, ProgressiveSender) or sender.is_waiting_packed:
            continue
        planned = worker.packed_ahead(req)
        if planned is not None:
            slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, : planned.tokens].long()
            if sender.pack_early(planned.method.sinks, planned.covered, slots):
                scheduler.tree_cache.unlock_path(req)
                logger.info("sglang-ext: request %s waits for its decode server, its prompt packed in host memory", req.rid)
    return original(scheduler, rids_to_check)


def _prompts(queue: "DecodePreallocQueue") -> "QuantizedPromptAllocator | None":
    from sglang_ext.managers.worker import KVWorker

    worker = queue.scheduler.draft_worker
    return worker.coded_prompts(queue.tree_cache) if isinstance(worker, KVWorker) else None
