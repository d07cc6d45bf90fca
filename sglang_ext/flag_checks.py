"""All checks of flags and of the options that SGLang derives, in order. Used by the plugin, and by a fork with ``patches/``.

Options that cannot be served are refused. A flag without effect is named in the log.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.config import (
    benchmark_options, disaggregation_options, method_options, model_folder, model_options, options, prefill_options, refusal,
    selection_options, stream_options,
)  # fmt: skip
from sglang_ext.config.options import FULL_TIERS, MAX_DRAFT_LENGTH, MAX_OFFLOAD_DRAFT_LENGTH, MODES, offload_obstacle, check_allowed
from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.limits import TokenBucket
from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.kvzap import KVzap
from sglang_ext.mem_cache.compressors.kvzip import KVzip

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)


def check_flags(args: "KVServerArgs") -> None:
    """Refuse wrong values and set open ones, before SGLang resolves its options. With mode full, only flags of transfers are checked.

    Raises:
        OptionError: A flag is out of range, or flags cannot be combined.
    """
    _check_transfer(args)
    if args.kv_mode == "full":
        from sglang_ext.arguments import KVServerArgs

        names = [name for name in KVServerArgs.__annotations__ if name not in disaggregation_options.TRANSFER_FLAGS]
        serving = "verified" if args.kv_prefill == prefill_options.EXACT else "lossy"
        _warn_of_idle(args, "--kv-mode is full, stock SGLang, in which", names, f"--kv-mode {serving}")
        return
    model_folder.check(args.model_path)
    _check_ranges(args)
    benchmark_options.check_flags(args)
    selection_options.resolve(args)
    method_options.resolve(args)
    prefill_options.resolve(args)
    method_options.resolve_head_budgets(args)
    _warn_of_idle_drafts(args)
    _warn_of_idle_compressor(args)


def check_resolved(args: "KVServerArgs") -> None:
    """Refuse backends, models and SGLang versions that cannot be served, after SGLang resolved its options.

    Raises:
        OptionError: The attention backend or the model is not supported, a predictor belongs to another model, preferred sampling
            parameters are wrong, or this host has too little memory.
        hooking.HookError: A hooked function has unexpected parameters.
    """
    from sglang_ext.hooks import activation as hooking
    from sglang_ext.hooks import frontend
    from sglang_ext.managers import served_methods
    from sglang_ext.mem_cache.host_tier import host_memory

    model_options.check_resolved(args)
    method_options.check_resolved(args)
    method_options.check_head_budgets(args)
    selection_options.check_resolved(args)
    prefill_options.check_resolved(args)
    served_methods.check_files(args)
    frontend.check_preferred(args)
    hooking.check(args.kv_mode)
    _check_sparse_from(args)
    _check_chunks(args)
    _warn_of_short_contexts(args)
    if args.kv_host_gb:
        # Before weights are loaded: otherwise the same refusal would come minutes later.
        _check_least_host_memory(args)
        host_memory.check(int(args.kv_host_gb * 1e9), options.ranks_per_host(args))


def _check_transfer(args: "KVServerArgs") -> None:
    """Check the flags of the transfer backend ``progressive``, in any mode."""
    from sglang_ext.hooks import activation as hooking

    if not options.has_progressive_transfer(args):
        backend = disaggregation_options.BACKEND
        why = f"KV is not transferred with --disaggregation-transfer-backend {backend}, without which"
        lacking = [] if args.disaggregation_transfer_backend == backend else [f"--disaggregation-transfer-backend {backend}"]
        lacking += ["--disaggregation-mode prefill or decode"] if args.disaggregation_mode == "null" else []
        remedy = " ".join(lacking)
        _warn_of_idle(args, why, (name for name in disaggregation_options.TRANSFER_FLAGS if name != "kv_bench_timeline"), remedy)
        if args.kv_mode == "full" or not selection_options.ranks(args):
            why = f"there are no cache ranks, and {why}"
            _warn_of_idle(args, why, ("kv_bench_timeline",), f"--kv-mode verified --kv-compressor spade --kv-cache-ranks 1, or {remedy}")
        return
    disaggregation_options.check_transfer(args)
    if args.kv_bench_codec is not None:
        from sglang_ext.managers.kv_transfer.progressive.compatibility import bench_codec

        bench_codec(args.kv_bench_codec)
    if args.disaggregation_mode == "decode":
        _warn_of_idle(args, "--disaggregation-mode is decode, which only receives, so that", ("kv_link_gbps",), "it to the prefill server")
    benchmark_options.warn(args, benchmark_options.TRANSFER_EFFECTS)
    hooking.check_transfer()
    try:
        TokenBucket.from_gbps(args.kv_link_gbps)
    except LinkError as error:
        raise OptionError(f"--kv-link-gbps: {error}") from error
    try:
        if args.kv_link_keys is not None:
            LinkKeys.read(Path(args.kv_link_keys))
    except LinkError as error:
        raise OptionError(f"--kv-link-keys: {error}") from error


def _warn_of_idle(args: "KVServerArgs", why: str, names: Iterable[str], remedy: str) -> None:
    """Log which flags, of fields ``names``, were given and have no effect.

    Args:
        args: Arguments before anything is resolved.
        why: The flag and value that make them ineffective, and the relation.
        names: Fields of the arguments.
        remedy: What to pass so that they have an effect.
    """
    named = [refusal.flag(name) for name in names if refusal.given(args, name)]
    if named:
        logger.warning(
            "sglang-ext: %s %s %s nothing: pass %s, or leave %s out",
            why, ", ".join(named), "does" if len(named) == 1 else "do", remedy, "it" if len(named) == 1 else "them",
        )  # fmt: skip


def _warn_of_idle_drafts(args: "KVServerArgs") -> None:
    """Log flags of drafts that are never made, or never that long."""
    if args.kv_mode == "lossy":
        names = ("kv_draft_length", "kv_max_burst", "kv_offload_draft_length")
        _warn_of_idle(args, "--kv-mode is lossy, without drafts, in which", names, "--kv-mode verified")
        return
    longest = options.requested_draft_length(args)
    if options.can_offload_full_kv(args):
        longest = max(longest, args.kv_offload_draft_length)
    else:
        why = f"--kv-full-tier is {args.kv_full_tier} and --kv-host-gb {args.kv_host_gb:g}, with which"
        _warn_of_idle(args, why, ("kv_offload_draft_length",), "--kv-full-tier auto and for example --kv-host-gb 16")
    if options.has_early_decoding(args):
        longest = max(longest, options.MAX_EARLY_DRAFTS)
    if args.kv_max_burst is not None and args.kv_max_burst > longest + 1:
        why = f"a verification gives at most {longest + 1} tokens, fewer than {args.kv_max_burst}, so that"
        _warn_of_idle(args, why, ("kv_max_burst",), f"at most {longest + 1}")


def _warn_of_idle_compressor(args: "KVServerArgs") -> None:
    """Log ``--kv-online-compressor`` if no method uses it, and flags of selection if nothing is selected."""
    if not selection_options.has_selector(args):
        why = f"--kv-compressor is {args.kv_compressor}, with which"
        _warn_of_idle(args, why, (*selection_options.SELECTION_FLAGS, *selection_options.SPADE_FLAGS), "--kv-compressor spade")
    elif not selection_options.is_spade(args):
        why = f"--kv-compressor is {args.kv_compressor}, with which"
        _warn_of_idle(args, why, selection_options.SPADE_FLAGS, "--kv-compressor spade")
    elif not args.kv_cache_ranks:
        _warn_of_idle(args, "--kv-cache-ranks is 0, with which", selection_options.RANK_FLAGS, "--kv-cache-ranks 1")
    if selection_options.has_selector(args) and args.kv_select == 1:
        logger.warning(
            "sglang-ext: --kv-select is 1, the whole context, so that selections leave nothing out: pass a share below 1, for example "
            "0.125, or a number from 2, for example 2048"
        )
    if selection_options.is_spade(args) and args.disaggregation_mode == "prefill":
        why, names = "--disaggregation-mode is prefill, which has no decode steps, so that", ("kv_cache_ranks", "kv_score_bits")
        _warn_of_idle(args, why, (*names, *(selection_options.RANK_FLAGS if args.kv_cache_ranks else ())), "that to the decode server")
    drops = {offer.drop_method for offer in method_options.offered_methods(args)}
    if KVzip.name in drops or (KVzap.name in drops and args.kv_host_gb):
        return
    if KVzap.name in drops:
        why, remedy = f"--kv-compressor is {args.kv_compressor} and --kv-host-gb 0, with which", "--kv-host-gb 16"
    else:
        why, remedy = f"--kv-compressor is {args.kv_compressor}, with which", f"--kv-compressor {KVzip.name}"
    _warn_of_idle(args, why, ("kv_online_compressor",), remedy)


def _check_sparse_from(args: "KVServerArgs") -> None:
    """Refuse a length that no context reaches.

    Raises:
        OptionError: Names it, and the longest context.
    """
    begin, context = args.kv_sparse_from, args.get_model_config().context_len
    if options.MIN_CONTEXT < begin >= context:
        raise OptionError(
            f"--kv-sparse-from is {begin}, and the longest context that is served has {context} tokens, so that none would be compressed: "
            f"pass a number below that, for example {max(options.MIN_CONTEXT, context // 4)}, a longer --context-length, or --kv-mode full"
        )


def _check_chunks(args: "KVServerArgs") -> None:
    """Refuse pages that do not fill the chunks of prompts. SGLang's own message has no numbers.

    Raises:
        OptionError: Names both, and matching values.
    """
    chunk, page = args.chunked_prefill_size, args.page_size
    if args.disaggregation_mode == "decode" or chunk <= 0 or chunk % page == 0:
        return
    raise OptionError(
        f"--page-size is {page}, and prompts are computed in chunks of {chunk} tokens, which must be whole pages: pass "
        f"--chunked-prefill-size {max(page, chunk // page * page)}, or --page-size {min(16, chunk & -chunk)}"
    )


def _warn_of_short_contexts(args: "KVServerArgs") -> None:
    """Log if no context that the server accepts is long enough for compression."""
    shortest = min(_shortest(args, each.quantizer) for each in method_options.methods(args))
    # Contexts with at most --kv-select tokens are read whole.
    least = max(args.kv_sparse_from, shortest, selection_options.max_selected_tokens(args) + 1)
    for name in ("context_length", "max_total_tokens"):
        tokens = getattr(args, name)
        if tokens is not None and tokens <= least:
            logger.warning(
                "sglang-ext: %s is %d, and a context is compressed from %d tokens on: no request is%s; pass more, or leave it out",
                refusal.flag(name), tokens, least, ", and nothing is drafted" if args.kv_mode == "verified" else "",
            )  # fmt: skip


def _shortest(args: "KVServerArgs", quantizer: Quantizer | None) -> int:
    """Tokens of the shortest context that is compressed. Compressed KV has whole pages, and if packed, whole blocks of them."""
    page = args.page_size or 1
    if quantizer is None:
        return max(options.MIN_CONTEXT, page)
    return max(options.MIN_CONTEXT, quantizer.sinks + math.lcm(quantizer.block, page)) + quantizer.recent


def _check_least_host_memory(args: "KVServerArgs") -> None:
    """Refuse host memory without space for the shortest compressed context.

    Raises:
        OptionError: Names the minimum.
    """
    config = args.get_model_config()
    width = config.get_num_kv_heads(args.tp_size) * (config.head_dim + config.v_head_dim)
    tokens = -(-options.MIN_CONTEXT // args.page_size) * args.page_size
    least = tokens * config.num_hidden_layers * width * config.dtype.itemsize / 1e9
    if args.kv_host_gb < least:
        raise OptionError(
            f"--kv-host-gb is {args.kv_host_gb:g}, less than full KV of {tokens} tokens takes: pass at least "
            f"{refusal.round_up(least)}, or better enough for many contexts, for example 16, or 0 for no host memory"
        )


def _check_ranges(args: "KVServerArgs") -> None:
    """Refuse flag values out of range.

    Raises:
        OptionError: Names the flag, its value and the allowed values.
    """
    check_allowed("--kv-mode", args.kv_mode, MODES)
    check_allowed("--kv-full-tier", args.kv_full_tier, FULL_TIERS)
    stream_options.check_flag(args)
    burst = args.kv_max_burst
    if burst is not None and not (isinstance(burst, int) and burst >= 2):
        raise OptionError(
            f"--kv-max-burst is {burst}; a round gives at least a draft and the bonus token: pass a whole number "
            "from 2, or leave it out"
        )
    begin = args.kv_sparse_from
    if not (isinstance(begin, int) and begin >= options.MIN_CONTEXT):
        raise OptionError(
            f"--kv-sparse-from is {begin}; it is the context length from which KV is compressed: pass a whole number from "
            f"{options.MIN_CONTEXT}, for example 4096"
        )
    length = args.kv_draft_length
    if length != "auto" and not (isinstance(length, int) and 1 <= length <= MAX_DRAFT_LENGTH):
        raise OptionError(
            f"--kv-draft-length is {length}; pass a whole number from 1 to {MAX_DRAFT_LENGTH}, for example 15, or auto"
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
        raise OptionError(f"--kv-host-gb is {size}; pass GB of host memory for full KV, for example 16, or 0 for none")
