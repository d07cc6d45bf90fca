"""Prometheus metrics of links, and the timeline of transfers.

The metrics ``sglang_ext:kv_link*`` are on the ``/metrics`` page of either server, in any mode.

Threads of links, and threads that open and end rooms, count them. Each rank counts its own links. SGLang's page shows the sum over ranks
for counters, and the maximum over ranks for gauges.

The timeline has timestamps of KV transfers and of drafting and verification, per request, in a file for benchmarks. Its times are of
``time.monotonic``, which all processes of a machine share. A line is one event in JSON (benchmarks/sglang_ext_bench/timelines.py).
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from sglang_ext.device import Mark
from sglang_ext.managers.kv_transfer.wire import RoomShape, Stream
from sglang_ext.managers.metrics import MetricSet

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from sglang_ext.config.rules import KVServerArgs

LINK_GAUGES = {
    "kv_links": ("Links between a prefill and a decode rank whose other end answers. Maximum over ranks.",),
    "kv_link_rooms": ("Requests whose KV is being transferred over links. Maximum over ranks.",),
}
RECONNECTS = {"kv_link_reconnects": ("Links that broke and were reconnected.",)}
# An unsplit page is sent in the stream of anchors, without a residual.
STREAM_LABELS = ("anchor", "residual", "whole", "aux")
# By role of the server.
LINK_COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "prefill": RECONNECTS | {
        "kv_link_sent_bytes": ("Bytes of requests sent, including retransmissions.", "stream", *STREAM_LABELS),
        "kv_link_wait_seconds": (
            "Seconds in which queued data could not be sent: the receiver granted no more, --kv-link-gbps was reached, or another "
            "link had anchors to send.",
            *("reason", "credit", "rate", "priority"),
        ),
    },
    "decode": RECONNECTS | {
        "kv_link_received_bytes": ("Bytes of requests received, including retransmissions.", "stream", *STREAM_LABELS),
        "kv_link_refused_frames": (
            "Refused messages: the part had a wrong checksum or did not belong to its request, or the message was invalid.",
            *("reason", "checksum", "bounds", "protocol"),
        ),
    },
}  # fmt: skip


def stream_label(stream: Stream, shape: RoomShape) -> str:
    """Return the metrics' label of a stream of a room."""
    return "whole" if stream is Stream.ANCHOR and not shape.residual else stream.value


def link_metrics(args: "KVServerArgs", role: str, registry: "CollectorRegistry | None" = None) -> MetricSet:
    """Define the metrics of a server's links, in the process's registry by default, if ``--enable-metrics`` is set."""
    metrics = MetricSet(args.served_model_name or args.model_path)
    if args.enable_metrics:
        metrics.define(LINK_GAUGES, LINK_COUNTERS[role], "max", registry)
        for name in LINK_GAUGES:
            # Creates the series.
            metrics.count(name, 0)
    return metrics


@dataclass
class WaitTimer:
    """Counts why a sender waits, and how long. Used by the sender's thread."""

    metrics: MetricSet
    _awaited: str | None = None
    _since: float = 0.0

    def set_wait_reason(self, awaited: str | None) -> None:
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
