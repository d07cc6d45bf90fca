"""Prefix store: full KV of prefixes outside the server (``--kv-store``), which other servers and later runs read instead of computing it.

With ``--kv-host-gb`` a server in mode ``full`` has it too, behind host memory. SGLang decodes there, and no function of it is hooked.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.config import options
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError, TPRanks
from sglang_ext.layers.forward import attention_scaling
from sglang_ext.managers.feature import Feature, MetricValue, Worker
from sglang_ext.managers.kv_offload.feature import HostOffload, attach_host_tier, host_values
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.prefix_cache.stored_prefixes import StoredPrefixes
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache
from sglang_ext.mem_cache.prefix_store.backend import UNIT, StoreError, open_backend
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat
from sglang_ext.mem_cache.prefix_store.store import PrefixStore
from sglang_ext.mem_cache.scores import model_folder, model_key

if TYPE_CHECKING:
    from sglang_ext.managers.spec_decode.early_drafts import AnchorDrafter

logger = logging.getLogger(__name__)

WEIGHT_UPDATES = tuple(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
"""Methods of SGLang's worker, which return whether they succeeded, and a message."""


class PrefixStorage(Feature):
    """Attaches a prefix store to the prefix tree, behind its host tier."""

    counters = {
        "store_hit_pages": ("Pages of waiting requests that came from the prefix store.",),
        "store_miss_pages": ("Pages of waiting requests that were asked for, and did not come from the prefix store.",),
        "store_slower": ("Requests that were computed, because the prefix store was predicted to be slower.",),
        "store_dropped_pages": ("Pages that were not written to the prefix store, because too many waited or the store failed.",),
        "store_written_pages": ("Pages that were written to the prefix store.",),
        "store_written_bytes": ("Bytes that were written to the prefix store.",),
        "store_read_bytes": ("Bytes of full KV that were restored from the prefix store.",),
        "store_read_seconds": ("Seconds in which threads read and decoded these pages.",),
        "store_bad_pages": ("Objects of the prefix store that were missing when read, damaged, or of another page.",),
        "store_errors": ("Requests to the prefix store that failed.",),
        "store_early_requests": ("Requests that drafted on anchors from the prefix store, before their full KV was restored.",),
        "store_early_seconds": ("Seconds from the arrival of these requests to their first draft.",),
        "store_early_accepted": ("Accepted drafts of the first verifications of these requests.",),
    }
    _stored: StoredPrefixes
    _drafter: "AnchorDrafter | None" = None

    def full_kv_provider(self, worker: Worker, tree_cache: TieredRadixCache) -> None:
        """Attach the store to the prefix tree, which has its host tier. Errors are those of :func:`attach_store`."""
        args = self.args
        if options.drafts_on_stored_anchors(args):
            from sglang_ext.managers.spec_decode.early_drafts import AnchorDrafter

            self._drafter = AnchorDrafter(worker, tree_cache, worker.max_verify_tokens - 1)
        self._stored = attach_store(tree_cache, args, worker.buffers, worker.ranks, self._drafter)

    def metrics(self, worker: Worker) -> Iterator[MetricValue]:
        """Totals of the store."""
        yield from store_values(self._stored)
        if self._drafter is not None:
            yield "store_early_requests", self._drafter.requests
            yield "store_early_seconds", self._drafter.seconds


def store_values(stored: StoredPrefixes) -> Iterator[MetricValue]:
    """Values of the metrics of a prefix store."""
    yield "store_hit_pages", stored.hits
    yield "store_miss_pages", stored.misses
    yield "store_slower", stored.skipped_slow
    yield "store_dropped_pages", stored.dropped
    for name, value in vars(stored.store.counters).items():
        yield f"store_{name}", value


def attach_store(
    tree: TieredRadixCache, args: KVServerArgs, buffers: KVBuffers, ranks: TPRanks, drafter: "AnchorDrafter | None" = None
) -> StoredPrefixes:
    """Let the prefix tree, which has its host tier, write to a prefix store and read from it.

    ``buffers`` are the layers of SGLang's pool. ``drafter`` drafts for requests that wait for the store.

    Raises:
        OptionError: The store cannot be reached, or does not support the KV.
    """
    key = buffers.keys[0]
    form = ObjectFormat(
        model=model_identity(args),
        dtype=key.dtype,
        layers=len(buffers.keys),
        heads=key.shape[1],
        head_dim=key.shape[2],
        page_size=max(UNIT, args.page_size),
        rank=ranks.rank,
        ranks=args.tp_size,
        form=args.kv_store_form,
    )
    form.compile_codec()
    try:
        backend = open_backend(args.kv_store)
    except StoreError as error:
        raise OptionError(f"--kv-store {args.kv_store}: {error}") from error
    tree.stored = StoredPrefixes(tree.host, PrefixStore(backend, args.kv_store), form, ranks, drafter)
    logger.info("sglang-ext: prefixes are shared through %s, as %s pages of %d tokens", args.kv_store, form.form, form.page_size)
    return tree.stored


def attach_in_full_mode(tree: TieredRadixCache, args: KVServerArgs, model_runner: ModelRunner) -> None:
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


def refuse_weight_updates(worker: TpModelWorker) -> None:
    """Let SGLang's worker refuse new weights: the names of stored pages are those of the weights at start."""

    def refuse(recv_req: object) -> tuple[bool, str]:
        return False, "the pages of --kv-store belong to the weights at start: restart the server with the new ones, or without --kv-store"

    for name in WEIGHT_UPDATES:
        setattr(worker, name, refuse)


def model_identity(args: KVServerArgs) -> str:
    """Text that differs between servers whose KV of equal tokens differs by more than rounding."""
    weights = model_key(model_folder(args.model_path, args.revision))
    return f"{weights} {args.dtype} {args.quantization} {args.torchao_config} {args.json_model_override_args}"
