"""The plugin's only entry point: SGLang calls :func:`register` in each process it starts.

It adds sglang-ext to SGLang's registries (arguments, speculative algorithm, radix cache backend, transfer backend). None of it runs
without ``--kv-mode`` or ``--disaggregation-transfer-backend progressive``.
"""

import sys

ARGUMENTS = "sglang.srt.server_args.ServerArgs"


def register() -> None:
    """Register the flags, the speculative algorithm, the radix cache backend and the transfer backend.

    Does nothing in a fork with the series of ``patches/``, which contains all of it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ext.arguments import KVServerArgs
    from sglang_ext.hooks.activation import is_patched_fork, register_transfer

    if is_patched_fork():
        return
    HookRegistry.register(ARGUMENTS, KVServerArgs, HookType.REPLACE)
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        # Engine bound the original class when its module was loaded.
        engine.Engine.server_args_class = KVServerArgs
    register_transfer()
    register_backends()


def register_backends() -> None:
    """Register the speculative algorithm, the radix cache backend and the transfer backend, once per process."""
    from sglang.srt.mem_cache.registry import (
        get_radix_cache_factory,
        register_radix_cache_backend,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_ext.core import RADIX_CACHE_BACKEND, SPECULATIVE_ALGORITHM
    from sglang_ext.hooks.algorithm import KVVerifiedAlgorithm, worker_class
    from sglang_ext.hooks.transfer import register_backend

    if get_spec(SPECULATIVE_ALGORITHM) is None:
        SpeculativeAlgorithm.register(
            SPECULATIVE_ALGORITHM, supports_overlap=True, spec_class=KVVerifiedAlgorithm
        )(worker_class)
    if get_radix_cache_factory(RADIX_CACHE_BACKEND) is None:
        register_radix_cache_backend(RADIX_CACHE_BACKEND, _radix_cache)
    register_backend()


def _radix_cache(context) -> object:
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

    return TieredRadixCache(context.params)
