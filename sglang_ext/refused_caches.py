"""SGLang's options for KV memory, caches and parallelism that a compressed KV cache cannot be combined with yet."""

from sglang_ext.refusal import Refusal, above, switched_on, variable

HICACHE = (
    *("hicache_ratio", "hicache_size", "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout"),
    *("hicache_storage_backend", "hicache_storage_prefetch_policy", "hicache_storage_backend_extra_config"),
)
OF_HOST = "use --kv-host-gb for KV in host memory"
LAYOUT = "copies are made in pools that hold each layer's tokens one after the other"
IDLE = "its tree would stand idle beside the one that counts compressed slots"
RANKS = "of all parallelism only --tp-size and experts over its ranks are tested"

CACHES: tuple[Refusal, ...] = (
    Refusal(
        "--radix-cache-backend",
        lambda args: args.radix_cache_backend not in (None, "kv_views"),
        "the prefix tree must count compressed slots",
        "leave it out, or use --kv-mode full",
    ),
    Refusal(
        "--enable-hierarchical-cache",
        switched_on("enable_hierarchical_cache"),
        "its tree does not know compressed slots",
        f"leave it out, and {OF_HOST}",
        HICACHE,
    ),
    Refusal(
        "--enable-lmcache",
        switched_on("enable_lmcache"),
        IDLE,
        f"leave it out, and {OF_HOST}",
        ("lmcache_config_file",),
    ),
    Refusal(
        "--enable-flexkv",
        switched_on("enable_flexkv"),
        IDLE,
        f"leave it out, and {OF_HOST}",
        ("flexkv_config_file",),
    ),
    variable("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", IDLE),
    variable("SGLANG_ENABLE_UNIFIED_RADIX_TREE", IDLE),
    Refusal(
        "--disable-radix-cache",
        lambda args: args.disable_radix_cache and bool(args.kv_host_gb),
        "--kv-host-gb keeps prefixes of the tree, and there would be none",
        "leave out one of the two",
    ),
    Refusal(
        "--kv-cache-dtype",
        lambda args: args.kv_cache_dtype not in (None, "auto"),
        "copies of a quantized cache are untested",
        "use --kv-cache-dtype auto",
        ("quantization_param_path",),
    ),
    Refusal(
        "--page-size",
        lambda args: args.page_size is not None and args.page_size < 1,
        "a page holds tokens",
        "pass a whole number from 1, for example 16, or leave it out",
    ),
    Refusal("--enable-page-major-kv-layout", switched_on("enable_page_major_kv_layout"), LAYOUT, "leave it out"),
    Refusal("--enable-unified-memory", switched_on("enable_unified_memory"), LAYOUT, "leave it out"),
    variable("SGLANG_USE_HND_KVCACHE", LAYOUT),
    variable("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "the pool would grow after what lies beside it was planned"),
    Refusal(
        "--enable-hisparse",
        switched_on("enable_hisparse"),
        "it drops tokens from KV that verifications read",
        "leave it out",
        ("hisparse_config",),
    ),
    Refusal(
        "--prefill-only-disable-kv-cache",
        switched_on("prefill_only_disable_kv_cache"),
        "there would be no KV to compress",
        "leave it out",
    ),
    Refusal(
        "--kv-canary",
        lambda args: args.kv_canary != "none",
        "it takes compressed copies for damage to the slots in which they lie",
        "leave it out",
        ("kv_canary_real_data", "kv_canary_sweep_interval"),
    ),
    Refusal(
        "--enable-streaming-session",
        switched_on("enable_streaming_session"),
        "a session keeps slots beyond a request",
        "leave it out",
    ),
    Refusal(
        "--enable-session-radix-cache",
        switched_on("enable_session_radix_cache"),
        "a session keeps slots beyond a request",
        "leave it out",
    ),
)

PARALLELISM: tuple[Refusal, ...] = (
    Refusal("--dp-size", above("dp_size", 1), "data parallelism is untested", "use --dp-size 1"),
    Refusal("--pp-size", above("pp_size", 1), "a draft needs all layers in one process", "use --pp-size 1"),
    Refusal("--attn-cp-size", above("attn_cp_size", 1), RANKS, "use --attn-cp-size 1"),
    Refusal(
        "--enable-prefill-cp",
        switched_on("enable_prefill_cp"),
        RANKS,
        "leave it out",
        (
            *("cp_strategy", "prefill_cp_mode", "enable_cp_decode_attn_tp", "enable_dsa_prefill_context_parallel"),
            *("dsa_prefill_cp_mode", "enable_dsa_cache_layer_split", "enable_prefill_context_parallel"),
        ),
    ),
    Refusal(
        "--dcp-size",
        above("dcp_size", 1),
        RANKS,
        "use --dcp-size 1",
        ("dcp_comm_backend", "dcp_replicate_q_proj"),
    ),
    Refusal("--moe-dp-size", above("moe_dp_size", 1), RANKS, "use --moe-dp-size 1"),
    Refusal("--dwdp-size", above("dwdp_size", 1), RANKS, "use --dwdp-size 1"),
    Refusal(
        "--enable-pdmux",
        switched_on("enable_pdmux"),
        "its loop computes prompts past the worker that compresses them",
        "leave it out",
        ("pdmux_config_path", "sm_group_num"),
    ),
    Refusal(
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode not in (None, "null"),
        "compressed views are built where the prompt is computed",
        "use --disaggregation-mode null",
        (
            *("disaggregation_decode_enable_radix_cache", "disaggregation_decode_enable_offload_kvcache"),
            *("disaggregation_ib_device", "disaggregation_decode_extra_slots", "disaggregation_decode_polling_interval"),
            *("num_reserved_decode_tokens", "optimistic_prefill_attempts"),
        ),
    ),
    Refusal("--use-ray", switched_on("use_ray"), "its actors start schedulers without plugins", "leave it out"),
)
