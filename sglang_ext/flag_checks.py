"""All checks of flags and of the options that SGLang derives, in order. Used by the plugin, and by a fork with ``patches/``.

Options that cannot be served are refused. A flag without effect is named in the log. What depends on flags alone is in the table
(config/flags.py); the functions here also read files, the model or the machine.
"""

import logging
import math
from pathlib import Path

from sglang_ext.config import disaggregation_options, method_options, model_folder, model_options, options, selection_options
from sglang_ext.config.combinations import BACKEND_OPTION, FULL_MODE, HAS_PROGRESSIVE_TRANSFER
from sglang_ext.config.flags import FLAGS
from sglang_ext.config.rules import IS_NOT_FULL_MODE, KVServerArgs, option, render_text, round_up
from sglang_ext.core import MIN_CONTEXT, OptionError
from sglang_ext.hooks import activation as hooking
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.wire import LinkError
from sglang_ext.mem_cache.prefix_store.backend import UNIT, check_url

logger = logging.getLogger(__name__)


def check_flags(args: KVServerArgs) -> None:
    """Refuse wrong values and combinations (``OptionError``), and set open values, before SGLang resolves its options.

    With mode full, only flags of host memory, of a prefix store, and of transfers are checked.
    """
    in_scope = [flag for flag in FLAGS if flag.scope.holds(args)]
    for flag in in_scope:
        flag.check_value(args)
    for flag in in_scope:
        flag.check_conflicts(args)
    transfers, compresses = HAS_PROGRESSIVE_TRANSFER.holds(args), IS_NOT_FULL_MODE.holds(args)
    if args.kv_bench_timeline is not None and (transfers or compresses):
        path = Path(args.kv_bench_timeline)
        if not path.parent.is_dir():
            raise OptionError(f"--kv-bench-timeline is '{path}', and there is no folder '{path.parent}': make it, or name another")
        if path.is_dir():
            raise OptionError(f"--kv-bench-timeline is '{path}', a folder: name a file in it")
    if options.has_own_tree(args) and args.page_size is not None and args.page_size < 1:
        raise OptionError(f"--page-size is {args.page_size}; pass a whole number from 1, for example 16, or leave it out")
    if transfers:
        _check_transfer(args)
    if compresses:
        model_folder.check_model_folder(args.model_path)
        selection_options.resolve_selection(args)
        method_options.resolve_methods(args)
        method_options.resolve_head_budgets(args)
    elif options.has_own_tree(args):
        for refusal in FULL_MODE:
            refusal.check(args, f"--kv-host-gb {args.kv_host_gb:g}", ", or leave --kv-host-gb out")
    if args.kv_store is not None:
        check_url(args.kv_store)
    # Flags without an effect are logged in one line for each reason.
    ignored: dict[tuple[str, str], list[str]] = {}
    for flag in FLAGS:
        if (unmet := flag.find_unmet(args)) is not None:
            ignored.setdefault((render_text(unmet.unmet, args), render_text(unmet.remedy, args)), []).append(flag.option)
    for (why, remedy), names in ignored.items():
        has, them = ("has", "it") if len(names) == 1 else ("have", "them")
        logger.warning("sglang-ext: %s %s no effect: %s. Remedy: %s, or leave %s out", ", ".join(names), has, why, remedy, them)
    for flag in in_scope:
        if flag.warning and flag.is_given(args):
            logger.warning("sglang-ext: %s is %s: %s", flag.option, getattr(args, flag.name), flag.warning)


def check_device(args: KVServerArgs) -> None:
    """Refuse flags that the device does not support (``OptionError``). The device must be known."""
    for flag in FLAGS:
        if flag.scope.holds(args):
            flag.check_conflicts(args, has_device=True)
    selection_options.check_gpus(args)


def check_resolved(args: KVServerArgs) -> None:
    """Refuse backends, models and SGLang versions that cannot be served, after SGLang resolved its options. Set those of host memory and a store.

    Raises ``OptionError`` for an option, a model or a host with too little memory, ``HookError`` if a hooked function has other parameters.
    """
    from sglang_ext.mem_cache.host_tier import host_memory

    if args.kv_mode == "full":
        model_options.check_full_mode(args)
    else:
        _check_compression(args)
    if args.kv_host_gb:
        # Before weights are loaded: otherwise the same refusal would come minutes later.
        _check_least_host_memory(args)
        host_memory.check(int(args.kv_host_gb * 1e9), options.ranks_per_host(args))
    if options.has_prefix_store(args):
        _check_store_pages(args)
        # The scheduler then asks the prefix tree for stored pages, as it does with HiCache.
        args.override("sglang_ext.kv_store", hicache_storage_backend=options.STORAGE_BACKEND)
    if args.kv_mode == "full" and args.device == "cuda":
        _leave_staging_memory(args)


def _check_compression(args: KVServerArgs) -> None:
    """Check what mode verified and lossy need."""
    from sglang_ext.hooks import frontend
    from sglang_ext.managers import served_methods

    check_device(args)
    model_options.check_model(args)
    method_options.check_methods(args)
    method_options.check_head_budgets(args)
    selection_options.check_selection(args)
    served_methods.check_files(args)
    frontend.check_preferred(args)
    hooking.check_hooks(args.kv_mode)
    _check_sparse_from(args)
    _check_chunks(args)
    _warn_of_short_contexts(args)


def _leave_staging_memory(args: KVServerArgs) -> None:
    """Leave memory for the buffers through which KV is copied. Without a worker of ours, nothing reserves it when SGLang sizes its pool."""
    from sglang.srt.utils import get_device_memory_capacity

    from sglang_ext.mem_cache.host_tier.tier import MOST_STAGING

    mebibytes = get_device_memory_capacity(args.device)
    if mebibytes and args.mem_fraction_static is not None:
        share = 2 * MOST_STAGING / (mebibytes * 2**20)
        args.override("sglang_ext.kv_host_gb", mem_fraction_static=round(args.mem_fraction_static - share, 4))


def _check_store_pages(args: KVServerArgs) -> None:
    """Refuse pages that neither divide a store page nor are whole store pages."""
    if UNIT % args.page_size and args.page_size % UNIT:
        raise OptionError(
            f"--page-size is {args.page_size}, and --kv-store has pages of {UNIT} tokens: pass --page-size {UNIT}, or a divisor or multiple of it"
        )


def _check_transfer(args: KVServerArgs) -> None:
    """Check the flags of the transfer backend ``progressive`` with SGLang's, the files that they name, and the hooks."""
    for refusal in disaggregation_options.TRANSFER_REFUSALS:
        refusal.check(args, BACKEND_OPTION)
    if args.kv_bench_codec is not None:
        from sglang_ext.managers.kv_transfer.progressive.compatibility import bench_codec

        bench_codec(args.kv_bench_codec)
    hooking.check_transfer()
    try:
        if args.kv_link_keys is not None:
            LinkKeys.read(Path(args.kv_link_keys))
    except LinkError as error:
        raise OptionError(f"--kv-link-keys: {error}") from error


def _check_sparse_from(args: KVServerArgs) -> None:
    """Refuse a length that no context reaches."""
    begin, context = args.kv_sparse_from, args.get_model_config().context_len
    if MIN_CONTEXT < begin >= context:
        raise OptionError(
            f"--kv-sparse-from is {begin}, and the longest context that is served has {context} tokens, so that none would be compressed: "
            f"pass a number below that, for example {max(MIN_CONTEXT, context // 4)}, a longer --context-length, or --kv-mode full"
        )


def _check_chunks(args: KVServerArgs) -> None:
    """Refuse pages that do not fill the chunks of prompts. SGLang's own message has no numbers."""
    chunk, page = args.chunked_prefill_size, args.page_size
    if args.disaggregation_mode == "decode" or chunk <= 0 or chunk % page == 0:
        return
    raise OptionError(
        f"--page-size is {page}, and prompts are computed in chunks of {chunk} tokens, which must be whole pages: pass "
        f"--chunked-prefill-size {max(page, chunk // page * page)}, or --page-size {min(16, chunk & -chunk)}"
    )


def _warn_of_short_contexts(args: KVServerArgs) -> None:
    """Log if no context that the server accepts is long enough for compression."""
    # Compressed KV has whole pages, and if packed, whole blocks of them.
    page, lengths = args.page_size or 1, []
    for quantizer in (each.quantizer for each in method_options.method_specs(args)):
        if quantizer is None:
            lengths.append(max(MIN_CONTEXT, page))
        else:
            lengths.append(max(MIN_CONTEXT, quantizer.sinks + math.lcm(quantizer.block, page)) + quantizer.recent)
    # Contexts with at most --kv-select tokens are read whole.
    least = max(args.kv_sparse_from, min(lengths), selection_options.max_selected_tokens(args) + 1)
    for name in ("context_length", "max_total_tokens"):
        tokens = getattr(args, name)
        if tokens is not None and tokens <= least:
            logger.warning(
                "sglang-ext: %s is %d, and a context is compressed from %d tokens on: no request is%s; pass more, or leave it out",
                option(name), tokens, least, ", and nothing is drafted" if args.kv_mode == "verified" else "",
            )  # fmt: skip


def _check_least_host_memory(args: KVServerArgs) -> None:
    """Refuse host memory without space for the shortest compressed context."""
    config = args.get_model_config()
    width = config.get_num_kv_heads(args.tp_size) * (config.head_dim + config.v_head_dim)
    tokens = -(-MIN_CONTEXT // args.page_size) * args.page_size
    least = tokens * config.num_hidden_layers * width * config.dtype.itemsize / 1e9
    if args.kv_host_gb < least:
        raise OptionError(
            f"--kv-host-gb is {args.kv_host_gb:g}, less than full KV of {tokens} tokens takes: pass at least "
            f"{round_up(least)}, or better enough for many contexts, for example 16, or 0 for no host memory"
        )
