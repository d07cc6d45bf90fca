"""Hooks for requests whose prompts are transferred quantized.

A decode server admits such requests by the slots of their compressed KV, and allocates no slots for their full KV. A prefill server packs
them in advance if no decode server has space. SGLang counts and allocates slots for each token of a prompt. The plan of such a prompt is
stored as an attribute of its request until it has slots.
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

    from sglang_ext.managers.kv_transfer.feature import KVTransfer
    from sglang_ext.managers.kv_transfer.quantized_prompts import QuantizedPromptAllocator

logger = logging.getLogger(__name__)

# Attribute of SGLang's request: its QuantizedPrompt, from planning until it has slots.
PLANNED = "kv_coded_prompt"


@dataclass(frozen=True)
class RecomputeQueue:
    """Lets the prefill server recompute prompts for one decode server's queue."""

    queue: "DecodePreallocQueue"

    def prefill_again(self, req: "Req") -> None:
        """Let the prefill server recompute a request that freed its slots, as SGLang does with requests retracted for new weights.

        The first token is kept, because the client may have it.
        """
        req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
        req.time_stats.set_retract_time()
        self.queue.add(req, is_rebootstrap=True)


def expect_quantized(queue: "DecodePreallocQueue", req: "Req", receiver: Any, is_rebootstrap: bool) -> None:
    """Plan how a request's prompt arrives, and tell its receiver the slots."""
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver

    prompts = _prompts(queue) if isinstance(receiver, ProgressiveReceiver) else None
    if prompts is None:
        return
    planned = prompts.plan(req, len(req.origin_input_ids) + len(req.output_ids) * is_rebootstrap)
    if planned is not None:
        setattr(req, PLANNED, planned)
        receiver.expect_quantized(lambda: prompts.slots(req, planned))


def count_prompt_slots(original: Callable, req: "Req") -> int:
    """Hook around ``DecodePreallocQueue._pre_alloc_fill_len`` and ``_rebootstrap_prefill_len``, used for admission: the slots of a prompt
    that arrives quantized."""
    planned = getattr(req, PLANNED, None)
    return original(req) if planned is None else planned.slots


def pre_alloc(original: Callable, queue: "DecodePreallocQueue", req: "Req", *prefix: Any, **named_prefix: Any) -> torch.Tensor:
    """Hook around ``DecodePreallocQueue._pre_alloc``: presents tokens in compressed KV to SGLang as a prefix in its padding page."""
    prompts, planned = _prompts(queue), getattr(req, PLANNED, None)
    if planned is None:
        slots = original(queue, req, *prefix, **named_prefix)
    else:
        # From here on it counts all its tokens.
        delattr(req, PLANNED)
        slots = prompts.allocate(req, planned, lambda padding, covered: original(queue, req, padding, covered, covered))
    if prompts is not None:
        prompts.enable_recompute(req, RecomputeQueue(queue))
    return slots


def pack_ahead(original: Callable, scheduler: "Scheduler", rids_to_check: list[str] | None = None) -> "list[Req]":
    """Hook around ``process_disagg_prefill_inflight_queue``: packs prompts that wait for a decode server into host memory
    (``--optimistic-prefill-attempts``), so that their full KV can be freed."""
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender

    feature = transfer_feature(scheduler)
    packs = feature is not None and not scheduler.tree_cache.disable
    for req in scheduler.disagg_prefill_inflight_queue if packs else ():
        # These conditions are equal on all ranks. The state of their senders is not.
        sender = req.disagg_kv_sender
        if not req.pending_bootstrap or not isinstance(sender, ProgressiveSender) or sender.is_waiting_packed:
            continue
        planned = feature.plan_early_packing(req)
        if planned is not None:
            slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, : planned.tokens].long()
            if sender.pack_early(planned.method.sinks, planned.covered, slots):
                scheduler.tree_cache.unlock_path(req)
                logger.info("sglang-ext: request %s waits for its decode server, with its prompt packed in host memory", req.rid)
    return original(scheduler, rids_to_check)


def transfer_feature(scheduler: "Scheduler") -> "KVTransfer | None":
    """The feature of a scheduler's worker; None in mode full, which has no worker of ours, or if another backend transfers KV."""
    from sglang_ext.managers.kv_transfer.feature import KVTransfer
    from sglang_ext.managers.worker import KVWorker

    worker = scheduler.draft_worker
    return worker.feature(KVTransfer) if isinstance(worker, KVWorker) else None


def _prompts(queue: "DecodePreallocQueue") -> "QuantizedPromptAllocator | None":
    feature = transfer_feature(queue.scheduler)
    return None if feature is None else feature.quantized_prompt_allocator(queue.tree_cache)
