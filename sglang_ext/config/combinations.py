"""Combinations of options for the table of flags (flags.py): conditions for an effect, and options that cannot be combined with a flag."""

from sglang_ext.config import options
from sglang_ext.config import selection_options as selection
from sglang_ext.config.disaggregation_options import ROLE_REFUSALS, quantized_transfer_settings
from sglang_ext.config.method_options import drop_methods
from sglang_ext.config.rules import Condition, Refusal, at_most_one, fields_with_prefix, refuse_env_var, refuse_if_set
from sglang_ext.core import RADIX_CACHE_BACKEND, SPECULATIVE_ALGORITHM
from sglang_ext.mem_cache.compressors import catalogue

BACKEND_OPTION = f"--disaggregation-transfer-backend {options.BACKEND}"
PASS_BACKEND = f"pass {BACKEND_OPTION} with --disaggregation-mode prefill or decode"

HAS_PROGRESSIVE_TRANSFER = Condition(BACKEND_OPTION, options.has_progressive_transfer, f"KV is not transferred with {BACKEND_OPTION}", PASS_BACKEND)
HAS_TIMELINE = Condition(
    f"{BACKEND_OPTION} or --kv-cache-ranks",
    lambda args: options.has_progressive_transfer(args) or (args.kv_mode != "full" and selection.num_cache_ranks(args) > 0),
    f"there are no cache ranks, and KV is not transferred with {BACKEND_OPTION}",
    f"pass --kv-mode verified --kv-compressor spade --kv-cache-ranks 1, or {PASS_BACKEND}",
)
IS_PREFILL_SERVER = Condition(
    "--disaggregation-mode prefill", lambda args: args.disaggregation_mode == "prefill",
    "--disaggregation-mode is {args.disaggregation_mode}, which only receives", "pass it to the prefill server",
)
IS_VERIFIED = Condition(
    "--kv-mode verified", lambda args: args.kv_mode == "verified", "--kv-mode is {args.kv_mode}, without drafts", "pass --kv-mode verified"
)
BURST_LIMITS_ROUND = Condition(
    "", lambda args: args.kv_max_burst <= options.max_verified_tokens(args),
    lambda args: f"a verification gives at most {options.max_verified_tokens(args)} tokens, fewer than {args.kv_max_burst}",
    lambda args: f"pass at most {options.max_verified_tokens(args)}",
)
HAS_NO_OFFLOAD_OBSTACLE = Condition(
    "--kv-host-gb, --kv-mode verified", lambda args: not any(options.offload_obstacle(args)),
    lambda args: f"all full KV stays on the device, as {options.offload_obstacle(args)[0]}", lambda args: options.offload_obstacle(args)[1],
)
CAN_OFFLOAD_FULL_KV = Condition(
    "--kv-full-tier auto or host", options.can_offload_full_kv,
    "--kv-full-tier is {args.kv_full_tier} and --kv-host-gb {args.kv_host_gb:g}", "pass --kv-full-tier auto and for example --kv-host-gb 16",
)
HAS_STORE = Condition("--kv-store", lambda args: args.kv_store is not None, "--kv-store is not given", "pass --kv-store URL")
HAS_SELECTOR = Condition(
    f"--kv-compressor {' or '.join(catalogue.per_step_methods())}", selection.has_selector,
    "--kv-compressor is {args.kv_compressor}", "pass --kv-compressor spade",
)
SELECTS_FEWER_THAN_ALL = Condition(
    "", lambda args: args.kv_select != 1, "--kv-select is 1, the whole context, so that selections leave nothing out",
    "pass a share below 1, for example 0.125, or a number from 2, for example 2048",
)
IS_SPADE = Condition("--kv-compressor spade", selection.is_spade, "--kv-compressor is {args.kv_compressor}", "pass --kv-compressor spade")
HAS_RANKS = Condition("--kv-cache-ranks", lambda args: args.kv_cache_ranks != 0, "--kv-cache-ranks is 0", "pass --kv-cache-ranks 1")
IS_NOT_PREFILL_SERVER = Condition(
    "--disaggregation-mode null or decode", lambda args: args.disaggregation_mode != "prefill",
    "--disaggregation-mode is prefill, which has no decode steps", "pass that to the decode server",
)
HAS_ONLINE_METHOD = Condition(
    "--kv-compressor kvzip or kvzap", lambda args: not drop_methods(args).isdisjoint((catalogue.KVZIP, catalogue.KVZAP)),
    "--kv-compressor is {args.kv_compressor}", f"pass --kv-compressor {catalogue.KVZIP}",
)
NEEDS_ONLINE_METHOD = Condition(
    "", lambda args: catalogue.KVZIP in drop_methods(args) or bool(args.kv_host_gb),
    "--kv-compressor is {args.kv_compressor} and --kv-host-gb 0", "pass --kv-host-gb 16",
)

OTHER_TREE = "it replaces our prefix tree, which has compressed KV, and with --kv-host-gb KV in host memory"
LAYOUT = "KV is compressed and copied from a pool that stores each layer's tokens one after another"
SESSION = "a session keeps slots beyond a request"
RANKS = "only --tp-size, and experts distributed over its ranks, are tested"

CACHES: tuple[Refusal, ...] = (
    Refusal("--radix-cache-backend", lambda args: args.radix_cache_backend not in (None, RADIX_CACHE_BACKEND), OTHER_TREE, "leave it out"),
    refuse_if_set("enable_hierarchical_cache", OTHER_TREE, dependent_fields=fields_with_prefix("hicache_")),
    refuse_if_set("enable_lmcache", OTHER_TREE, dependent_fields=("lmcache_config_file",)),
    refuse_if_set("enable_flexkv", OTHER_TREE, dependent_fields=("flexkv_config_file",)),
    refuse_env_var("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", OTHER_TREE),
    refuse_env_var("SGLANG_ENABLE_UNIFIED_RADIX_TREE", OTHER_TREE),
    Refusal(
        "--kv-cache-dtype", lambda args: args.kv_cache_dtype not in (None, "auto"), "a quantized cache is untested",
        "use --kv-cache-dtype auto", ("quantization_param_path",),
    ),
    refuse_if_set("enable_page_major_kv_layout", LAYOUT),
    refuse_if_set("enable_unified_memory", LAYOUT),
    refuse_env_var("SGLANG_USE_HND_KVCACHE", LAYOUT),
    refuse_env_var("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "the pool would grow after the memory beside it was planned"),
    refuse_if_set("enable_hisparse", "it moves KV to host memory itself", dependent_fields=("hisparse_config",)),
    Refusal(
        "--kv-canary", lambda args: args.kv_canary != "none", "it reads SGLang's own prefix tree, and would report compressed KV as damaged",
        "leave it out", ("kv_canary_real_data", "kv_canary_sweep_interval"),
    ),
    refuse_if_set("enable_streaming_session", SESSION),
    refuse_if_set("enable_session_radix_cache", SESSION),
    refuse_if_set("dllm_algorithm", "diffusion models have no autoregressive KV", dependent_fields=("dllm_algorithm_config", "dllm_fdfo")),
)

PARALLELISM: tuple[Refusal, ...] = (
    at_most_one("dp_size", "data parallelism is untested"),
    at_most_one("pp_size", "drafts, and pages of stored KV, need all layers in one process"),
    at_most_one("attn_cp_size", RANKS),
    refuse_if_set(
        "enable_prefill_cp", RANKS,
        dependent_fields=(
            *("cp_strategy", "prefill_cp_mode", "enable_cp_decode_attn_tp", "enable_dsa_prefill_context_parallel"),
            *("dsa_prefill_cp_mode", "enable_dsa_cache_layer_split", "enable_prefill_context_parallel"),
        ),
    ),
    at_most_one("dcp_size", RANKS, ("dcp_comm_backend", "dcp_replicate_q_proj")),
    at_most_one("moe_dp_size", RANKS),
    at_most_one("dwdp_size", RANKS),
    Refusal(
        "--decoupled-spec-role", lambda args: args.decoupled_spec_role != "null", "KV of a separate drafter is neither compressed nor stored",
        "leave it out", ("decoupled_spec_bind_endpoint", "decoupled_spec_connect_endpoints", "decoupled_spec_rank"),
    ),
    refuse_if_set(
        "enable_pdmux", "its loop runs forwards on several streams, without the worker that compresses prompts",
        dependent_fields=("pdmux_config_path", "sm_group_num"),
    ),
    refuse_if_set("use_ray", "its actors start schedulers without plugins"),
)

TOKENIZER = "requests would bypass the checks of the tokenizer process, and lack our fields of meta_info"
# Options of other speculative algorithms. Here --kv-draft-length and similar flags replace them.
SPECULATION = (
    *(name for name in fields_with_prefix("speculative_") if name != "speculative_algorithm"),
    *("enable_multi_layer_eagle", "spec_trace_dir", "enable_draft_weights_cpu_backup", "decrypted_draft_config_file"),
    *("enable_linear_replayssm_spec", "linear_attn_verify_backend"),
)

REFUSALS: tuple[Refusal, ...] = (
    *CACHES,
    *PARALLELISM,
    *ROLE_REFUSALS,
    Refusal(
        "--speculative-algorithm", lambda args: args.speculative_algorithm not in (None, SPECULATIVE_ALGORITHM),
        "the compressed KV cache is the drafter, and --kv-draft-length its draft length", "leave it out", SPECULATION,
    ),
    refuse_if_set("prefill_only_disable_kv_cache", "there would be no KV to compress"),
    refuse_if_set("enable_mixed_chunk", "SGLang has it without speculation only"),
    refuse_if_set("enable_two_batch_overlap", "its split assumes equal lengths"),
    refuse_if_set("torchao_config", "quantized weights are untested"),
    refuse_if_set("is_embedding", "embeddings are not decoded"),
    at_most_one("tokenizer_worker_num", "only the first tokenizer would report drafts and verifies"),
    at_most_one("detokenizer_worker_num", "with one tokenizer SGLang's router of detokenizers ends the server at the first request"),
    Refusal(
        "--smg-grpc-mode", lambda args: args.smg_grpc_mode or args.grpc_mode, TOKENIZER,
        "use --grpc-port, which serves gRPC in addition to HTTP", ("smg_http_sidecar_port",),
    ),
    refuse_env_var("SGLANG_RUST_SERVER", TOKENIZER),
    refuse_if_set("encoder_only", "an encoder decodes nothing", dependent_fields=("language_only", "enable_adaptive_dispatch_to_encoder")),
    refuse_if_set(
        "enable_torch_compile", "drafts and verifications are untested as compiled code",
        dependent_fields=("enable_torch_compile_debug_mode", "torch_compile_max_bs"),
    ),
    refuse_if_set("enable_mis", "items do not attend to one another, and compressed KV is shared by all"),
    Refusal(
        "--rl-on-policy-target", lambda args: args.rl_on_policy_target is not None,
        "verifications sample differently from its trainer", "leave it out", ("rl_quant_profile",),
    ),
    refuse_if_set("enable_return_routed_experts", "experts of rejected drafts would be returned"),
    refuse_if_set("enable_return_indexer_topk", "models with an indexer are not served"),
)
"""Options that cannot be combined with a compressed KV cache. All of them are served in mode full without ``--kv-host-gb``."""

FULL_MODE: tuple[Refusal, ...] = (
    *CACHES,
    *PARALLELISM,
    Refusal(
        "--speculative-algorithm", lambda args: args.speculative_algorithm is not None,
        "a draft model's KV is not stored, so that it would draft without a part of its context",
        "leave it out, or use --kv-mode verified, which drafts without a draft model",
    ),
)
"""Options that cannot be combined with ``--kv-host-gb`` in mode full."""

PREFILL_CONFLICTS = (
    Refusal(
        "--kv-compressor {args.kv_compressor}",
        lambda args: catalogue.parse(args.kv_compressor) not in {(None, name) for name in catalogue.partitioned()},
        "prompts attend to all tokens, quantized and multiplied as integers", f"pass --kv-compressor {' or '.join(catalogue.partitioned())}",
    ),
    Refusal("--kv-mode verified", lambda args: args.kv_mode != "lossy", "its outputs are those of exact prompts", "pass --kv-mode lossy"),
    Refusal(
        "--device {args.device}", lambda args: args.device not in ("cpu", "cuda"),
        "prompts can attend to quantized KV on cpu and cuda", "pass --device cpu", needs_device=True,
    ),
    Refusal(
        "--disaggregation-mode {args.disaggregation_mode}",
        lambda args: args.disaggregation_mode != "null" and not quantized_transfer_settings(args),
        "transferred KV does not say how it was computed", f"pass {BACKEND_OPTION}", needs_device=True,
    ),
)  # fmt: skip
"""Combinations in which prompts cannot attend to quantized KV."""
