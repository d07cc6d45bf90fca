"""Quality measures: KL bounds, first differences, and the scorers and tasks of part functional."""

import math

import pytest
from bench_helpers import CharTokenizer
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tools import CommandError
from sglang_ext_bench.quality import scorers
from sglang_ext_bench.quality.divergence import (
    FLOOR,
    above_noise,
    first_differences,
    kl_bound,
    kl_by_step,
    summarize,
)
from sglang_ext_bench.quality.tasks import build_tasks


def best(probabilities: list[float], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most probable tokens with their log-probabilities."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    return tuple((token, math.log(probabilities[token])) for token in order[:count])


def normalized(weights: list[int]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


weights = st.lists(st.integers(1, 1000), min_size=6, max_size=6)


@given(weights, weights, st.integers(1, 6), st.integers(1, 6))
def test_the_bound_is_never_above_the_true_divergence(full, other, ours, theirs):
    p, q = normalized(full), normalized(other)
    true = sum(a * math.log(a / b) for a, b in zip(p, q))
    assert 0 <= kl_bound(best(p, ours), best(q, theirs)) <= true + 1e-4


@given(weights, weights)
def test_with_all_tokens_the_bound_is_the_divergence(full, other):
    p, q = normalized(full), normalized(other)
    true = sum(a * math.log(a / b) for a, b in zip(p, q))
    assert kl_bound(best(p, 6), best(q, 6)) == pytest.approx(true, abs=1e-9)


@given(weights, st.integers(1, 6))
def test_equal_distributions_do_not_diverge(full, count):
    tops = best(normalized(full), count)
    assert kl_bound(tops, tops) == 0


def test_lists_without_a_common_token_say_only_that_the_rest_is_all():
    assert kl_bound(((1, math.log(0.9)),), ((2, math.log(0.9)),)) == 0


def test_mass_that_the_other_server_lost_counts_though_its_tokens_are_unknown():
    full, other = ((1, math.log(0.5)), (2, math.log(0.4))), ((1, math.log(0.999)),)
    assert kl_bound(full, other) == pytest.approx(0.5 * math.log(0.5 / 0.999) + 0.5 * math.log(0.5 / 0.001))


def test_float32_noise_in_the_rest_is_no_divergence():
    assert kl_bound(((1, 1e-7),), ((1, -2e-7),)) < FLOOR


def test_steps_are_pooled_and_cumulated():
    found = summarize([[0.1, 0.3], [0.0, 0.2]])
    assert found.by_step == pytest.approx((0.05, 0.25)) and found.per_step == pytest.approx(0.15)
    assert found.cumulated == pytest.approx(0.3) and found.largest == 0.3
    assert found.growth == pytest.approx((0.05, 0.3))


def test_an_answer_that_was_not_scored_to_its_end_is_refused():
    with pytest.raises(CommandError, match="of 1 tokens of full KV for an answer of 2"):
        kl_by_step([((1, -0.1),)], [((1, -0.1),)] * 2)


def test_verified_is_above_noise_only_where_it_leaves_stock_more_than_stock_itself():
    control = summarize([[1e-5, 3e-5]])
    servers = {"same": summarize([[2e-5, 2e-5]]), "other": summarize([[1e-3, 0.0]])}
    assert above_noise(servers, control) == ["other"]
    assert above_noise({"rounding": summarize([[FLOOR]])}, summarize([[0.0]])) == []


def test_first_differences_count_identical_answers_at_their_length():
    full = [(1, 2, 3, 4)] * 4
    found = first_differences(full, [(1, 2, 3, 4), (9, 2, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9)])
    assert found.indices == (None, 0, 2, 3) and found.identical == 1
    assert found.median == 2.5
    assert found.histogram == {"0-0": 1, "1-1": 0, "2-3": 2, "identical": 1}


@given(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=6))
def test_the_histogram_holds_every_answer(answers):
    found = first_differences([[0] * 5] * len(answers), answers)
    assert sum(found.histogram.values()) == len(answers)


@pytest.mark.parametrize(
    ("scorer", "right", "wrong"),
    [
        (scorers.exact("The Nile"), " the  nile.\n", "the nile river"),
        (scorers.contains("4171"), "It is 4171.", "It is 41712"),
        (scorers.begins("one two three"), " one\ntwo three four", "two three"),
        (scorers.number("so 3 + 4 = 7 #### 1,007"), "The answer is 1007.00.", "7 of 1007 are 12"),
        (scorers.number("-3"), "x = -3.", "10-3"),
        (scorers.number("12"), "12, or 5,12", "1,2"),
        (scorers.letter("C"), "B looks right, but the answer is (C).", "The answer is B, not C"),
        (scorers.letter("C"), "C. Paris", "Paris"),
        (scorers.is_json_object, ' {"a": [1, {"b": null}]} and more', '{"a": 1, "b"'),
        (scorers.is_json_object, "```json\n{}\n```", "[1, 2]"),
    ],
)
def test_scorers_tell_right_from_wrong(scorer, right, wrong):
    assert scorer(right) == 1.0 and scorer(wrong) == 0.0


FUNCTION = scorers.function_parses('def f(x):\n    """Doc."""')


@pytest.mark.parametrize(
    "answer", ["\n    return x\n\n\ndef g(", "\n    y = [\n        1,\n    ]\n    return y", "\n    y = x\n    return max(x,"]
)
def test_a_function_parses_up_to_its_end_or_to_where_its_last_statement_was_cut(answer):
    assert FUNCTION(answer) == 1.0


@pytest.mark.parametrize(
    "answer", ["", "\ndef g(x):\n    return x", "\n    this is no code", " is a function\n    return x", "\n    return (x,"]
)
def test_an_answer_without_a_valid_body_does_not_parse(answer):
    assert FUNCTION(answer) == 0.0


def test_tasks_come_in_four_kinds_and_hold_the_answers_they_ask_for():
    tasks = build_tasks(CharTokenizer(), 2, 600)
    assert [task.kind for task in tasks] == ["needle", "repetition", "json", "python"] * 2
    texts = ["".join(map(chr, task.input_ids)) for task in tasks]
    for task, text in zip(tasks, texts):
        assert 600 <= len(task.input_ids) <= 1300 and task.score("") == 0.0
        if task.kind in ("needle", "repetition"):
            # The text contains the fact and the passage that the end of the prompt begins.
            begun = text[-28:]
            assert text.index(begun) < len(text) - 60
            assert task.score(text[text.index(begun) + len(begun) :][: task.new_tokens + 10]) == 1.0
    assert texts[0] != texts[4]


def test_tasks_are_the_same_in_every_run():
    first, second = (build_tasks(CharTokenizer(), 2, 200) for _ in range(2))
    assert [task.input_ids for task in first] == [task.input_ids for task in second]
