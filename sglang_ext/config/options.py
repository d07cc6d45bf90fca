"""What the flags may be, and what follows from what they are: how much is drafted, and how much is verified at once.

Stands here once, so that ``--help``, the checks at start, the doctor and the tests agree.
"""

from typing import TYPE_CHECKING

import torch

from sglang_ext.core import DEFAULT_BUDGET, MIN_CONTEXT, PLAIN_STEPS, OptionError
from sglang_ext.mem_cache.compressors import catalogue

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

MODES = ("full", "lossy", "verified")
MAX_DRAFT_LENGTH = 64
FULL_TIERS = ("auto", "device", "host")
# Tokens drafted before a verification whose full KV has to be loaded from the host, at most.
MAX_OFFLOAD_DRAFT_LENGTH = 256
# Tokens drafted on an anchor while the residual arrives, at most (Lynx, section 5).
MAX_EARLY_DRAFTS = 64
# The transfer backend whose KV comes as anchor and residual, and its reference that comes in one piece.
BACKEND, RAW = "progressive", "raw"
# Such verifications in one forward at most: they are wide, and come one by one, as their loads do.
MAX_WIDE_REQUESTS = 2
# They are captured for every so many tokens of a request: what is beyond the drafts is computed for nothing.
WIDE_STEP = 64
# Drafts at most with --kv-draft-length auto: 16 tokens of 4 query heads fill a tile of verifications, 17 begin another.
AUTO_DRAFT_LENGTH = 15
# Tokens of a narrow verification there: where acceptance is middling, short drafts are best, and wait for less.
NARROW_VERIFY = 5
ATTENTION_BACKENDS = ("torch_native", "flashinfer", "triton", "fa3")
# Of these, on which a verification's tokens are, bit for bit, those of decoding one by one.
DETERMINISTIC_BACKENDS = ("torch_native", "triton")


def check_allowed(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a flag's value that is not among those allowed.

    Raises:
        OptionError: names all three.
    """
    if value not in allowed:
        raise OptionError(f"{flag} is {value!r}; allowed: {', '.join(allowed)}. Pass one of these.")


def expected_device(device: str | None) -> str:
    """What a server with this ``--device`` will run on, before SGLang has chosen: where none is named, what torch finds."""
    return (device or ("cuda" if torch.cuda.is_available() else "cpu")).split(":")[0]


def attention_backends(args: "KVServerArgs") -> set[str]:
    """Those that flags or SGLang chose so far."""
    return {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}


def ranks_per_host(args: "KVServerArgs") -> int:
    """Tensor-parallel ranks that run on one host."""
    return -(-args.tp_size // args.nnodes)


def parse_int_or_word(text: str) -> int | str:
    """Parse a flag's value: a whole number, or else a word such as ``auto``, which is checked later."""
    return int(text) if text.lstrip("-").isdigit() else text


def requested_draft_length(args: "KVServerArgs") -> int:
    """Tokens that ``--kv-draft-length`` lets a round draft at most."""
    return AUTO_DRAFT_LENGTH if args.kv_draft_length == "auto" else args.kv_draft_length


def max_draft_length(args: "KVServerArgs") -> int:
    """Tokens drafted before a verification at most; in mode lossy, which drafts nothing, steps of a round, whatever flags of drafts say."""
    if args.kv_mode == "lossy":
        return PLAIN_STEPS
    longest = requested_draft_length(args)
    return longest if args.kv_max_burst is None else min(longest, args.kv_max_burst - 1)


def offload_obstacle(args: "KVServerArgs") -> str | None:
    """Why full KV of running requests cannot leave the device, and the remedy; None when it can."""
    for refused, why in (
        (not args.kv_host_gb, "there is no host memory for full KV: pass --kv-host-gb"),
        (args.kv_mode != "verified", f"--kv-mode {args.kv_mode} verifies nothing: pass --kv-mode verified"),
        (
            catalogue.points(args.kv_compressor),
            f"drafts of --kv-compressor {args.kv_compressor} read it on the device: pass --kv-compressor snapkv",
        ),
        (args.disable_radix_cache, "full KV leaves the device by nodes of the prefix tree: leave out --disable-radix-cache"),
    ):
        if refused:
            return why
    return None


def can_offload_full_kv(args: "KVServerArgs") -> bool:
    """Whether full KV of running requests may leave the device."""
    return args.kv_full_tier != "device" and offload_obstacle(args) is None


def why_full_kv_stays(args: "KVServerArgs") -> str | None:
    """Why mode lossy keeps full KV beside copies that hold all of it, in a few words; None where it gives that back."""
    # What such a decode server has given back, it is sent again where it is needed; it computes no prompts.
    sent = args.disaggregation_mode == "decode" and has_progressive_transfer(args)
    for kept, why in (
        (args.kv_mode != "lossy", "verifications read it"),
        (args.kv_host_gb, "it goes to host memory when others need its slots"),
        (args.disaggregation_mode != "null" and not sent, "it travels"),
        (args.disable_radix_cache and not sent, "without a prefix tree nobody would find the codes"),
        (
            args.enable_deterministic_inference and args.device != "cpu",
            "beside requests that need full KV nobody reads a copy in deterministic mode",
        ),
    ):
        if kept:
            return why
    return None


def has_progressive_transfer(args: "KVServerArgs") -> bool:
    """Whether KV travels over links of ours."""
    return args.disaggregation_mode != "null" and args.disaggregation_transfer_backend == BACKEND


def has_early_decoding(args: "KVServerArgs") -> bool:
    """Whether requests are drafted on the anchors of their KV while its residuals arrive from a prefill server."""
    return (
        args.kv_mode == "verified"
        and args.disaggregation_mode == "decode"
        and args.disaggregation_transfer_backend == BACKEND
        and args.kv_reference != RAW
        and args.kv_bench_codec is None
    )


def has_deferred_verification(args: "KVServerArgs") -> bool:
    """Whether verifications wait for full KV, so that drafts gather over rounds: it comes from host memory, or over a link."""
    return can_offload_full_kv(args) or has_early_decoding(args)


def max_pending_drafts(args: "KVServerArgs") -> int:
    """Drafts that a request gathers before a verification at most; where full KV may leave the device, whole rounds of them."""
    longest = max_draft_length(args)
    if not has_deferred_verification(args):
        return longest
    burst = MAX_OFFLOAD_DRAFT_LENGTH if args.kv_max_burst is None else args.kv_max_burst - 1
    if has_early_decoding(args):
        return max(longest, min(MAX_EARLY_DRAFTS, burst))
    return max(1, min(args.kv_offload_draft_length, burst) // longest) * longest


def verify_widths(args: "KVServerArgs") -> tuple[int, ...]:
    """Tokens of a request in the verifications of one round's drafts; several where the draft length is chosen."""
    widest = max_draft_length(args) + 1
    return (NARROW_VERIFY, widest) if args.kv_draft_length == "auto" and widest > NARROW_VERIFY else (widest,)


def max_captured_tokens(args: "KVServerArgs", requests: int) -> int:
    """Tokens of the largest verification that is captured, where so many requests run at most."""
    narrow = min(max(args.cuda_graph_config.decode.bs), requests) * verify_widths(args)[-1]
    return max(narrow, MAX_WIDE_REQUESTS * args.speculative_num_draft_tokens) if has_deferred_verification(args) else narrow


def wide_verify_widths(args: "KVServerArgs") -> tuple[int, ...]:
    """Tokens of a request in verifications of drafts that gathered over several rounds, wide ones first."""
    if not has_deferred_verification(args):
        return ()
    return tuple(range(max_pending_drafts(args) + 1, verify_widths(args)[-1], -WIDE_STEP))
