"""Prometheus metrics of links, ``sglang_ext:kv_link*``, on the ``/metrics`` page of either server, in any mode.

They are counted where it happens, by the threads of links and those that open and end rooms. Each rank counts its own links: of
counters SGLang's page tells the sum over ranks, of what is there now the most that one of them has.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sglang_ext.managers.kv_transfer.wire import RoomShape, Stream

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics import MetricWrapperBase

    from sglang_ext.arguments import KVServerArgs

Role = Literal["prefill", "decode"]
# A page that is not split travels in the stream of anchors, without a residual.
StreamLabel = Literal["anchor", "residual", "whole", "aux"]
RefusalReason = Literal["checksum", "bounds", "protocol"]
WaitReason = Literal["credit", "rate", "priority"]

GAUGES = {
    "kv_links": "Links between a prefill and a decode rank on which the other end answers; of the rank with the most.",
    "kv_link_rooms": "Requests whose KV is on its way over links; of the rank with the most.",
}
RECONNECTS = "kv_link_reconnects"
# Each with its help, its label and what that may be.
COUNTERS: dict[str, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "prefill": {
        "kv_link_sent_bytes": ("Bytes of requests that were sent, again where they had to be.", "stream", StreamLabel.__args__),
        "kv_link_wait_seconds": (
            "Seconds in which something was to be sent and could not: the receiver granted no more, --kv-link-gbps was reached, or another "
            "link had anchors to send.",
            "reason",
            WaitReason.__args__,
        ),
    },
    "decode": {
        "kv_link_received_bytes": ("Bytes of requests that came, again where they had to.", "stream", StreamLabel.__args__),
        "kv_link_refused_frames": (
            "Messages that were not taken: their part had a wrong checksum, was none of its request, or they could not be followed.",
            "reason",
            RefusalReason.__args__,
        ),
    },
}


def stream_label(stream: Stream, shape: RoomShape) -> StreamLabel:
    """What metrics call a stream of such a room."""
    return "whole" if stream is Stream.ANCHOR and not shape.residual else stream.value


@dataclass
class LinkMetrics:
    """Of all links of one rank; as it is made, it counts nothing. All methods may be called from any thread.

    Attributes:
        model_name: their label.
    """

    model_name: str = ""
    _gauges: "dict[str, MetricWrapperBase]" = field(default_factory=dict)
    _counters: "dict[tuple[str, ...], MetricWrapperBase]" = field(default_factory=dict)

    @classmethod
    def create(cls, args: "KVServerArgs", role: Role, registry: "CollectorRegistry | None" = None) -> "LinkMetrics":
        """Those of a server of that role, where ``--enable-metrics`` asks for them.

        Args:
            args: of the server.
            role: which says what is counted.
            registry: that takes them; None for the process's own, which takes them once.
        """
        made = cls(args.served_model_name or args.model_path)
        if args.enable_metrics:
            made._define(role, registry)
        return made

    def _define(self, role: Role, registry: "CollectorRegistry | None") -> None:
        """Begin all series at 0: what asks for a rate needs a first value."""
        # Imported after SGLang prepared its multi-process folder.
        from prometheus_client import REGISTRY, Counter, Gauge

        into, label = registry or REGISTRY, "model_name"
        for name, text in GAUGES.items():
            made = Gauge(f"sglang_ext:{name}", text, (label,), multiprocess_mode="max", registry=into)
            self._gauges[name] = made.labels(self.model_name)
        made = Counter(f"sglang_ext:{RECONNECTS}", "Links that broke and were connected again.", (label,), registry=into)
        self._counters[RECONNECTS,] = made.labels(self.model_name)
        for name, (text, by, values) in COUNTERS[role].items():
            made = Counter(f"sglang_ext:{name}", text, (label, by), registry=into)
            self._counters |= {(name, value): made.labels(self.model_name, value) for value in values}

    def add_links(self, count: int) -> None:
        """So many links more have an end that answers; fewer, where it is negative."""
        self._add("kv_links", count)

    def add_rooms(self, count: int) -> None:
        """So many rooms more are open; fewer, where it is negative."""
        self._add("kv_link_rooms", count)

    def count_reconnect(self) -> None:
        """A link is there again."""
        self._count(1, RECONNECTS)

    def count_sent(self, size: int, what: StreamLabel) -> None:
        """Bytes of a part went to libzmq."""
        self._count(size, "kv_link_sent_bytes", what)

    def count_received(self, size: int, what: StreamLabel) -> None:
        """Bytes of a part came, whatever becomes of them."""
        self._count(size, "kv_link_received_bytes", what)

    def count_refused(self, reason: RefusalReason) -> None:
        """A message was not taken."""
        self._count(1, "kv_link_refused_frames", reason)

    def count_wait(self, seconds: float, awaited: WaitReason) -> None:
        """A sender waited."""
        self._count(seconds, "kv_link_wait_seconds", awaited)

    def _add(self, name: str, count: int) -> None:
        if name in self._gauges:
            self._gauges[name].inc(count)

    def _count(self, amount: float, *key: str) -> None:
        if key in self._counters:
            self._counters[key].inc(amount)


@dataclass
class WaitTimer:
    """What one sender waits for, and since when; of its thread."""

    metrics: LinkMetrics
    _awaited: WaitReason | None = None
    _since: float = 0.0

    def set_wait_reason(self, awaited: WaitReason | None) -> None:
        """From now on it waits for that, or for nothing; what it waited so far is counted."""
        if awaited is None and self._awaited is None:
            return
        now = time.monotonic()
        if self._awaited is not None:
            self.metrics.count_wait(now - self._since, self._awaited)
        self._awaited, self._since = awaited, now
