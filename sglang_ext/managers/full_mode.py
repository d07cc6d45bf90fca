"""Mode ``full`` with ``--kv-host-gb``: SGLang's own decoding, with our prefix tree, host memory and prefix store.

There is no :class:`~sglang_ext.managers.worker.KVWorker`, and no function of SGLang is hooked.
"""

from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError, TPRanks
from sglang_ext.layers.forward import attention_scaling
from sglang_ext.managers.feature import Feature
from sglang_ext.managers.kv_offload.feature import HostOffload, attach_host_tier, host_values
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.prefix_storage import PrefixStorage, attach_store, store_values
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


def attach_storage(tree: TieredRadixCache, args: KVServerArgs, model_runner: ModelRunner) -> None:
    """Let the prefix tree of a stock server use host memory and, with ``--kv-store``, a prefix store. Report their metrics.

    Raises:
        OptionError: The pool's layers differ, the host has too little memory, or the store cannot be reached.
    """
    ranks = TPRanks.from_group(model_runner.tp_group)
    buffers = KVBuffers.from_pool(model_runner.token_to_kv_pool, attention_scaling(model_runner.model))
    try:
        attach_host_tier(tree, args, buffers, ranks, model_runner.forward_stream)
    except ValueError as error:
        raise OptionError(f"--kv-host-gb {args.kv_host_gb:g}: {error}; leave --kv-host-gb out") from error
    sources: list[Feature] = [HostOffload(args)]
    if args.kv_store is not None:
        attach_store(tree, args, buffers, ranks)
        sources.append(PrefixStorage(args))
    metrics = KVMetrics.create(args, ranks.first, sources)

    def observe(row: int) -> None:
        metrics.observe(host_values(tree.host))
        if tree.stored is not None:
            metrics.observe(store_values(tree.stored))

    # A request ended: there is no other call that comes regularly.
    tree.bind(compressed_kv=None, ended=observe)
