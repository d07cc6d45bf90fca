"""Verdict of an identity run in float32: errors, different outputs, the tolerance, and the share of tolerated outputs."""

import json

import pytest
from bench_helpers import CONTROL_SETTING, comparison, result
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_bench.comparing.compare import Comparison
from sglang_ext_bench.comparing.verdict import (
    Rules,
    judge,
    measured_tolerance,
    tolerated_share,
)

GOOD = result("good", differs=False)
differences = st.one_of(st.none(), st.floats(0, 10))


def run_of(*results, good: int = 0) -> Comparison:
    """A verified setting with ``good`` further identical outputs."""
    return comparison(*results, *[GOOD] * good)


class TestFailures:
    @pytest.mark.parametrize(
        ("margin", "dtype", "tolerance", "failed"),
        [
            (0.001, "float32", 0.0, 1),
            (0.0, "float32", 0.0, 1),
            (0.001, "float32", 0.01, 0),
            (0.01, "float32", 0.01, 1),
            (None, "float32", 1.0, 1),
            (5.0, "bfloat16", 0.0, 0),
        ],
    )
    def test_difference(self, margin: float | None, dtype: str, tolerance: float, failed: int) -> None:
        verdict = judge([run_of(result(margin=margin), good=999)], Rules(dtype, tolerance))
        assert (verdict.failed, verdict.exit_code) == (failed, failed)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_error_fails_in_every_dtype(self, dtype: str) -> None:
        assert judge([run_of(result(error="stock: boom"))], Rules(dtype, 1.0)).exit_code == 1

    def test_one_bad_prompt_of_one_setting_is_enough(self) -> None:
        fine = run_of(GOOD)
        assert judge([fine], Rules("float32")).exit_code == 0
        assert judge([fine, run_of(GOOD, result(margin=1.0))], Rules("float32")).exit_code == 1

    def test_control_differences_measure_beside_verified_arms_and_fail_alone(self) -> None:
        control = comparison(result(margin=1.0), setting=CONTROL_SETTING)
        assert judge([control, run_of(GOOD)], Rules("float32")).exit_code == 0
        assert judge([control], Rules("float32", judges_control=True)).exit_code == 1

    def test_control_errors_always_fail(self) -> None:
        control = comparison(result(error="control: gone"), setting=CONTROL_SETTING)
        assert judge([control, run_of(GOOD)], Rules("float32")).exit_code == 1


class TestToleratedShare:
    @pytest.mark.parametrize(("outputs", "code"), [(999, 1), (1000, 0), (1001, 0)])
    def test_one_in_a_thousand_outputs_may_be_tolerated(self, outputs: int, code: int) -> None:
        found = run_of(result(margin=0.001), good=outputs - 1)
        verdict = judge([found], Rules("float32", 0.01))
        assert (verdict.failed, verdict.exit_code) == (0, code)
        relation = "exceeds" if code else "within"
        assert any(f"1 of {outputs} outputs" in line and relation in line for line in verdict.lines())

    def test_tolerated_difference_is_listed_by_name_with_margin_and_tolerance(self) -> None:
        verdict = judge([run_of(result("odd.txt", margin=0.00125))], Rules("float32", 0.0321))
        expected = "quant 0.5, concurrency 1: odd.txt at token 2, top-2 margin 0.00125, tolerance 0.0321"
        assert f"tolerated: {expected}" in verdict.lines()
        entry = json.loads(json.dumps(verdict.as_json()))["tolerated"]
        assert (entry["share"], entry["holds"], entry["differences"][0]["prompt"]) == (1.0, False, "odd.txt")

    def test_controls_are_neither_outputs_nor_tolerated(self) -> None:
        control = comparison(result(margin=0.001), setting=CONTROL_SETTING)
        share = tolerated_share([control, run_of(GOOD)], Rules("float32", 1.0))
        assert (share.outputs, share.differences) == (1, ())

    def test_a_run_without_differences_says_nothing_of_them(self) -> None:
        assert judge([run_of(GOOD)], Rules("float32", 1.0)).lines() == []

    @given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 20), st.floats(0, 1))
    def test_each_difference_either_fails_or_is_tolerated(
        self, margins: list[float], good: int, tolerance: float
    ) -> None:
        verdict = judge([run_of(*(result(margin=m) for m in margins), good=good)], Rules("float32", tolerance))
        assert verdict.failed + len(verdict.tolerated.differences) == len(margins)
        assert verdict.holds == (not margins)  # so few outputs allow no tolerated one


class TestMeasuredTolerance:
    @given(st.lists(st.lists(differences, max_size=4), max_size=3))
    def test_ten_times_the_largest_of_all_controls(self, arms: list[list[float | None]]) -> None:
        controls = [
            comparison(*(result(logprob=value) for value in values), setting=CONTROL_SETTING) for values in arms
        ]
        largest = max((value for values in arms for value in values if value is not None), default=0.0)
        assert measured_tolerance(controls) == 10 * largest

    def test_controls_without_logprobs_forgive_nothing(self) -> None:
        assert measured_tolerance([comparison(GOOD, setting=CONTROL_SETTING)]) == 0.0


class TestLogprobLines:
    def test_control_and_verified_are_told_apart_and_named(self) -> None:
        control = comparison(result("a", differs=False, logprob=0.001), setting=CONTROL_SETTING)
        verified = run_of(result("b", differs=False, logprob=0.002), result("c", differs=False, logprob=0.003))
        lines = judge([control, verified], Rules("float32")).lines()
        assert lines == [
            "largest logprob difference, control: 0.001 (control --chunked-prefill-size 512, concurrency 1: a)",
            "largest logprob difference, verified: 0.003 (quant 0.5, concurrency 1: c)",
        ]
