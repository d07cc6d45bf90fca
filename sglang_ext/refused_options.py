"""SGLang's options that a compressed KV cache cannot be combined with yet, each with the reason and what to do instead."""

from typing import TYPE_CHECKING

from sglang_ext.options import POINTING
from sglang_ext.refusal import Refusal, above, switched_on, variable
from sglang_ext.refused_caches import CACHES, PARALLELISM

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

TOKENIZER = "requests would not pass the checks of its tokenizer process, nor get their fields of meta_info"
# Of other speculation; what --kv-draft-length and its like say here.
SPECULATION = (
    *("speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format"),
    *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_dflash_block_size"),
    *("speculative_dspark_block_size", "speculative_dspark_sps_table_path", "speculative_dspark_confidence_sts_path"),
    *("speculative_dspark_align_verify_tokens_to_graph_tier", "speculative_accept_threshold_single"),
    *("speculative_accept_threshold_acc", "speculative_use_rejection_sampling", "speculative_token_map"),
    *("speculative_attention_mode", "speculative_draft_attention_backend", "speculative_draft_window_size"),
    *("speculative_moe_runner_backend", "speculative_moe_a2a_backend", "speculative_draft_model_quantization"),
    *("speculative_skip_dp_mlp_sync", "enable_multi_layer_eagle", "speculative_adaptive", "speculative_adaptive_config"),
    *("spec_trace_dir", "speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth"),
    *("speculative_ngram_match_type", "speculative_ngram_max_trie_depth", "speculative_ngram_capacity"),
    *("speculative_ngram_external_corpus_path", "speculative_ngram_external_sam_budget"),
    *("speculative_ngram_external_corpus_max_tokens", "enable_draft_weights_cpu_backup", "decrypted_draft_config_file"),
    *("enable_linear_replayssm_spec", "linear_attn_verify_backend"),
)

REFUSALS: tuple[Refusal, ...] = (
    *CACHES,
    *PARALLELISM,
    Refusal(
        "--speculative-algorithm",
        lambda args: args.speculative_algorithm not in (None, "KV_VERIFIED"),
        "the compressed KV cache is the drafter",
        "leave it out (drafts are set by --kv-draft-length), or use --kv-mode full",
        SPECULATION,
    ),
    Refusal(
        "--decoupled-spec-role",
        lambda args: args.decoupled_spec_role != "null",
        "the compressed KV cache is the drafter",
        "leave it out, or use --kv-mode full",
        ("decoupled_spec_bind_endpoint", "decoupled_spec_connect_endpoints", "decoupled_spec_rank"),
    ),
    Refusal(
        "--dllm-algorithm",
        switched_on("dllm_algorithm"),
        "diffusion models have no autoregressive KV",
        "use --kv-mode full",
        ("dllm_algorithm_config", "dllm_fdfo"),
    ),
    Refusal("--enable-mixed-chunk", switched_on("enable_mixed_chunk"), "SGLang has it without speculation only", "leave it out"),
    Refusal("--enable-two-batch-overlap", switched_on("enable_two_batch_overlap"), "its split assumes equal lengths", "leave it out"),
    Refusal(
        "--kv-compressor verify-guided",
        lambda args: args.kv_mode == "lossy" and args.kv_compressor in POINTING,
        "nothing is verified, and verifications choose what it keeps",
        "use --kv-mode verified, or --kv-compressor snapkv",
    ),
    Refusal("--torchao-config", switched_on("torchao_config"), "quantized weights are untested", "leave it out"),
    Refusal("--is-embedding", switched_on("is_embedding"), "embeddings are not decoded", "use --kv-mode full"),
    Refusal(
        "--tokenizer-worker-num",
        above("tokenizer_worker_num", 1),
        "only the first tokenizer would report drafts and verifies",
        "use --tokenizer-worker-num 1",
    ),
    Refusal(
        "--detokenizer-worker-num",
        above("detokenizer_worker_num", 1),
        "with one tokenizer SGLang's router of detokenizers ends the server at the first request",
        "use --detokenizer-worker-num 1",
    ),
    Refusal(
        "--smg-grpc-mode",
        lambda args: args.smg_grpc_mode or args.grpc_mode,
        TOKENIZER,
        "leave it out; --grpc-port serves gRPC beside HTTP",
        ("smg_http_sidecar_port",),
    ),
    variable("SGLANG_RUST_SERVER", TOKENIZER),
    Refusal(
        "--encoder-only",
        switched_on("encoder_only"),
        "an encoder decodes nothing",
        "use --kv-mode full",
        ("language_only", "enable_adaptive_dispatch_to_encoder"),
    ),
    Refusal(
        "--enable-torch-compile",
        switched_on("enable_torch_compile"),
        "drafts and verifications are untested as compiled code",
        "leave it out",
        ("enable_torch_compile_debug_mode", "torch_compile_max_bs"),
    ),
    Refusal(
        "--enable-mis",
        switched_on("enable_mis"),
        "items do not attend to one another, and copies hold what all attend to",
        "use --kv-mode full",
    ),
    Refusal(
        "--rl-on-policy-target",
        lambda args: args.rl_on_policy_target is not None,
        "verifications sample otherwise than its trainer",
        "use --kv-mode full",
        ("rl_quant_profile",),
    ),
    Refusal(
        "--enable-return-routed-experts",
        switched_on("enable_return_routed_experts"),
        "experts of rejected drafts would be returned",
        "leave it out",
    ),
    Refusal(
        "--enable-return-indexer-topk",
        switched_on("enable_return_indexer_topk"),
        "models with an indexer are not served",
        "leave it out",
    ),
)


def check_combinations(args: "KVServerArgs") -> None:
    """Refuse SGLang options that a compressed KV cache cannot be combined with yet.

    Raises:
        OptionError: names the option, the reason and the remedy.
    """
    for refusal in REFUSALS:
        refusal.check(args)
