"""The selection interval that is chosen gains the most tokens per second, by measured times and acceptance."""

import random
import statistics

import pytest

from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts, RoundTimes, expected_tokens
from sglang_ext.managers.spec_decode.round_timer import SelectionInterval

INTERVALS, DRAFTS, LOAD = (16, 8, 4, 2, 1), 15, BatchLoad.of([8000] * 4)


def run(chooser, selection, acceptance, rounds=400):
    """Rounds on a machine whose draft step takes 1 s, and so much more for each selection; the choices, by round."""
    costs, found, noise = RoundCosts(widths=(16,)), [], random.Random(0)
    costs.observe(LOAD, RoundTimes(0, 4, 0.0, 0.0, 8.0))
    for _ in range(rounds):
        every = chooser.choose(costs, LOAD, DRAFTS)
        found.append(every)
        drafting = DRAFTS * (1 + selection / every)
        costs.observe(LOAD._replace(selection_interval=every), RoundTimes(DRAFTS, 0, 0.0, drafting, drafting + 2))
        for _ in range(LOAD.requests):
            accepted = next((each for each in range(DRAFTS) if noise.random() >= acceptance[every]), DRAFTS)
            chooser.observe(every, DRAFTS, accepted)
    return found


@pytest.mark.parametrize("selection", [0.0, 0.2, 2.0, 20.0])
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.04])
def test_the_fastest_interval_is_found(selection, loss):
    acceptance = {every: 0.97 - loss * index for index, every in enumerate(reversed(INTERVALS))}
    rates = {every: expected_tokens(p, DRAFTS) / (DRAFTS * (1 + selection / every) + 2) for every, p in acceptance.items()}
    found = run(SelectionInterval(INTERVALS), selection, acceptance)
    assert statistics.mean(rates[every] for every in found[150:]) > 0.95 * max(rates.values())


def test_intervals_that_could_not_win_are_not_tried():
    found = run(SelectionInterval(INTERVALS), 20.0, dict.fromkeys(INTERVALS, 0.95))
    assert {1, 2}.isdisjoint(found)


def test_an_interval_that_was_asked_for_is_kept():
    assert set(run(SelectionInterval((4,)), 2.0, {4: 0.5}, 20)) == {4}


def test_without_drafts_nothing_is_tried():
    chooser, costs = SelectionInterval(INTERVALS), RoundCosts()
    assert {chooser.choose(costs, LOAD, 0) for _ in range(50)} == {16}
