"""Verdict of runs in dtypes other than float32: verified outputs are compared with the controls' outputs."""

import json

import pytest
from bench_helpers import CONTROL_SETTING, comparison, result
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_bench.comparing.compare import Comparison
from sglang_ext_bench.comparing.verdict import (
    NoiseVerdict,
    Rules,
    judge,
    noise_verdict,
    percentile,
)

RULES = Rules("bfloat16")


def arm(margins: list[float | None], good: int, control: bool = False) -> Comparison:
    """A comparison with outputs that differ at these margins, and ``good`` identical outputs."""
    prompts = [result(f"d{i}", margin=margin) for i, margin in enumerate(margins)]
    prompts += [result("same", differs=False)] * good
    return comparison(*prompts, setting=CONTROL_SETTING) if control else comparison(*prompts)


def verdict_of(*comparisons: Comparison) -> NoiseVerdict:
    found = noise_verdict(comparisons)
    assert found is not None
    return found


class TestRate:
    @pytest.mark.parametrize(("differing", "holds"), [(3, True), (4, False)])
    def test_verified_may_differ_one_and_a_half_times_as_often(self, differing: int, holds: bool) -> None:
        verified = arm([0.0] * differing, 10 - differing)
        found = verdict_of(arm([0.0] * 2, 8, control=True), verified)
        assert (found.ratio, found.rate_holds) == (pytest.approx(differing / 2), holds)

    def test_controls_are_pooled(self) -> None:
        controls = [arm([0.1], 9, control=True), arm([0.5] * 3, 7, control=True)]
        found = verdict_of(*controls, arm([0.3] * 2, 8))
        assert (found.control.differing, found.control.outputs) == (4, 20)
        assert (found.ratio, found.margin_limit, found.holds) == (1.0, 0.5, True)

    def test_no_noise_of_stock_allows_no_difference(self) -> None:
        calm = arm([], 10, control=True)
        assert verdict_of(calm, arm([], 10)).holds
        found = verdict_of(calm, arm([0.0], 9))
        assert (found.ratio, found.rate_holds, found.margins_hold) == (None, False, False)

    def test_failed_requests_are_no_outputs(self) -> None:
        control = comparison(result(margin=0.1), result(error="boom"), setting=CONTROL_SETTING)
        assert verdict_of(control, arm([], 1)).control.outputs == 1

    def test_without_controls_or_in_float32_there_is_no_verdict(self) -> None:
        control, verified = arm([0.1], 9, control=True), arm([5.0], 9)
        assert noise_verdict([verified]) is None
        assert noise_verdict([control]) is None
        assert judge([control, verified], Rules("float32", 9.0)).noise is None


class TestMargins:
    @pytest.mark.parametrize(("margin", "holds"), [(0.25, True), (0.2500001, False), (None, False)])
    def test_verified_differs_only_where_stock_does(self, margin: float | None, holds: bool) -> None:
        found = verdict_of(arm([0.0, 0.25], 8, control=True), arm([margin], 9))
        assert (found.margins_hold, [each.prompt for each in found.above]) == (holds, [] if holds else ["d0"])

    def test_a_single_outlier_among_hundreds_is_not_the_limit(self) -> None:
        found = verdict_of(arm([0.1] * 199 + [9.0], 0, control=True), arm([0.2], 0))
        assert (found.margin_limit, found.margins_hold) == (0.1, False)

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
    def test_percentile_covers_its_share_with_one_of_the_values(self, values: list[float]) -> None:
        limit = percentile(values, 99)
        assert limit in values
        covered = sum(value <= limit for value in values)
        assert 100 * covered >= 99 * len(values)
        below = sum(value < limit for value in values)
        assert 100 * below < 99 * len(values)

    def test_no_value_has_no_percentile(self) -> None:
        assert percentile([], 99) is None


class TestReport:
    def test_lines_and_json_say_rates_ratio_percentile_and_verdicts(self) -> None:
        verdict = judge([arm([0.125] * 5, 5, control=True), arm([0.5] * 8, 2)], RULES)
        assert verdict.exit_code == 1
        text = "\n".join(verdict.lines())
        expected = "verified 8 of 10 (80.0%), control 5 of 10 (50.0%); ratio 1.60, limit 1.5: does not hold"
        assert expected in text
        assert "at most 0.5, 99th percentile of control 0.125: does not hold" in text
        assert "above it: quant 0.5, concurrency 1: d7 at token 2, top-2 margin 0.5" in text
        noise = json.loads(json.dumps(verdict.as_json()))["noise"]
        assert (noise["ratio"], noise["rate_holds"], noise["margin_limit"]) == (1.6, False, 0.125)
        assert noise["by_setting"]["quant 0.5, concurrency 1"]["rate"] == 0.8

    def test_run_that_holds_ends_with_0(self) -> None:
        verdict = judge([arm([0.125] * 5, 5, control=True), arm([0.125] * 7, 3)], RULES)
        assert verdict.exit_code == 0
        assert sum(line.endswith(": holds") for line in verdict.lines()) == 2

    @given(st.lists(st.floats(0, 1), max_size=9), st.lists(st.floats(0, 1), max_size=9))
    def test_an_arm_like_its_control_always_holds(self, margins: list[float], more: list[float]) -> None:
        control, verified = arm([*margins, *more], 3, control=True), arm(margins, 3 + len(more))
        found = verdict_of(control, verified)
        assert found.rate_holds
        assert found.margins_hold or len(margins + more) > 99
