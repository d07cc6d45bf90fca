"""The tables of the transfer backend ``progressive``: its hooks in SGLang, and the private names that it uses (activation.py)."""

from sglang_ext.hooks.table import KV_CLASS_HOOK, Hook, PrivateName

DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
PREFILL_SCHEDULER = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
RECEIVER = "sglang.srt.disaggregation.common.conn.CommonKVReceiver"
SENDER = "sglang.srt.disaggregation.common.conn.CommonKVSender"

# Applied in any mode, when a scheduler process uses the backend.
TRANSFER_HOOKS: tuple[Hook, ...] = (
    KV_CLASS_HOOK,
    Hook(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
        "sglang_ext.hooks.transfer.create_sender",
        "pages of KV are identified by the tokens before them, which SGLang does not pass to senders", ("self", "req", "num_kv_heads"),
    ),
    Hook(
        f"{DECODE_QUEUE}._create_receiver_and_enqueue",
        "sglang_ext.hooks.transfer.create_receiver",
        "pages of KV are compared with the tokens before them, which SGLang does not pass to receivers", ("self", "req", "is_rebootstrap"),
    ),
    *(
        Hook(
            f"{DECODE_QUEUE}.{name}",
            "sglang_ext.hooks.transfer.count_prompt_slots",
            "a prompt that arrives quantized needs fewer slots than tokens, and requests are admitted by their tokens", ("req",),
        )
        for name in ("_pre_alloc_fill_len", "_rebootstrap_prefill_len")
    ),
    Hook(
        f"{PREFILL_SCHEDULER}.process_disagg_prefill_inflight_queue",
        "sglang_ext.hooks.transfer.pack_ahead",
        "a prompt that waits for space at a decode server must be quantized in host memory, without full KV", ("self", "rids_to_check"),
    ),
    Hook(
        f"{PREFILL_SCHEDULER}.send_kv_chunk",
        "sglang_ext.hooks.transfer.send_kv_chunk",
        "a chunk would be sent after the next forward, and no chunk would be encoded during one", ("self", "req", "last_chunk", "end_idx"),
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier",
        "sglang_ext.hooks.transfer.record_launch",
        "a chunk's slots are read in parallel with the launched forward, and SGLang does not record its work before the launch", ("self",),
    ),
    Hook(
        f"{DECODE_QUEUE}._pre_alloc",
        "sglang_ext.hooks.transfer.pre_alloc",
        "a prompt that arrives quantized gets no slots for the full KV of packed tokens",
        ("self", "req", "prefix_indices", "prefix_len", "total_prefix_len"),
    ),
    Hook(
        "sglang.srt.disaggregation.utils.prepare_abort",
        "sglang_ext.hooks.transfer.prepare_abort",
        "a request that cannot be served must end as on one server, and not with status 500 and details of its room",
        ("req", "error_message", "status_code"),
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        "sglang_ext.hooks.transfer.abort_request",
        "a request that is aborted while it waits for prefill must not leave its decode side waiting", ("self", "recv_req"),
    ),
)

TRANSFER_NAMES: tuple[PrivateName, ...] = (
    PrivateName(f"{MANAGER}._start_heartbeat_checker_thread", "rooms of a prefill server that died must fail", ("self",)),
    PrivateName(f"{MANAGER}._on_heartbeat_success", "finished rooms are removed with each heartbeat", ("self", "bootstrap_addr")),
    PrivateName(
        f"{MANAGER}.try_ensure_parallel_info",
        "the override queries prefill servers in a thread, where SGLang blocks its scheduler", ("self", "bootstrap_addr"),
    ),
    PrivateName(f"{MANAGER}._resolve_rank_mapping", "it maps prefill ranks to this decode rank", ("self", "info")),
    PrivateName(
        f"{RECEIVER}._get_bootstrap_info_from_server",
        "the override returns the address of a rank that the thread has queried",
        ("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    ),
    PrivateName(
        f"{DECODE_QUEUE}._ensure_prefill_info",
        "the queue polls that thread in every iteration, and the receiver decides when to give up",
        mentions=("self._ensure_retry_interval", "self._max_ensure_retries", "self.kv_manager.try_ensure_parallel_info("),
    ),
    PrivateName(f"{RECEIVER}._connect", "messages go to other managers over SGLang's sockets", ("endpoint", "is_ipv6")),
    PrivateName(f"{SENDER}._check_bootstrap_timeout", "senders must not wait forever for decode", ("self",)),
    PrivateName(f"{SENDER}._prepare_send_indices", "it identifies the last chunk of a prompt", ("self", "kv_indices", "state_indices")),
    PrivateName(f"{SENDER}._record_transfer_indices", "SGLang's metrics count the sent pages", ("self", "kv_indices", "state_indices")),
    PrivateName(
        "sglang.srt.disaggregation.common.conn.KVTransferError",
        "a client gets the reason of a failure without details", mentions=("KVTransferError(bootstrap_room={self.bootstrap_room}): ",),
    ),
    PrivateName(f"{RECEIVER}._check_waiting_timeout", "receivers must not wait forever for prefill", ("self",)),
    PrivateName(f"{RECEIVER}._send_abort_notification", "the prefill side gets our own messages", ("self",)),
    PrivateName(
        f"{PREFILL_SCHEDULER}.maybe_send_cached_prefix_chunk",
        "a sender waits for the event after which a cached prefix is written", mentions=("disagg_kv_sender._early_send_wait_event",),
    ),
    PrivateName(
        f"{PREFILL_SCHEDULER}.event_loop_overlap_disagg_prefill",
        "while a result is processed, the queue of results shows whether a later forward was launched",
        mentions=("self._apply_war_barrier()", "self.result_queue.append(", "tmp_batch, tmp_result = self.result_queue.popleft()"),
    ),
    PrivateName(
        f"{PREFILL_SCHEDULER}.process_batch_result_disagg_prefill",
        "a chunk is sent with its result if the next one is launched before", mentions=("last_chunk=False, end_idx=req.tmp_end_idx",),
    ),
    PrivateName(
        f"{PREFILL_SCHEDULER}.process_prefill_chunk",
        "it is the end of the chunk whose result is pending", mentions=("req.tmp_end_idx = min(",),
    ),
    PrivateName(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        "a request whose residual does not arrive is prefilled again as SGLang does it",
        mentions=("req.pd_rebootstrap_forced_output_id = req.output_ids.pop()", "req.pd_rebootstrap_in_progress = True"),
    ),
    PrivateName(f"{DECODE_QUEUE}.add", "such a request waits for slots again", ("self", "req", "is_retracted", "is_rebootstrap")),
    PrivateName(
        f"{MANAGER}.submit_prefill_recompute",
        "the prefill server receives such a request with an id of its own", ("self", "kv_receiver", "payload"),
    ),
    PrivateName(
        "sglang.srt.managers.schedule_batch.Req.load_kv_cache",
        "the earlier KV of a request that is prefilled again is not restored", mentions=("del self.kv_cache_cpu",),
    ),
)
