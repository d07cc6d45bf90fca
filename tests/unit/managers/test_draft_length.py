"""The draft length that is chosen gains the most tokens per second, and notices when none pays."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_ext.core import AcceptanceTracker, RequestState
from sglang_ext.managers.spec_decode.round_timer import PROBE_SHARE, DraftLength, RoundTimer
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts, RoundTimes, expected_tokens
from sglang_ext.managers.spec_decode.planner import RoundPlan


@given(st.floats(0, 1), st.integers(0, 64))
def test_expected_tokens_are_the_sum_over_accepted_lengths(p, drafts):
    assert expected_tokens(p, drafts) == pytest.approx(sum(p**k for k in range(drafts + 1)), rel=1e-6)


@pytest.mark.parametrize("p", [0.05, 0.4, 0.7, 0.9, 0.98])
def test_acceptance_finds_the_probability_per_token(p):
    # Fixed seeds: a search for the worst one finds noise.
    means = []
    for seed in range(10):
        noise, found, seen = random.Random(seed), AcceptanceTracker(), []
        for _ in range(400):
            accepted = 0
            while accepted < 16 and noise.random() < p:
                accepted += 1
            found.observe(16, accepted)
            seen.append(found.probability)
        means.append(sum(seen[100:]) / 300)
    assert means == pytest.approx([p] * 10, abs=0.08) and sum(means) / 10 == pytest.approx(p, abs=0.03)


def drive(chooser, costs, times, p, iterations, batch=4, plain_steps=4):
    """Run iterations on a machine with these (step, draft, rest) seconds; lengths chosen, and their speed."""
    step, draft, rest = times
    load = BatchLoad.of([1000] * batch)
    lengths, tokens, seconds = [], 0.0, 0.0
    for _ in range(iterations):
        drafts = chooser.choose(costs, load, [p] * batch)
        steps = 0 if drafts else plain_steps
        whole = drafts * draft + rest if drafts else steps * step
        spent = RoundTimes(drafts, steps, 0.0, drafts * draft, whole)
        chooser.observe(spent)
        costs.observe(load, spent)
        lengths.append(drafts)
        tokens += batch * (expected_tokens(p, drafts) if drafts else steps)
        seconds += whole
    return lengths, tokens / seconds


@given(
    st.floats(0.3, 0.99), st.floats(0.2, 1.2), st.floats(0.8, 3.0), st.sampled_from([4, 16, 32]), st.integers(1, 16)
)
@example(0.99, 1.125, 1.125, 4, 1)  # a draft step that is slower than a plain step, before a plain step is measured
@settings(max_examples=30, deadline=None)
def test_it_comes_within_a_twentieth_of_the_best_fixed_length(p, draft, rest, longest, batch):
    chooser, costs = DraftLength(longest), RoundCosts(widths=(longest + 1,))
    drive(chooser, costs, (1.0, draft, rest), p, 10, batch)
    _, speed = drive(chooser, costs, (1.0, draft, rest), p, 400, batch)
    best = max([batch] + [batch * expected_tokens(p, x) / (x * draft + rest) for x in range(1, longest + 1)])
    assert speed > 0.95 * best


@pytest.mark.parametrize("times", [(1.0, 0.9, 3.0), (1.0, 1.2, 1.5)], ids=["dear-verify", "dear-draft"])
def test_where_nothing_pays_full_kv_is_served_and_probes_lose_no_more_than_their_share(times):
    chooser, costs = DraftLength(16), RoundCosts(widths=(17,))
    drive(chooser, costs, times, 0.2, 100)
    lengths, speed = drive(chooser, costs, times, 0.2, 1500)
    assert (1 - PROBE_SHARE) * 0.995 < speed / 4 < 0.999
    assert sum(x > 0 for x in lengths) > 10


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_short_answer_of_a_hopeless_compressor_loses_little_even_at_first(batch):
    _, speed = drive(DraftLength(16), RoundCosts(widths=(17,)), (1.0, 0.9, 1.6), 0.0, 64, batch)
    assert speed > 0.98 * batch


def test_a_length_is_kept_until_another_is_clearly_better():
    chooser, costs, load = DraftLength(16), RoundCosts(widths=(17,)), BatchLoad.of([1000] * 4)
    drive(chooser, costs, (1.0, 0.3, 1.0), 0.8, 40)
    kept = chooser.choose(costs, load, [0.8] * 4)
    assert chooser.choose(costs, load, [0.82] * 4) == kept
    assert chooser.choose(costs, load, [0.97] * 4) > kept


def test_a_narrow_verification_makes_short_drafts_pay():
    chooser, costs, load = DraftLength(16), RoundCosts(widths=(5, 17)), BatchLoad.of([1000])
    for spent in [RoundTimes(0, 4, 0, 0, 56.0), RoundTimes(16, 0, 0, 96.0, 118.0), RoundTimes(4, 0, 0, 24.0, 46.0)] * 2:
        costs.observe(load, spent)
    assert chooser.choose(costs, load, [0.9]) > 4, "both widths take as long"
    for _ in range(5):
        costs.observe(load, RoundTimes(4, 0, 0, 24.0, 32.0))
    assert 0 < chooser.choose(costs, load, [0.9]) <= 4


def test_a_rise_of_acceptance_is_found():
    chooser, costs = DraftLength(16), RoundCosts(widths=(17,))
    drive(chooser, costs, (1.0, 0.3, 1.2), 0.0, 500)
    lengths, _ = drive(chooser, costs, (1.0, 0.3, 1.2), 0.95, 4)
    assert min(lengths) > 0


@pytest.mark.parametrize("stalled", range(5))
@pytest.mark.parametrize("p", [0.0, 0.95])
def test_a_round_that_stalls_as_when_a_kernel_is_compiled_spoils_no_choice(p, stalled):
    load, chooser, costs = BatchLoad.of([1000] * 4), DraftLength(16), RoundCosts(widths=(5, 17))
    for number in range(24):
        drafts = chooser.choose(costs, load, [p] * 4)
        stall = 200.0 if number == stalled else 0.0
        whole = drafts * 0.4 + 1.6 if drafts else 4.0
        spent = RoundTimes(drafts, 0 if drafts else 4, 0.0, drafts * (0.4 + stall), whole + (1 + drafts) * stall)
        chooser.observe(spent)
        costs.observe(load, spent)
    _, speed = drive(chooser, costs, (1.0, 0.4, 1.6), p, 100)
    assert speed / 4 > (0.97 if p == 0 else 0.95 * expected_tokens(p, 16) / 8)


# A machine of a fixed time and a time per byte, in milliseconds; weights are as many bytes as 1,000 tokens.
FIXED, PER_TOKEN, WEIGHTS = 1.0, 1e-3, 1000


def seen_at(loads):
    """A cost model that has seen plain steps and rounds of 4 drafts at these loads."""
    costs = RoundCosts(WEIGHTS, 1.0, 0.125, (5, 17))
    for requests, context in loads:
        load = BatchLoad.of([context] * requests)
        step, draft = (FIXED + PER_TOKEN * (WEIGHTS + share * load.tokens) for share in (1, 0.125))
        for _ in range(2):
            costs.observe(load, RoundTimes(0, 4, 0, 0, 4 * step))
            costs.observe(load, RoundTimes(4, 0, 0, 4 * draft, 4 * draft + 1.1 * step))
    return costs


@pytest.mark.parametrize("load", [(1, 1000), (3, 9000), (16, 3000), (8, 30_000)])
def test_a_load_that_was_not_measured_is_predicted_from_others(load):
    costs, load = seen_at([(1, 2000), (2, 2000), (16, 30_000)]), BatchLoad.of([load[1]] * load[0])
    step, draft = (FIXED + PER_TOKEN * (WEIGHTS + share * load.tokens) for share in (1, 0.125))
    assert costs.step_seconds(load) == pytest.approx(step, rel=0.1)
    assert costs.draft_seconds(load) == pytest.approx(draft, rel=0.1)


def test_predictions_have_no_steps_where_requests_double():
    costs = seen_at([(1, 2000), (4, 8000), (16, 30_000)])
    seconds = [costs.round_seconds(BatchLoad.of([8000] * count), [0, 4, 15]) for count in range(1, 17)]
    for count, (before, after) in enumerate(itertools.pairwise(seconds), 1):
        most = 1 + 1.3 * (count + 1) / count - 1.3
        assert all(0.95 * b < a < most * b for b, a in zip(before, after)), count


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=70))
def test_a_load_tells_its_requests_and_tokens(lengths):
    load = BatchLoad.of(lengths)
    assert (load.requests, load.tokens) == (len(lengths), sum(lengths))
    assert 2 ** sum(load.coordinates) == pytest.approx(sum(lengths))


class Machine:
    """A device whose marks are set at times that the test moves."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.round_timer = RoundTimer(DraftLength(8), torch.device("cpu"), costs=SimpleNamespace(observe=self._observe))
        self.round_timer.draft_length.choose = lambda *_: 0
        self.seen = []
        self.states = {n: [RequestState(rid=str(i), row=i, seed=0) for i in range(n)] for n in range(1, 9)}

    def _observe(self, load, spent):
        self.seen.append(spent)

    def iterate(self, drafts, planning, drafting, rest, batch=2, turnaround=0.0, first=None, compressed=False, verifies=True, shortened=False):
        states, lengths = self.states[batch], [500] * batch
        for state in states:
            state.compressor = "snapkv" if compressed else ""
        self.round_timer.start_round(lengths, states)
        self.now += planning
        rows = list(range(len(states)))
        more = dict(rows=[row + 99 for row in rows] if drafts else rows, fallbacks=[0] * len(rows))
        self.round_timer.on_planned(
            RoundPlan(states, drafts or 2, lengths, rows, row_lens=rows, full_kv_reqs=[] if drafts else rows, remaining=[40] * len(rows), verify_batches=[rows] if drafts and verifies else [], is_shortened=shortened, **more)
        )
        if first is not None:
            self.now += first
            self.round_timer.on_first_step()
        self.now += drafting - (first or 0.0)
        self.round_timer.on_drafted()
        self.now += rest - turnaround
        self.round_timer.on_launched()
        self.now += turnaround

    def times(self):
        self.round_timer.start_round([500], self.states[1])
        return self.seen


def test_times_run_to_the_next_iteration_and_leave_out_copies(monkeypatch):
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=50.0, drafting=2.0, rest=1.0)
    for _ in range(2):
        machine.iterate(0, planning=0.0, drafting=0.0, rest=0.7)
    assert [pytest.approx(tuple(spent)[:5]) for spent in machine.times()] == [(4, 0, 50.0, 2.0, 3.0), *[(0, 2, 0.0, 0.0, 0.7)] * 2]


def test_the_wait_for_the_plan_of_a_plain_round_between_drafts_is_not_a_plain_step(monkeypatch):
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=1.0, drafting=2.0, rest=1.0)
    machine.iterate(0, planning=2.0, drafting=1.5, rest=0.2, first=0.8)
    machine.iterate(0, planning=0.1, drafting=1.5, rest=0.2, first=0.8)
    assert [spent.plain_step for spent in machine.times()[1:]] == [pytest.approx(0.7), pytest.approx(0.9)]


def test_a_single_plain_step_after_drafts_or_a_prefill_has_no_time(monkeypatch):
    """A request that only stores its prompt decodes one step after its prefill: on an H200 that took twice the time of plain decoding."""
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=1.0, drafting=2.0, rest=1.0)
    machine.iterate(0, planning=2.0, drafting=1.5, rest=0.2)
    machine.round_timer.interrupt()
    machine.iterate(0, planning=2.0, drafting=1.5, rest=0.2)
    assert [spent.plain_step for spent in machine.times()[1:]] == [None, None]


def test_copies_that_each_round_makes_anew_belong_to_its_time(monkeypatch):
    machine = Machine(monkeypatch)
    machine.round_timer.compresses_each_round = True
    machine.iterate(4, planning=50.0, drafting=2.0, rest=1.0)
    machine.round_timer.interrupt()
    assert [tuple(spent)[:5] for spent in machine.times()] == [(4, 0, 0.0, 2.0, 53.0)]


def test_planning_and_the_wait_for_the_first_step_belong_to_the_rest_of_a_round(monkeypatch):
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=1.5, drafting=5.0, rest=2.0, first=3.5, compressed=True)
    machine.round_timer.interrupt()
    (spent,) = machine.times()
    assert (spent.compressing, spent.whole) == (0.0, 8.5)
    assert (spent.draft_step, spent.rest) == pytest.approx((0.5, 6.5))


def test_a_single_draft_step_counts_as_a_step_only_before_others_are_known():
    costs, load = RoundCosts(), BatchLoad.of([1000] * 4)
    costs.observe(load, RoundTimes(1, 0, 0.0, 5.0, 7.0))
    assert costs.draft_seconds(load) == pytest.approx(5.0, rel=0.1)
    for _ in range(3):
        costs.observe(load, RoundTimes(4, 0, 0.0, 6.5, 8.5, 1.5))
    assert costs.draft_seconds(load) == pytest.approx(0.5, rel=0.1)
    costs.observe(load, RoundTimes(1, 0, 0.0, 5.5, 7.5))
    assert costs.draft_seconds(load) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("other", ["prefill", "other-batch", "none"])
def test_a_wait_belongs_to_an_iteration_only_where_the_same_requests_go_on(monkeypatch, other):
    machine = Machine(monkeypatch)
    machine.iterate(4, planning=0.0, drafting=2.0, rest=1.5, turnaround=0.5)
    if other == "prefill":
        machine.round_timer.interrupt()
        machine.now += 60.0
    machine.iterate(4, planning=0.0, drafting=2.0, rest=1.5, batch=3 if other == "other-batch" else 2)
    machine.round_timer.interrupt()
    seen = [spent.whole - spent.drafting for spent in machine.times()]
    assert seen[0] == pytest.approx(1.5 if other == "none" else 1.0)
    assert seen[1:] == pytest.approx([1.5])


def test_short_rounds_whose_drafts_gather_are_learned_from_together(monkeypatch):
    machine = Machine(monkeypatch)
    for verifies in (False, False, True, True):
        machine.iterate(1, planning=0.0, drafting=1.0, rest=0.5, compressed=True, verifies=verifies, shortened=True)
    machine.round_timer.interrupt()
    found = [(spent.num_draft_steps, spent.num_rounds, spent.drafting, spent.whole) for spent in machine.times()]
    assert found == [(3, 3, 3.0, 4.5), (1, 1, 1.0, 1.5)], "the next begins anew"
