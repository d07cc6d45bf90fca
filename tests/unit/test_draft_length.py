"""The draft length that is chosen gains the most tokens per second, and notices when none pays."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core import Acceptance, RequestState
from sglang_ext.managers.clock import Mark
from sglang_ext.managers.draft_length import LONGEST_PATIENCE, DraftLength, Load, expected_tokens
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.round_plan import Round
from sglang_ext.metrics import KVMetrics


@given(st.floats(0, 1), st.integers(0, 64))
def test_expected_tokens_are_the_sum_over_accepted_lengths(p, drafts):
    assert expected_tokens(p, drafts) == pytest.approx(sum(p**k for k in range(drafts + 1)), rel=1e-6)


@given(st.floats(0.05, 0.98), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_acceptance_finds_the_probability_per_token(p, seed):
    noise, found, seen = random.Random(seed), Acceptance(), []
    for _ in range(400):
        accepted = 0
        while accepted < 16 and noise.random() < p:
            accepted += 1
        found.observe(16, accepted)
        seen.append(found.probability)
    assert sum(seen[100:]) / 300 == pytest.approx(p, abs=0.08)


def drive(chooser, times, p, iterations, batch=4, plain_steps=4):
    """Run iterations on a machine with these (step, draft, rest) seconds; lengths chosen, and their speed."""
    step, draft, rest = times
    load = Load.of([1000] * batch)
    lengths, tokens, seconds = [], 0.0, 0.0
    for _ in range(iterations):
        drafts = chooser.choose(load, [p] * batch)
        steps = 0 if drafts else plain_steps
        whole = drafts * draft + rest if drafts else steps * step
        chooser.observe(load, drafts, steps, drafts * draft, whole)
        lengths.append(drafts)
        tokens += batch * (expected_tokens(p, drafts) if drafts else steps)
        seconds += whole
    return lengths, tokens / seconds


@given(
    st.floats(0.3, 0.99), st.floats(0.2, 1.2), st.floats(0.5, 3.0), st.sampled_from([4, 16, 32]), st.integers(1, 16)
)
@settings(max_examples=30, deadline=None)
def test_it_comes_within_a_twentieth_of_the_best_fixed_length(p, draft, rest, longest, batch):
    chooser = DraftLength(longest)
    drive(chooser, (1.0, draft, rest), p, 10, batch)
    _, speed = drive(chooser, (1.0, draft, rest), p, 800, batch)
    best = max([batch] + [batch * expected_tokens(p, x) / (x * draft + rest) for x in range(1, longest + 1)])
    assert speed > 0.95 * best


@pytest.mark.parametrize("times", [(1.0, 0.9, 3.0), (1.0, 1.2, 1.5)], ids=["dear-verify", "dear-draft"])
def test_where_nothing_pays_full_kv_is_served_and_looked_past_now_and_then(times):
    chooser = DraftLength(16)
    drive(chooser, times, 0.2, 600)
    lengths, speed = drive(chooser, times, 0.2, LONGEST_PATIENCE)
    assert speed > 0.98 * 4
    assert 3 <= sum(x > 0 for x in lengths) <= 5


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_short_answer_of_a_hopeless_compressor_loses_little_even_at_first(batch):
    chooser = DraftLength(16)
    _, speed = drive(chooser, (1.0, 0.9, 1.6), 0.0, 64, batch)
    assert speed > 0.98 * batch


def test_what_begins_to_pay_is_found_by_few_looks():
    chooser, load = DraftLength(16), Load.of([1000] * 8)
    drive(chooser, (1.0, 0.4, 1.5), 0.0, 400, batch=8)
    requests = [Acceptance.expecting(0.01) for _ in range(8)]
    looks = tokens = 0
    while (drafts := chooser.choose(load, [r.probability for r in requests])) <= 4:
        chooser.observe(load, drafts, 0 if drafts else 4, 0.4 * drafts, 0.4 * drafts + 1.5 if drafts else 4.0)
        for request in requests:
            if drafts:
                request.observe(drafts, drafts)
        looks, tokens = looks + bool(drafts), tokens + (drafts or 4)
    assert looks <= 6 and tokens < 2 * LONGEST_PATIENCE


def test_a_new_load_is_measured_before_it_is_judged():
    chooser = DraftLength(8)
    lengths, _ = drive(chooser, (1.0, 0.3, 1.5), 0.9, 6, batch=3)
    assert lengths == [0, 0, 2, 7, 7, 7]
    assert drive(chooser, (1.0, 0.3, 1.5), 0.9, 1, batch=4)[0] == [7], "four pad to the same graph as three"
    assert drive(chooser, (1.0, 0.3, 1.5), 0.9, 1, batch=5)[0] == [0]


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=70))
def test_a_load_holds_its_requests_and_their_mean(lengths):
    load, mean = Load.of(lengths), sum(lengths) // len(lengths)
    assert 2**load.requests >= len(lengths) > 2 ** (load.requests - 1) - 0.5
    assert 2**load.context > mean >= 2 ** (load.context - 1)


class Machine:
    """A device whose marks are set at times that the test moves."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(Mark, "now", lambda device: Mark(seconds=self.now))
        self.pace = Pace(DraftLength(8), torch.device("cpu"), KVMetrics("model"))

    def iterate(self, drafts, planning, drafting, rest, batch=2, turnaround=0.0):
        states = [RequestState(rid=str(i), row=i, seed=0) for i in range(batch)]
        lengths = [500] * batch
        self.pace.begin(lengths, states)
        self.now += planning
        self.pace.planned(Round(states, drafts, 0 if drafts else 2, lengths, [], [], []))
        self.now += drafting
        self.pace.drafted()
        self.now += rest - turnaround
        self.pace.ended()
        self.now += turnaround

    def times(self, batch=2):
        self.pace.begin([500], [])
        return self.pace.lengths.times[Load.of([500] * batch)]


def test_times_run_to_the_next_iteration_and_leave_out_copies(monkeypatch):
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=50.0, drafting=2.0, rest=1.0)
    machine.iterate(0, planning=0.0, drafting=0.0, rest=0.7)
    machine.iterate(0, planning=0.0, drafting=0.0, rest=0.7)
    times = machine.times()
    assert (times.draft, times.rest, times.step) == pytest.approx((0.5, 1.0, 0.35))


@pytest.mark.parametrize("other", ["prefill", "other-batch", "none"])
def test_a_wait_belongs_to_an_iteration_only_where_the_same_requests_go_on(monkeypatch, other):
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=0.0, drafting=2.0, rest=1.5, turnaround=0.5)
    if other == "prefill":
        machine.pace.interrupt()
        machine.now += 60.0
    machine.iterate(4, planning=0.0, drafting=2.0, rest=1.5, batch=3 if other == "other-batch" else 2)
    machine.pace.interrupt()
    machine.pace.begin([500, 500], [])
    first = 1.5 if other == "none" else 1.0
    expected = first if other == "other-batch" else (first + 1.5) / 2
    assert machine.times().rest == pytest.approx(expected)
