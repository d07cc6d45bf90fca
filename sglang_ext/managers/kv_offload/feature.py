"""Host offload: full KV in host memory (``--kv-host-gb``), also that of running requests (``--kv-full-tier``)."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.config import options
from sglang_ext.core import TPRanks
from sglang_ext.managers.feature import Feature, MetricValue, Worker
from sglang_ext.managers.kv_offload.offloaded_full_kv import OffloadedFullKV
from sglang_ext.managers.kv_offload.offload_policy import OffloadPolicy
from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.level_quantizers import Lynx
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import ResidualPages, unsupported_reason
from sglang_ext.mem_cache.host_tier.tier import HostTier, staging_bytes
from sglang_ext.mem_cache.prefix_cache.host_store import Anchoring, FaultInjector, HostStore
from sglang_ext.mem_cache.prefix_cache.residency import Residency

if TYPE_CHECKING:
    from sglang_ext.config.rules import KVServerArgs
    from sglang_ext.managers.memory_plan import MemoryPlanner
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)

# Loaded once at start, to measure the link.
LINK_SAMPLE_BYTES = 256 << 20


class HostOffload(Feature):
    """Stores full KV in host memory. With ``--kv-full-tier``, full KV of running requests may leave the device."""

    gauges = {
        "host_bytes": ("Bytes of full KV in host memory.",),
        "host_staging_bytes": ("Bytes on the device through which full KV goes to host memory and back.",),
        "offloaded_bytes": ("Bytes of full KV of running requests that are not on the device.",),
        "host_load_bytes_per_second": ("Bandwidth of loads from host memory, newer ones counting more.",),
        "link_reserved": ("Share of a round's time in which the link to host memory is reserved for loads.",),
        "reload_room_reserved": ("Share of the device memory for loads that is reserved in this round.",),
    }
    counters = {
        "host_stored_bytes": ("Bytes of full KV stored to host memory.",),
        "host_loaded_bytes": ("Bytes loaded from host memory for full KV.",),
        "host_restored_bytes": ("Bytes of full KV restored from these loads: more than were loaded if host memory holds residuals.",),
        "host_loads": ("Loads of full KV from host memory that ended.",),
        "host_load_seconds": ("Seconds of these loads. Their rate is the share of time in which the link is in use.",),
        "host_failed_pages": ("Pages of full KV that were corrupt when loaded, and are computed again.",),
        "reservations": ("Verifications for which link time and memory were reserved.",),
        "waits": ("Rounds in which a request found no link time or no memory for its next verification.",),
        "late_verifications": ("Rounds by which verifications were postponed because their full KV was not loaded yet.",),
        "slack_rounds": ("Rounds between the end of a load of full KV and its verification.",),
    }
    _host: HostStore
    _provider: OffloadedFullKV | None = None

    def planned_bytes(self, planner: "MemoryPlanner", requests: int, tokens: int, rings: int) -> dict[str, int]:
        """Staging buffers for full KV on its way to and from host memory."""
        page_size, slot_bytes = self.args.page_size, planner.model.slot_bytes
        return {"staging": 2 * staging_bytes((tokens + page_size) * slot_bytes, page_size * slot_bytes)}

    def full_kv_provider(self, worker: Worker, tree_cache: "TieredRadixCache") -> OffloadedFullKV | None:
        """Attach the host tier to the prefix tree. Create the provider if full KV of running requests may leave the device.

        Raises:
            OptionError: The host has too little memory.
            TransferError: The KV loaded back differs from the stored KV.
        """
        compressed_kv, corrupt = worker.compressed_kv, self.args.kv_bench_corrupt_loads
        anchoring = create_anchoring(compressed_kv, self.args.page_size, self.args.kv_store is not None)
        callbacks = {} if worker.methods.scores is None else {"on_load_start": worker.methods.scores.forget}
        if worker.key_derived_data is not None:
            # Writes the sidecar before rows may point to the slots. The next forward waits for it.
            callbacks["on_load_done"] = worker.key_derived_data.write
        faults = None if corrupt is None else FaultInjector(corrupt, loads=worker.ranks.rank)
        stream = worker.model_runner.forward_stream
        self._host = attach_host_tier(tree_cache, self.args, worker.buffers, worker.ranks, stream, anchoring, faults=faults, **callbacks)
        if options.can_offload_full_kv(self.args):
            self._provider = create_offloaded_full_kv(worker, tree_cache)
        return self._provider

    def metrics(self, worker: Worker) -> Iterator[MetricValue]:
        """Values of the host tier, of loads, and of reservations."""
        yield from host_values(self._host)
        provider = self._provider
        if provider is None:
            return
        scheduler = provider.scheduler
        yield "offloaded_bytes", provider.bytes_per_token * provider.residency.offloaded_tokens
        yield "link_reserved", scheduler.link.occupancy()
        yield "reload_room_reserved", scheduler.memory.occupancy()
        yield "reservations", scheduler.admitted
        yield "waits", scheduler.refused
        yield "late_verifications", scheduler.num_postponed
        yield "slack_rounds", provider.waited_rounds


def host_values(host: HostStore) -> Iterator[MetricValue]:
    """Values of the metrics of host memory, without those of running requests."""
    yield "host_bytes", host.bytes
    yield "host_staging_bytes", host.tier.workspace_bytes
    yield "host_load_bytes_per_second", host.link.bandwidth or 0.0
    yield "host_stored_bytes", host.stored_bytes
    yield "host_loaded_bytes", host.loaded_bytes
    yield "host_restored_bytes", host.restored_bytes
    yield "host_loads", host.link.loads
    yield "host_load_seconds", host.link.seconds
    yield "host_failed_pages", host.failed_pages


def attach_host_tier(
    tree: "TieredRadixCache",
    args: "KVServerArgs",
    buffers: KVBuffers,
    ranks: TPRanks,
    forward_stream: torch.Stream,
    anchoring: Anchoring | None = None,
    **callbacks: Any,
) -> HostStore:
    """Let the prefix tree store full KV in host memory. Called before any forward.

    Args:
        buffers: The layers of SGLang's pool.
        forward_stream: SGLang's stream of forwards.
        anchoring: Which pages are stored as residuals. None stores all pages whole.
        callbacks: Further arguments of :class:`HostStore`.
    """
    pool = HostPool.create(buffers, args.page_size, int(args.kv_host_gb * 1e9), frames=anchoring is not None)
    residuals = None if anchoring is None else ResidualPages(buffers, anchoring.packing, args.page_size)
    tier = HostTier(buffers, pool, residuals=residuals, forward_stream=forward_stream if buffers.on_gpu else None)
    tree.use_host(tier, ranks=ranks, anchoring=anchoring, **callbacks)
    if options.can_offload_full_kv(args):
        # Repeats the page that no request owns.
        count = max(1, min(pool.pages.count, LINK_SAMPLE_BYTES // pool.page_bytes))
        slots = torch.arange(args.page_size, device=buffers.keys[0].device).repeat(count)
        rate = tree.host.link.measure(tree.host.tier, slots, tree.host.arrivals)
        logger.info("sglang-ext: full KV loads from host memory at %.1f GB/s", rate / 1e9)
    return tree.host


def create_anchoring(compressed_kv: "CompressedKVCache", page_size: int, has_store: bool) -> Anchoring | None:
    """Return how the host stores residuals of compressed KV, if ``lynx`` packs it. None if the host stores full KV whole.

    With a prefix store it does, because a store page needs no other KV.
    """
    quantizers = [getattr(method.packing, "quantizer", None) for method in compressed_kv.methods]
    if has_store or not any(isinstance(each, Lynx) for each in quantizers):
        return None
    (method, *others), packing = compressed_kv.methods, compressed_kv.methods[0].packing
    if others or not method.compressor.keeps_all:
        why = "other methods are served too, or select tokens for lynx: pass --kv-compressor lynx alone"
    else:
        why = unsupported_reason(packing, compressed_kv.buffers, page_size)
    if why:
        logger.info("sglang-ext: full KV is stored in host memory whole, not as a residual of its anchor: %s", why)
        return None
    logger.info("sglang-ext: full KV of packed tokens is stored in host memory as the residual of its anchor")
    return Anchoring(method.name, page_size, packing)


def create_offloaded_full_kv(worker: Worker, tree: "TieredRadixCache") -> OffloadedFullKV:
    """Create the full-KV provider for servers where full KV of running requests in ``tree`` leaves the device."""
    args, compressed_kv = worker.server_args, worker.compressed_kv
    policy = OffloadPolicy(
        weights=sum(each.nbytes for each in worker.model_runner.model.parameters()),
        bytes_per_token=compressed_kv.buffers.bytes_per_slot,
        memory=compressed_kv.allocator.size,
        drafts=options.max_draft_length(args),
        longest=worker.max_verify_tokens - 1,
        requests=worker.max_requests,
        tier=args.kv_full_tier,
    )
    first = policy.initial_decision
    residency = Residency(tree.host, compressed_kv, args.kv_full_tier == "host", max_offloaded=first.requests)
    # The initial value does not matter: it is measured from the first round on.
    admission = VerificationScheduler(iteration_seconds=1.0, memory=residency.load_capacity)
    return OffloadedFullKV(admission, residency, compressed_kv.buffers.bytes_per_slot, first.drafts, policy)
