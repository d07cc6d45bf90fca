"""Flags of methods that select tokens for each step: how many and how often. For ``spade`` also by which query, and in which process."""

import logging
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_ext.config import benchmark_options, options, refusal
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import Compressor, catalogue
from sglang_ext.mem_cache.compressors.each_step.quest import Quest
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.host_tier import host_memory
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, SCORE_BITS, KeySpec
from sglang_ext.mem_cache.selection.predictors import query_predictor

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

RANK_FLAGS = ("kv_pack_layers", "kv_cache_rank_gb", "kv_cache_rank_gpu")
SELECTION_FLAGS = ("kv_select", "kv_select_every")
AUTO = "auto"
# Selection intervals for --kv-select-every auto, in steps, longest first. With the longest, a usual round selects once.
INTERVALS = (16, 8, 4, 2, 1)
# Maximum exchange buffer of each cache rank, in memory of the model's GPU, for keys and queries. And if it also holds values and rows that
# the rank sends.
EXCHANGE_BUFFER_BYTES, ROW_EXCHANGE_BUFFER_BYTES = 256 << 20, 3 << 29
# Default bits of the keys with which cache ranks on GPUs select.
RANK_BITS = 8
SPADE_FLAGS = ("kv_select_by", "kv_cache_ranks", *RANK_FLAGS, "kv_score_bits")


def has_selector(args: "KVServerArgs") -> bool:
    """Whether the server's method selects tokens for each step."""
    return catalogue.parse(args.kv_compressor)[0] in catalogue.per_step_methods()


def is_spade(args: "KVServerArgs") -> bool:
    """Whether the server's method is spade, which selects with predicted queries."""
    return catalogue.parse(args.kv_compressor)[0] == Spade.name


def has_attention_selector(args: "KVServerArgs") -> bool:
    """Whether attention selects pages by their extremes, stored beside the pool. Known after SGLang selected the device."""
    return args.device == "cuda" and catalogue.parse(args.kv_compressor)[0] == Quest.name


def selection_interval(args: "KVServerArgs") -> int:
    """The selection interval, in steps; for auto the shortest interval."""
    return 1 if args.kv_select_every == AUTO else args.kv_select_every


def selection_intervals(args: "KVServerArgs") -> tuple[int, ...]:
    """Selection intervals from which a server chooses by measured times, longest first; a single one if it does not choose.

    A server chooses only for spade in mode verified: in mode lossy, answers would depend on times. Cache ranks choose their own interval.
    """
    chooses = args.kv_select_every == AUTO and args.kv_mode == "verified" and is_spade(args) and not ranks(args)
    return INTERVALS if chooses else (selection_interval(args),)


def ranks(args: "KVServerArgs") -> int:
    """Number of cache ranks to start, 0 for none. A server that only prefills has no steps to select tokens for."""
    return args.kv_cache_ranks if is_spade(args) and args.disaggregation_mode != "prefill" else 0


def slot_code_bits(args: "KVServerArgs") -> int:
    """Bits of the quantized keys that are stored beside the pool for selection. 0 if selection uses exact keys, or is done by cache ranks.
    A server that only prefills selects nothing."""
    if not is_spade(args) or args.kv_cache_ranks or args.disaggregation_mode == "prefill" or args.kv_score_bits in (None, EXACT):
        return 0
    return args.kv_score_bits


def score_bits(args: "KVServerArgs") -> int:
    """Bits of the keys used for selection. Known after SGLang selected the device.

    With the default, cache ranks on GPUs select for some layers in less time than the model computes them (docs/results/longcot.md).
    """
    if args.kv_score_bits is not None:
        return args.kv_score_bits
    return RANK_BITS if has_gpu_ranks(args) else EXACT


def max_cache_ranks() -> int:
    """Maximum number of cache ranks here: the cores of this process."""
    return len(os.sched_getaffinity(0))


def has_remote_values(args: "KVServerArgs") -> bool:
    """Whether cache ranks also hold values, and send K and V of the selected tokens. Known after SGLang selected the device.

    They do in mode lossy, where no verification reads full KV here. On GPUs only if full KV is freed: otherwise selected tokens are read
    from the pool.
    """
    if not ranks(args) or args.kv_mode != "lossy":
        return False
    return not has_gpu_ranks(args) or (args.disaggregation_mode == "null" and options.why_full_kv_stays(args) is None)


def has_gpu_ranks(args: "KVServerArgs") -> bool:
    """Whether cache ranks select on GPUs of their own. Known after SGLang selected the device."""
    return ranks(args) > 0 and args.device == "cuda"


def exchange_buffer_bytes(args: "KVServerArgs") -> int:
    """Maximum memory of the model's GPU that it shares with each cache rank, bytes."""
    return ROW_EXCHANGE_BUFFER_BYTES if has_remote_values(args) else EXCHANGE_BUFFER_BYTES


def cache_rank_gpus(args: "KVServerArgs") -> list[int]:
    """The GPUs of the cache ranks, in order: from the flag's GPU, or from the one after the model's."""
    first = args.base_gpu_id + 1 if args.kv_cache_rank_gpu is None else args.kv_cache_rank_gpu
    return [first + each for each in range(args.kv_cache_ranks)]


def resolve(args: "KVServerArgs") -> None:
    """Refuse wrong values, and set the budget from the share of selected tokens, before the budget is checked.

    Raises:
        OptionError: Names the flag, its value and the remedy.
    """
    share = args.kv_select
    if share is not None and not (isinstance(share, int | float) and (0 < share <= 1 or (share > 1 and float(share).is_integer()))):
        raise OptionError(
            f"--kv-select is {share}; it is the share of the context's tokens that each KV head reads, above 0 and at most 1, or their "
            "number: pass for example 0.125, or a whole number, for example 2048"
        )
    every = args.kv_select_every
    if every != AUTO and not (isinstance(every, int) and every >= 1):
        raise OptionError(
            f"--kv-select-every is {every}; it is the number of steps between selections: pass a whole number from 1, for example 4, or "
            f"{AUTO}"
        )
    query_predictor(args.kv_select_by)
    _check_ranks(args)
    _check_coded_slots(args)
    if share is None or not has_selector(args):
        return
    _check_fewest(args)
    if args.kv_budget is not None:
        raise OptionError(
            f"--kv-select is {share:g} and --kv-budget {args.kv_budget}; both say how many tokens each KV head reads: leave one of them out"
        )
    args.kv_budget = min(1.0, float(share))


def _check_fewest(args: "KVServerArgs") -> None:
    """Refuse a number so small that queries would select no token."""
    always, most = _compressor(args).always_kept, max_selected_tokens(args)
    if 0 < most <= always:
        raise OptionError(
            f"--kv-select is {most}; the first and the newest tokens, {always} in total, are always read, so that queries would select "
            "none: pass a number above that, for example 2048, or a share, for example 0.125"
        )


def _check_share(args: "KVServerArgs", context: int) -> None:
    """Refuse a share with which queries select no token in the longest context, and log if they select none in shorter ones."""
    always, share = _compressor(args).always_kept, args.kv_budget
    if max_selected_tokens(args) or share is None:
        return
    flag, enough = "--kv-budget" if args.kv_select is None else "--kv-select", math.floor(always / share) + 1
    if enough > context:
        raise OptionError(
            f"{flag} is {share:g}, which is {share * context:.0f} tokens of the longest context. The first and the newest tokens, {always} "
            f"in total, are always read, so that queries would select none: pass a larger share, for example 0.125, or a longer "
            f"--context-length, now {context}"
        )
    # Contexts below this length are read completely soon, whatever is selected.
    if enough > max(args.kv_sparse_from, 2 * options.MIN_CONTEXT):
        logger.warning(
            "sglang-ext: in contexts of fewer than %d tokens queries select none of the share %s of %s, because the first and the newest "
            "tokens, %d in total, are always read: pass --kv-sparse-from %d to read these contexts whole, or a larger share",
            enough, f"{share:g}", flag, always, enough,
        )  # fmt: skip


def _check_ranks(args: "KVServerArgs") -> None:
    """Refuse wrong values of the flags of cache ranks. With other methods these flags are logged as without effect instead."""
    ranks, pack, size, cores = args.kv_cache_ranks, args.kv_pack_layers, args.kv_cache_rank_gb, max_cache_ranks()
    if not (isinstance(ranks, int) and 0 <= ranks <= cores):
        raise OptionError(
            f"--kv-cache-ranks is {ranks}; each is a process on a core of its own, and there are {cores} cores: pass a whole number "
            f"from 0, for none, to {cores}, for example 1"
        )
    if pack != "auto" and not (isinstance(pack, int) and pack >= 1):
        raise OptionError(f"--kv-pack-layers is {pack}; pass a whole number of layers from 1, for example 6, or auto")
    if size is not None and not (isinstance(size, int | float) and 0 < size < float("inf")):
        raise OptionError(
            f"--kv-cache-rank-gb is {size}; pass GB of memory for keys, above 0, and in mode lossy for values, for example 8, or leave it "
            "out for the size that the pool needs"
        )
    first = args.kv_cache_rank_gpu
    if first is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
        raise OptionError(
            f"--kv-cache-rank-gpu is {first!r}; pass the number of the GPU of the first cache rank, from 0, for example 1, or leave it out "
            "for the one after the model's"
        )
    if args.kv_score_bits not in (None, *SCORE_BITS):
        raise OptionError(
            f"--kv-score-bits is {args.kv_score_bits!r}; tokens are selected with unchanged keys (16), or with keys in 8 or 4 bits: pass "
            f"one of {', '.join(map(str, SCORE_BITS))}"
        )
    benchmark_options.check_timeline(args)
    if ranks and is_spade(args) and args.tp_size > 1:
        raise OptionError(
            f"--kv-cache-ranks is {ranks} with --tp-size {args.tp_size}; the selections that arrive in time could differ between ranks, "
            "which must make equal decisions: pass --tp-size 1, or --kv-cache-ranks 0"
        )


def _check_coded_slots(args: "KVServerArgs") -> None:
    """Refuse quantized keys if keys do not only come from forwards or host memory: others would not be quantized."""
    bits = slot_code_bits(args)
    if bits and args.disaggregation_mode == "decode":
        raise OptionError(
            f"--kv-score-bits is {bits} with --disaggregation-mode decode; keys from another server would not be quantized, because "
            f"forwards do that: pass --kv-score-bits {EXACT}, or --kv-cache-ranks 1, which quantizes them"
        )


def check_resolved(args: "KVServerArgs") -> None:
    """Refuse options that the device does not support, and more tokens than a context has, after SGLang selected the device and read the
    model's config.

    Raises:
        OptionError: Names the option, and the remedy.
    """
    if not has_selector(args):
        return
    check_device(args)
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
    if ranks(args):
        _check_against_model(args)


def check_device(args: "KVServerArgs") -> None:
    """Refuse methods and ranks that the device does not support, and ranks without a GPU. The device must be known.

    Raises:
        OptionError: Names the option, and the remedy.
    """
    if not has_selector(args):
        return
    if has_attention_selector(args):
        _check_pages(args)
    elif args.device != "cpu" and not is_spade(args):
        raise OptionError(
            f"--device is {args.device} with --kv-compressor {args.kv_compressor}; it selects tokens on a CPU alone: "
            "pass --kv-compressor spade, verify-guided or, on an NVIDIA GPU, quest, or --device cpu"
        )
    if has_gpu_ranks(args):
        _check_gpus(args)
    elif ranks(args) and args.kv_cache_rank_gpu is not None:
        raise OptionError(
            f"--kv-cache-rank-gpu is {args.kv_cache_rank_gpu} with --device {args.device}; cache ranks are on GPUs only if the model is: "
            "leave it out"
        )
    elif args.device != "cpu" and ranks(args):
        raise OptionError(
            f"--kv-cache-ranks is {args.kv_cache_ranks} with --device {args.device}; cache ranks work on a CPU "
            "or on NVIDIA GPUs: pass --kv-cache-ranks 0, or --device cpu"
        )


def _check_pages(args: "KVServerArgs") -> None:
    """Refuse pages of the pool that are not pages of Quest, and keys that no forward writes."""
    page, given = Quest.scoring.page, args.page_size or 1
    if given % page:
        raise OptionError(
            f"--page-size is {given} with --kv-compressor {args.kv_compressor} on a GPU; it selects pages of {page} tokens, which "
            f"must be pages of the pool: pass --page-size {page}"
        )
    if args.disaggregation_mode != "null":
        raise OptionError(
            f"--disaggregation-mode is {args.disaggregation_mode} with --kv-compressor {args.kv_compressor} on a GPU; for keys from "
            "another server the extremes would be unknown, because forwards compute them: pass --kv-compressor spade"
        )


def _check_gpus(args: "KVServerArgs") -> None:
    """Refuse options that ranks on GPUs do not support, and more ranks than GPUs."""
    asked = f"--kv-cache-ranks is {args.kv_cache_ranks} on GPUs"
    if args.kv_pack_layers != "auto":
        raise OptionError(f"{asked} with --kv-pack-layers {args.kv_pack_layers}; all layers of a step are sent at once: pass auto")
    if args.kv_bench_timeline is not None:
        raise OptionError(f"{asked} with --kv-bench-timeline {args.kv_bench_timeline}; such times are not known for a device: leave it out")
    for name in ("dp_size", "pp_size"):
        if getattr(args, name) > 1:
            raise OptionError(f"{asked} with {refusal.flag(name)} {getattr(args, name)}; they belong to the GPU of one model: pass 1")
    gpus, found = cache_rank_gpus(args), torch.cuda.device_count()
    if gpus[-1] >= found:
        raise OptionError(
            f"{asked}, from GPU {gpus[0]} to GPU {gpus[-1]}, the model being on GPU {args.base_gpu_id}; there are {found} GPUs: pass fewer "
            "ranks, a lower --kv-cache-rank-gpu, or --kv-cache-ranks 0, with which a second stream of the model's GPU selects"
        )
    if args.base_gpu_id in gpus:
        logger.warning(
            "sglang-ext: a cache rank shares GPU %d with the model, so that they wait for each other: pass --kv-cache-rank-gpu %d, or "
            "--kv-cache-ranks 0, with which a second stream selects",
            args.base_gpu_id, args.base_gpu_id + 1,
        )  # fmt: skip


def _check_against_model(args: "KVServerArgs") -> None:
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
            f"{refusal.round_up(least)}, or better enough for many requests, for example 8{fewer}"
        )
    if size is not None and not has_gpu_ranks(args):
        # Otherwise the process could fail to allocate it, or be killed: the server would continue without selections.
        host_memory.check(int(size * 1e9), args.kv_cache_ranks, "--kv-cache-rank-gb", what)


def check_layer_packs(args: "KVServerArgs", layers: int) -> None:
    """Refuse packs of more layers than a model has.

    Raises:
        OptionError: Names both numbers.
    """
    pack = args.kv_pack_layers
    if ranks(args) and pack != "auto" and pack > layers:
        raise OptionError(f"--kv-pack-layers is {pack}, and the model has {layers} layers: pass a number up to that, or auto")


def max_selected_tokens(args: "KVServerArgs") -> int:
    """Maximum number of tokens that each KV head reads, for any context. 0 if a share sets it."""
    return int(args.kv_select) if has_selector(args) and args.kv_select is not None and args.kv_select > 1 else 0


def spade(args: "KVServerArgs") -> Spade:
    """The spade method with the flags' settings, for arguments after :func:`resolve`."""
    # Cache ranks select for steps only: compressed KV is not refreshed after each verification.
    each_round = args.kv_mode == "verified" and not ranks(args)
    return Spade(query_predictor(args.kv_select_by), selection_interval(args), each_round, most=max_selected_tokens(args))


def stepping(args: "KVServerArgs", name: str) -> Compressor:
    """Another per-step method with the flags' settings."""
    found = replace(catalogue.create(name), every=selection_interval(args), each_round=args.kv_mode == "verified", most=max_selected_tokens(args))
    return replace(found, in_attention=True) if isinstance(found, Quest) and has_attention_selector(args) else found


def _compressor(args: "KVServerArgs") -> Spade | Compressor:
    """The server's per-step method."""
    return spade(args) if is_spade(args) else stepping(args, catalogue.parse(args.kv_compressor)[0])
