"""Verified decoding beside stock's own noise, in dtypes that round differently for each batch shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.comparing.compare import Comparison
from sglang_ext_bench.comparing.tolerance import Difference, differences

RATE_LIMIT = 1.5
"""Verified outputs may differ at most this many times as often as the controls' do."""
MARGIN_PERCENTILE = 99


@dataclass(frozen=True)
class DifferenceRate:
    """Outputs that differ from stock's, among those that were answered."""

    differing: int
    outputs: int

    @property
    def rate(self) -> float:
        """Share that differs."""
        return self.differing / self.outputs if self.outputs else 0.0

    def __str__(self) -> str:
        return f"{self.differing} of {self.outputs} ({self.rate:.1%})"


@dataclass(frozen=True)
class NoiseVerdict:
    """All verified outputs of a run against all its controls'.

    ``by_setting`` has the rate of each verified setting, by label; the verdict is on their sum.
    ``margin_limit`` is the 99th percentile of stock's top-2 margins at the controls' first
    differences (None: no control differs), ``above`` the verified differences whose margin lies
    above it or is unknown.
    """

    verified: DifferenceRate
    control: DifferenceRate
    by_setting: tuple[tuple[str, DifferenceRate], ...]
    margin_limit: float | None
    largest_margin: float | None
    above: tuple[Difference, ...]

    @property
    def ratio(self) -> float | None:
        """Verified rate over control rate; None where no control differs."""
        return self.verified.rate / self.control.rate if self.control.differing else None

    @property
    def rate_holds(self) -> bool:
        """Whether verified outputs differ seldom enough."""
        return self.verified.differing == 0 or (self.ratio is not None and self.ratio <= RATE_LIMIT)

    @property
    def margins_hold(self) -> bool:
        """Whether verified outputs differ only where stock's own do."""
        return not self.above

    @property
    def holds(self) -> bool:
        """Whether both do."""
        return self.rate_holds and self.margins_hold

    def lines(self) -> list[str]:
        """The numbers and two verdicts."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return [
            *(f"outputs that differ, {label}: {rate}" for label, rate in self.by_setting),
            f"outputs that differ: verified {self.verified}, control {self.control}; "
            f"ratio {ratio}, limit {RATE_LIMIT}: {_verdict(self.rate_holds)}",
            f"top-2 margin at the first difference: verified at most {_number(self.largest_margin)}, "
            f"{MARGIN_PERCENTILE}th percentile of control {_number(self.margin_limit)}: "
            f"{_verdict(self.margins_hold)}",
            *(f"above it: {each}" for each in self.above),
        ]


def noise_verdict(comparisons: Sequence[Comparison]) -> NoiseVerdict | None:
    """Judge the verified comparisons by the controls, pooled; None where one of the two is missing."""
    control = [each for each in comparisons if each.setting.is_control]
    verified = [each for each in comparisons if not each.setting.is_control]
    if not control or not verified:
        return None
    known = [each.margin for each in differences(control) if each.margin is not None]
    limit = percentile(known, MARGIN_PERCENTILE)
    found = differences(verified)
    return NoiseVerdict(
        verified=difference_rate(verified),
        control=difference_rate(control),
        by_setting=tuple((each.setting.label, difference_rate([each])) for each in verified),
        margin_limit=limit,
        largest_margin=max((each.margin for each in found if each.margin is not None), default=None),
        above=tuple(each for each in found if each.margin is None or limit is None or each.margin > limit),
    )


def difference_rate(comparisons: Sequence[Comparison]) -> DifferenceRate:
    """Count over comparisons; prompts with an error have no output and count nowhere."""
    answered = [result for each in comparisons for result in each.results if result.error is None]
    return DifferenceRate(sum(not result.identical for result in answered), len(answered))


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that ``percent`` % of the values do not exceed (nearest rank); None for none."""
    if not values:
        return None
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
