"""Cache ranks: processes that hold keys, in mode lossy also values, and select tokens for steps (``--kv-cache-ranks``)."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.config import options, selection_options
from sglang_ext.managers.cache_rank.client import MISSES, CacheRankClient
from sglang_ext.managers.cache_rank.launch import start_cache_ranks
from sglang_ext.managers.feature import Feature, MetricValue, Worker
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.policy import max_tail
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.managers.memory_plan import MemoryPlanner
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteOnlyFullKV(FullKVProvider):
    """Full-KV provider of one scheduler process with cache ranks, in mode lossy.

    Attributes:
        freed_full_kv: Frees the full KV that the ranks hold.
    """

    freed_full_kv: RemoteOnlyKV

    def on_round_start(self, reqs: "list[Req]", drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """Free full KV that the ranks hold, at the start of a round."""
        self.freed_full_kv.free_full_kv(reqs)

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which a request's row points to its own full KV."""
        return self.freed_full_kv.full_kv_start(row, protected)


class CacheRanks(Feature):
    """Starts the cache ranks, and frees full KV that they hold. Does nothing if the server's method uses no ranks."""

    gauges = {
        "cache_ranks_ready": ("Cache ranks that accept requests.",),
        "cache_rank_tokens": ("Tokens whose keys are stored in blocks at cache ranks.",),
        "rank_alone_tokens": ("Tokens of running requests with remote-only KV: only cache ranks hold their full KV.",),
        "selection_steps": ("Steps between two selections of a request: more than requested if cache ranks on GPUs cannot keep up.",),
        "choosing_seconds": ("Seconds that a cache rank took to select the tokens of the last pack of layers; of the slowest rank.",),
    }
    counters = {
        "cache_rank_starts": ("Processes of cache ranks that were started.",),
        "missed_selections": ("Steps, and rounds on full KV, without a selection in time, by reason.", "reason", *MISSES),
        "selections": ("Selections of cache ranks that were applied to compressed KV, each of a request in all layers.",),
        "selection_wait_seconds": ("Seconds that steps waited for selected tokens.",),
        "selection_rows": ("Rows of K and V received from cache ranks, each of a token, layer and KV head.",),
    }
    _client: CacheRankClient | None = None

    def planned_bytes(self, planner: "MemoryPlanner", requests: int, tokens: int, rings: int) -> dict[str, int]:
        """The exchange buffers. If ranks send rows, also records of compressed KV: a number per token of the pool, layer and KV head."""
        if not planner.on_gpu:
            return {}
        records = 4 * tokens * planner.model.layers * planner.model.kv_heads if selection_options.has_remote_values(self.args) else 0
        return {"exchange_buffers": selection_options.exchange_buffer_bytes(self.args) * selection_options.ranks(self.args) + records}

    def selector(self, worker: Worker, method: CompressionMethod) -> CacheRankClient | None:
        """Start the cache ranks, and create their client.

        Raises:
            ExchangeBufferError: A GPU cannot read this GPU's memory.
            OptionError: Rows of this model cannot be sent.
        """
        if not selection_options.ranks(self.args):
            return None
        table, query_heads = worker.req_to_token_pool.req_to_token, worker.memory.model.query_heads
        self._client = start_cache_ranks(
            self.args, method, table, worker.buffers, worker.queries, query_heads, worker.methods.rotary, worker.max_requests
        )
        return self._client

    def full_kv_provider(self, worker: Worker, tree_cache: "TieredRadixCache") -> RemoteOnlyFullKV | None:
        """Create the provider that frees full KV in mode lossy. None if full KV stays."""
        compressed_kv = worker.compressed_kv
        stays = options.why_full_kv_stays(self.args) is not None or self.args.disaggregation_mode != "null"
        if stays or compressed_kv.row_sender is None:
            return None
        method, most = compressed_kv.methods[0], selection_options.max_selected_tokens(self.args)
        takes = f"slots of {most} tokens" if most else f"about {method.share:.2f} of the full KV's slots"
        logger.info("sglang-ext: full KV is freed once a cache rank has it; compressed KV takes %s, plus slots for the newest tokens", takes)
        tail = max_tail(method, compressed_kv.allocator.page_size, worker.memory.model.context)
        return RemoteOnlyFullKV(RemoteOnlyKV(tree_cache, compressed_kv, compressed_kv.row_sender, worker.method_of, tail))

    def metrics(self, worker: Worker) -> Iterator[MetricValue]:
        """Values of the ranks; none if no ranks were started."""
        if self._client is not None:
            freed_full_kv = worker.compressed_kv.tree_cache.freed_full_kv
            yield from rank_values(self._client, freed_full_kv if isinstance(freed_full_kv, RemoteOnlyKV) else None)


def rank_values(client: CacheRankClient, remote_only: RemoteOnlyKV | None) -> Iterator[MetricValue]:
    """Values of the metrics of cache ranks. ``remote_only``: the full KV that was freed; None if full KV stays."""
    yield "cache_ranks_ready", client.ready
    yield "cache_rank_tokens", client.held_tokens
    yield "choosing_seconds", client.slowest
    yield "selection_steps", client.interval
    yield "cache_rank_starts", client.starts
    yield "selections", client.taken
    yield "selection_wait_seconds", client.waited
    yield "selection_rows", client.rows
    if remote_only is not None:
        yield "rank_alone_tokens", remote_only.tokens
    for reason, count in client.missed.items():
        yield "missed_selections", count, reason
