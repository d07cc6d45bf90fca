"""How many drafts the full cache accepted, by draft position."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sglang_ext_bench.comparing.generation import VerifyStats


@dataclass(frozen=True)
class Acceptance:
    """Verifies summed over requests; position j (1-based) stands at index j - 1.

    ``offered[j-1]`` counts verifies that offered at least j drafts, ``accepted[j-1]`` those that
    accepted at least j.
    """

    verifies: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of the verifies with a j-th draft that accepted it; ends where none had one."""
        return tuple(a / o for a, o in zip(self.accepted, self.offered, strict=True) if o)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify: the accepted drafts and the one the full cache adds."""
        return 1 + sum(self.accepted) / self.verifies if self.verifies else None

    @property
    def rate(self) -> float | None:
        """g = accepted drafts / offered drafts."""
        return sum(self.accepted) / sum(self.offered) if sum(self.offered) else None


def add_up(stats: Iterable[VerifyStats], draft_length: int) -> Acceptance:
    """Sum the counters of requests."""
    curves = [acceptance(each, draft_length) for each in stats]
    return Acceptance(
        verifies=sum(curve.verifies for curve in curves),
        offered=_sum_columns([curve.offered for curve in curves]),
        accepted=_sum_columns([curve.accepted for curve in curves]),
    )


def acceptance(stats: VerifyStats, draft_length: int) -> Acceptance:
    """Counters by draft position of one request."""
    accepted = at_least(stats.accepted_histogram)
    if stats.offered_histogram is not None:
        offered = at_least(stats.offered_histogram)
    else:
        offered = assumed_offers(stats.verifies, stats.drafts, draft_length)
    pairs = list(zip_longest(offered, accepted, fillvalue=0))
    # The assumption may fall short of what was accepted, which was surely offered.
    return Acceptance(
        stats.verifies, tuple(max(pair) for pair in pairs), tuple(pair[1] for pair in pairs)
    )


def at_least(histogram: Sequence[int]) -> tuple[int, ...]:
    """From counts of exactly 0, 1, 2... to counts of at least 1, 2..."""
    return tuple(sum(histogram[k:]) for k in range(1, len(histogram)))


def assumed_offers(verifies: int, drafts: int, draft_length: int) -> tuple[int, ...]:
    """Verifies that offered at least j drafts, where the server gives only the sum.

    Assumes that as many verifies as possible offered ``draft_length``: only the last ones of a
    request, near the end of its output, offer fewer.
    """
    if not draft_length:
        return ()
    full, rest = divmod(min(drafts, verifies * draft_length), draft_length)
    return tuple(full + (j <= rest) for j in range(1, draft_length + 1))


def _sum_columns(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))
