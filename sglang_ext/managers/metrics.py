"""Prometheus metrics, ``sglang_ext:*``, on SGLang's own ``/metrics`` page."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from sglang_ext.config.method_options import offered_methods
from sglang_ext.core import FALLBACK_REASONS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from sglang_ext.config.rules import KVServerArgs
    from sglang_ext.managers.spec_decode.cost_model import RoundTimes
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache

# Help text of each metric; then its label next to the model's name, and the known values of that label, if it has one.
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
    "fallback_tokens": ("Tokens served with full KV, by reason.", "reason", *FALLBACK_REASONS[1:]),
    "copies": ("Creations and refreshes of compressed KV, by compressor.", "compressor"),
    "recomputed_requests": ("Running requests that were computed again, because full KV was lost, or freed without being compressed.",),
}


class MetricSource(Protocol):
    """A feature of the worker (feature.py) that adds metrics to :data:`GAUGES` and :data:`COUNTERS`."""

    gauges: ClassVar[Mapping[str, tuple[str, ...]]]
    counters: ClassVar[Mapping[str, tuple[str, ...]]]


@dataclass
class MetricSet:
    """Gauges and counters with the label ``model_name``, and at most one more. A new set has none, so that all calls do nothing.

    Any thread may call :meth:`count`.
    """

    model_name: str = ""
    _gauges: "dict[str, Gauge]" = field(default_factory=dict)
    _counters: "dict[str, Counter]" = field(default_factory=dict)

    def define(
        self,
        gauges: Mapping[str, tuple[str, ...]],
        counters: Mapping[str, tuple[str, ...]],
        gauge_mode: str,
        registry: "CollectorRegistry | None" = None,
    ) -> None:
        """Define metrics of tables like :data:`GAUGES` and :data:`COUNTERS`, in the process's registry by default.

        The series of all known labels of counters start at 0, because a rate needs a first value. ``gauge_mode``: how SGLang's page combines
        a gauge's values of several processes.
        """
        # Import it after SGLang prepared the folder of its processes.
        from prometheus_client import REGISTRY, Counter, Gauge

        into = registry or REGISTRY
        for name, (text, *label) in gauges.items():
            self._gauges[name] = Gauge(f"sglang_ext:{name}", text, ("model_name", *label), multiprocess_mode=gauge_mode, registry=into)
        for name, (text, *rest) in counters.items():
            label, known = rest[:1], rest[1:]
            self._counters[name] = Counter(f"sglang_ext:{name}", text, ("model_name", *label), registry=into)
            for value in [(each,) for each in known] if label else [()]:
                self._counters[name].labels(self.model_name, *value)

    def count(self, name: str, amount: float, *label: str) -> None:
        """Increase a counter, or change a gauge by ``amount``; no-op if it is not defined."""
        metric = self._counters.get(name) or self._gauges.get(name)
        if metric is not None:
            metric.labels(self.model_name, *label).inc(amount)


@dataclass
class KVMetrics(MetricSet):
    """The metrics of one scheduler process."""

    _accept_length: "Histogram | None" = None
    _last_totals: dict[tuple[str, ...], float] = field(default_factory=dict)

    @classmethod
    def create(cls, args: "KVServerArgs", counts: bool = True, sources: Iterable[MetricSource] = ()) -> "KVMetrics":
        """Define the metrics, if ``--enable-metrics`` is set and this process ``counts``. Otherwise all calls do nothing.

        In mode full only those of ``sources`` are defined.
        """
        made = cls(args.served_model_name or args.model_path)
        if not args.enable_metrics or not counts:
            return made
        compresses = args.kv_mode != "full"
        gauges, counters = (dict(GAUGES), dict(COUNTERS)) if compresses else ({}, {})
        for source in sources:
            gauges.update(source.gauges)
            counters.update(source.counters)
        if compresses:
            counters["copies"] += tuple(offer.public_name for offer in offered_methods(args))
        made.define(gauges, counters, "mostrecent")
        if compresses:
            from prometheus_client import Histogram

            buckets = [*range(1, args.speculative_num_draft_tokens + 1)]
            histogram = Histogram("sglang_ext:accept_length", "Tokens per verification.", ("model_name",), buckets=buckets)
            made._accept_length = histogram.labels(made.model_name)
        return made

    def count_verify(self, num_tokens: int) -> None:
        """Count a verification that gave ``num_tokens`` output tokens, with the bonus token."""
        self.count("verifies", 1)
        self.count("accepted_drafts", num_tokens - 1)
        if self._accept_length is not None:
            self._accept_length.observe(num_tokens)

    def observe_round(self, spent: "RoundTimes") -> None:
        """Report the seconds of a round's parts."""
        parts = {"draft": spent.draft_step, "rest": spent.rest} if spent.num_draft_steps else {"step": spent.plain_step}
        self.observe(("round_seconds", seconds, part) for part, seconds in parts.items() if seconds is not None)

    def observe_pool(self, compressed_kv: "CompressedKVCache", more: Iterable[tuple] = ()) -> None:
        """Report the bytes of compressed KV and of queries, and ``more``, the values of features (``MetricValue`` in feature.py)."""
        if not self._gauges:
            return
        codes, derived = compressed_kv.buffers.codes, compressed_kv.layout.key_derived_data
        values = {
            "compressed_bytes": compressed_kv.held_bytes(),
            # A feature may replace it.
            "codes_alone_tokens": 0,
            "recomputed_requests": compressed_kv.tree_cache.recomputed,
            "query_bytes": compressed_kv.queries.used_bytes,
            "score_bytes": max(method.compressor.held_bytes for method in compressed_kv.methods),
            "key_code_bytes": 0 if codes is None else codes.nbytes,
            "page_extreme_bytes": 0 if derived is None else derived.nbytes,
        }
        totals = {(name,): value for name, value in values.items()}
        totals |= {("copies", method): made for method, made in compressed_kv.num_compressions.items()}
        totals |= {(name, *label): value for name, value, *label in more}
        self.observe((name, value, *label) for (name, *label), value in totals.items())

    def observe(self, values: Iterable[tuple]) -> None:
        """Report values of features (``MetricValue`` in feature.py): the current ones of gauges, the totals of counters."""
        for name, value, *label in values if self._gauges else ():
            if name in self._gauges:
                self._gauges[name].labels(self.model_name, *label).set(value)
            elif value != (before := self._last_totals.get((name, *label), 0)):
                self.count(name, value - before, *label)
                self._last_totals[name, *label] = value
