"""Reads counters of a device without blocking the host."""

import torch

from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import COUNTERS


class GpuCounters:
    """Returns how much the counters of a device have grown, as far as known without waiting.

    Args:
        counters: int64 [counters], on the device, in the order of :data:`COUNTERS`.
    """

    def __init__(self, counters: torch.Tensor):
        self._counters, self._seen, self._coming = counters, dict.fromkeys(COUNTERS, 0), None
        self._read = torch.zeros(len(counters), dtype=torch.int64, pin_memory=counters.is_cuda)

    def look(self) -> dict[str, int]:
        """Return the growth since the last call, by name. Counts that the device has not delivered yet are in a later call."""
        if self._counters.is_cuda:
            if self._coming is not None and not self._coming.query():
                return dict.fromkeys(COUNTERS, 0)
            found = None if self._coming is None else self._read.tolist()
            self._read.copy_(self._counters, non_blocking=True)
            self._coming = torch.cuda.current_stream().record_event()
            if found is None:
                return dict.fromkeys(COUNTERS, 0)
        else:
            found = self._counters.tolist()
        before, self._seen = self._seen, dict(zip(COUNTERS, found))
        return {name: self._seen[name] - before[name] for name in COUNTERS}
