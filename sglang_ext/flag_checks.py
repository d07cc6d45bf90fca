"""All checks of flags and of what SGLang made of them, in their order: for the plugin, and for a fork with ``patches/``."""

import logging
import math
from typing import TYPE_CHECKING

from sglang_ext import (
    benchmark_options,
    head_budget_options,
    method_options,
    model_options,
    options,
    range_options,
    refusal,
)
from sglang_ext.options import OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

# Tokens of full KV that host memory has room for at least: from as many on a context is drafted for.
LEAST_HOST_TOKENS = 128


def check_flags(args: "KVServerArgs") -> None:
    """Before SGLang resolves its options: refuse wrong values, and set what was left open.

    Raises:
        options.OptionError: a flag is out of range, or flags cannot be combined.
    """
    _warn_of_idle_flags(args)
    range_options.check_flags(args)
    benchmark_options.check_flags(args)
    method_options.resolve(args)
    head_budget_options.resolve(args)


def check_resolved(args: "KVServerArgs") -> None:
    """After SGLang resolved its options: refuse backends, models and versions of SGLang that cannot be served.

    Raises:
        options.OptionError: the attention backend or the model is not supported, a predictor is of another model, or this host
            lacks the memory that is asked for.
        hooking.HookError: a function that is hooked has other parameters than expected.
    """
    from sglang_ext import hooking
    from sglang_ext.managers import compression
    from sglang_ext.mem_cache import host_memory

    model_options.check_resolved(args)
    method_options.check_resolved(args)
    head_budget_options.check_resolved(args)
    compression.check_files(args)
    hooking.check(args.kv_mode)
    if args.kv_host_gb:
        # Before weights are loaded: minutes later it would be found lacking all the same.
        _check_least_host_memory(args)
        host_memory.check(int(args.kv_host_gb * 1e9), options.ranks_of_host(args))


def _warn_of_idle_flags(args: "KVServerArgs") -> None:
    """Name the flags that were given with ``--kv-mode full``, in which they do nothing."""
    from sglang_ext.arguments import KVServerArgs

    if args.kv_mode != "full":
        return
    named = [refusal.flag(name) for name in KVServerArgs.__annotations__ if refusal.given(args, name)]
    if named:
        logger.warning(
            "sglang-ext: --kv-mode is full, stock SGLang, in which %s %s nothing: pass --kv-mode verified, or leave %s out",
            ", ".join(named), "does" if len(named) == 1 else "do", "it" if len(named) == 1 else "them",
        )  # fmt: skip


def _check_least_host_memory(args: "KVServerArgs") -> None:
    """Refuse host memory that has no room for one context.

    Raises:
        OptionError: names the least that has.
    """
    config = args.get_model_config()
    width = config.get_num_kv_heads(args.tp_size) * (config.head_dim + config.v_head_dim)
    tokens = -(-LEAST_HOST_TOKENS // args.page_size) * args.page_size
    least = tokens * config.num_hidden_layers * width * config.dtype.itemsize / 1e9
    if args.kv_host_gb < least:
        raise OptionError(
            f"--kv-host-gb is {args.kv_host_gb:g}, less than full KV of {tokens} tokens takes: pass at least "
            f"{_rounded_up(least)}, better room for many contexts, for example 16, or 0 for no host memory"
        )


def _rounded_up(gigabytes: float) -> str:
    """Two digits that are no less."""
    step = 10.0 ** (math.floor(math.log10(gigabytes)) - 1)
    return f"{math.ceil(gigabytes / step) * step:.3g}"
