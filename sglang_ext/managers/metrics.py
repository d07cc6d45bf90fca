"""Prometheus metrics, ``sglang_ext:*``, on SGLang's own ``/metrics`` page."""

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.config.method_options import offers
from sglang_ext.core import FALLBACK_REASONS
from sglang_ext.managers.tier_metrics import LABELS, TierMetrics

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs
    from sglang_ext.managers.offload.verifications import Verifications
    from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews


@dataclass
class KVMetrics:
    """Counters of one scheduler process; all None when metrics are off.

    Attributes:
        drafts: tokens drafted on compressed views.
        verifies: verifications over full KV.
        accepted: drafts that verification accepted.
        accept_length: tokens per verification.
        fallbacks: tokens served with full KV, by reason.
        held_bytes: bytes of KV in compressed slots.
        query_bytes: bytes of the rings in which queries are kept for compressors.
        score_bytes: bytes of scores and networks that compressors hold.
        copies: copies made or renewed, by the method that chose what they keep.
        round_seconds: times of the last round, by part: a draft, the rest, or a step of plain decoding.
        tiers: of full KV in host memory; None without any.
    """

    model_name: str
    drafts: object = None
    verifies: object = None
    accepted: object = None
    accept_length: object = None
    fallbacks: object = None
    held_bytes: object = None
    query_bytes: object = None
    score_bytes: object = None
    copies: object = None
    round_seconds: object = None
    tiers: TierMetrics | None = None
    _copies_told: collections.Counter[str] = field(default_factory=collections.Counter)

    @classmethod
    def create(cls, server_args: "KVServerArgs", counts: bool = True) -> "KVMetrics":
        """Define the metrics when ``--enable-metrics`` asks for them and this process ``counts``.

        prometheus_client must be imported after SGLang prepared its multi-process folder.
        """
        name = server_args.served_model_name or server_args.model_path
        if not (server_args.enable_metrics and counts):
            return cls(name)
        from prometheus_client import Counter, Gauge, Histogram

        buckets = [*range(1, server_args.speculative_num_draft_tokens + 1)]
        made = cls(
            name,
            drafts=Counter("sglang_ext:drafts", "Tokens drafted on compressed KV.", LABELS),
            verifies=Counter("sglang_ext:verifies", "Verifications over full KV.", LABELS),
            accepted=Counter("sglang_ext:accepted_drafts", "Drafts accepted.", LABELS),
            accept_length=Histogram(
                "sglang_ext:accept_length", "Tokens per verification.", LABELS, buckets=buckets
            ),
            fallbacks=Counter(
                "sglang_ext:fallback_tokens",
                "Tokens served with full KV, by reason.",
                (*LABELS, "reason"),
            ),
            held_bytes=Gauge(
                "sglang_ext:compressed_bytes",
                "Bytes of KV in compressed slots.",
                LABELS,
                multiprocess_mode="mostrecent",
            ),
            query_bytes=Gauge(
                "sglang_ext:query_bytes",
                "Bytes of queries kept for compressors, outside the KV pool.",
                LABELS,
                multiprocess_mode="mostrecent",
            ),
            score_bytes=Gauge(
                "sglang_ext:score_bytes",
                "Bytes of predicted scores and of the network that gives them, outside the KV pool.",
                LABELS,
                multiprocess_mode="mostrecent",
            ),
            copies=Counter(
                "sglang_ext:copies", "Compressed copies made or renewed, by compressor.", (*LABELS, "compressor")
            ),
            round_seconds=Gauge(
                "sglang_ext:round_seconds",
                "Seconds on the device in the last round: one draft, the rest with the verification, or a plain step.",
                (*LABELS, "part"),
                multiprocess_mode="mostrecent",
            ),
            tiers=TierMetrics(name) if server_args.kv_host_gb else None,
        )
        made._begin([offer.name for offer in offers(server_args)])
        return made

    def _begin(self, methods: Iterable[str]) -> None:
        """Begin the series of all labels that are known at 0: what asks for a rate needs a first value."""
        for each in (self.drafts, self.verifies, self.accepted, self.accept_length):
            each.labels(self.model_name)
        for reason in FALLBACK_REASONS[1:]:
            self.fallbacks.labels(self.model_name, reason)
        for method in methods:
            self.copies.labels(self.model_name, method)

    def count_drafts(self, drafts: int) -> None:
        """Count a request's tokens drafted on a compressed view."""
        if self.drafts is not None:
            self.drafts.labels(self.model_name).inc(drafts)

    def count_verify(self, answers: int) -> None:
        """Count a verification that gave ``answers`` tokens, its own among them."""
        if self.verifies is not None:
            self.verifies.labels(self.model_name).inc()
            self.accepted.labels(self.model_name).inc(answers - 1)
            self.accept_length.labels(self.model_name).observe(answers)

    def count_fallback(self, reason: int, answers: int) -> None:
        """Count tokens served with full KV; ``reason`` is an index into ``FALLBACK_REASONS``."""
        if self.fallbacks is not None:
            self.fallbacks.labels(self.model_name, FALLBACK_REASONS[reason]).inc(answers)

    def observe_round(self, drafts: int, steps: int, drafting: float, whole: float) -> None:
        """Report a round's seconds: of all its drafts, and of all of it, ``steps`` of plain decoding without any."""
        if self.round_seconds is None:
            return
        parts = {"draft": drafting / drafts, "rest": whole - drafting} if drafts else {"step": whole / steps}
        for part, seconds in parts.items():
            self.round_seconds.labels(self.model_name, part).set(seconds)

    def observe_pool(self, views: "CompressedViews", verifications: "Verifications | None" = None) -> None:
        """Report the bytes in compressed slots, of queries, and what became of full KV in host memory."""
        if self.held_bytes is not None:
            self.held_bytes.labels(self.model_name).set(views.held_bytes())
            self.query_bytes.labels(self.model_name).set(views.queries.taken_bytes)
            self.score_bytes.labels(self.model_name).set(max(method.compressor.held_bytes for method in views.methods))
            for method, made in (views.made - self._copies_told).items():
                self.copies.labels(self.model_name, method).inc(made)
            self._copies_told = views.made.copy()
        if self.tiers is not None:
            self.tiers.observe(views.tree_cache, verifications)
