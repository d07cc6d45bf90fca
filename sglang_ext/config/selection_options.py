"""Flags of methods that select tokens for each step: how many and how often. For ``spade`` also by which query, and in which process."""

import logging
import math
import os
from dataclasses import replace

import torch

from sglang_ext.config import options
from sglang_ext.config.rules import KVServerArgs, round_up
from sglang_ext.core import MIN_CONTEXT, OptionError
from sglang_ext.mem_cache.compressors import Compressor, catalogue
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.predictors import query_predictor
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeySpec

logger = logging.getLogger(__name__)

AUTO = "auto"
# Selection intervals for --kv-select-every auto, in steps, longest first. With the longest, a usual round selects once.
INTERVALS = (16, 8, 4, 2, 1)
# Maximum bytes of a cache rank's exchange buffer in memory of the model's GPU: for keys and queries; and for values and sent rows too.
EXCHANGE_BUFFER_BYTES, ROW_EXCHANGE_BUFFER_BYTES = 256 << 20, 3 << 29
# Default bits of the keys with which cache ranks on GPUs select: for some layers in less time than the model computes them
# (docs/results/longcot.md).
RANK_BITS = 8


def has_selector(args: KVServerArgs) -> bool:
    """Whether the server's method selects tokens for each step."""
    return catalogue.parse(args.kv_compressor)[0] in catalogue.per_step_methods()


def is_spade(args: KVServerArgs) -> bool:
    """Whether the server's method is spade, which selects with predicted queries."""
    return catalogue.parse(args.kv_compressor)[0] == catalogue.SPADE


def has_attention_selector(args: KVServerArgs) -> bool:
    """Whether attention selects pages by their extremes, stored beside the pool. Known after SGLang selected the device."""
    return args.device == "cuda" and catalogue.parse(args.kv_compressor)[0] == catalogue.QUEST


def selection_interval(args: KVServerArgs) -> int:
    """The selection interval, in steps; for auto the shortest interval."""
    return 1 if args.kv_select_every == AUTO else args.kv_select_every


def selection_intervals(args: KVServerArgs) -> tuple[int, ...]:
    """Selection intervals from which a server chooses by measured times, longest first; a single one if it does not choose."""
    # In mode lossy, answers would depend on times. Cache ranks choose their own interval.
    chooses = args.kv_select_every == AUTO and args.kv_mode == "verified" and is_spade(args) and not num_cache_ranks(args)
    return INTERVALS if chooses else (selection_interval(args),)


def num_cache_ranks(args: KVServerArgs) -> int:
    """Number of cache ranks to start, 0 for none. A server that only prefills has no steps."""
    return args.kv_cache_ranks if is_spade(args) and args.disaggregation_mode != "prefill" else 0


def slot_code_bits(args: KVServerArgs) -> int:
    """Bits of the quantized keys that are stored beside the pool for selection. 0 if selection uses exact keys, or is done by cache ranks.
    A server that only prefills selects nothing."""
    if not is_spade(args) or args.kv_cache_ranks or args.disaggregation_mode == "prefill" or args.kv_score_bits in (None, EXACT):
        return 0
    return args.kv_score_bits


def score_bits(args: KVServerArgs) -> int:
    """Bits of the keys used for selection. Known after SGLang selected the device."""
    if args.kv_score_bits is not None:
        return args.kv_score_bits
    return RANK_BITS if has_gpu_ranks(args) else EXACT


def has_remote_values(args: KVServerArgs) -> bool:
    """Whether cache ranks also hold values, and send K and V of the selected tokens. Known after SGLang selected the device.

    They do in mode lossy, where no verification reads full KV here. On GPUs only if full KV is freed: otherwise selected tokens are read
    from the pool.
    """
    if not num_cache_ranks(args) or args.kv_mode != "lossy":
        return False
    return not has_gpu_ranks(args) or (args.disaggregation_mode == "null" and options.why_full_kv_stays(args) is None)


def has_gpu_ranks(args: KVServerArgs) -> bool:
    """Whether cache ranks select on GPUs of their own. Known after SGLang selected the device."""
    return num_cache_ranks(args) > 0 and args.device == "cuda"


def exchange_buffer_bytes(args: KVServerArgs) -> int:
    """Maximum memory of the model's GPU that it shares with each cache rank, bytes."""
    return ROW_EXCHANGE_BUFFER_BYTES if has_remote_values(args) else EXCHANGE_BUFFER_BYTES


def cache_rank_gpus(args: KVServerArgs) -> list[int]:
    """The GPUs of the cache ranks, in order: from the flag's GPU, or from the one after the model's."""
    first = args.base_gpu_id + 1 if args.kv_cache_rank_gpu is None else args.kv_cache_rank_gpu
    return [first + each for each in range(args.kv_cache_ranks)]


def resolve_selection(args: KVServerArgs) -> None:
    """Refuse more cache ranks than cores, and set the budget from the share of selected tokens, before the budget is checked."""
    if args.kv_cache_ranks > (cores := len(os.sched_getaffinity(0))):
        raise OptionError(
            f"--kv-cache-ranks is {args.kv_cache_ranks}; each is a process on a core of its own, and there are {cores} cores: pass a whole "
            f"number from 0, for none, to {cores}, for example 1"
        )
    if args.kv_select is not None and has_selector(args):
        _check_fewest(args)
        args.kv_budget = min(1.0, float(args.kv_select))


def _check_fewest(args: KVServerArgs) -> None:
    """Refuse a number so small that queries would select no token."""
    always, most = step_method(args).always_kept, max_selected_tokens(args)
    if 0 < most <= always:
        raise OptionError(
            f"--kv-select is {most}; the first and the newest tokens, {always} in total, are always read, so that queries would select "
            "none: pass a number above that, for example 2048, or a share, for example 0.125"
        )


def _check_share(args: KVServerArgs, context: int) -> None:
    """Refuse a share with which queries select no token in the longest context, and log if they select none in shorter ones."""
    always, share = step_method(args).always_kept, args.kv_budget
    if max_selected_tokens(args) or share is None:
        return
    flag, enough = "--kv-budget" if args.kv_select is None else "--kv-select", math.floor(always / share) + 1
    if enough > context:
        raise OptionError(
            f"{flag} is {share:g}, which is {share * context:.0f} tokens of the longest context. The first and the newest tokens, {always} "
            f"in total, are always read, so that queries would select none: pass a larger share, for example 0.125, or a longer "
            f"--context-length, now {context}"
        )
    # Shorter contexts are compressed late, so that most of their tokens are read in any case.
    if enough > max(args.kv_sparse_from, 2 * MIN_CONTEXT):
        logger.warning(
            "sglang-ext: in contexts of fewer than %d tokens queries select none of the share %s of %s, because the first and the newest "
            "tokens, %d in total, are always read: pass --kv-sparse-from %d to read these contexts whole, or a larger share",
            enough, f"{share:g}", flag, always, enough,
        )  # fmt: skip


def check_selection(args: KVServerArgs) -> None:
    """Refuse more tokens than a context has, and cache ranks that do not fit the model, after SGLang read the model's config."""
    if not has_selector(args):
        return
    most, context = max_selected_tokens(args), args.get_model_config().context_len
    _check_fewest(args)
    _check_share(args, context)
    if most >= context:
        raise OptionError(
            f"--kv-select is {most}, and the longest context that is served has {context} tokens: pass a number below that, a share, for "
            "example 0.125, or a longer --context-length"
        )
    if selection_interval(args) >= context:
        # Rings keep this many queries of each request.
        raise OptionError(
            f"--kv-select-every is {args.kv_select_every}, and the longest context that is served has {context} tokens: pass a number below "
            "that, for example 4"
        )
    if num_cache_ranks(args):
        _check_against_model(args)


def check_gpus(args: KVServerArgs) -> None:
    """Refuse more cache ranks on GPUs than there are GPUs, and log if one shares the model's. The device must be known."""
    if not has_gpu_ranks(args):
        return
    gpus, found = cache_rank_gpus(args), torch.cuda.device_count()
    if gpus[-1] >= found:
        raise OptionError(
            f"--kv-cache-ranks is {args.kv_cache_ranks} on GPUs, from GPU {gpus[0]} to GPU {gpus[-1]}, the model being on GPU "
            f"{args.base_gpu_id}; there are {found} GPUs: pass fewer ranks, a lower --kv-cache-rank-gpu, or --kv-cache-ranks 0, with which a "
            "second stream of the model's GPU selects"
        )
    if args.base_gpu_id in gpus:
        logger.warning(
            "sglang-ext: a cache rank shares GPU %d with the model, so that they wait for each other: pass --kv-cache-rank-gpu %d, or "
            "--kv-cache-ranks 0, with which a second stream selects",
            args.base_gpu_id, args.base_gpu_id + 1,
        )  # fmt: skip


def _check_against_model(args: KVServerArgs) -> None:
    """Refuse packs of more layers than the model has, and memory too small for the shortest request, or larger than the host's."""
    config, size = args.get_model_config(), args.kv_cache_rank_gb
    check_layer_packs(args, config.num_hidden_layers)
    heads = config.get_num_kv_heads(args.tp_size)
    sizes = KeySpec(config.num_hidden_layers, heads, config.head_dim, config.dtype, score_bits(args), has_remote_values(args))
    token, what, fewer = sizes.token_bytes, "keys and values" if sizes.rows else "keys", ""
    if sizes.rows and sizes.bits != EXACT:
        what, fewer = f"{what}, and keys in {sizes.bits} bits,", f", or --kv-score-bits {EXACT}"
    # One block more than its tokens fill, because the last block grows.
    least = (args.kv_sparse_from + 128) * token / 1e9
    if size is not None and size < least:
        raise OptionError(
            f"--kv-cache-rank-gb is {size:g}, less than {what} of {args.kv_sparse_from} tokens (--kv-sparse-from) take: pass at least "
            f"{round_up(least)}, or better enough for many requests, for example 8{fewer}"
        )
    if size is not None and not has_gpu_ranks(args):
        # Otherwise the process could fail to allocate it, or be killed: the server would continue without selections.
        from sglang_ext.mem_cache.host_tier import host_memory

        host_memory.check(int(size * 1e9), args.kv_cache_ranks, "--kv-cache-rank-gb", what)


def check_layer_packs(args: KVServerArgs, layers: int) -> None:
    """Refuse packs of more layers than a model has."""
    pack = args.kv_pack_layers
    if num_cache_ranks(args) and pack != "auto" and pack > layers:
        raise OptionError(f"--kv-pack-layers is {pack}, and the model has {layers} layers: pass a number up to that, or auto")


def max_selected_tokens(args: KVServerArgs) -> int:
    """Maximum number of tokens that each KV head reads, for any context. 0 if a share sets it."""
    return int(args.kv_select) if has_selector(args) and args.kv_select is not None and args.kv_select > 1 else 0


def step_method(args: KVServerArgs) -> Compressor:
    """The server's per-step method with the flags' settings. For arguments after :func:`resolve_selection`."""
    # Cache ranks select for steps only: compressed KV is not refreshed after each verification.
    each_round = args.kv_mode == "verified" and not num_cache_ranks(args)
    method = Spade(query_predictor(args.kv_select_by)) if is_spade(args) else catalogue.create(catalogue.parse(args.kv_compressor)[0])
    method = replace(method, every=selection_interval(args), each_round=each_round, most=max_selected_tokens(args))
    return replace(method, in_attention=True) if has_attention_selector(args) else method
