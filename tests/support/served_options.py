"""SGLang's arguments that are served with a compressed KV cache, by what makes them so."""

SERVED: dict[str, str] = {
    # Which model, and how its files are read: all is over before KV is made.
    "model": """
        model_path tokenizer_path tokenizer_mode tokenizer_backend load_format model_loader_extra_config trust_remote_code
        context_length revision model_impl model_config_parser json_model_override_args dtype enable_fp32_lm_head
        enable_tf32_matmul custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
        engine_info_bootstrap_port modelexpress_config download_dir model_checksum delete_ckpt_after_loading
        decrypted_config_file checkpoint_engine_wait_weights_before_ready enable_weights_cpu_backup weight_cache_mode
        weight_cache_socket weight_cache_timeout cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step
        offload_mode enable_memory_saver weight_version forward_hooks
    """,
    # Refused by what the model's config says of them, or by what SGLang chose (model_options.py).
    "checked once resolved": """
        quantization modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        quantize_and_serve attention_backend decode_attention_backend prefill_attention_backend cuda_graph_config
        cuda_graph_backend_prefill enable_multimodal
    """,
    # Read with models alone that are refused: sparse, recurrent or latent attention, pictures and sound.
    "other models": """
        swa_full_tokens_ratio disable_hybrid_swa_memory disable_chunked_prefix_cache dsa_prefill_backend dsa_decode_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend mamba_backend flashinfer_mla_disable_ragged enable_scattered_sconv
        enable_precise_embedding_interpolation enable_deepseek_v4_fp4_indexer max_mamba_cache_size mamba_ssm_dtype
        mamba_max_states_per_path enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_full_memory_ratio
        mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size
        linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend enable_linear_replayssm
        linear_replayssm_cache_len mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num limit_mm_data_per_request
        enable_mm_global_cache disable_fast_image_processor mm_feature_transport keep_mm_feature_on_device
        asr_max_buffer_seconds asr_max_concurrent_sessions encoder_transfer_backend encoder_urls encoder_bootstrap_port
        encoder_register_urls
    """,
    # What a forward computes with: drafts and verifications are forwards like others.
    "forwards": """
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune
        flashinfer_autotune_skip_ops cuda_graph_backend_decode cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
        cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_tc_compiler disable_prefill_cuda_graph disable_decode_cuda_graph
        disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_layerwise_nvtx_marker triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size enable_fused_qk_norm_rope enable_deterministic_inference
    """,
    # Between ranks, and experts over them.
    "ranks": """
        tp_size nnodes node_rank nccl_port dist_timeout dist_init_addr enable_p2p_check device base_gpu_id gpu_id_step numa_node
        enable_attn_tp_input_scattered disable_attn_tp_gather enable_nccl_nvls enable_symm_mem disable_custom_all_reduce
        enable_mscclpp enable_torch_symm_mem pre_warm_nccl enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        enable_fused_moe_sum_all_reduce ep_size moe_a2a_backend moe_runner_backend flashinfer_mxfp4_moe_precision deepep_mode
        fuseep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts ep_dispatch_algorithm init_expert_location
        enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        enable_expert_distribution_metrics deepep_config moe_dense_tp_size elastic_ep_backend enable_elastic_expert_backup
        mooncake_ib_device enable_waterfill ep_join_mode ep_join_rank_offset elastic_ep_initial_size max_ep_size
        elastic_ep_scale_timeout elastic_ep_rejoin disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion enable_single_batch_overlap kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token
    """,
    # Idle in stock as well without another option, which is refused or without effect there.
    "idle in stock": """
        num_continuous_decode_steps enable_dynamic_chunking pp_max_micro_batch_size pp_async_batch_depth load_balance_method
        enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head tbo_token_distribution_threshold
    """,
    # How KV comes from the server that prefills to the one that decodes; what the roles cannot be is in disaggregation_options.py.
    "disaggregation": """
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval num_reserved_decode_tokens optimistic_prefill_attempts
    """,
    # Which requests run, and how much room they have: the scheduler's own, with the tree's eviction strategies.
    "scheduling": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens page_size chunked_prefill_size max_prefill_tokens
        prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first priority_scheduling_preemption_threshold
        retraction_policy schedule_conservativeness radix_eviction_policy disable_radix_cache disable_overlap_schedule scheduler_recv_interval
        sleep_on_idle enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms min_free_slots_delay strip_thinking_cache
    """,
    # Before a request is scheduled, and after its tokens are there.
    "texts": """
        skip_tokenizer_init chat_template hf_chat_template_name completion_template file_storage_path
        enable_cache_report reasoning_parser default_chat_template_kwargs enable_strict_thinking tool_call_parser tool_server
        sampling_defaults preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode
    """,
    # How tokens are chosen, as verifications do: grammars, processors, seeds, hidden states, adapters.
    "sampling": """
        random_seed sampling_backend grammar_backend constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace disable_outlines_disk_cache enable_custom_logit_processor
        enable_return_hidden_states return_hidden_states_mode enable_lora_overlap_loading max_lora_rank lora_target_modules
        enable_lora lora_paths max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold
    """,
    # The HTTP server and its process.
    "server": """
        host port fastapi_root_path grpc_port sidecar sidecar_args skip_server_warmup warmups enable_http2 ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
        watchdog_timeout soft_watchdog_timeout custom_sigquit_handler gc_threshold
    """,
    # What is told of the server.
    "logs and metrics": """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
        enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
        bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint export_metrics_to_file
        export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder debug_tensor_dump_layers
        debug_tensor_dump_input_file msprobe_dump_config
    """,
}
