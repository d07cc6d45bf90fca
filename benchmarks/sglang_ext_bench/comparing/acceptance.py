"""Counts accepted draft tokens by draft position."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sglang_ext_bench.client import VerifyStats


@dataclass(frozen=True)
class Acceptance:
    """Counters of verifications by draft position, summed over requests.

    The counters of draft position j (from 1) are at index j - 1.

    Attributes:
        verifies: Verifications.
        offered: Verifications with at least j draft tokens.
        accepted: Verifications that accepted at least j draft tokens.
    """

    verifies: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def by_position(self) -> tuple[float, ...]:
        """Acceptance rate of each draft position, up to the last one that was drafted."""
        return tuple(a / o for a, o in zip(self.accepted, self.offered, strict=True) if o)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens of a verification, the bonus token included. None without verifications."""
        return 1 + sum(self.accepted) / self.verifies if self.verifies else None

    @property
    def rate(self) -> float | None:
        """Acceptance rate: accepted draft tokens over draft tokens. None without draft tokens."""
        return sum(self.accepted) / sum(self.offered) if sum(self.offered) else None


def add_up(stats: Iterable[VerifyStats], draft_length: int) -> Acceptance:
    """Sum the counters of several requests."""
    curves = [acceptance(each, draft_length) for each in stats]
    return Acceptance(
        verifies=sum(curve.verifies for curve in curves),
        offered=_sum_columns([curve.offered for curve in curves]),
        accepted=_sum_columns([curve.accepted for curve in curves]),
    )


def acceptance(stats: VerifyStats, draft_length: int) -> Acceptance:
    """Count the verifications of one request by draft position.

    Args:
        stats: The counters that the server sent.
        draft_length: Draft tokens of a full round. It is used if the server does not report how many tokens each round drafted.
    """
    accepted = at_least(stats.accepted_histogram)
    if stats.offered_histogram is not None:
        offered = at_least(stats.offered_histogram)
    else:
        offered = assumed_offers(stats.verifies, stats.drafts, draft_length)
    pairs = list(zip_longest(offered, accepted, fillvalue=0))
    # The assumed number of draft tokens can be too low, but accepted tokens were drafted.
    return Acceptance(
        stats.verifies, tuple(max(pair) for pair in pairs), tuple(pair[1] for pair in pairs)
    )


def at_least(histogram: Sequence[int]) -> tuple[int, ...]:
    """Turn counts of exactly 0, 1, 2... into counts of at least 1, 2..."""
    return tuple(sum(histogram[k:]) for k in range(1, len(histogram)))


def assumed_offers(verifies: int, drafts: int, draft_length: int) -> tuple[int, ...]:
    """Estimate the verifications with at least j draft tokens, from the sum of all draft tokens.

    Assumes that as many rounds as possible drafted ``draft_length`` tokens. Only the last rounds of a request draft fewer.
    """
    if not draft_length:
        return ()
    full, rest = divmod(min(drafts, verifies * draft_length), draft_length)
    return tuple(full + (j <= rest) for j in range(1, draft_length + 1))


def _sum_columns(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))
