"""Base of the cache-rank clients: the connections to the rank processes, and the selection of a rank for a new request."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases
from sglang_ext.managers.cache_rank.rank_link import RankUnavailable, RankLink
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.remote_selector import FreeBlocks
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


class LeasedRequest(Protocol):
    """A request at a rank: its lease, the manager of that lease, and whether the rank's process has ended."""

    leases: KeyLeases
    lease: KeyLease

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys has ended."""


class CacheRankClient:
    """Common part of the clients of ranks on CPUs (cpu_client.py) and on GPUs (on_gpu/gpu_client.py).

    Args:
        links: Connections to the ranks.
        buffers: Layers of SGLang's KV pool.

    Attributes:
        missed: Number of missing selections, by reason.
        taken: Number of applied selections; one covers all layers of a request.
        waited: Seconds that steps have waited.
        rows: Received and applied rows of K and V, each of one layer and KV head.
    """

    def __init__(self, links: Sequence[RankLink], buffers: KVBuffers):
        self.links, self.buffers = tuple(links), buffers
        self.missed: Counter[str] = Counter()
        self.taken, self.waited, self.rows = 0, 0.0, 0
        self._leases: dict[RankLink, KeyLeases] = {}

    @property
    def ready(self) -> int:
        """Number of ranks that accept selection requests."""
        return sum(link.ready for link in self.links)

    @property
    def starts(self) -> int:
        """Number of processes started."""
        return sum(link.starts for link in self.links)

    @property
    def processes(self) -> tuple[int, int]:
        """See :attr:`RowSender.processes`."""
        return self.ready, self.starts

    @property
    def slowest(self) -> float:
        """Duration of the last selection, of a pack of layers or a step, at the slowest rank, in seconds."""
        return max((link.seconds for link in self.links), default=0.0)

    @property
    def held_tokens(self) -> int:
        """Token capacity of the allocated blocks at all ranks."""
        return BLOCK * sum(link.settings.attach.blocks - self._free_blocks(link) for link in self.links if link.ready)

    @property
    def _known(self) -> "Mapping[int, LeasedRequest]":
        """Requests that were handed over, by request row."""
        raise NotImplementedError

    def _current(self, link: RankLink) -> KeyLeases | None:
        """Leases at the running process, or None if it has none."""
        leases = self._leases.get(link)
        return None if leases is None or leases.epoch != link.epoch else leases

    def _free_blocks(self, link: RankLink) -> int:
        leases = self._current(link)
        return link.settings.attach.blocks if leases is None else leases.free_blocks

    def _free_lanes(self, link: RankLink) -> int:
        leases = self._current(link)
        return link.settings.attach.shape.lanes if leases is None else leases.free_lanes

    def free_blocks(self) -> FreeBlocks:
        """See :meth:`RowSender.free_blocks`."""
        ready = [link for link in self.links if link.ready]
        return FreeBlocks([*map(self._free_blocks, ready)], BLOCK, [*map(self._free_lanes, ready)])

    def has_request(self, row: int) -> bool:
        """See :meth:`RowSender.has_request`."""
        request = self._known.get(row)
        return request is not None and not request.has_lost_rank

    def _select_rank(self) -> KeyLeases:
        """Return the leases of the rank with the most free blocks, preferring ranks with a free lane.

        Raises:
            RankUnavailable: No rank is ready.
        """
        ready = [link for link in self.links if link.ready]
        if not ready:
            raise RankUnavailable(self.links[0].down_reason)
        for link in ready:
            if self._current(link) is None:
                self._leases[link] = KeyLeases(link, self.buffers)
        return max((self._leases[link] for link in ready), key=lambda each: (each.free_lanes > 0, each.free_blocks))

    def end(self) -> None:
        """End all rank processes."""
        for link in self.links:
            link.end()
