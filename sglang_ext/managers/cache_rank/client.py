"""The cache ranks of an inference rank: their processes, and which of them a request begins at."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases
from sglang_ext.managers.cache_rank.rank_link import RankUnavailable, RankLink
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.remote_selector import FreeBlocks
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


class LeasedRequest(Protocol):
    """A request at a rank: who gave out its lease, that, and whether the process that had its keys is gone."""

    leases: KeyLeases
    lease: KeyLease

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys is gone."""


class CacheRankClient:
    """What is the same wherever ranks choose: on a CPU (choices.py), or on GPUs of their own (on_gpu/gpu_client.py).

    Args:
        links: to the ranks.
        buffers: the layers of SGLang's pool.

    Attributes:
        missed: choices that were not there, by reason.
        taken: choices that copies were led to, of a request in all layers.
        waited: seconds that steps have waited.
        rows: of one layer and KV head each, whose K and V came and were taken.
    """

    def __init__(self, links: Sequence[RankLink], buffers: KVBuffers):
        self.links, self.buffers = tuple(links), buffers
        self.missed: Counter[str] = Counter()
        self.taken, self.waited, self.rows = 0, 0.0, 0
        self._leases: dict[RankLink, KeyLeases] = {}

    @property
    def ready(self) -> int:
        """Ranks that can be asked."""
        return sum(link.ready for link in self.links)

    @property
    def starts(self) -> int:
        """Processes that were started."""
        return sum(link.starts for link in self.links)

    @property
    def processes(self) -> tuple[int, int]:
        """As :attr:`RowSender.processes`."""
        return self.ready, self.starts

    @property
    def slowest(self) -> float:
        """Seconds that the last question took, a pack of layers or a step, at the rank where it took longest."""
        return max((link.seconds for link in self.links), default=0.0)

    @property
    def held_tokens(self) -> int:
        """Tokens for which blocks are taken, at all ranks."""
        return BLOCK * sum(link.settings.attach.blocks - self._free_blocks(link) for link in self.links if link.ready)

    @property
    def _known(self) -> "Mapping[int, LeasedRequest]":
        """Requests that were handed over, by row."""
        raise NotImplementedError

    def _current(self, link: RankLink) -> KeyLeases | None:
        """The leases at the process that runs; None where nobody has any."""
        leases = self._leases.get(link)
        return None if leases is None or leases.epoch != link.epoch else leases

    def _free_blocks(self, link: RankLink) -> int:
        leases = self._current(link)
        return link.settings.attach.blocks if leases is None else leases.free_blocks

    def _free_lanes(self, link: RankLink) -> int:
        leases = self._current(link)
        return link.settings.attach.shape.lanes if leases is None else leases.free_lanes

    def free_blocks(self) -> FreeBlocks:
        """As :meth:`RowSender.free_blocks`."""
        ready = [link for link in self.links if link.ready]
        return FreeBlocks([*map(self._free_blocks, ready)], BLOCK, [*map(self._free_lanes, ready)])

    def has_request(self, row: int) -> bool:
        """As :meth:`RowSender.has_request`."""
        request = self._known.get(row)
        return request is not None and not request.has_lost_rank

    def _select_rank(self) -> KeyLeases:
        """Of the rank with the most room, of those that take another request.

        Raises:
            RankUnavailable: none is ready.
        """
        ready = [link for link in self.links if link.ready]
        if not ready:
            raise RankUnavailable(self.links[0].down_reason)
        for link in ready:
            if self._current(link) is None:
                self._leases[link] = KeyLeases(link, self.buffers)
        return max((self._leases[link] for link in ready), key=lambda each: (each.free_lanes > 0, each.free_blocks))

    def end(self) -> None:
        """End all ranks."""
        for link in self.links:
            link.end()
