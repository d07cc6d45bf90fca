"""Prometheus metrics of full KV in host memory, on SGLang's own ``/metrics`` page."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_ext.managers.offload.verifications import Verifications
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

LABELS = ("model_name",)
GAUGES = {
    "host_bytes": "Bytes of full KV in host memory.",
    "host_staging_bytes": "Bytes on the device through which full KV goes to host memory and back.",
    "offloaded_bytes": "Bytes of full KV of running requests that are not on the device.",
    "host_load_bytes_per_second": "Bandwidth of loads from host memory, newer ones counting more.",
    "link_reserved": "Share of a round's time in which the link to host memory is reserved for loads.",
    "reload_room_reserved": "Share of the room for loads on the device that is reserved in this round.",
}
COUNTERS = {
    "host_stored_bytes": "Bytes of full KV stored to host memory.",
    "host_loaded_bytes": "Bytes of full KV loaded from host memory.",
    "host_loads": "Loads of full KV from host memory that ended.",
    "host_load_seconds": "Seconds that these loads took; their growth is the share of time in which the link is in use.",
    "host_failed_pages": "Pages of full KV that came back changed, and are computed again.",
    "recomputed_requests": "Running requests whose full KV came back changed, and that were computed again.",
    "reservations": "Verifications for which link time and room were reserved.",
    "waits": "Rounds in which a request found no time or no room for its next verification.",
    "late_verifications": "Rounds by which verifications were put off as their full KV was not there.",
    "slack_rounds": "Rounds by which full KV was there before its verification.",
}


@dataclass
class TierMetrics:
    """What became of full KV; totals are told as they are, and counted by how much they grew.

    Attributes:
        model_name: their label.
    """

    model_name: str
    _told: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self._gauges = {
            name: Gauge(f"sglang_ext:{name}", text, LABELS, multiprocess_mode="mostrecent") for name, text in GAUGES.items()
        }
        self._counters = {name: Counter(f"sglang_ext:{name}", text, LABELS) for name, text in COUNTERS.items()}
        for counter in self._counters.values():
            # Begins at 0, not with the first that there is to count.
            counter.labels(self.model_name)

    def observe(self, tree: "TieredRadixCache", verifications: "Verifications | None") -> None:
        """Report what is new."""
        for name, value in _values(tree, verifications):
            if value == self._told.get(name, 0):
                continue
            if name in self._gauges:
                self._gauges[name].labels(self.model_name).set(value)
            else:
                self._counters[name].labels(self.model_name).inc(value - self._told.get(name, 0))
            self._told[name] = value


def _values(tree: "TieredRadixCache", verifications: "Verifications | None") -> Iterator[tuple[str, float]]:
    host, reloads = tree.host, tree.reloads
    yield "host_bytes", host.bytes
    yield "host_staging_bytes", host.tier.workspace_bytes
    yield "host_load_bytes_per_second", reloads.link.bandwidth or 0.0
    yield "host_stored_bytes", host.stored_bytes
    yield "host_loaded_bytes", reloads.loaded_bytes
    yield "host_loads", reloads.link.loads
    yield "host_load_seconds", reloads.link.seconds
    yield "host_failed_pages", reloads.failed_pages
    if verifications is None:
        return
    residency, admission = verifications.residency, verifications.admission
    yield "offloaded_bytes", verifications.bytes_per_token * residency.offloaded_tokens
    yield "link_reserved", admission.occupancy.link
    yield "reload_room_reserved", admission.occupancy.memory
    yield "recomputed_requests", residency.recomputed
    yield "reservations", admission.admitted
    yield "waits", admission.refused
    yield "late_verifications", admission.slips
    yield "slack_rounds", verifications.slack
