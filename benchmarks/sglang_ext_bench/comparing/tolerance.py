"""Which float32 differences a run may forgive, and how many of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang_ext_bench.comparing.compare import Comparison, PromptResult

TOLERANCE_FACTOR = 10.0
"""A measured tolerance is this many times the largest log-probability difference of the controls."""
SHARE_LIMIT = 0.001
"""At most this share of a run's outputs may be forgiven."""


@dataclass(frozen=True)
class Rules:
    """What a run is judged by.

    ``margin_tolerance``: a float32 difference is forgiven where stock's top-2 margin lies below it.
    ``judges_control``: differences between two stock servers fail the run too, as in a run of
    nothing else; beside verified arms they only measure stock's noise.
    """

    dtype: str
    margin_tolerance: float = 0.0
    judges_control: bool = False

    def judges(self, comparison: Comparison) -> bool:
        """Whether differences of this comparison count as failures."""
        return self.judges_control or not comparison.setting.is_control

    def tolerates(self, result: PromptResult) -> bool:
        """Whether this is a float32 difference below the tolerance."""
        return _differs(result, self) and result.margin is not None and result.margin < self.margin_tolerance

    def fails(self, comparison: Comparison, result: PromptResult) -> bool:
        """Whether this prompt alone fails the run.

        An error always does. A difference does in float32, unless it is tolerated; other dtypes
        round differently for each batch shape, and are judged together (:mod:`~.noise`).
        """
        if result.error is not None:
            return True
        return self.judges(comparison) and _differs(result, self) and not self.tolerates(result)


@dataclass(frozen=True)
class Difference:
    """A difference by name: where it is, and stock's top-2 margin there."""

    setting: str
    prompt: str
    index: int
    margin: float | None

    def __str__(self) -> str:
        margin = "unknown" if self.margin is None else f"{self.margin:.3g}"
        return f"{self.setting}: {self.prompt} at token {self.index}, top-2 margin {margin}"


@dataclass(frozen=True)
class ToleratedShare:
    """The forgiven differences of a run among all its outputs, those with full KV included."""

    outputs: int
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def share(self) -> float:
        """Forgiven outputs over all."""
        return len(self.differences) / self.outputs if self.outputs else 0.0

    @property
    def holds(self) -> bool:
        """Whether the share is small enough."""
        return self.share <= SHARE_LIMIT

    def lines(self) -> list[str]:
        """The forgiven differences by name, and what they amount to."""
        if not self.differences:
            return []
        relation = "within" if self.holds else "exceeds"
        return [
            *(f"tolerated: {each}, tolerance {self.tolerance:.3g}" for each in self.differences),
            f"tolerated differences: {len(self.differences)} of {self.outputs} outputs = {self.share:.2%}, "
            f"{relation} the limit of {SHARE_LIMIT:.1%}",
        ]


def measured_tolerance(controls: Iterable[Comparison]) -> float:
    """Ten times the largest log-probability difference between stock servers of other batch shapes.

    0, which forgives nothing, where the controls gave no log-probabilities to compare.
    """
    found = [each.max_logprob_difference for each in controls]
    largest = max((difference.value for _, difference in filter(None, found)), default=0.0)
    return TOLERANCE_FACTOR * largest


def tolerated_share(comparisons: Sequence[Comparison], rules: Rules) -> ToleratedShare:
    """The forgiven differences of all comparisons that the rules judge."""
    judged = [each for each in comparisons if rules.judges(each)]
    return ToleratedShare(
        outputs=sum(len(each.results) for each in judged),
        tolerance=rules.margin_tolerance,
        differences=differences(judged, rules.tolerates),
    )


def differences(
    comparisons: Iterable[Comparison], selects: Callable[[PromptResult], bool] = lambda result: True
) -> tuple[Difference, ...]:
    """Every output that differs and that ``selects`` takes."""
    return tuple(
        Difference(each.setting.label, result.name, result.first_difference, result.margin)
        for each in comparisons
        for result in each.results
        if result.first_difference is not None and selects(result)
    )


def _differs(result: PromptResult, rules: Rules) -> bool:
    """Whether this is a difference in the dtype that promises none."""
    return rules.dtype == "float32" and result.error is None and not result.identical
