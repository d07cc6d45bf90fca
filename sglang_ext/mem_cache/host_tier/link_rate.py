"""How fast KV moves between host and device, as measured."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.host_tier.arrivals import Arrivals
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import TransferError


@dataclass
class LinkRate:
    """Bandwidth in one direction over the transfers that ended, newer ones counting more.

    Attributes:
        decay: what is left of a transfer's weight when the next one ends.
        loads, seconds: that were counted, and how long they took.
    """

    decay: float = 0.9
    loads: int = 0
    seconds: float = 0.0
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None until a transfer was counted."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    def add(self, size: int, seconds: float) -> None:
        """Count a load of ``size`` bytes that took so long."""
        self._bytes = self.decay * self._bytes + size
        self._seconds = self.decay * self._seconds + seconds
        self.loads += 1
        self.seconds += seconds

    def measure(self, tier: HostTier, slots: torch.Tensor, arrivals: Arrivals) -> float:
        """Count one load of what lies in ``slots``, waiting for it, and give the bandwidth.

        Stores it first, and loads it once more before, since a first load waits for compilers. For the start of a
        server: the more slots, the less the launches count.

        Args:
            tier: a tier with room for so many pages.
            slots: int64 [pages * page_size], on the device, that nobody writes meanwhile; they may repeat.
            arrivals: tell when all ranks are done.

        Raises:
            TransferError: the host has too few free pages, or the loads did not bring back what was stored.
        """
        pages = tier.pool.pages.allocate(max(1, len(slots) // tier.pool.page_size))
        if pages is None:
            raise TransferError(
                f"{len(slots)} tokens do not fit in the {tier.pool.pages.free_pages} free pages of host memory; measure with "
                "fewer slots, or raise --kv-host-gb"
            )
        try:
            for transfer in (tier.store(slots, pages), tier.load(pages, slots), last := tier.load(pages, slots)):
                arrivals.wait(transfer)
        finally:
            tier.pool.pages.free(pages)
        seconds, failed = arrivals.outcome(last)
        if failed:
            raise TransferError(
                f"host pages {failed[:8]} came back changed; the link or the memory is broken: do not serve from it"
            )
        self.add(last.size, seconds)
        return self.bandwidth
