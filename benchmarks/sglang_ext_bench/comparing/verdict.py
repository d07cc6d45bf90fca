"""Decides whether an identity run passes.

Every error fails a run. In float32 each different output fails it too, unless stock's top-2 margin is below a tolerance, and then at
most 0.1 % of the outputs may differ. Other dtypes round differently for each batch shape. There, all verified outputs are compared with
the controls, which measure how much stock's own outputs vary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext_bench.comparing.compare import Comparison, PromptResult

TOLERANCE_FACTOR = 10.0
"""A measured tolerance is the largest log-probability difference of the controls times this factor."""
SHARE_LIMIT = 0.001
"""Largest share of a run's outputs that may be tolerated."""
RATE_LIMIT = 1.5
"""Verified outputs may differ from stock's at most this many times as often as the controls' outputs."""
MARGIN_PERCENTILE = 99
"""Percentile of the controls' margins that limits the margins of verified outputs."""


@dataclass(frozen=True)
class Rules:
    """The rules of a run.

    Attributes:
        dtype: Value of ``--dtype``.
        margin_tolerance: A different output in float32 is tolerated if stock's top-2 margin is below this value.
        judges_control: Differences between two stock servers fail the run. Otherwise the controls only measure stock's variation.
    """

    dtype: str
    margin_tolerance: float = 0.0
    judges_control: bool = False

    def judges(self, comparison: Comparison) -> bool:
        """Whether different outputs of this comparison can fail the run."""
        return self.judges_control or not comparison.setting.is_control

    def tolerates(self, result: PromptResult) -> bool:
        """Whether the outputs differ in float32 with a margin below the tolerance."""
        return self._differs(result) and result.margin is not None and result.margin < self.margin_tolerance

    def fails(self, comparison: Comparison, result: PromptResult) -> bool:
        """Whether this prompt alone fails the run: by an error, or by a float32 difference that is not tolerated."""
        if result.error is not None:
            return True
        return self.judges(comparison) and self._differs(result) and not self.tolerates(result)

    def _differs(self, result: PromptResult) -> bool:
        """Whether the outputs differ in float32, in which they should be identical."""
        return self.dtype == "float32" and result.error is None and not result.identical


@dataclass(frozen=True)
class Difference:
    """One output that differs from stock's.

    Attributes:
        setting: Label of the comparison.
        prompt: Name of the prompt.
        index: Index of the first token that differs.
        margin: Stock's top-2 margin at that token. None if it is unknown.
    """

    setting: str
    prompt: str
    index: int
    margin: float | None

    def __str__(self) -> str:
        margin = "unknown" if self.margin is None else f"{self.margin:.3g}"
        return f"{self.setting}: {self.prompt} at token {self.index}, top-2 margin {margin}"


@dataclass(frozen=True)
class ToleratedShare:
    """The tolerated differences of a run.

    Attributes:
        outputs: All outputs of the run, also those of the full KV.
        tolerance: Limit of the margin.
        differences: The tolerated differences.
    """

    outputs: int
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def share(self) -> float:
        """Tolerated outputs over all outputs."""
        return len(self.differences) / self.outputs if self.outputs else 0.0

    @property
    def holds(self) -> bool:
        """Whether the share is within the limit."""
        return self.share <= SHARE_LIMIT

    def lines(self) -> list[str]:
        """One line for each tolerated difference, and one for their share."""
        if not self.differences:
            return []
        relation = "within" if self.holds else "exceeds"
        return [
            *(f"tolerated: {each}, tolerance {self.tolerance:.3g}" for each in self.differences),
            f"tolerated differences: {len(self.differences)} of {self.outputs} outputs = {self.share:.2%}, "
            f"{relation} the limit of {SHARE_LIMIT:.1%}",
        ]


def measured_tolerance(controls: Iterable[Comparison]) -> float:
    """The tolerance for ``--margin-tolerance auto``: ten times the controls' largest log-probability difference.

    It is 0, which tolerates nothing, if the controls returned no log-probabilities.
    """
    found = [each.max_logprob_difference for each in controls]
    largest = max((difference.value for _, difference in filter(None, found)), default=0.0)
    return TOLERANCE_FACTOR * largest


def tolerated_share(comparisons: Sequence[Comparison], rules: Rules) -> ToleratedShare:
    """Collect the tolerated differences of the comparisons that the rules judge."""
    judged = [each for each in comparisons if rules.judges(each)]
    return ToleratedShare(
        outputs=sum(len(each.results) for each in judged),
        tolerance=rules.margin_tolerance,
        differences=differences(judged, rules.tolerates),
    )


def differences(
    comparisons: Iterable[Comparison], selects: Callable[[PromptResult], bool] = lambda result: True
) -> tuple[Difference, ...]:
    """Return the outputs that differ and that ``selects`` accepts."""
    return tuple(
        Difference(each.setting.label, result.name, result.first_difference, result.margin)
        for each in comparisons
        for result in each.results
        if result.first_difference is not None and selects(result)
    )


@dataclass(frozen=True)
class DifferenceRate:
    """How many outputs differ from stock's. Failed requests are not counted."""

    differing: int
    outputs: int

    @property
    def rate(self) -> float:
        """Share of the outputs that differ."""
        return self.differing / self.outputs if self.outputs else 0.0

    def __str__(self) -> str:
        return f"{self.differing} of {self.outputs} ({self.rate:.1%})"

    def as_json(self) -> dict[str, Any]:
        """Return the rate as JSON values."""
        return {"differing": self.differing, "outputs": self.outputs, "rate": self.rate}


@dataclass(frozen=True)
class NoiseVerdict:
    """The verified outputs of a run compared with the outputs of the controls.

    Attributes:
        verified: Rate of all verified outputs that differ from stock's.
        control: Rate of all control outputs that differ from stock's.
        by_setting: Rate of each verified setting, by label. Only the sum is judged.
        margin_limit: 99th percentile of stock's top-2 margins at the controls' first differences. None if no control differs.
        largest_margin: Largest known margin of a verified difference.
        above: Verified differences whose margin is above the limit or unknown.
    """

    verified: DifferenceRate
    control: DifferenceRate
    by_setting: tuple[tuple[str, DifferenceRate], ...]
    margin_limit: float | None
    largest_margin: float | None
    above: tuple[Difference, ...]

    @property
    def ratio(self) -> float | None:
        """Verified rate over control rate. None if no control differs."""
        return self.verified.rate / self.control.rate if self.control.differing else None

    @property
    def rate_holds(self) -> bool:
        """Whether verified outputs differ rarely enough."""
        return self.verified.differing == 0 or (self.ratio is not None and self.ratio <= RATE_LIMIT)

    @property
    def margins_hold(self) -> bool:
        """Whether verified outputs differ only at margins at which stock's own outputs differ."""
        return not self.above

    @property
    def holds(self) -> bool:
        """Whether the rate and the margins are within their limits."""
        return self.rate_holds and self.margins_hold

    def lines(self) -> list[str]:
        """The rates, the ratio and the margins, with the two verdicts."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return [
            *(f"outputs that differ, {label}: {rate}" for label, rate in self.by_setting),
            f"outputs that differ: verified {self.verified}, control {self.control}; "
            f"ratio {ratio}, limit {RATE_LIMIT}: {_holds_text(self.rate_holds)}",
            f"top-2 margin at the first difference: verified at most {_number(self.largest_margin)}, "
            f"{MARGIN_PERCENTILE}th percentile of control {_number(self.margin_limit)}: "
            f"{_holds_text(self.margins_hold)}",
            *(f"above it: {each}" for each in self.above),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return dataclasses.asdict(self) | {
            "verified": self.verified.as_json(),
            "control": self.control.as_json(),
            "by_setting": {label: rate.as_json() for label, rate in self.by_setting},
            "ratio": self.ratio,
            "rate_holds": self.rate_holds,
            "margins_hold": self.margins_hold,
            "holds": self.holds,
        }


def noise_verdict(comparisons: Sequence[Comparison]) -> NoiseVerdict | None:
    """Compare all verified outputs with those of all controls. Returns None if there are no controls or no verified arms."""
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
    """Count the outputs that differ. Failed requests have no output."""
    answered = [result for each in comparisons for result in each.results if result.error is None]
    return DifferenceRate(sum(not result.identical for result in answered), len(answered))


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that ``percent`` % of the values do not exceed (nearest rank). None without values."""
    if not values:
        return None
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        failed: Prompts that fail the run by themselves.
        tolerated: The tolerated differences.
        noise: Comparison with the controls. None in float32 and without controls.
        logprob_differences: The largest log-probability differences of the controls and of the verified arms, as text.
    """

    failed: int
    tolerated: ToleratedShare
    noise: NoiseVerdict | None
    logprob_differences: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the run passes."""
        return not self.failed and self.tolerated.holds and (self.noise is None or self.noise.holds)

    @property
    def exit_code(self) -> int:
        """0 if the run passes, else 1."""
        return int(not self.holds)

    def lines(self) -> list[str]:
        """The verdict as lines of text."""
        noise = self.noise.lines() if self.noise else []
        return [*self.logprob_differences, *self.tolerated.lines(), *noise]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        tolerated = dataclasses.asdict(self.tolerated)
        tolerated |= {"share": self.tolerated.share, "holds": self.tolerated.holds}
        return {
            "holds": self.holds,
            "failed": self.failed,
            "tolerated": tolerated,
            "noise": self.noise and self.noise.as_json(),
            "lines": self.lines(),
        }


def judge(comparisons: Sequence[Comparison], rules: Rules) -> Verdict:
    """Apply the rules to all comparisons of a run."""
    return Verdict(
        failed=sum(rules.fails(each, result) for each in comparisons for result in each.results),
        tolerated=tolerated_share(comparisons, rules),
        noise=None if rules.dtype == "float32" else noise_verdict(comparisons),
        logprob_differences=tuple(_logprob_lines(comparisons)),
    )


def _logprob_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """The largest log-probability difference of the controls, and that of the verified arms, one line each."""
    lines = []
    for name, is_control in (("control", True), ("verified", False)):
        found = [
            (each.max_logprob_difference[1].value, each.max_logprob_difference[0], each)
            for each in comparisons
            if each.setting.is_control == is_control and each.max_logprob_difference is not None
        ]
        if found:
            value, prompt, each = max(found, key=lambda entry: entry[0])
            lines.append(f"largest logprob difference, {name}: {value:.3g} ({each.setting.label}: {prompt})")
    return lines


def _holds_text(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
