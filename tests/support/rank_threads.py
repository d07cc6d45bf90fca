"""Tensor-parallel ranks as threads of a test."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from sglang_ext.core import TPRanks


class Meeting:
    """What ranks that are threads tell each other. A rank that is alone for 20 s fails."""

    def __init__(self, count: int) -> None:
        self.count, self.said = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=20)

    def group(self, rank: int) -> SimpleNamespace:
        """Stands for SGLang's group of ranks."""
        return SimpleNamespace(
            world_size=self.count,
            rank_in_group=rank,
            all_gather_object=lambda value: self.gather(rank, value),
            broadcast_object=lambda value, src: self.gather(rank, value)[src],
        )

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self.said[rank] = value
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


def on_ranks(count: int, work: Callable[[TPRanks], Any]) -> list[Any]:
    """What ``work(ranks)`` gives on each of ``count`` ranks that run side by side."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(TPRanks.from_group(meeting.group(rank))), range(count)))
