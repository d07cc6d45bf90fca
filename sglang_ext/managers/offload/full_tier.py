"""Where full KV lies besides the device: builds what ``--kv-host-gb`` and ``--kv-full-tier`` ask for."""

import logging
from typing import TYPE_CHECKING

import torch

from sglang_ext.config import options
from sglang_ext.managers.offload.admission import Admission
from sglang_ext.managers.offload.policy import OffloadPolicy
from sglang_ext.managers.offload.verifications import Verifications
from sglang_ext.mem_cache.compressors.lynx import Lynx
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.residuals import ResidualPages, refusal
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.prefix_cache.anchors import Anchoring
from sglang_ext.mem_cache.prefix_cache.reloads import Faults
from sglang_ext.mem_cache.prefix_cache.residency import Residency

if TYPE_CHECKING:
    from sglang_ext.managers.worker import KVWorker
    from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)

# Loaded once at start, to know how fast that goes.
LINK_SAMPLE_BYTES = 256 << 20


def use_host_memory(worker: "KVWorker", tree: "TieredRadixCache") -> None:
    """Give the prefix tree its host tier; before anything else runs.

    Raises:
        OptionError: the host lacks the memory.
        TransferError: what was stored to it does not come back.
    """
    args, buffers = worker.server_args, worker.views.buffers
    anchoring = anchoring_of(worker.views, args.page_size)
    pool = HostPool.create(buffers, args.page_size, int(args.kv_host_gb * 1e9), rooms=anchoring is not None)
    residuals = None if anchoring is None else ResidualPages(buffers, worker.views.methods[0].packing, args.page_size)
    corrupt = args.kv_bench_corrupt_loads
    faults = None if corrupt is None else Faults(corrupt, loads=worker.ranks.rank)
    scores = worker.methods.scores
    told = {} if scores is None else {"about_to_write": scores.forget}
    if worker.beside_keys is not None:
        # Before rows may lead there; the next forward waits for it.
        told["arrived"] = worker.beside_keys.write
    tree.use_host(HostTier(buffers, pool, residuals=residuals), worker.ranks, faults, anchoring=anchoring, **told)
    if options.offloads(args):
        # The page that no request owns, again and again.
        count = max(1, min(pool.pages.count, LINK_SAMPLE_BYTES // pool.page_bytes))
        slots = torch.arange(args.page_size, device=worker.views.token_table.device).repeat(count)
        rate = tree.reloads.link.measure(tree.host.tier, slots, tree.host.arrivals)
        logger.info("sglang-ext: full KV comes back from host memory at %.1f GB/s", rate / 1e9)


def anchoring_of(views: "CompressedViews", page_size: int) -> Anchoring | None:
    """How the host holds residuals of copies alone, where ``lynx`` packs them; None where it holds full KV whole."""
    quantizers = [getattr(method.packing, "quantizer", None) for method in views.methods]
    if not any(isinstance(each, Lynx) for each in quantizers):
        return None
    (method, *others), packing = views.methods, views.methods[0].packing
    if others or not method.compressor.keeps_all:
        why = "other methods are served beside lynx, or choose tokens for it: pass --kv-compressor lynx alone"
    else:
        why = refusal(packing, views.buffers, page_size)
    if why:
        logger.info("sglang-ext: full KV lies in host memory whole, not as a residual of its anchor: %s", why)
        return None
    logger.info("sglang-ext: full KV of packed tokens lies in host memory as the residual of its anchor")
    return Anchoring(method.name, page_size, packing.block_tokens, packing.block_slots, packing.sinks)


def offloading(worker: "KVWorker", tree: "TieredRadixCache") -> tuple[Verifications, OffloadPolicy]:
    """Whose turn it is to verify where full KV of running requests in ``tree`` leaves the device, and how much of it does."""
    args, views = worker.server_args, worker.views
    policy = _policy(worker)
    first = policy.unknown
    residency = Residency(tree, views.token_table, args.kv_full_tier == "host", most=first.requests)
    # What a first round takes does not matter; it is measured from then on.
    admission = Admission(iteration_seconds=1.0, memory=residency.room)
    return Verifications(admission, residency, views.buffers.bytes_per_slot, first.drafts), policy


def _policy(worker: "KVWorker") -> OffloadPolicy:
    args, views = worker.server_args, worker.views
    rows = views.rows - 1
    return OffloadPolicy(
        weights=sum(each.nbytes for each in worker.model_runner.model.parameters()),
        bytes_per_token=views.buffers.bytes_per_slot,
        memory=views.allocator.size,
        drafts=options.longest_draft(args),
        longest=worker.stride - 1,
        requests=min(rows, args.max_running_requests or rows),
        tier=args.kv_full_tier,
    )
