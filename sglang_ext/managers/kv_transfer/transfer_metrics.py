"""Prometheus metrics of links, and the timeline of transfers.

The metrics ``sglang_ext:kv_link*`` are on the ``/metrics`` page of either server, in any mode.

Threads of links, and threads that open and end rooms, count them. Each rank counts its own links. SGLang's page shows the sum over ranks
for counters, and the maximum over ranks for gauges.

The timeline has timestamps of KV transfers and of drafting and verification, per request, in a file for benchmarks. Its times are of
``time.monotonic``, which all processes of a machine share. A line is one event in JSON (benchmarks/sglang_ext_bench/timelines.py).
"""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from sglang_ext.device import Mark
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
PlainName = Literal["kv_links", "kv_link_rooms", "kv_link_reconnects"]
CounterName = Literal["kv_link_sent_bytes", "kv_link_received_bytes", "kv_link_refused_frames", "kv_link_wait_seconds"]

LINK_GAUGES: dict[PlainName, str] = {
    "kv_links": "Links between a prefill and a decode rank whose other end answers. Maximum over ranks.",
    "kv_link_rooms": "Requests whose KV is being transferred over links. Maximum over ranks.",
}
RECONNECTS = "kv_link_reconnects"
# For each counter: its help, its label and the label's values.
LINK_COUNTERS: dict[Role, dict[CounterName, tuple[str, str, tuple[str, ...]]]] = {
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
    """Metrics of all links of one rank. A new object counts nothing. All methods may be called from any thread."""

    _plain: "dict[str, MetricWrapperBase]" = field(default_factory=dict)
    _labelled: "dict[tuple[str, str], MetricWrapperBase]" = field(default_factory=dict)

    @classmethod
    def create(cls, args: "KVServerArgs", role: Role, registry: "CollectorRegistry | None" = None) -> "LinkMetrics":
        """Create the metrics of a server in ``role``; they count if ``--enable-metrics`` is set. Default: the process's registry.

        All series are created with value 0, because rates need a first value.
        """
        made = cls()
        if not args.enable_metrics:
            return made
        # Imported after SGLang prepared its multi-process folder.
        from prometheus_client import REGISTRY, Counter, Gauge

        into, label, model_name = registry or REGISTRY, "model_name", args.served_model_name or args.model_path
        for name, text in LINK_GAUGES.items():
            gauge = Gauge(f"sglang_ext:{name}", text, (label,), multiprocess_mode="max", registry=into)
            made._plain[name] = gauge.labels(model_name)
        reconnects = Counter(f"sglang_ext:{RECONNECTS}", "Links that broke and were reconnected.", (label,), registry=into)
        made._plain[RECONNECTS] = reconnects.labels(model_name)
        for name, (text, by, values) in LINK_COUNTERS[role].items():
            counter = Counter(f"sglang_ext:{name}", text, (label, by), registry=into)
            made._labelled |= {(name, value): counter.labels(model_name, value) for value in values}
        return made

    def add(self, name: PlainName, count: int) -> None:
        """Add to a metric without labels; negative to subtract from a gauge."""
        if name in self._plain:
            self._plain[name].inc(count)

    def count(self, name: CounterName, amount: float, label: StreamLabel | WaitReason | RefusalReason) -> None:
        """Add to a counter, under the value of its label."""
        if (name, label) in self._labelled:
            self._labelled[name, label].inc(amount)


@dataclass
class WaitTimer:
    """Counts why a sender waits, and how long. Used by the sender's thread."""

    metrics: LinkMetrics
    _awaited: WaitReason | None = None
    _since: float = 0.0

    def set_wait_reason(self, awaited: WaitReason | None) -> None:
        """Set the reason why the sender waits from now on, None if it does not wait. Count the time since the last call."""
        if awaited is None and self._awaited is None:
            return
        now = time.monotonic()
        if self._awaited is not None:
            self.metrics.count("kv_link_wait_seconds", now - self._since, self._awaited)
        self._awaited, self._since = awaited, now


TransferEventKind = Literal["sending", "computed", "encoded", "expected", "anchor", "complete", "drafted", "verified", "answered"]


class TransferTimeline:
    """Appends events to a file, which several processes may share. Converts marks of ``device`` to times. Any thread may call it."""

    def __init__(self, file: str | Path, device: torch.device = torch.device("cpu")) -> None:
        self._file = Path(file).open("ab", buffering=0)
        self._lock = threading.Lock()
        self._zero = Mark.now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._began = time.monotonic()

    def at(self, mark: Mark) -> float:
        """Return the time in seconds of a mark that the device has reached."""
        return self._began + self._zero.until(mark)

    def add_event(
        self, room: int, kind: TransferEventKind, at: float | None = None, number: int = 0, of: int = 0, early: bool = False
    ) -> None:
        """Append an event; ``at`` defaults to the current time."""
        event = {"room": room, "kind": kind, "at": time.monotonic() if at is None else at, "number": number, "of": of, "early": early}
        with self._lock:
            self._file.write(msgspec.json.encode(event) + b"\n")
