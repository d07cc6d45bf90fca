"""Hooks for the transfer backend ``progressive``. They give senders and receivers the prompts, send chunks during the next forward, admit
prompts that are transferred quantized, and word failures for clients.

A prefill server sends a chunk of a prompt while the next chunk is computed. SGLang's overlapped loop launches a forward, makes later device
work of the scheduler wait for it, and sends the previous forward's chunk. To send, it copies the chunk's slots to the host. That copy
waits for the new forward, and blocks the device for all other threads of the process. So a chunk would be sent one forward late, and no chunk
would be encoded during a forward.

A decode server admits requests whose prompts arrive quantized by the slots of their compressed KV, and allocates no slots for their full KV.
SGLang counts and allocates slots for each token. A prefill server packs prompts in advance if no decode server has space.
"""

import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler

from sglang_ext.managers.kv_transfer.feature import KVTransfer
from sglang_ext.managers.kv_transfer.progressive.handshakes import retry_room
from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager
from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
from sglang_ext.managers.kv_transfer.quantized_transfer import QuantizedPromptAllocator
from sglang_ext.managers.worker import KVWorker

logger = logging.getLogger(__name__)

# Attribute of SGLang's request: its QuantizedPrompt, from planning until it has slots.
PLANNED = "kv_coded_prompt"
# Attribute of SGLang's scheduler: an event of its stream, after its device work before the last launch.
LAUNCH_EVENT_ATTRIBUTE = "kv_before_launch"
# Failure reasons are text: SGLang's, or another server's. These reasons mean that the other server is gone, or too slow.
RETRYABLE_REASONS = re.compile(
    r"is silent for|not reached for|cannot be reached|no prefill server answers|no prefill rank is known|"
    r"Lost connection with|but now it is down|Could not fetch bootstrap info|timed out after .* in KVPoll|PD retract rebootstrap"
)
FAILED = {
    "prefill": "the prefill server could not send the prompt's KV to the decode server",
    "decode": "the decode server could not get the prompt's KV from the prefill server",
}
RETRY_ADVICE = "send the request again"


def create_sender(original: Callable, queue: PrefillBootstrapQueue, req: Req, num_kv_heads: int) -> bool:
    """Hook around ``PrefillBootstrapQueue.create_sender``: passes the prompt, its packing and its newest queries to the sender."""
    made = original(queue, req, num_kv_heads)
    if not made or not _sends(req):
        return made
    feature, tokens = transfer_feature(queue.scheduler), len(req.origin_input_ids)
    packing = None if feature is None else feature.prompt_packing()
    read_queries = None if feature is None else lambda most: feature.prompt_queries.read(req.req_pool_idx, tokens, most)
    req.disagg_kv_sender.set_prompt(req.origin_input_ids, _refusal(req), packing, read_queries)
    return made


def create_receiver(original: Callable, queue: DecodePreallocQueue, req: Req, is_rebootstrap: bool = False) -> DecodeRequest:
    """Hook around ``DecodePreallocQueue._create_receiver_and_enqueue``: prepares the receiver.

    It passes the prompt, the destination of its newest queries, its packing, and whether the request may decode early. A request that does
    not fit an empty pool is refused. The KV of a request that was retracted and is prefilled again includes its output. Such a request gets a new
    room, and begins when all KV has arrived.
    """
    if is_rebootstrap and isinstance(queue.kv_manager, ProgressiveManager):
        req.bootstrap_room = retry_room(req.bootstrap_room, req.rid)
    made = original(queue, req, is_rebootstrap=is_rebootstrap)
    receiver = made.kv_receiver
    if not isinstance(receiver, ProgressiveReceiver):
        return made
    # The queue polls a request's prefill server in each iteration of the scheduler, as long as the receiver waits. SGLang polls 15 times,
    # once per second, because each attempt blocks its scheduler. This backend's look-up does not block.
    queue._ensure_retry_interval, queue._max_ensure_retries = 0.0, sys.maxsize
    expect_quantized(queue, req, receiver, is_rebootstrap)
    _refuse_beyond_pool(queue, req)
    receiver.set_prompt([*req.origin_input_ids, *req.output_ids] if is_rebootstrap else req.origin_input_ids, _refusal(req))
    feature = transfer_feature(queue.scheduler)
    if feature is None:
        return made
    receiver.expect_queries(feature.prompt_queries, lambda: req.req_pool_idx)
    full_kv = None if is_rebootstrap else feature.arriving_full_kv(req)
    if full_kv is not None:
        receiver.enable_early_decoding(lambda arrival: full_kv.expect(req.req_pool_idx, arrival), partial(prefill_again, queue))
    return made


def prefill_again(queue: DecodePreallocQueue, req: Req) -> None:
    """Let the prefill server recompute a request that freed its slots, as SGLang does with requests retracted for new weights."""
    # The first token is kept, because the client may have it.
    req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
    req.pd_rebootstrap_in_progress = True
    req.time_stats.set_retract_time()
    queue.add(req, is_rebootstrap=True)


def expect_quantized(queue: DecodePreallocQueue, req: Req, receiver: ProgressiveReceiver, is_rebootstrap: bool) -> None:
    """Plan how a request's prompt arrives, and tell its receiver the slots."""
    prompts = _prompts(queue)
    if prompts is None:
        return
    planned = prompts.plan(req, len(req.origin_input_ids) + len(req.output_ids) * is_rebootstrap)
    if planned is not None:
        setattr(req, PLANNED, planned)
        receiver.expect_quantized(lambda: prompts.slots(req, planned))


def count_prompt_slots(original: Callable, req: Req) -> int:
    """Hook around ``DecodePreallocQueue._pre_alloc_fill_len`` and ``_rebootstrap_prefill_len``: the slots of a prompt that arrives quantized."""
    planned = getattr(req, PLANNED, None)
    return original(req) if planned is None else planned.slots


def pre_alloc(original: Callable, queue: DecodePreallocQueue, req: Req, *prefix: Any, **named_prefix: Any) -> torch.Tensor:
    """Hook around ``DecodePreallocQueue._pre_alloc``: presents tokens in compressed KV to SGLang as a prefix in its padding page."""
    prompts, planned = _prompts(queue), getattr(req, PLANNED, None)
    if planned is None:
        slots = original(queue, req, *prefix, **named_prefix)
    else:
        # From here on it counts all its tokens.
        delattr(req, PLANNED)
        slots = prompts.allocate(req, planned, lambda padding, covered: original(queue, req, padding, covered, covered))
    if prompts is not None:
        prompts.enable_recompute(req, partial(prefill_again, queue))
    return slots


def pack_ahead(original: Callable, scheduler: Scheduler, rids_to_check: list[str] | None = None) -> list[Req]:
    """Hook around ``process_disagg_prefill_inflight_queue``: packs prompts that wait for a decode server into host memory
    (``--optimistic-prefill-attempts``), so that their full KV can be freed."""
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


def transfer_feature(scheduler: Scheduler) -> KVTransfer | None:
    """The feature of a scheduler's worker; None in mode full, which has no worker of ours, or if another backend transfers KV."""
    worker = scheduler.draft_worker
    return worker.feature(KVTransfer) if isinstance(worker, KVWorker) else None


def _prompts(queue: DecodePreallocQueue) -> QuantizedPromptAllocator | None:
    feature = transfer_feature(queue.scheduler)
    return None if feature is None else feature.quantized_prompt_allocator(queue.tree_cache)


def prepare_abort(original: Callable, req: Req, error_message: str, status_code: int | None = None) -> None:
    """Hook around ``prepare_abort``, with which SGLang ends the request of a failed room: gives the client a message that it understands.

    If SGLang has ended the request before, for example because its grammar could not be compiled, that reason and status stay.
    """
    message, status = describe_failure(error_message, getattr(req, "bootstrap_room", None), status_code)
    original(req, message, status_code=status)
    if isinstance(req.to_finish, FINISH_ABORT):
        req.finished_reason = req.to_finish


def abort_request(original: Callable, scheduler: Scheduler, recv_req: AbortReq) -> None:
    """Hook around ``Scheduler.abort_request``: also notifies the decode side of a request that waits to be computed."""
    # SGLang removes the request from its queue and never polls its sender again.
    waiting = [req for req in scheduler.waiting_queue if _sends(req)]
    original(scheduler, recv_req)
    left = {id(req) for req in scheduler.waiting_queue}
    for req in waiting:
        if id(req) not in left:
            req.disagg_kv_sender.abort()


def record_launch(original: Callable, scheduler: Scheduler) -> None:
    """Hook around ``Scheduler._apply_war_barrier``, which follows each launch: records the scheduler's earlier work."""
    if torch.cuda.is_available():
        setattr(scheduler, LAUNCH_EVENT_ATTRIBUTE, torch.cuda.current_stream().record_event())
    original(scheduler)


def send_kv_chunk(original: Callable, scheduler: Scheduler, req: Req, last_chunk: bool = False, end_idx: int | None = None) -> None:
    """Hook around ``send_kv_chunk``: reads the slots of a chunk on a second stream, in parallel with the launched forward.

    The last chunk and a cached prefix are not read in this way: the scheduler wrote their slots after that forward was launched.
    This function waits for them before the copy. SGLang sends a chunk whose forward still runs as a prefix of the next chunk, and then
    launches the next chunk only after that forward. Here such a chunk is sent with its result, after the launch. If no forward was launched
    after the one whose results are processed, there is nothing to wait for.
    """
    before, sender = getattr(scheduler, LAUNCH_EVENT_ATTRIBUTE, None), req.disagg_kv_sender
    if before is None or not scheduler.result_queue or not isinstance(sender, ProgressiveSender):
        original(scheduler, req, last_chunk, end_idx)
    elif sender.is_sending_prefix and end_idx == req.tmp_end_idx:
        sender.defer_prefix()
    elif last_chunk or sender.is_sending_prefix:
        torch.cuda.current_stream().record_event().synchronize()
        original(scheduler, req, last_chunk, end_idx)
    else:
        with sender.kv_mgr.pool.on_side_stream(before):
            original(scheduler, req, last_chunk, end_idx)


def _sends(req: Req) -> bool:
    """Whether this backend sends the request's KV. Other senders belong to SGLang's warm-up, or to another backend in a patched fork."""
    return isinstance(getattr(req, "disagg_kv_sender", None), ProgressiveSender)


def _refuse_beyond_pool(queue: DecodePreallocQueue, req: Req) -> None:
    """End a request that does not fit an empty pool. SGLang would let it wait forever, and all requests behind it."""
    if req.to_finish is not None:
        return
    slots, kept, pool = queue._pre_alloc_fill_len(req), queue.num_reserved_decode_tokens, queue.max_total_num_tokens
    if slots + kept > pool:
        why = (
            f"the request's KV takes {slots} tokens of the decode server's pool, which has {pool} and keeps {kept} of them free for answers "
            "(--num-reserved-decode-tokens): send a shorter prompt, or start the decode server with more --max-total-tokens"
        )
        req.to_finish = FINISH_ABORT(why, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _refusal(req: Req) -> str | None:
    """Why SGLang has ended a request before its transfer: it was refused, or aborted while its grammar was compiled. None if it has not."""
    return getattr(req.to_finish, "message", None)


def describe_failure(message: str, room: int | None, status: int | None) -> tuple[str, int | None]:
    """Return message and status for a request in ``room`` that SGLang ends with these. Both are unchanged if no room failed.

    For a failed room SGLang answers with status 500 and a text that begins with ranks and numbers. These stay in its log. The client needs
    to know what failed, at which server, and whether to send the request again.
    """
    before, mark, reason = message.partition(f"KVTransferError(bootstrap_room={room}): ")
    if not mark:
        return message, status
    failed = FAILED["prefill" if before.startswith("Prefill") else "decode"]
    if RETRYABLE_REASONS.search(reason) is None:
        return f"{failed}: {reason}", status
    return f"{failed}: {reason.rstrip('.')}; {RETRY_ADVICE}", HTTPStatus.SERVICE_UNAVAILABLE
