"""A transfer cut into pieces that fit a buffer, and into runs of consecutive pages, which one copy can move."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Run:
    """Consecutive pages in a list of pages.

    Attributes:
        place: of the first of them in the list.
        first: the first page.
        count: how many pages.
    """

    place: int
    first: int
    count: int


def runs(pages: torch.Tensor) -> tuple[Run, ...]:
    """The runs of ``pages`` (int64 [pages], on the host), as long as they get, in the list's order."""
    if not len(pages):
        return ()
    breaks = (pages.diff() != 1).nonzero().flatten() + 1
    ends = [0, *breaks.tolist(), len(pages)]
    return tuple(Run(place, int(pages[place]), end - place) for place, end in pairwise(ends))


@dataclass(frozen=True)
class Piece:
    """What of a transfer goes through a buffer at once.

    Attributes:
        buffers: which of the device's buffers, keys of all layers before values.
        tokens: which of the transfer's tokens.
        runs: the runs of these tokens' pages, counted in tokens.
    """

    buffers: range
    tokens: slice
    runs: tuple[Run, ...]

    def part(self, half: torch.Tensor) -> torch.Tensor:
        """The part of a buffer, [rows, words], that it takes: [buffers, tokens, words]."""
        tokens = self.tokens.stop - self.tokens.start
        return half[: len(self.buffers) * tokens].view(len(self.buffers), tokens, -1)


def pieces(buffers: int, pages: torch.Tensor, page_size: int, room: int) -> Iterator[Piece]:
    """Cut a transfer of ``pages`` (int64 [pages]) of so many buffers into pieces of at most ``room`` pages each."""
    span = min(len(pages), room)
    group = room // span
    spans = []
    for first in range(0, len(pages), span):
        part = pages[first : first + span]
        of_tokens = tuple(Run(r.place * page_size, r.first * page_size, r.count * page_size) for r in runs(part))
        spans.append((slice(first * page_size, (first + len(part)) * page_size), of_tokens))
    for first in range(0, buffers, group):
        for tokens, of_tokens in spans:
            yield Piece(range(first, min(first + group, buffers)), tokens, of_tokens)
