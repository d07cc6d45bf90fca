"""Where sglang-ext enters SGLang: the table of hooks. What it calls or sets there without one is in uses.py.

Nothing of ``HOOKS`` is applied while ``--kv-mode`` is ``full``; application.py checks and applies it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One place where sglang-ext enters SGLang.

    Attributes:
        target: dotted name of the function or method.
        kind: ``around`` (called with the original first) or ``replace``.
        hook: dotted name of ours, imported only when the hook is applied.
        why: what would go wrong without it.
        expects: parameter names of the target, in order.
        process: ``frontend`` (tokenizer and HTTP server) or ``scheduler``.
    """

    target: str
    kind: str
    hook: str
    why: str
    expects: tuple[str, ...]
    process: str


HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        kind="around",
        hook="sglang_ext.hooks.telling.add_kv_fields",
        why="meta_info shall tell drafts, verifies and accepted length of the request",
        expects=("self", "meta_info", "recv_obj", "i"),
        process="frontend",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        kind="around",
        hook="sglang_ext.hooks.processing.process_emitted",
        why="in an iteration most requests only draft: they have no tokens to stream or count",
        expects=("self", "batch", "result"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
        kind="around",
        hook="sglang_ext.hooks.reporting.send_what_is_due",
        why="the frontend takes the time to the first token when it is sent, which tokens that come together put off to the end",
        expects=("self", "req"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
        kind="around",
        hook="sglang_ext.mem_cache.compressed.query_hooks.cap_prefix_match",
        why="a prefix hit must leave enough new queries for a compressor that scores by queries",
        expects=("self", "input_len"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        kind="around",
        hook="sglang_ext.hooks.finish.end_at_first",
        why="of tokens accepted together, the first that ends the output ends it, as without speculation",
        expects=("self", "new_accepted_len"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
        kind="around",
        hook="sglang_ext.hooks.reserve.reserve_to_the_end",
        why="slots that are taken ahead of a request shall end where its answer does, or a prompt that fits would not",
        expects=("batch",),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        kind="around",
        hook="sglang_ext.hooks.penalties.restore_penalties",
        why="penalties must not depend on the process, nor forget a retracted request's output",
        expects=("self",),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        kind="around",
        hook="sglang_ext.hooks.give_back.give_back_when_full",
        why="a full pool takes compressed copies back before it retracts a request",
        expects=("self", "selected_indices"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        kind="around",
        hook="sglang_ext.mem_cache.prefix_cache.recompute.retract_lost",
        why="a request whose full KV came back changed from the host is computed again",
        expects=("self", "server_args"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_tree_cache",
        kind="around",
        hook="sglang_ext.mem_cache.prefix_cache.tree_integrity.check_when_idle",
        why="an idle scheduler checks its prefix tree, of which SGLang checks other kinds only",
        expects=("self",),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool",
        kind="around",
        hook="sglang_ext.hooks.algorithm.get_draft_kv_pool",
        why="SGLang assumes that each registered algorithm has a draft model with a pool",
        expects=("draft_worker", "spec_algorithm", "server_args"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        kind="around",
        hook="sglang_ext.mem_cache.compressed.query_hooks.record_queries",
        why="compressors score keys by the queries of the newest tokens",
        expects=("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        kind="around",
        hook="sglang_ext.hooks.request_checks.check_shape",
        why="a number of answers, or lists for several prompts, that SGLang cannot take apart shall be told, not raise",
        expects=("self",),
        process="frontend",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="around",
        hook="sglang_ext.hooks.request_checks.check_request",
        why="a request that the scheduler cannot take, or that asks for a method that the server does not have, shall be told so",
        expects=("self", "obj", "input_ids"),
        process="frontend",
    ),
    Hook(
        target="sglang.srt.entrypoints.http_server._wait_and_warmup",
        kind="around",
        hook="sglang_ext.hooks.readiness.say_when_ready",
        why="when the server is ready it shall tell mode, method and address",
        expects=("server_args", "launch_callback", "execute_warmup_func"),
        process="frontend",
    ),
    Hook(
        target="sglang.srt.entrypoints.engine._scheduler_died_error",
        kind="around",
        hook="sglang_ext.command_line.end_like_scheduler",
        why="an option that only the scheduler can refuse shall end the server with that word alone",
        expects=("rank", "proc"),
        process="frontend",
    ),
)

# Of the transfer backend ``progressive``, in any mode.
TRANSFER_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.disaggregation.utils.get_kv_class",
        kind="around",
        hook="sglang_ext.hooks.transfer.get_kv_class",
        why="SGLang has a name for transfer backends of others, and no place for their classes",
        expects=("transfer_backend", "class_type"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
        kind="around",
        hook="sglang_ext.hooks.transfer.create_sender",
        why="pages of KV are named by the tokens before them, which SGLang does not tell senders",
        expects=("self", "req", "num_kv_heads"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        kind="around",
        hook="sglang_ext.hooks.transfer.create_receiver",
        why="pages of KV are compared with the tokens before them, which SGLang does not tell receivers",
        expects=("self", "req", "is_rebootstrap"),
        process="scheduler",
    ),
)

PLAIN_CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        kind="replace",
        hook="sglang_ext.platforms.torch_kernels.assign_req_to_token_pool",
        why="SGLang's is a Triton kernel",
        expects=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        kind="replace",
        hook="sglang_ext.platforms.torch_kernels.enable_batch_invariant_mode",
        why="SGLang's batch-invariant operators are Triton kernels",
        expects=("enable_bmm",),
        process="scheduler",
    ),
    Hook(
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        kind="replace",
        hook="sglang_ext.platforms.torch_kernels.murmur_hash32",
        why="SGLang's is a Triton kernel",
        expects=("seed", "positions", "col_indices"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras",
        kind="around",
        hook="sglang_ext.platforms.plain_cpu.relay_without_streams",
        why="SGLang's overlapped scheduler records the stream that reads its relayed tensors; torch refuses to on a CPU",
        expects=("self", "batch"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        kind="around",
        hook="sglang_ext.platforms.plain_cpu.send_prefix_without_events",
        why="SGLang's overlapped scheduler records a CUDA event before it sends a cached prefix; torch has none on a CPU",
        expects=("self", "req"),
        process="scheduler",
    ),
    *(
        Hook(
            target=f"sglang.srt.lora.lora_manager.LoRAManager.{name}",
            kind="around",
            hook="sglang_ext.platforms.plain_cpu.without_pinning",
            why="SGLang pins adapters and their batches; torch refuses to without an accelerator",
            expects=("self", *parameters),
            process="scheduler",
        )
        for name, parameters in {
            "init_state": ("max_lora_rank", "target_modules", "lora_paths"),
            "load_lora_weights": ("lora_ref",),
            "load_lora_weights_from_tensors": ("lora_ref", "tensors"),
            "prepare_lora_batch": ("forward_batch",),
        }.items()
    ),
)
