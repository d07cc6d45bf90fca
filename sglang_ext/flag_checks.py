"""All checks of flags and of what SGLang made of them, in their order: for the plugin, and for a fork with ``patches/``."""

from typing import TYPE_CHECKING

from sglang_ext import benchmark_options, head_budget_options, method_options, model_options, options, range_options

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def check_flags(args: "KVServerArgs") -> None:
    """Before SGLang resolves its options: refuse wrong values, and set what was left open.

    Raises:
        options.OptionError: a flag is out of range, or flags cannot be combined.
    """
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
        host_memory.check(int(args.kv_host_gb * 1e9), options.ranks_of_host(args))
