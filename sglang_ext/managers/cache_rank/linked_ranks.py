"""The cache ranks of an inference rank: their processes, and which of them a request begins at."""

from collections import Counter
from collections.abc import Sequence

from sglang_ext.managers.cache_rank.leases import KeyLeases
from sglang_ext.managers.cache_rank.link import RankDown, RankLink
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


class LinkedRanks:
    """What is the same wherever ranks choose: on a CPU (choices.py), or on GPUs of their own (on_gpu/rank_steps.py).

    Args:
        links: to the ranks.
        buffers: the layers of SGLang's pool.

    Attributes:
        missed: choices that were not there, by reason.
        waited: seconds that steps have waited.
        rows: of one layer and KV head each, whose K and V came and were taken.
    """

    def __init__(self, links: Sequence[RankLink], buffers: KVBuffers):
        self.links, self.buffers = tuple(links), buffers
        self.missed: Counter[str] = Counter()
        self.waited, self.rows = 0.0, 0
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
    def slowest(self) -> float:
        """Seconds that the last question took, a pack of layers or a step, at the rank where it took longest."""
        return max((link.seconds for link in self.links), default=0.0)

    @property
    def held_tokens(self) -> int:
        """Tokens for which blocks are taken, at all ranks."""
        return BLOCK * sum(link.settings.attach.blocks - self._free_blocks(link) for link in self.links if link.ready)

    def _free_blocks(self, link: RankLink) -> int:
        leases = self._leases.get(link)
        return link.settings.attach.blocks if leases is None or leases.epoch != link.epoch else leases.free_blocks

    def _roomiest(self) -> KeyLeases:
        """Of the rank with the most room.

        Raises:
            RankDown: none is ready.
        """
        ready = [link for link in self.links if link.ready]
        if not ready:
            raise RankDown(self.links[0].why)
        for link in ready:
            if link not in self._leases or self._leases[link].epoch != link.epoch:
                self._leases[link] = KeyLeases(link, self.buffers)
        return max((self._leases[link] for link in ready), key=lambda each: each.free_blocks)

    def end(self) -> None:
        """End all ranks."""
        for link in self.links:
            link.end()
