"""Allocator of host pages. It records which pages are free, and which have been stored to."""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class PageRun:
    """Consecutive pages in a list of pages.

    Attributes:
        place: Index of the first one in the list.
        first: The first page.
        count: Number of pages.
    """

    place: int
    first: int
    count: int


def runs(pages: torch.Tensor) -> tuple[PageRun, ...]:
    """Return the maximal runs of ``pages`` (int64 [pages], on the host), in the list's order."""
    if not len(pages):
        return ()
    breaks = (pages.diff() != 1).nonzero().flatten() + 1
    ends = [0, *breaks.tolist(), len(pages)]
    return tuple(PageRun(place, int(pages[place]), end - place) for place, end in pairwise(ends))


class HostPageError(ValueError):
    """Pages that a transfer or an owner must not name."""


@dataclass
class HostPages:
    """Allocates pages by number, in as few runs as possible.

    Attributes:
        count: Pages of host memory.
    """

    count: int
    _free: list[range] = field(init=False)
    # Not PyTorch tensors: those cannot be written if inference mode differs between creation and use.
    _owned: np.ndarray = field(init=False)
    _filled: np.ndarray = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._free = [range(self.count)]
        self._owned, self._filled = np.zeros(self.count, bool), np.zeros(self.count, bool)
        self._left = self.count

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return self._left

    def allocate(self, count: int) -> torch.Tensor | None:
        """Allocate ``count`` pages: int64 [count], on the host. None if fewer are free.

        The pages form one run if a free run is long enough. It takes the shortest such run, to keep long runs.

        Raises:
            HostPageError: ``count`` is below 1.
        """
        if count < 1:
            raise HostPageError(f"{count} pages of host memory were requested; request at least 1")
        if count > self._left:
            return None
        taken = []
        while count:
            taken.append(self._take(count))
            count -= len(taken[-1])
        pages = torch.cat([torch.arange(run.start, run.stop) for run in taken])
        self._owned[pages.numpy()] = True
        self._filled[pages.numpy()] = False
        self._left -= len(pages)
        return pages

    def _take(self, count: int) -> range:
        """Take up to ``count`` pages of one free run."""
        long = [run for run in self._free if len(run) >= count]
        best = min(long, key=len) if long else max(self._free, key=len)
        index = self._index(best.start)
        rest = best[count:]
        self._free[index : index + 1] = [rest] if rest else []
        return best[:count]

    def _index(self, page: int) -> int:
        """Index in the list of free runs of a run that starts at ``page``."""
        return bisect_left(self._free, page, key=lambda run: run.start)

    def free(self, pages: torch.Tensor) -> None:
        """Free ``pages`` (int64 [pages], on the host). Transfers in progress may still use them.

        Raises:
            HostPageError: Some are not owned, or are named twice. Nothing is freed then.
        """
        self.check_owned(pages)
        ordered = pages.sort().values
        twice = ordered[1:][ordered.diff() == 0]
        if len(twice):
            raise HostPageError(f"host pages {twice.tolist()[:8]} are freed twice in one call; name each page once")
        self._owned[pages.numpy()] = False
        self._left += len(pages)
        for run in runs(ordered):
            self._put(range(run.first, run.first + run.count))

    def _put(self, run: range) -> None:
        """Add a free run, merged with adjacent free runs."""
        index = self._index(run.start)
        start, stop = index, index
        if start > 0 and self._free[start - 1].stop == run.start:
            start -= 1
        if stop < len(self._free) and self._free[stop].start == run.stop:
            stop += 1
        joined = [*self._free[start:stop], run]
        self._free[start:stop] = [range(min(r.start for r in joined), max(r.stop for r in joined))]

    def check_owned(self, pages: torch.Tensor) -> None:
        """Raise unless all of ``pages`` (int64 [pages], on the host) are owned.

        Raises:
            HostPageError: Names pages that do not exist or are free.
        """
        foreign = pages[(pages < 0) | (pages >= self.count)]
        if len(foreign):
            raise HostPageError(f"host pages {foreign.tolist()[:8]} do not exist; there are pages 0 to {self.count - 1}")
        unowned = pages.numpy()[~self._owned[pages.numpy()]]
        if len(unowned):
            raise HostPageError(f"host pages {unowned.tolist()[:8]} are free; allocate pages before using them, free them once")

    def fill(self, pages: torch.Tensor) -> None:
        """Record that ``pages`` (int64 [pages], on the host, owned) are stored to."""
        self._filled[pages.numpy()] = True

    def check_filled(self, pages: torch.Tensor) -> None:
        """Raise unless all of ``pages`` (int64 [pages], on the host) were stored to since they were allocated.

        Raises:
            HostPageError: Names pages that were not.
        """
        empty = pages.numpy()[~self._filled[pages.numpy()]]
        if len(empty):
            raise HostPageError(f"host pages {empty.tolist()[:8]} were not stored since they were allocated; store, then load them")
