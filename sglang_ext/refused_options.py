"""SGLang's options that a compressed KV cache cannot be combined with yet, each with the reason and what to do instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.options import POINTING, OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


@dataclass(frozen=True)
class Refusal:
    """An SGLang option that cannot be combined with a compressed KV cache yet.

    Attributes:
        option: the flag as users type it.
        asked: whether the arguments ask for it.
        why: the reason, for the message.
        remedy: what to do instead.
    """

    option: str
    asked: Callable[["KVServerArgs"], bool]
    why: str
    remedy: str


def _set(name: str) -> Callable[["KVServerArgs"], bool]:
    return lambda args: bool(getattr(args, name))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--speculative-algorithm",
        lambda args: args.speculative_algorithm not in (None, "KV_VERIFIED"),
        "the compressed KV cache is the drafter",
        "leave it out, or use --kv-mode full",
    ),
    Refusal(
        "--radix-cache-backend",
        lambda args: args.radix_cache_backend not in (None, "kv_views"),
        "the prefix tree must count compressed slots",
        "leave it out, or use --kv-mode full",
    ),
    Refusal("--dp-size", lambda a: a.dp_size > 1, "data parallelism is untested", "use --dp-size 1"),
    Refusal("--pp-size", lambda a: a.pp_size > 1, "a draft needs all layers in one process", "use --pp-size 1"),
    Refusal(
        "--enable-hierarchical-cache",
        _set("enable_hierarchical_cache"),
        "its tree does not know compressed slots",
        "leave it out",
    ),
    Refusal("--enable-mixed-chunk", _set("enable_mixed_chunk"), "SGLang has it without speculation only", "leave it out"),
    Refusal("--enable-two-batch-overlap", _set("enable_two_batch_overlap"), "its split assumes equal lengths", "leave it out"),
    Refusal(
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode not in (None, "null"),
        "compressed views are built where the prompt is computed",
        "use --disaggregation-mode null",
    ),
    Refusal(
        "--kv-compressor verify-guided",
        lambda args: args.kv_mode == "lossy" and args.kv_compressor in POINTING,
        "nothing is verified, and verifications choose what it keeps",
        "use --kv-mode verified, or --kv-compressor snapkv",
    ),
    Refusal("--torchao-config", _set("torchao_config"), "quantized weights are untested", "leave it out"),
    Refusal(
        "--kv-cache-dtype",
        lambda args: args.kv_cache_dtype not in (None, "auto"),
        "copies of a quantized cache are untested",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "--enable-lora",
        lambda args: args.kv_schedule == "lockstep" and bool(args.enable_lora or args.lora_paths),
        "adapters are untested in CUDA graphs of verifications",
        "use --kv-schedule staggered and a number for --kv-draft-length",
    ),
    Refusal(
        "--kv-schedule staggered",
        lambda args: args.kv_draft_length == "auto" and args.kv_schedule == "staggered",
        "--kv-draft-length auto measures whole rounds",
        "use --kv-schedule lockstep, or a number",
    ),
    Refusal(
        "--kv-ngram-tokens",
        lambda args: args.kv_ngram_tokens > 0 and (args.kv_mode != "verified" or args.kv_schedule == "staggered"),
        "proposals of n-grams are checked in rounds that a verification ends",
        "use --kv-mode verified and --kv-schedule lockstep, or leave it out",
    ),
    Refusal("--dllm-algorithm", _set("dllm_algorithm"), "diffusion models have no autoregressive KV", "use --kv-mode full"),
    Refusal("--is-embedding", _set("is_embedding"), "embeddings are not decoded", "use --kv-mode full"),
    Refusal(
        "--tokenizer-worker-num",
        lambda args: args.tokenizer_worker_num > 1,
        "only the first tokenizer would report drafts and verifies",
        "use --tokenizer-worker-num 1",
    ),
    Refusal(
        "--enable-streaming-session",
        _set("enable_streaming_session"),
        "a session keeps slots beyond a request",
        "leave it out",
    ),
)


def check_combinations(args: "KVServerArgs") -> None:
    """Refuse SGLang options that a compressed KV cache cannot be combined with yet.

    Raises:
        OptionError: names the option, the reason and the remedy.
    """
    for refusal in REFUSALS:
        if refusal.asked(args):
            raise OptionError(
                f"--kv-mode {args.kv_mode} cannot be combined with {refusal.option}: {refusal.why}; "
                f"{refusal.remedy}."
            )
