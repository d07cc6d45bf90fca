"""Creates the full-KV tiers requested with ``--kv-host-gb`` and ``--kv-full-tier``."""

import logging
from typing import TYPE_CHECKING

import torch

from sglang_ext.config import options
from sglang_ext.managers.kv_offload.offloaded_full_kv import OffloadedFullKV
from sglang_ext.managers.kv_offload.policy import OffloadPolicy
from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext.mem_cache.compressors.lynx import Lynx
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.residuals import ResidualPages, unsupported_reason
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.prefix_cache.anchors import Anchoring
from sglang_ext.mem_cache.prefix_cache.reloads import FaultInjector
from sglang_ext.mem_cache.prefix_cache.residency import Residency

if TYPE_CHECKING:
    from sglang_ext.managers.worker import KVWorker
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)

# Loaded once at start, to measure the link.
LINK_SAMPLE_BYTES = 256 << 20


def attach_host_tier(worker: "KVWorker", tree: "TieredRadixCache") -> None:
    """Attach the host tier to the prefix tree. Called before any forward.

    Raises:
        OptionError: The host has too little memory.
        TransferError: The KV loaded back differs from the stored KV.
    """
    args, buffers = worker.server_args, worker.compressed_kv.buffers
    anchoring = create_anchoring(worker.compressed_kv, args.page_size)
    pool = HostPool.create(buffers, args.page_size, int(args.kv_host_gb * 1e9), frames=anchoring is not None)
    residuals = None if anchoring is None else ResidualPages(buffers, worker.compressed_kv.methods[0].packing, args.page_size)
    corrupt = args.kv_bench_corrupt_loads
    faults = None if corrupt is None else FaultInjector(corrupt, loads=worker.ranks.rank)
    scores = worker.methods.scores
    told = {} if scores is None else {"on_load_start": scores.forget}
    if worker.key_derived_data is not None:
        # Writes the sidecar before rows may point to the slots. The next forward waits for it.
        told["on_load_done"] = worker.key_derived_data.write
    tree.use_host(HostTier(buffers, pool, residuals=residuals), worker.ranks, faults, anchoring=anchoring, **told)
    if options.can_offload_full_kv(args):
        # Repeats the page that no request owns.
        count = max(1, min(pool.pages.count, LINK_SAMPLE_BYTES // pool.page_bytes))
        slots = torch.arange(args.page_size, device=worker.compressed_kv.token_table.device).repeat(count)
        rate = tree.reloads.link.measure(tree.host.tier, slots, tree.host.arrivals)
        logger.info("sglang-ext: full KV loads from host memory at %.1f GB/s", rate / 1e9)


def create_anchoring(compressed_kv: "CompressedKVCache", page_size: int) -> Anchoring | None:
    """Return how the host stores residuals of compressed KV, if ``lynx`` packs it. None if the host stores full KV whole."""
    quantizers = [getattr(method.packing, "quantizer", None) for method in compressed_kv.methods]
    if not any(isinstance(each, Lynx) for each in quantizers):
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
    return Anchoring(method.name, page_size, packing.block_tokens, packing.block_slots, packing.sinks)


def create_offloaded_full_kv(worker: "KVWorker", tree: "TieredRadixCache") -> tuple[OffloadedFullKV, OffloadPolicy]:
    """Create the full-KV provider and the policy for servers where full KV of running requests in ``tree`` leaves the device."""
    args, compressed_kv = worker.server_args, worker.compressed_kv
    policy = _policy(worker)
    first = policy.initial_decision
    residency = Residency(tree, compressed_kv.token_table, args.kv_full_tier == "host", max_offloaded=first.requests)
    # The initial value does not matter: it is measured from the first round on.
    admission = VerificationScheduler(iteration_seconds=1.0, memory=residency.load_capacity)
    return OffloadedFullKV(admission, residency, compressed_kv.buffers.bytes_per_slot, first.drafts), policy


def _policy(worker: "KVWorker") -> OffloadPolicy:
    args, compressed_kv = worker.server_args, worker.compressed_kv
    rows = compressed_kv.rows - 1
    return OffloadPolicy(
        weights=sum(each.nbytes for each in worker.model_runner.model.parameters()),
        bytes_per_token=compressed_kv.buffers.bytes_per_slot,
        memory=compressed_kv.allocator.size,
        drafts=options.max_draft_length(args),
        longest=worker.max_verify_tokens - 1,
        requests=min(rows, args.max_running_requests or rows),
        tier=args.kv_full_tier,
    )
