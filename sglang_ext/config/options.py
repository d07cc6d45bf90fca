"""Settings derived from the flags: draft lengths, verification widths, and where full KV is stored."""

import torch

from sglang_ext.config.rules import KVServerArgs, Refusal, render_text
from sglang_ext.core import PLAIN_STEPS
from sglang_ext.mem_cache.compressors import catalogue

MODES = ("full", "lossy", "verified")
MAX_DRAFT_LENGTH = 64
# Name of the prefix store in SGLang's options.
STORAGE_BACKEND = "sglang_ext"
# KV that prompts attend to: --kv-prefill.
EXACT, QUANTIZED = PREFILL_MODES = ("exact", "quantized")
FULL_TIERS = ("auto", "device", "host")
# Maximum drafts before a verification whose full KV is loaded from the host.
MAX_OFFLOAD_DRAFT_LENGTH = 256
# Maximum drafts on an anchor while the residual arrives (Lynx, section 5).
MAX_EARLY_DRAFTS = 64
# The transfer backend that sends KV as anchor and residual, and its reference that sends KV in one piece.
BACKEND, RAW = "progressive", "raw"
# Maximum requests with offloaded or arriving full KV in one verification. They have many drafts, and become ready one at a time.
MAX_WIDE_REQUESTS = 2
# Their widths are the longest one, and shorter ones in steps of this number of tokens per request. Extra tokens are computed and ignored.
WIDE_STEP = 64
# Maximum drafts with --kv-draft-length auto. Verification tiles have 64 rows: 16 tokens of 4 query heads. A 17th token needs a second tile.
AUTO_DRAFT_LENGTH = 15
# Tokens of a narrow verification with auto: with moderate acceptance, short drafts are best, and need a shorter verification.
NARROW_VERIFY = 5
ATTENTION_BACKENDS = ("torch_native", "flashinfer", "triton", "fa3")
# Backends on which a verification's tokens are bit-identical to those of decoding one by one.
DETERMINISTIC_BACKENDS = ("torch_native", "triton")


def expected_device(device: str | None) -> str:
    """The device of a server with this ``--device``, before SGLang selects it. If None, the device that torch finds."""
    return (device or ("cuda" if torch.cuda.is_available() else "cpu")).split(":")[0]


def attention_backends(args: KVServerArgs) -> set[str]:
    """The attention backends that flags or SGLang selected so far."""
    return {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}


def ranks_per_host(args: KVServerArgs) -> int:
    """Number of tensor-parallel ranks on one host."""
    return -(-args.tp_size // args.nnodes)


def requested_draft_length(args: KVServerArgs) -> int:
    """Maximum drafts of a round according to ``--kv-draft-length``."""
    return AUTO_DRAFT_LENGTH if args.kv_draft_length == "auto" else args.kv_draft_length


def max_verified_tokens(args: KVServerArgs) -> int:
    """Maximum tokens that a verification gives without ``--kv-max-burst``."""
    offloaded = args.kv_offload_draft_length if can_offload_full_kv(args) else 0
    return max(requested_draft_length(args), offloaded, MAX_EARLY_DRAFTS if drafts_on_anchors(args) else 0) + 1


def max_draft_length(args: KVServerArgs) -> int:
    """Maximum drafts of a round. In mode lossy, which drafts nothing, the steps of a round, whatever the draft flags are."""
    if args.kv_mode == "lossy":
        return PLAIN_STEPS
    longest = requested_draft_length(args)
    return longest if args.kv_max_burst is None else min(longest, args.kv_max_burst - 1)


OFFLOAD_OBSTACLES = (
    Refusal("--kv-host-gb 0", lambda args: not args.kv_host_gb, "there is no host memory for full KV", "pass --kv-host-gb"),
    Refusal("--kv-mode lossy", lambda args: args.kv_mode != "verified", "--kv-mode lossy verifies nothing", "pass --kv-mode verified"),
    Refusal(
        "--kv-compressor {args.kv_compressor}", lambda args: catalogue.points(args.kv_compressor),
        "drafts of --kv-compressor {args.kv_compressor} read full KV on the device", "pass --kv-compressor snapkv",
    ),
)  # fmt: skip
"""Why full KV of running requests cannot leave the device. ``--kv-host-gb`` also needs the prefix tree."""


def offload_obstacle(args: KVServerArgs) -> tuple[str, str]:
    """Why full KV of running requests cannot leave the device, and the remedy. Both are empty if it can."""
    found = (each for each in OFFLOAD_OBSTACLES if each.is_requested(args))
    return next(((render_text(each.why, args), render_text(each.remedy, args)) for each in found), ("", ""))


def can_offload_full_kv(args: KVServerArgs) -> bool:
    """Whether full KV of running requests may leave the device."""
    return args.kv_full_tier != "device" and not any(offload_obstacle(args))


def why_full_kv_stays(args: KVServerArgs) -> str | None:
    """Why mode lossy keeps full KV that compressed KV or cache ranks could replace, in a few words. None if it frees it."""
    # A decode server with progressive transfer computes no prompts. If it needs freed full KV, the prefill server sends it again.
    sent = args.disaggregation_mode == "decode" and has_progressive_transfer(args)
    for kept, why in (
        (args.kv_mode != "lossy", "verifications read it"),
        (args.kv_host_gb, "it moves to host memory when other requests need its slots"),
        (args.disaggregation_mode != "null" and not sent, "it is transferred"),
        (args.disable_radix_cache and not sent, "freeing full KV needs the prefix tree"),
        (args.enable_deterministic_inference and args.device != "cpu", "in deterministic mode compressed KV cannot be read together with full KV"),
    ):
        if kept:
            return why
    return None


def has_own_tree(args: KVServerArgs) -> bool:
    """Whether our prefix tree replaces SGLang's: in mode full only with host memory."""
    return args.kv_mode != "full" or bool(args.kv_host_gb)


def has_prefix_store(args: KVServerArgs) -> bool:
    """Whether prefixes are written to a store and read from it."""
    return args.kv_store is not None and bool(args.kv_host_gb)


def drafts_on_stored_anchors(args: KVServerArgs) -> bool:
    """Whether waiting requests draft on anchors from a prefix store. A prefill server decodes nothing."""
    return has_prefix_store(args) and args.kv_mode == "verified" and args.kv_store_form != "raw" and args.disaggregation_mode == "null"


def has_progressive_transfer(args: KVServerArgs) -> bool:
    """Whether KV is transferred with our backend."""
    return args.disaggregation_mode != "null" and args.disaggregation_transfer_backend == BACKEND


def has_early_decoding(args: KVServerArgs) -> bool:
    """Whether requests draft on the anchors of their KV while the residuals arrive from a prefill server."""
    receives = args.disaggregation_mode == "decode" and has_progressive_transfer(args)
    return receives and args.kv_mode == "verified" and args.kv_reference != RAW and args.kv_bench_codec is None


def drafts_on_anchors(args: KVServerArgs) -> bool:
    """Whether requests draft on anchors while the residuals arrive, from a prefill server or from a prefix store."""
    return has_early_decoding(args) or drafts_on_stored_anchors(args)


def has_deferred_verification(args: KVServerArgs) -> bool:
    """Whether verifications wait for full KV from host memory, a link or a store, so that many drafts are pending."""
    return can_offload_full_kv(args) or drafts_on_anchors(args)


def max_pending_drafts(args: KVServerArgs) -> int:
    """Maximum pending drafts of a request. If full KV may leave the device, a whole number of rounds."""
    longest = max_draft_length(args)
    if not has_deferred_verification(args):
        return longest
    burst = MAX_OFFLOAD_DRAFT_LENGTH if args.kv_max_burst is None else args.kv_max_burst - 1
    if has_early_decoding(args) or not can_offload_full_kv(args):
        return max(longest, min(MAX_EARLY_DRAFTS, burst))
    return max(1, min(args.kv_offload_draft_length, burst) // longest) * longest


def verify_widths(args: KVServerArgs) -> tuple[int, ...]:
    """Tokens per request in verifications of one round's drafts. Several widths if the draft length is selected automatically."""
    widest = max_draft_length(args) + 1
    return (NARROW_VERIFY, widest) if args.kv_draft_length == "auto" and widest > NARROW_VERIFY else (widest,)


def max_verification_tokens(args: KVServerArgs, requests: int) -> int:
    """Tokens of the largest captured verification with at most ``requests`` running requests."""
    narrow = min(max(args.cuda_graph_config.decode.bs), requests) * verify_widths(args)[-1]
    return max(narrow, MAX_WIDE_REQUESTS * args.speculative_num_draft_tokens) if has_deferred_verification(args) else narrow


def wide_verify_widths(args: KVServerArgs) -> tuple[int, ...]:
    """Tokens per request in verifications of drafts from several rounds, widest first."""
    if not has_deferred_verification(args):
        return ()
    return tuple(range(max_pending_drafts(args) + 1, verify_widths(args)[-1], -WIDE_STEP))
