"""What a whole run amounts to: every rule that applies to it, and pass or fail."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext_bench.comparing.compare import Comparison
from sglang_ext_bench.comparing.noise import DifferenceRate, NoiseVerdict, noise_verdict
from sglang_ext_bench.comparing.tolerance import Rules, ToleratedShare, tolerated_share


@dataclass(frozen=True)
class Verdict:
    """``failed`` counts prompts that fail by themselves; ``noise`` is None in float32 and without controls.

    ``logprob_differences`` has the largest one of each setting, as a line of text.
    """

    failed: int
    tolerated: ToleratedShare
    noise: NoiseVerdict | None
    logprob_differences: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the run is as promised."""
        return not self.failed and self.tolerated.holds and (self.noise is None or self.noise.holds)

    @property
    def exit_code(self) -> int:
        """0 when it holds, else 1."""
        return int(not self.holds)

    def lines(self) -> list[str]:
        """The verdict for people."""
        noise = self.noise.lines() if self.noise else []
        return [*self.logprob_differences, *self.tolerated.lines(), *noise]

    def as_json(self) -> dict[str, Any]:
        """The verdict for machines."""
        tolerated = dataclasses.asdict(self.tolerated)
        tolerated |= {"share": self.tolerated.share, "holds": self.tolerated.holds}
        return {
            "holds": self.holds,
            "failed": self.failed,
            "tolerated": tolerated,
            "noise": self.noise and _noise_json(self.noise),
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
    """The largest difference of a log-probability, over the controls and over the verified arms."""
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


def _noise_json(noise: NoiseVerdict) -> dict[str, Any]:
    return dataclasses.asdict(noise) | {
        "verified": _rate_json(noise.verified),
        "control": _rate_json(noise.control),
        "by_setting": {label: _rate_json(rate) for label, rate in noise.by_setting},
        "ratio": noise.ratio,
        "rate_holds": noise.rate_holds,
        "margins_hold": noise.margins_hold,
        "holds": noise.holds,
    }


def _rate_json(rate: DifferenceRate) -> dict[str, Any]:
    return {"differing": rate.differing, "outputs": rate.outputs, "rate": rate.rate}
