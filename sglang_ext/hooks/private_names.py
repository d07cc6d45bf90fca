"""Private names of SGLang that are called, set or subclassed without a hook. They must match too (activation.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """A private SGLang name that is called or set, not hooked.

    Attributes:
        target: Dotted name of the function, method or dataclass.
        why: Why it is needed.
        expects: A function's parameter names in order, or the required fields of a dataclass.
        mentions: Texts that the source of the target must contain, such as attributes that a class sets.
    """

    target: str
    why: str
    expects: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


USES: tuple[PrivateName, ...] = (
    PrivateName(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        "the unfinished parts of a streamed request are found by its ids and those of its answers",
        mentions=("self.rid_to_state: Dict[str, ReqState]", "self.logical_rid_to_child_rids: Dict[str, set[str]]"),
    ),
    PrivateName(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._accept_grammar_tokens",
        "grammars advance after the search for the end of an output, as without speculation", ("self", "req", "tokens"),
    ),
    PrivateName(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",
        "a request whose full KV is lost frees all its slots", ("self", "idx", "remaing_req_count", "server_args"),
    ),
    PrivateName(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._handle_finish_state_updated_req",
        "an aborted request with pending drafts finishes without a new token",
        ("self", "req", "batch", "result", "i", "logits_output"),
    ),
    PrivateName(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.update_spec_metrics",
        "tokens of plain steps count as one forward each, not as accepted drafts", mentions=("self.spec_num_forward_ct += bs",),
    ),
    PrivateName(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "it carries accepted tokens, and whether their grammars were advanced",
        ("accept_lens", "new_seq_lens", "grammar_advanced", "grammar_retained_tokens"),
    ),
    PrivateName(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "predicted scores, and quantized keys, are stored at the slots to which a forward writes its KV", ("out_cache_loc",),
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
