"""What the flags may be: ranges, refused combinations, supported models.

One table for each, so that ``--help``, the checks at start, the doctor and the tests agree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

MODES = ("full", "lossy", "verified")
# Methods that drop tokens; those that pack them in few bits are in compressor_options.py. First those that look at KV and
# queries as they are made.
ONLINE_COMPRESSORS = ("snapkv", "sink-recent", "expected-attention")
# Methods whose copies hold no KV, but lead into full KV on the device (Compressor.points): verifications choose them.
POINTING = ("verify-guided",)
COMPRESSORS = (*ONLINE_COMPRESSORS, "kvzip", "kvzap", *POINTING)
MAX_DRAFT_LENGTH = 64
SCHEDULES = ("auto", "lockstep", "staggered")
FULL_TIERS = ("auto", "device", "host")
# Tokens drafted before a verification whose full KV has to be loaded from the host, at most.
MAX_OFFLOAD_DRAFT_LENGTH = 256
# Such verifications in one forward at most: they are wide, and come one by one, as their loads do.
WIDE_REQUESTS = 2
# They are captured for every so many tokens of a request: what is beyond the drafts is computed for nothing.
WIDE_STEP = 64
# Drafts at most with --kv-draft-length auto.
AUTO_DRAFT_LENGTH = 16
# Tokens of a narrow verification there: where acceptance is middling, short drafts are best, and wait for less.
NARROW_VERIFY = 5
ATTENTION_BACKENDS = ("torch_native", "flashinfer", "triton", "fa3")
# Of these, on which a verification's tokens are, bit for bit, those of decoding one by one.
DETERMINISTIC_BACKENDS = ("torch_native", "triton")


class OptionError(ValueError):
    """A flag that cannot be served: says the value, what is allowed, and the remedy."""


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
    Refusal("--enable-streaming-session", _set("enable_streaming_session"), "a session keeps slots beyond a request", "leave it out"),
)


def check_flags(args: "KVServerArgs") -> None:
    """Refuse flag values out of range.

    Raises:
        OptionError: names the flag, its value and the allowed values.
    """
    one_of("--kv-mode", args.kv_mode, MODES)
    one_of("--kv-schedule", args.kv_schedule, SCHEDULES)
    one_of("--kv-full-tier", args.kv_full_tier, FULL_TIERS)
    burst = args.kv_max_burst
    if burst is not None and not (isinstance(burst, int) and burst >= 2):
        raise OptionError(
            f"--kv-max-burst is {burst}; a round gives at least a draft and the verifier's token: pass a whole number "
            "from 2, or leave it out"
        )
    length = args.kv_draft_length
    if length != "auto" and not (isinstance(length, int) and 1 <= length <= MAX_DRAFT_LENGTH):
        raise OptionError(
            f"--kv-draft-length is {length}; pass a whole number from 1 to {MAX_DRAFT_LENGTH}, for example 16, or auto"
        )
    proposed = args.kv_ngram_tokens
    if not isinstance(proposed, int) or not 0 <= proposed <= longest_draft(args):
        raise OptionError(
            f"--kv-ngram-tokens is {proposed}; n-grams propose no more than is drafted: pass a whole number from 0, for "
            f"none, to {longest_draft(args)}"
        )
    _check_host(args)
    _check_offload(args)


def _check_offload(args: "KVServerArgs") -> None:
    length = args.kv_offload_draft_length
    if not (isinstance(length, int) and 1 <= length <= MAX_OFFLOAD_DRAFT_LENGTH):
        raise OptionError(
            f"--kv-offload-draft-length is {length}; pass a whole number from 1 to {MAX_OFFLOAD_DRAFT_LENGTH}, for example 64"
        )
    obstacle = offload_obstacle(args)
    if args.kv_full_tier == "host" and obstacle is not None:
        raise OptionError(f"--kv-full-tier is 'host', but {obstacle}, or use --kv-full-tier device")


def _check_host(args: "KVServerArgs") -> None:
    size = args.kv_host_gb
    if not isinstance(size, int | float) or not 0 <= size < float("inf"):
        raise OptionError(f"--kv-host-gb is {size}; pass GB of host memory for full KV, from 0, for none, for example 16")
    if size and args.kv_mode == "full":
        raise OptionError(
            f"--kv-host-gb is {size} with --kv-mode full, which is stock SGLang: use its --enable-hierarchical-cache, or "
            "--kv-mode verified"
        )


def parse_draft_length(text: str) -> int | str:
    """``--kv-draft-length`` from the command line: a number, or what :func:`check_flags` will look at."""
    return int(text) if text.lstrip("-").isdigit() else text


def longest_draft(args: "KVServerArgs") -> int:
    """Tokens drafted before a verification at most."""
    longest = AUTO_DRAFT_LENGTH if args.kv_draft_length == "auto" else args.kv_draft_length
    return longest if args.kv_max_burst is None else min(longest, args.kv_max_burst - 1)


def offload_obstacle(args: "KVServerArgs") -> str | None:
    """Why full KV of running requests cannot leave the device, and the remedy; None when it can."""
    for refused, why in (
        (not args.kv_host_gb, "there is no host memory for full KV: pass --kv-host-gb"),
        (args.kv_mode != "verified", f"--kv-mode {args.kv_mode} verifies nothing: pass --kv-mode verified"),
        (
            args.kv_compressor in POINTING,
            f"drafts of --kv-compressor {args.kv_compressor} read it on the device: pass --kv-compressor snapkv",
        ),
        (args.disable_radix_cache, "full KV leaves the device by nodes of the prefix tree: leave out --disable-radix-cache"),
        (args.kv_ngram_tokens > 0, "proposals of n-grams are verified in the round that checks them: leave out --kv-ngram-tokens"),
        (args.kv_schedule == "staggered", "drafts gather on the device in lockstep: use --kv-schedule lockstep"),
    ):
        if refused:
            return why
    return None


def offloads(args: "KVServerArgs") -> bool:
    """Whether full KV of running requests may leave the device."""
    return args.kv_full_tier != "device" and offload_obstacle(args) is None


def gathered_drafts(args: "KVServerArgs") -> int:
    """Drafts that a request gathers before a verification at most; where full KV may leave the device, whole rounds of them."""
    longest = longest_draft(args)
    if not offloads(args):
        return longest
    most = args.kv_offload_draft_length
    if args.kv_max_burst is not None:
        most = min(most, args.kv_max_burst - 1)
    return max(1, most // longest) * longest


def verify_widths(args: "KVServerArgs") -> tuple[int, ...]:
    """Tokens of a request in the verifications of one round's drafts; several where the draft length is chosen."""
    widest = longest_draft(args) + 1
    return (NARROW_VERIFY, widest) if args.kv_draft_length == "auto" and widest > NARROW_VERIFY else (widest,)


def wide_widths(args: "KVServerArgs") -> tuple[int, ...]:
    """Tokens of a request in verifications of drafts that gathered over several rounds, wide ones first."""
    if not offloads(args):
        return ()
    return tuple(range(gathered_drafts(args) + 1, verify_widths(args)[-1], -WIDE_STEP))


def one_of(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a flag's value that is not among those allowed.

    Raises:
        OptionError: names all three.
    """
    if value not in allowed:
        raise OptionError(f"{flag} is {value!r}; allowed: {', '.join(allowed)}. Pass one of these.")


def attention_backends(args: "KVServerArgs") -> set[str]:
    """Those that flags or SGLang chose so far."""
    return {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}


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


def check_resolved(args: "KVServerArgs") -> None:
    """Refuse what shows only after SGLang resolved its defaults: attention backend, graphs and model.

    Raises:
        OptionError: names what is not supported, and what is.
    """
    if args.cuda_graph_config.prefill.backend == "full":
        raise OptionError(
            f"--cuda-graph-backend-prefill is 'full'; --kv-mode {args.kv_mode} reads the prompt's queries, which such "
            "graphs hide. Pass breakable, tc_piecewise or disabled."
        )
    for backend in sorted(attention_backends(args)):
        if backend not in ATTENTION_BACKENDS:
            raise OptionError(
                f"--attention-backend is {backend!r}; --kv-mode {args.kv_mode} runs with "
                f"{', '.join(ATTENTION_BACKENDS)}. Pass one of these."
            )
        if args.enable_deterministic_inference and backend not in DETERMINISTIC_BACKENDS:
            raise OptionError(
                f"--attention-backend is {backend!r}; with --enable-deterministic-inference --kv-mode {args.kv_mode} "
                f"runs with {', '.join(DETERMINISTIC_BACKENDS)}: elsewhere a verification rounds differently from a "
                "decode. Pass one of these."
            )
    reason = unsupported_model(args.get_model_config())
    if reason is not None:
        raise OptionError(
            f"--model-path {args.model_path}: {reason}; --kv-mode {args.kv_mode} serves decoder-only "
            "text models with multi-head, grouped-query or multi-query attention over the whole "
            "context, in float weights. Use --kv-mode full for this model."
        )


def unsupported_model(config: object) -> str | None:
    """Why a model cannot be served from a compressed KV cache; None when it can.

    Args:
        config: SGLang's ``ModelConfig``.
    """
    from sglang.srt.configs.model_config import AttentionArch

    text = config.hf_text_config
    if config.attention_arch == AttentionArch.MLA:
        return "it uses multi-head latent attention (MLA)"
    if getattr(config, "is_hybrid_swa", False) or _uses_sliding_window(text):
        return "it uses sliding-window attention"
    if _has_recurrent_layers(text):
        return "it is a hybrid of attention and recurrent layers"
    if config.is_multimodal:
        return "it is multimodal"
    if not config.is_generation:
        return "it does not generate"
    if config.quantization is not None:
        # Activations scaled over a whole batch would make an answer depend on the drafts beside it.
        return f"its weights are quantized ({config.quantization}), which is untested"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    return None


def _has_recurrent_layers(text: object) -> bool:
    if any(hasattr(text, name) for name in ("mamba_d_state", "linear_num_key_heads", "layers_block_type")):
        return True
    return any("attention" not in kind for kind in getattr(text, "layer_types", None) or ())


def _uses_sliding_window(text: object) -> bool:
    if getattr(text, "sliding_window", None) is None:
        return False
    if getattr(text, "use_sliding_window", True) is False:
        return False
    kinds = getattr(text, "layer_types", None)
    return kinds is None or any("sliding" in kind for kind in kinds)
