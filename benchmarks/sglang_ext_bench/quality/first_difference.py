"""Where answers first leave full KV's."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.comparing.compare import first_difference


@dataclass(frozen=True)
class FirstDifferences:
    """First tokens in which a server's answers differ from full KV's, counted from 0.

    Attributes:
        indices: of each answer; None where it is identical.
        tokens: of the longest answer.
    """

    indices: tuple[int | None, ...]
    tokens: int

    @property
    def identical(self) -> int:
        """Answers that do not differ."""
        return self.indices.count(None)

    @property
    def median(self) -> float:
        """Median index; an identical answer counts as its length, so the true one may be above."""
        return statistics.median(self.tokens if index is None else index for index in self.indices)

    @property
    def histogram(self) -> dict[str, int]:
        """Answers by the index of their first difference, in ranges that double."""
        bounds, found = [0, 1], {}
        while bounds[-1] < self.tokens:
            bounds.append(2 * bounds[-1])
        for low, high in zip(bounds, bounds[1:]):
            found[f"{low}-{high - 1}"] = sum(index is not None and low <= index < high for index in self.indices)
        return found | {"identical": self.identical}


def first_differences(full: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> FirstDifferences:
    """Compare the token ids of two servers' answers, prompt by prompt (as many of both)."""
    pairs = list(zip(full, other, strict=True))
    return FirstDifferences(
        tuple(first_difference(*pair) for pair in pairs), max((len(one) for one, _ in pairs), default=0)
    )
