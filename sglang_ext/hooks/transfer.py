"""SGLang's transfer backend ``progressive``: its name in SGLang's registries, its classes, and the prompts of its rooms."""

import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_ext.config.options import BACKEND
from sglang_ext.hooks import quantized_prompts

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.managers.kv_transfer.prompt_queries import PromptQueries
    from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
    from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


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


def register_backend() -> None:
    """Add the backend's name to SGLang's flags and its enumeration of backends, once per process."""
    from sglang.srt import server_args
    from sglang.srt.disaggregation.utils import TransferBackend

    if BACKEND not in server_args.DISAGG_TRANSFER_BACKEND_CHOICES:
        server_args.add_disagg_transfer_backend_choices([BACKEND])
    if BACKEND not in TransferBackend._value2member_map_:
        member = object.__new__(TransferBackend)
        member._name_, member._value_ = BACKEND.upper(), BACKEND
        member.__objclass__, member._sort_order_ = TransferBackend, len(TransferBackend)
        TransferBackend._member_names_.append(member.name)
        TransferBackend._member_map_[member.name] = TransferBackend._value2member_map_[BACKEND] = member


def get_kv_class(original: Callable, transfer_backend: "TransferBackend", class_type: "KVClassType") -> type | None:
    """Hook around ``get_kv_class``: returns the classes of this backend, or SGLang's own for other backends."""
    if transfer_backend.value != BACKEND:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
    from sglang.srt.disaggregation.utils import KVClassType

    if class_type in (KVClassType.KVARGS, KVClassType.BOOTSTRAP_SERVER):
        return {KVClassType.KVARGS: KVArgs, KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer}[class_type]
    from sglang_ext.hooks import activation as hooking
    from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender

    if class_type is KVClassType.MANAGER:
        # Once per scheduler process, before its first request.
        hooking.activate_transfer()
    classes = {
        KVClassType.MANAGER: ProgressiveManager,
        KVClassType.SENDER: ProgressiveSender,
        KVClassType.RECEIVER: ProgressiveReceiver,
    }
    return classes[class_type]


def create_sender(original: Callable, queue: "PrefillBootstrapQueue", req: "Req", num_kv_heads: int) -> bool:
    """Hook around ``PrefillBootstrapQueue.create_sender``: passes the prompt, its packing and its newest queries to the sender."""
    made = original(queue, req, num_kv_heads)
    if made:
        _set_prompt(req.disagg_kv_sender, req, req.origin_input_ids)
        packs = _packs_prompts(queue, req.disagg_kv_sender)
        if packs is not None:
            req.disagg_kv_sender.set_packing(*packs)
        traveling = _prompt_queries(queue, req.disagg_kv_sender)
        if traveling is not None:
            tokens = len(req.origin_input_ids)
            req.disagg_kv_sender.set_query_reader(lambda most: traveling.read(req.req_pool_idx, tokens, most))
    return made


def create_receiver(original: Callable, queue: "DecodePreallocQueue", req: "Req", is_rebootstrap: bool = False) -> "DecodeRequest":
    """Hook around ``DecodePreallocQueue._create_receiver_and_enqueue``: prepares the receiver.

    It passes the prompt, the destination of its newest queries, its packing, and whether the request may decode early. A request that does
    not fit an empty pool is refused. The KV of a request that was retracted and is prefilled again includes its output. Such a request gets a new
    room, and begins when all KV has arrived.
    """
    from sglang_ext.managers.kv_transfer.progressive.control import retry_room
    from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager

    if is_rebootstrap and isinstance(queue.kv_manager, ProgressiveManager):
        req.bootstrap_room = retry_room(req.bootstrap_room, req.rid)
    made = original(queue, req, is_rebootstrap=is_rebootstrap)
    _poll_prefill_servers(queue, made.kv_receiver)
    quantized_prompts.expect_quantized(queue, req, made.kv_receiver, is_rebootstrap)
    _refuse_beyond_pool(queue, req, made.kv_receiver)
    _set_prompt(made.kv_receiver, req, [*req.origin_input_ids, *req.output_ids] if is_rebootstrap else req.origin_input_ids)
    traveling = _prompt_queries(queue, made.kv_receiver)
    if traveling is not None:
        made.kv_receiver.expect_queries(traveling, lambda: req.req_pool_idx)
    if not is_rebootstrap:
        _enable_early_decoding(queue, req, made.kv_receiver)
    return made


def prepare_abort(original: Callable, req: "Req", error_message: str, status_code: int | None = None) -> None:
    """Hook around ``prepare_abort``, with which SGLang ends the request of a failed room: gives the client a message that it understands.

    :func:`describe_failure` makes the message. If SGLang has ended the request before, for example because its grammar could not be
    compiled, that reason and status stay.
    """
    message, status = describe_failure(error_message, getattr(req, "bootstrap_room", None), status_code)
    original(req, message, status_code=status)
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if isinstance(req.to_finish, FINISH_ABORT):
        req.finished_reason = req.to_finish


def abort_request(original: Callable, scheduler: "Scheduler", recv_req: "AbortReq") -> None:
    """Hook around ``Scheduler.abort_request``: also notifies the decode side of a request that waits to be computed.

    SGLang removes the request from its queue and never polls its sender again.
    """
    waiting = [req for req in scheduler.waiting_queue if _sends(req)]
    original(scheduler, recv_req)
    left = {id(req) for req in scheduler.waiting_queue}
    for req in waiting:
        if id(req) not in left:
            req.disagg_kv_sender.abort()


def _sends(req: "Req") -> bool:
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender

    return isinstance(getattr(req, "disagg_kv_sender", None), ProgressiveSender)


def _prompt_queries(queue: "PrefillBootstrapQueue | DecodePreallocQueue", end: Any) -> "PromptQueries | None":
    """The queries of this rank's requests, if compressors use some and this backend transfers them."""
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
    from sglang_ext.managers.worker import KVWorker

    if not isinstance(end, ProgressiveSender | ProgressiveReceiver):
        return None
    worker = queue.scheduler.draft_worker
    return worker.prompt_queries if isinstance(worker, KVWorker) else None


def _packs_prompts(queue: "PrefillBootstrapQueue", end: Any) -> "tuple[Packing, KVBuffers] | None":
    """How this rank packs prompts that are transferred quantized. None if it does not."""
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
    from sglang_ext.managers.worker import KVWorker

    if not isinstance(end, ProgressiveSender):
        return None
    worker = queue.scheduler.draft_worker
    return worker.prompt_packing() if isinstance(worker, KVWorker) else None


def _refuse_beyond_pool(queue: "DecodePreallocQueue", req: "Req", receiver: Any) -> None:
    """End a request that does not fit an empty pool. SGLang would let it wait forever, and all requests behind it."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver

    if not isinstance(receiver, ProgressiveReceiver) or req.to_finish is not None:
        return
    slots, kept, pool = queue._pre_alloc_fill_len(req), queue.num_reserved_decode_tokens, queue.max_total_num_tokens
    if slots + kept > pool:
        why = (
            f"the request's KV takes {slots} tokens of the decode server's pool, which has {pool} and keeps {kept} of them free for answers "
            "(--num-reserved-decode-tokens): send a shorter prompt, or start the decode server with more --max-total-tokens"
        )
        req.to_finish = FINISH_ABORT(why, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _poll_prefill_servers(queue: "DecodePreallocQueue", receiver: Any) -> None:
    """Let the queue poll a request's prefill server in each iteration of the scheduler, as long as the receiver waits.

    SGLang polls 15 times, once per second, because each attempt blocks its scheduler. This backend's look-up does not block.
    """
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver

    if isinstance(receiver, ProgressiveReceiver):
        queue._ensure_retry_interval, queue._max_ensure_retries = 0.0, sys.maxsize


def _enable_early_decoding(queue: "DecodePreallocQueue", req: "Req", receiver: Any) -> None:
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
    from sglang_ext.managers.worker import KVWorker

    worker = queue.scheduler.draft_worker
    if not (isinstance(receiver, ProgressiveReceiver) and isinstance(worker, KVWorker)):
        return
    full_kv = worker.arriving_full_kv(req, queue.tree_cache)
    if full_kv is not None:
        receiver.enable_early_decoding(lambda room: full_kv.expect(req.req_pool_idx, room), quantized_prompts.RecomputeQueue(queue).prefill_again)


def _set_prompt(end: Any, req: "Req", tokens: "list[int]") -> None:
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender

    # Other senders belong to SGLang's warm-up, or to another backend in a patched fork.
    if isinstance(end, ProgressiveSender | ProgressiveReceiver):
        # SGLang keeps a single token of a request that it has refused, or that was aborted while its grammar was compiled.
        end.set_prompt(tokens, getattr(req.to_finish, "message", None))


def describe_failure(message: str, room: int | None, status: int | None) -> tuple[str, int | None]:
    """Return message and status for a request that SGLang ends with ``message``. Both are unchanged if no room failed.

    For a failed room SGLang answers with status 500 and a text that begins with ranks and numbers. These stay in its log. The client needs
    to know what failed, at which server, and whether to send the request again.

    Args:
        message: The text that SGLang makes from a ``KVTransferError``.
        room: The request's room.
        status: The status that SGLang would answer with.
    """
    before, mark, reason = message.partition(f"KVTransferError(bootstrap_room={room}): ")
    if not mark:
        return message, status
    failed = FAILED["prefill" if before.startswith("Prefill") else "decode"]
    if RETRYABLE_REASONS.search(reason) is None:
        return f"{failed}: {reason}", status
    return f"{failed}: {reason.rstrip('.')}; {RETRY_ADVICE}", HTTPStatus.SERVICE_UNAVAILABLE
