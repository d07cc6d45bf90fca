"""The hooks of sglang-ext in SGLang (``HOOKS``), and the private names that it calls or sets without a hook (``PRIVATE_NAMES``).

None of ``HOOKS`` is applied while ``--kv-mode`` is ``full``. activation.py checks and applies them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One hook in SGLang.

    Attributes:
        target: Dotted name of the function or method.
        hook: Dotted name of our function, imported only when the hook is applied.
        why: What would fail without it. Completes "It is needed because" in a message.
        expects: Parameter names of the target, in order.
        kind: ``around`` (called with the original first) or ``replace``.
    """

    target: str
    hook: str
    why: str
    expects: tuple[str, ...]
    kind: str = "around"


@dataclass(frozen=True)
class PrivateName:
    """A private SGLang name that is called or set, not hooked.

    Attributes:
        target: Dotted name of the function, method or class.
        why: Why it is needed.
        expects: A function's parameter names in order.
        mentions: Texts that the source of the target must contain, such as fields of a dataclass.
    """

    target: str
    why: str
    expects: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
RESULT_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"

# In the process of the tokenizer and the HTTP server.
FRONTEND_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{TOKENIZER_MANAGER}._calculate_spec_decoding_metrics",
        "sglang_ext.hooks.frontend.add_kv_fields",
        "meta_info must contain the drafts, verifications and accept length of the request", ("self", "meta_info", "recv_obj", "i"),
    ),
    Hook(
        f"{TOKENIZER_MANAGER}._handle_batch_output",
        "sglang_ext.hooks.stream_delivery.receive_outputs",
        "the messages of a round arrive together, and SGLang would merge them into one chunk", ("self", "recv_obj"),
    ),
    Hook(
        f"{TOKENIZER_MANAGER}._wait_one_response",
        "sglang_ext.hooks.stream_delivery.wait_one_response",
        "the next message of a stream is delivered when its client asks for the next chunk", ("self", "obj", "request"),
    ),
    Hook(
        "sglang.srt.entrypoints.http_server.ORJSONRequest.json",
        "sglang_ext.hooks.request_body.read_body",
        "SGLang silently drops unknown fields of a request, kv_compressor among them", ("self",),
    ),
    Hook(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        "sglang_ext.hooks.frontend.check_shape",
        "a number of answers, or lists for several prompts, that SGLang cannot split must be refused, not raise", ("self",),
    ),
    Hook(
        f"{TOKENIZER_MANAGER}._validate_one_request",
        "sglang_ext.hooks.frontend.check_request",
        "a request that the scheduler cannot serve, or with a method that the server does not have, must be refused", ("self", "obj", "input_ids"),
    ),
    Hook(
        f"{TOKENIZER_MANAGER}.create_abort_task",
        "sglang_ext.hooks.stream_delivery.abort_unfinished",
        "a request must not be aborted because it has the id of a request that has just finished", ("self", "obj"),
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._wait_and_warmup",
        "sglang_ext.hooks.startup_log.log_when_ready",
        "a server that is ready must log mode, method and address",
        ("server_args", "launch_callback", "execute_warmup_func"),
    ),
    Hook(
        "sglang.srt.entrypoints.engine._scheduler_died_error",
        "sglang_ext.command_line.exit_like_scheduler",
        "an option that only the scheduler can refuse must end the server with that message alone", ("rank", "proc"),
    ),
)

SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{RESULT_PROCESSOR}.process_batch_result_decode",
        "sglang_ext.hooks.rounds.process_output_tokens",
        "many requests in a round have no output token to stream or count", ("self", "batch", "result"),
    ),
    Hook(
        f"{SCHEDULE_BATCH}.ScheduleBatch.grammar_needs_sync",
        "sglang_ext.hooks.rounds.needs_grammar_sync",
        "a request with a grammar must not make each round of other requests wait for the host", ("self",),
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
        "sglang_ext.hooks.token_streams.send_unstreamed",
        "the frontend takes the time of the first token from its message, which SGLang delays to the end if tokens come together",
        ("self", "req"),
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "sglang_ext.hooks.token_streams.stream_each_token",
        "a stream must advance token by token, also if a round gives several: intervals, log probabilities and parsers rely on it",
        ("self", "reqs", "return_logprob", "skip_req"),
    ),
    Hook(
        f"{SCHEDULE_BATCH}.Req._compute_max_prefix_len",
        "sglang_ext.mem_cache.compressed.queries.cap_prefix_match",
        "a prefix hit must leave enough new queries for a compressor that scores by queries", ("self", "input_len"),
    ),
    Hook(
        f"{SCHEDULE_BATCH}.Req.update_finish_state",
        "sglang_ext.hooks.rounds.check_finish_at_last_token",
        "of tokens accepted together, only the last may end the output, and is checked as without speculation", ("self", "new_accepted_len"),
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
        "sglang_ext.hooks.rounds.cap_slot_reservation",
        "slots reserved for a request must end at the end of its output, or a prompt that barely fits the pool would fail", ("batch",),
    ),
    Hook(
        f"{SCHEDULE_BATCH}.ScheduleBatch.check_decode_mem",
        "sglang_ext.hooks.rounds.free_compressed_kv_when_full",
        "in a full pool compressed KV is freed before a request is retracted", ("self", "selected_indices"),
    ),
    Hook(
        f"{SCHEDULE_BATCH}.ScheduleBatch.retract_decode",
        "sglang_ext.mem_cache.prefix_cache.freed_full_kv.retract_lost",
        "a request whose full KV is lost (changed in host memory, at a cache rank that ended, or on a link) must be recomputed",
        ("self", "server_args"),
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_tree_cache",
        "sglang_ext.mem_cache.prefix_cache.tree_integrity.check_when_idle",
        "an idle scheduler checks its prefix tree, and SGLang only checks other kinds of trees", ("self",),
    ),
    *(
        Hook(
            f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}",
            "sglang_ext.hooks.weights.refuse_update",
            "an update of weights that fails must be refused, and must not end the server", ("self", "recv_req"),
        )
        for name in (
            *("init_weights_update_group", "update_weights_from_disk", "update_weights_from_distributed"),
            *("update_weights_from_ipc", "update_weights_from_tensor"),
        )
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool",
        "sglang_ext.hooks.algorithm.get_draft_kv_pool",
        "SGLang assumes that each registered algorithm has a draft model with a pool",
        ("draft_worker", "spec_algorithm", "server_args"),
    ),
    Hook(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        "sglang_ext.mem_cache.compressed.queries.record_queries",
        "compressors score keys by the queries of the newest tokens",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
    ),
    Hook(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        "sglang_ext.managers.spec_decode.sampling.draw_with_finite_noise",
        "SGLang's seeded noise is infinite once in 2**32 numbers, and then draws a token of any probability",
        ("logprobs", "seed", "positions"),
    ),
)

# In the scheduler, in mode lossy only.
LOSSY_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "sglang_ext.hooks.lossy_admission.admit_prompt",
        "in mode lossy a prompt needs slots for its full KV and its compressed KV: full KV is freed after compression",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        "sglang_ext.hooks.lossy_admission.admit_chunk",
        "in mode lossy SGLang would shrink chunks by the slots of future outputs, but full KV is freed before", ("self", "req"),
    ),
)

HOOKS = FRONTEND_HOOKS + SCHEDULER_HOOKS + LOSSY_HOOKS


def scheduler_hooks(mode: str) -> tuple[Hook, ...]:
    """The hooks of a scheduler process in this ``--kv-mode``."""
    return SCHEDULER_HOOKS + LOSSY_HOOKS if mode == "lossy" else SCHEDULER_HOOKS


# Registered in each process. The other hooks of the transfer backend ``progressive`` are in transfer_table.py.
KV_CLASS_HOOK = Hook(
    "sglang.srt.disaggregation.utils.get_kv_class",
    "sglang_ext.plugin.get_kv_class",
    "SGLang's backend registry has no entry for other classes", ("transfer_backend", "class_type"),
)

PLAIN_CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "sglang_ext.platforms.torch_kernels.assign_req_to_token_pool",
        "SGLang's is a Triton kernel",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"), kind="replace",
    ),
    Hook(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        "sglang_ext.platforms.torch_kernels.enable_batch_invariant_mode",
        "SGLang's batch-invariant operators are Triton kernels", ("enable_bmm",), kind="replace",
    ),
    Hook(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        "sglang_ext.platforms.torch_kernels.murmur_hash32",
        "SGLang's is a Triton kernel", ("seed", "positions", "col_indices"), kind="replace",
    ),
    Hook(
        "sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras",
        "sglang_ext.platforms.plain_cpu.relay_without_streams",
        "SGLang's overlapped scheduler records the stream that reads its relayed tensors, which torch refuses on a CPU",
        ("self", "batch"),
    ),
    Hook(
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        "sglang_ext.platforms.plain_cpu.send_prefix_without_events",
        "SGLang's overlapped scheduler records a CUDA event before it sends a cached prefix, and torch has none on a CPU",
        ("self", "req"),
    ),
    *(
        Hook(
            f"sglang.srt.lora.lora_manager.LoRAManager.{name}",
            "sglang_ext.platforms.plain_cpu.run_without_pinning",
            "SGLang pins adapters and their batches, which torch refuses without an accelerator", ("self", *parameters),
        )
        for name, parameters in {
            "init_state": ("max_lora_rank", "target_modules", "lora_paths"),
            "load_lora_weights": ("lora_ref",),
            "load_lora_weights_from_tensors": ("lora_ref", "tensors"),
            "prepare_lora_batch": ("forward_batch",),
        }.items()
    ),
)

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName(
        TOKENIZER_MANAGER,
        "the unfinished parts of a streamed request are found by its ids and those of its answers",
        mentions=("self.rid_to_state: Dict[str, ReqState]", "self.logical_rid_to_child_rids: Dict[str, set[str]]"),
    ),
    PrivateName(
        f"{RESULT_PROCESSOR}._accept_grammar_tokens",
        "grammars advance after the search for the end of an output, as without speculation", ("self", "req", "tokens"),
    ),
    PrivateName(
        f"{SCHEDULE_BATCH}.ScheduleBatch.release_req",
        "a request whose full KV is lost frees all its slots", ("self", "idx", "remaing_req_count", "server_args"),
    ),
    PrivateName(
        f"{RESULT_PROCESSOR}._handle_finish_state_updated_req",
        "an aborted request with pending drafts finishes without a new token", ("self", "req", "batch", "result", "i", "logits_output"),
    ),
    PrivateName(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.update_spec_metrics",
        "tokens of plain steps count as one forward each, not as accepted drafts", mentions=("self.spec_num_forward_ct += bs",),
    ),
    PrivateName(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "it carries accepted tokens, and whether their grammars were advanced",
        mentions=("accept_lens:", "new_seq_lens:", "grammar_advanced:", "grammar_retained_tokens:"),
    ),
    PrivateName(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "predicted scores, and quantized keys, are stored at the slots to which a forward writes its KV", mentions=("out_cache_loc:",),
    ),
    PrivateName(
        "sglang.srt.lora.lora_manager.LoRAManager.fetch_new_loras",
        "a batch's adapters are fetched before its forward (prepare_lora_batch is hooked on a CPU)",
        ("self", "new_loras", "running_loras"),
    ),
    PrivateName(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        "the subclass passes the lengths of a captured verification to attention backends", ("self", "num_tokens"),
    ),
    PrivateName(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
        "the subclass replays steps over compressed KV, which read the token table to their end",
        ("self", "forward_batch", "pp_proxy_tensors"),
    ),
    PrivateName(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_kv_cache_configurator",
        "memory beside the KV pool is planned from the pool's capacity", ("self",),
    ),
    PrivateName(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "memory beside the KV pool is subtracted from the memory that SGLang would give the pool", ("self", "pre_model_load_memory"),
    ),
    PrivateName(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
        "there is a draft row for each request that SGLang allows to run", ("self", "token_capacity"),
    ),
    PrivateName(
        "sglang.srt.model_executor.graph_shared_output.GraphSharedOutput",
        "logits of captured verifications need a buffer for all their tokens", ("device", "max_rows"),
    ),
    PrivateName(
        "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.init_cuda_graph_state",
        "captured verifications need a buffer for the contexts of their requests", ("self", "max_bs", "max_num_tokens", "kv_indices_buf"),
    ),
    PrivateName(
        "sglang.kernels.ops.attention.decode_attention._decode_softmax_reducev_fwd",
        "parts of a verification's attention are merged as SGLang merges those of a decode",
        (*("logits", "lse", "q", "o", "v_scale", "v_buffer", "kv_indptr"), *("num_kv_splits", "max_kv_splits", "sinks", "use_pdl")),
    ),
    *(
        PrivateName(
            f"sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_{kind}",
            "the subclass attends to compressed KV, and in time linear in the context",
            (
                *("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens"),
                *more,
                *("encoder_lens", "scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size"),
            ),
        )
        for kind, more in {"extend": ("extend_prefix_lens", "extend_seq_lens"), "decode": ()}.items()
    ),
    PrivateName(
        "sglang.srt.mem_cache.radix_cache.RadixCache",
        "an empty match contains the root, which is replaced by a node with tiers", mentions=("_empty_match_result",),
    ),
    PrivateName(
        "sglang.srt.model_executor.model_runner.ModelRunner",
        "SGLang's scheduler must not mistake an earlier read of the token table for a round's last",
        mentions=("war_fastpath_read_done_event",),
    ),
    PrivateName(
        "sglang.srt.plugins.hook_registry.HookRegistry",
        "it only logs a hook that fails, so that the plugin checks whether it took effect", mentions=("_hooks", "_patched"),
    ),
    PrivateName(
        "sglang.srt.layers.attention.flashinfer_backend.fast_prefill_plan",
        "verifications are planned from lengths on the host",
        (
            *("self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
            *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo", "custom_mask", "causal"),
            *("window_left", "q_data_type", "kv_data_type", "o_data_type", "non_blocking", "fixed_split_size"),
            *("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"),
            *("qo_indptr_host", "kv_indptr_host", "kv_lens_host", "max_q_len", "max_kv_len"),
        ),
    ),
)
