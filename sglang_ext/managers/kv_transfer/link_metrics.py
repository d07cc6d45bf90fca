"""Prometheus metrics of links, ``sglang_ext:kv_link*``, on the ``/metrics`` page of either server, in any mode.

Threads of links, and threads that open and end rooms, count them. Each rank counts its own links. SGLang's page shows the sum over ranks
for counters, and the maximum over ranks for gauges.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sglang_ext.managers.kv_transfer.wire import RoomShape, Stream

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics import MetricWrapperBase

    from sglang_ext.config.rules import KVServerArgs

Role = Literal["prefill", "decode"]
# An unsplit page is sent in the stream of anchors, without a residual.
StreamLabel = Literal["anchor", "residual", "whole", "aux"]
RefusalReason = Literal["checksum", "bounds", "protocol"]
WaitReason = Literal["credit", "rate", "priority"]

GAUGES = {
    "kv_links": "Links between a prefill and a decode rank whose other end answers. Maximum over ranks.",
    "kv_link_rooms": "Requests whose KV is being transferred over links. Maximum over ranks.",
}
RECONNECTS = "kv_link_reconnects"
# For each counter: its help, its label and the label's values.
COUNTERS: dict[str, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "prefill": {
        "kv_link_sent_bytes": ("Bytes of requests sent, including retransmissions.", "stream", StreamLabel.__args__),
        "kv_link_wait_seconds": (
            "Seconds in which queued data could not be sent: the receiver granted no more, --kv-link-gbps was reached, or another "
            "link had anchors to send.",
            "reason",
            WaitReason.__args__,
        ),
    },
    "decode": {
        "kv_link_received_bytes": ("Bytes of requests received, including retransmissions.", "stream", StreamLabel.__args__),
        "kv_link_refused_frames": (
            "Refused messages: the part had a wrong checksum or did not belong to its request, or the message was invalid.",
            "reason",
            RefusalReason.__args__,
        ),
    },
}


def stream_label(stream: Stream, shape: RoomShape) -> StreamLabel:
    """Return the metrics' label of a stream of a room."""
    return "whole" if stream is Stream.ANCHOR and not shape.residual else stream.value


@dataclass
class LinkMetrics:
    """Metrics of all links of one rank. A new object counts nothing. All methods may be called from any thread.

    Attributes:
        model_name: Their ``model_name`` label.
    """

    model_name: str = ""
    _gauges: "dict[str, MetricWrapperBase]" = field(default_factory=dict)
    _counters: "dict[tuple[str, ...], MetricWrapperBase]" = field(default_factory=dict)

    @classmethod
    def create(cls, args: "KVServerArgs", role: Role, registry: "CollectorRegistry | None" = None) -> "LinkMetrics":
        """Create the metrics of a server; they count if ``--enable-metrics`` is set.

        Args:
            args: Arguments of the server.
            role: Role of the server, which selects the metrics.
            registry: Registry to use; None for the process's own, which can hold them only once.
        """
        made = cls(args.served_model_name or args.model_path)
        if args.enable_metrics:
            made._define(role, registry)
        return made

    def _define(self, role: Role, registry: "CollectorRegistry | None") -> None:
        """Create all series with value 0, because rates need a first value."""
        # Imported after SGLang prepared its multi-process folder.
        from prometheus_client import REGISTRY, Counter, Gauge

        into, label = registry or REGISTRY, "model_name"
        for name, text in GAUGES.items():
            made = Gauge(f"sglang_ext:{name}", text, (label,), multiprocess_mode="max", registry=into)
            self._gauges[name] = made.labels(self.model_name)
        made = Counter(f"sglang_ext:{RECONNECTS}", "Links that broke and were reconnected.", (label,), registry=into)
        self._counters[RECONNECTS,] = made.labels(self.model_name)
        for name, (text, by, values) in COUNTERS[role].items():
            made = Counter(f"sglang_ext:{name}", text, (label, by), registry=into)
            self._counters |= {(name, value): made.labels(self.model_name, value) for value in values}

    def add_links(self, count: int) -> None:
        """Add to the number of connected links; negative to subtract."""
        self._add("kv_links", count)

    def add_rooms(self, count: int) -> None:
        """Add to the number of open rooms; negative to subtract."""
        self._add("kv_link_rooms", count)

    def count_reconnect(self) -> None:
        """Count a reconnected link."""
        self._count(1, RECONNECTS)

    def count_sent(self, size: int, what: StreamLabel) -> None:
        """Count bytes of a part passed to libzmq."""
        self._count(size, "kv_link_sent_bytes", what)

    def count_received(self, size: int, what: StreamLabel) -> None:
        """Count received bytes of a part, whether used or not."""
        self._count(size, "kv_link_received_bytes", what)

    def count_refused(self, reason: RefusalReason) -> None:
        """Count a refused message."""
        self._count(1, "kv_link_refused_frames", reason)

    def count_wait(self, seconds: float, awaited: WaitReason) -> None:
        """Count seconds that a sender waited."""
        self._count(seconds, "kv_link_wait_seconds", awaited)

    def _add(self, name: str, count: int) -> None:
        if name in self._gauges:
            self._gauges[name].inc(count)

    def _count(self, amount: float, *key: str) -> None:
        if key in self._counters:
            self._counters[key].inc(amount)


@dataclass
class WaitTimer:
    """Why a sender waits, and since when. Used by the sender's thread."""

    metrics: LinkMetrics
    _awaited: WaitReason | None = None
    _since: float = 0.0

    def set_wait_reason(self, awaited: WaitReason | None) -> None:
        """Set the reason why the sender waits from now on, None if it does not wait. Count the time since the last call."""
        if awaited is None and self._awaited is None:
            return
        now = time.monotonic()
        if self._awaited is not None:
            self.metrics.count_wait(now - self._since, self._awaited)
        self._awaited, self._since = awaited, now
