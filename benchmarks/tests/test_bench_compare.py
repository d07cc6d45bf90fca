"""Comparison of two arms: the first token that differs, and differences of log-probabilities."""

import pytest
from bench_helpers import PROMPT, SETTING, STATS, comparison, result, tops
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_bench.client import Generation, TopLogprobs, VerifyStats
from sglang_ext_bench.comparing.compare import (
    LogprobDifference,
    compare,
    compare_prompt,
    first_difference,
    largest_logprob_difference,
)

tokens = st.lists(st.integers(0, 5), max_size=12)
rows = st.dictionaries(st.integers(0, 4), st.floats(-9, 0), max_size=3).map(lambda row: tuple(row.items()))


@st.composite
def answers(draw: st.DrawFn) -> Generation:
    """A response with log-probabilities of each token."""
    ids = draw(st.lists(st.integers(0, 1), max_size=5))
    return Generation(tuple(ids), tuple(draw(rows) for _ in ids))


class TestFirstDifference:
    @given(tokens)
    def test_equal_outputs_have_none(self, ids: list[int]) -> None:
        assert first_difference(ids, tuple(ids)) is None

    @given(tokens, tokens)
    def test_everything_before_it_agrees_and_it_does_not(self, a: list[int], b: list[int]) -> None:
        at = first_difference(a, b)
        if at is None:
            assert a == b
        else:
            assert a[:at] == b[:at]
            assert a[at : at + 1] != b[at : at + 1]

    def test_an_output_that_ends_early_differs_at_its_end(self) -> None:
        assert first_difference([1, 2, 3], [1, 2]) == 2


class TestComparePrompt:
    def test_margin_is_the_stock_margin_at_the_first_difference(self) -> None:
        stock = Generation((1, 2, 3), tops(9.0, 0.25, 7.0))
        result = compare_prompt(PROMPT, stock, Generation((1, 5, 6), verify=STATS))
        assert (result.identical, result.first_difference, result.margin) == (False, 1, 0.25)

    def test_difference_beyond_the_stock_output_has_no_margin(self) -> None:
        stock = Generation((1,), tops(9.0))
        result = compare_prompt(PROMPT, stock, Generation((1, 2), verify=STATS))
        assert (result.first_difference, result.margin) == (1, None)

    @pytest.mark.parametrize("arm", ["stock", "verified"])
    def test_failed_request_is_never_identical_and_names_its_arm(self, arm: str) -> None:
        good, bad = Generation((), verify=STATS), Generation(error="boom")
        pair = (bad, good) if arm == "stock" else (good, bad)
        result = compare_prompt(PROMPT, *pair)
        assert not result.identical
        assert result.error == f"{arm}: boom"

    @pytest.mark.parametrize("verify", [None, VerifyStats(0, 0, 0, 0.0, ())])
    def test_equal_output_that_was_not_verified_is_a_failure(self, verify: VerifyStats | None) -> None:
        ids = (1, 2, 3)
        result = compare_prompt(PROMPT, Generation(ids), Generation(ids, verify=verify))
        assert result.error is not None and "compared with stock" in result.error

    def test_fallback_with_a_reason_needs_no_counters(self) -> None:
        result = compare_prompt(PROMPT, Generation((1,)), Generation((1,), fallback="grammar"))
        assert result.identical and result.fallback == "grammar"

    def test_control_needs_no_counters(self) -> None:
        assert compare_prompt(PROMPT, Generation((1,)), Generation((1,)), needs_verify=False).identical

    def test_arms_of_unequal_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            compare(SETTING, [PROMPT], [Generation()], [], draft_length=2)


class TestLogprobDifference:
    def test_compares_shared_tokens_up_to_and_with_the_first_difference(self) -> None:
        left = Generation((1, 2, 3), (((1, -0.5), (9, -2.0)), ((2, -0.5), (5, -0.75)), ((3, -0.1),)))
        right = Generation((1, 5, 3), (((1, -0.25), (8, -9.0)), ((5, -0.375), (2, -1.5)), ((3, -7.0),)))
        found = largest_logprob_difference(left, right)
        assert found == LogprobDifference(value=1.0, index=1, token=2)

    def test_position_that_only_one_arm_reached_is_not_compared(self) -> None:
        left = Generation((1,), (((1, -0.5),),))
        right = Generation((1, 2), (((1, -0.5),), ((2, -0.5),)))
        assert largest_logprob_difference(left, right) == LogprobDifference(0.0, 0, 1)

    @pytest.mark.parametrize("rows", [None, (), ((),), (((4, -1.0),),)])
    def test_without_shared_tokens_there_is_none(self, rows: tuple[TopLogprobs, ...] | None) -> None:
        left = Generation((1,), (((1, -0.5), (2, -1.0)),))
        assert largest_logprob_difference(left, Generation((1,), rows)) is None

    @given(answers(), answers())
    def test_is_the_same_from_both_sides_and_stays_in_the_common_prefix(
        self, left: Generation, right: Generation
    ) -> None:
        found, back = largest_logprob_difference(left, right), largest_logprob_difference(right, left)
        assert (found and found.value) == (back and back.value)
        at = first_difference(left.output_ids, right.output_ids)
        if found is not None and at is not None:
            assert found.index <= at

    @given(answers())
    def test_an_arm_does_not_differ_from_itself(self, answer: Generation) -> None:
        found = largest_logprob_difference(answer, answer)
        assert found is None or found.value == 0

    def test_largest_of_a_comparison_names_its_prompt(self) -> None:
        found = comparison(result("a", logprob=0.25), result("b"), result("c", logprob=0.5))
        assert found.max_logprob_difference == ("c", LogprobDifference(0.5, 1, 7))
        assert comparison(result("b")).max_logprob_difference is None

    def test_margin_needs_two_tokens(self) -> None:
        assert Generation((1,), (((1, -0.5),),)).margin(0) is None
