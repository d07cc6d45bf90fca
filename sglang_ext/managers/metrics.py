"""Prometheus metrics, ``sglang_ext:*``, on SGLang's own ``/metrics`` page."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.config.method_options import offered_methods
from sglang_ext.core import FALLBACK_REASONS
from sglang_ext.managers.cache_rank.client import MISSES, CacheRankClient
from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV

if TYPE_CHECKING:
    from prometheus_client.metrics import MetricWrapperBase

    from sglang_ext.arguments import KVServerArgs
    from sglang_ext.managers.kv_offload.offloaded_full_kv import OffloadedFullKV
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

# Help text of each metric, and its label next to the model's name.
GAUGES = {
    "compressed_bytes": ("Bytes of KV in compressed slots.",),
    "codes_alone_tokens": ("Tokens of quantized-only KV: their full KV was freed.",),
    "query_bytes": ("Bytes of queries kept for compressors, outside the KV pool.",),
    "score_bytes": ("Bytes of predicted scores and of the network that gives them, outside the KV pool.",),
    "key_code_bytes": ("Bytes of keys in few bits by which tokens are selected, outside the KV pool.",),
    "page_extreme_bytes": ("Bytes of smallest and largest numbers of pages of keys, by which pages are selected; outside the KV pool.",),
    "round_seconds": ("Seconds on the device in the last round: one draft, the rest with the verification, or a plain step.", "part"),
    "draft_length": ("Mean draft steps of a round, since the last log line of drafting; 0 if no round drafted.",),
    "draft_acceptance_rate": ("Accepted tokens over verified draft tokens, since the last log line of drafting.",),
    "draft_accept_length": ("Mean tokens of a verification, since the last log line of drafting.",),
    "draft_gain": ("Measured speed of rounds with drafts over that of plain steps, since the last log line of drafting; 0 if not known.",),
    "selection_interval": ("With --kv-select-every auto and spade: steps between two selections; 0 if the server does not choose it.",),
    "draft_predicted_gain": ("With --kv-draft-length auto: predicted speed of the best draft length over that of plain steps.",),
}
COUNTERS = {
    "drafts": ("Tokens drafted on compressed KV.",),
    "verifies": ("Verifications over full KV.",),
    "accepted_drafts": ("Drafts accepted.",),
    "fallback_tokens": ("Tokens served with full KV, by reason.", "reason"),
    "copies": ("Creations and refreshes of compressed KV, by compressor.", "compressor"),
    "recomputed_requests": ("Running requests that were computed again, because full KV was lost, or freed without being compressed.",),
}
# Metrics of full KV in host memory.
HOST_GAUGES = {
    "host_bytes": ("Bytes of full KV in host memory.",),
    "host_staging_bytes": ("Bytes on the device through which full KV goes to host memory and back.",),
    "offloaded_bytes": ("Bytes of full KV of running requests that are not on the device.",),
    "host_load_bytes_per_second": ("Bandwidth of loads from host memory, newer ones counting more.",),
    "link_reserved": ("Share of a round's time in which the link to host memory is reserved for loads.",),
    "reload_room_reserved": ("Share of the device memory for loads that is reserved in this round.",),
}
HOST_COUNTERS = {
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
# Metrics of selections by cache ranks.
RANK_GAUGES = {
    "cache_ranks_ready": ("Cache ranks that accept requests.",),
    "cache_rank_tokens": ("Tokens whose keys are stored in blocks at cache ranks.",),
    "rank_alone_tokens": ("Tokens of running requests with remote-only KV: only cache ranks hold their full KV.",),
    "selection_steps": ("Steps between two selections of a request: more than requested if cache ranks on GPUs cannot keep up.",),
    "choosing_seconds": ("Seconds that a cache rank took to select the tokens of the last pack of layers; of the slowest rank.",),
}
RANK_COUNTERS = {
    "cache_rank_starts": ("Processes of cache ranks that were started.",),
    "missed_selections": ("Steps, and rounds on full KV, without a selection in time, by reason.", "reason"),
    "selections": ("Selections of cache ranks that were applied to compressed KV, each of a request in all layers.",),
    "selection_wait_seconds": ("Seconds that steps waited for selected tokens.",),
    "selection_rows": ("Rows of K and V received from cache ranks, each of a token, layer and KV head.",),
}


@dataclass
class KVMetrics:
    """The metrics of one scheduler process. Totals are passed as they are; counters are increased by their growth.

    Attributes:
        model_name: Label of all metrics.
        host: Whether to report full KV in host memory.
        ranks: Whether to report cache ranks.
    """

    model_name: str
    host: bool = False
    ranks: bool = False
    _gauges: "dict[str, MetricWrapperBase]" = field(default_factory=dict)
    _counters: "dict[str, MetricWrapperBase]" = field(default_factory=dict)
    _accept_length: "MetricWrapperBase | None" = None
    _last_totals: dict[tuple[str, ...], float] = field(default_factory=dict)

    @classmethod
    def create(cls, server_args: "KVServerArgs", counts: bool = True) -> "KVMetrics":
        """Define the metrics, if ``--enable-metrics`` is set and this process ``counts``. Otherwise all calls do nothing.

        prometheus_client must be imported after SGLang prepared its multi-process folder.
        """
        made = cls(server_args.served_model_name or server_args.model_path)
        if server_args.enable_metrics and counts:
            made._define(server_args)
        return made

    def _define(self, args: "KVServerArgs") -> None:
        """Define all metrics. The series of all known labels start at 0, because a rate needs a first value."""
        from prometheus_client import Counter, Gauge, Histogram

        self.host, self.ranks = bool(args.kv_host_gb), bool(args.kv_cache_ranks)
        gauges = GAUGES | (HOST_GAUGES if self.host else {}) | (RANK_GAUGES if self.ranks else {})
        counters = COUNTERS | (HOST_COUNTERS if self.host else {}) | (RANK_COUNTERS if self.ranks else {})
        for name, (text, *label) in gauges.items():
            self._gauges[name] = Gauge(f"sglang_ext:{name}", text, ("model_name", *label), multiprocess_mode="mostrecent")
        known = {"fallback_tokens": FALLBACK_REASONS[1:], "copies": [offer.public_name for offer in offered_methods(args)], "missed_selections": MISSES}
        for name, (text, *label) in counters.items():
            self._counters[name] = Counter(f"sglang_ext:{name}", text, ("model_name", *label))
            for value in [(each,) for each in known[name]] if label else [()]:
                self._counters[name].labels(self.model_name, *value)
        buckets = [*range(1, args.speculative_num_draft_tokens + 1)]
        self._accept_length = Histogram("sglang_ext:accept_length", "Tokens per verification.", ("model_name",), buckets=buckets)
        self._accept_length.labels(self.model_name)

    def _count(self, name: str, amount: float, *label: str) -> None:
        if name in self._counters:
            self._counters[name].labels(self.model_name, *label).inc(amount)

    def _set_total(self, name: str, value: float, *label: str) -> None:
        """Set a gauge to ``value``, or increase a counter to the total ``value``."""
        before = self._last_totals.get((name, *label), 0)
        if name in self._gauges:
            self._gauges[name].labels(self.model_name, *label).set(value)
        elif value != before:
            self._count(name, value - before, *label)
        self._last_totals[name, *label] = value

    def count_drafts(self, drafts: int) -> None:
        """Count a request's draft tokens on compressed KV."""
        self._count("drafts", drafts)

    def count_verify(self, num_tokens: int) -> None:
        """Count a verification that gave ``num_tokens`` output tokens, with the bonus token."""
        self._count("verifies", 1)
        self._count("accepted_drafts", num_tokens - 1)
        if self._accept_length is not None:
            self._accept_length.labels(self.model_name).observe(num_tokens)

    def count_fallback(self, reason: int, num_tokens: int) -> None:
        """Count output tokens served with full KV; ``reason`` is an index into ``FALLBACK_REASONS``."""
        self._count("fallback_tokens", num_tokens, FALLBACK_REASONS[reason])

    def observe_round(self, drafts: int, steps: int, drafting: float, whole: float) -> None:
        """Report the seconds of a round: of all its draft steps, and of the whole round. Without drafts it has ``steps`` plain steps."""
        if not self._gauges:
            return
        parts = {"draft": drafting / drafts, "rest": whole - drafting} if drafts else {"step": whole / steps}
        for part, seconds in parts.items():
            self._set_total("round_seconds", seconds, part)

    def observe_drafting(self, figures: Mapping[str, float | None]) -> None:
        """Set the gauges of drafting, by name. A figure that is None becomes 0."""
        for name, value in figures.items() if self._gauges else ():
            self._set_total(name, value or 0.0)

    def observe_pool(self, compressed_kv: "CompressedKVCache", verifications: "OffloadedFullKV | None" = None) -> None:
        """Report the bytes of compressed KV and of queries, the state of full KV in host memory, and cache ranks."""
        if not self._gauges:
            return
        self._set_total("compressed_bytes", compressed_kv.held_bytes())
        freed_full_kv = compressed_kv.tree_cache.freed_full_kv
        self._set_total("codes_alone_tokens", freed_full_kv.tokens if isinstance(freed_full_kv, QuantizedOnlyKV) else 0)
        self._set_total("recomputed_requests", compressed_kv.tree_cache.recomputed)
        self._set_total("query_bytes", compressed_kv.queries.used_bytes)
        self._set_total("score_bytes", max(method.compressor.held_bytes for method in compressed_kv.methods))
        self._set_total("key_code_bytes", 0 if compressed_kv.buffers.codes is None else compressed_kv.buffers.codes.nbytes)
        self._set_total("page_extreme_bytes", compressed_kv.layout.extremes.nbytes if isinstance(compressed_kv.layout, PagePointerLayout) else 0)
        for method, made in compressed_kv.num_compressions.items():
            self._set_total("copies", made, method)
        for name, value in _host_values(compressed_kv.tree_cache, verifications) if self.host else ():
            self._set_total(name, value)
        ranks = compressed_kv.async_selector
        for name, value, *label in _rank_values(ranks, freed_full_kv) if self.ranks and isinstance(ranks, CacheRankClient) else ():
            self._set_total(name, value, *label)


def _host_values(tree: "TieredRadixCache", verifications: "OffloadedFullKV | None") -> Iterator[tuple[str, float]]:
    host, reloads = tree.host, tree.reloads
    yield "host_bytes", host.bytes
    yield "host_staging_bytes", host.tier.workspace_bytes
    yield "host_load_bytes_per_second", reloads.link.bandwidth or 0.0
    yield "host_stored_bytes", host.stored_bytes
    yield "host_loaded_bytes", reloads.loaded_bytes
    yield "host_restored_bytes", reloads.restored_bytes
    yield "host_loads", reloads.link.loads
    yield "host_load_seconds", reloads.link.seconds
    yield "host_failed_pages", reloads.failed_pages
    if verifications is None:
        return
    residency, scheduler = verifications.residency, verifications.scheduler
    yield "offloaded_bytes", verifications.bytes_per_token * residency.offloaded_tokens
    yield "link_reserved", scheduler.occupancy.link
    yield "reload_room_reserved", scheduler.occupancy.memory
    yield "reservations", scheduler.admitted
    yield "waits", scheduler.refused
    yield "late_verifications", scheduler.num_postponed
    yield "slack_rounds", verifications.waited_rounds


def _rank_values(client: CacheRankClient, freed: FreedFullKV | None) -> Iterator[tuple]:
    yield "cache_ranks_ready", client.ready
    yield "cache_rank_tokens", client.held_tokens
    yield "choosing_seconds", client.slowest
    yield "selection_steps", client.interval
    yield "cache_rank_starts", client.starts
    yield "selections", client.taken
    yield "selection_wait_seconds", client.waited
    yield "selection_rows", client.rows
    if isinstance(freed, RemoteOnlyKV):
        yield "rank_alone_tokens", freed.tokens
    for reason, count in client.missed.items():
        yield "missed_selections", count, reason
