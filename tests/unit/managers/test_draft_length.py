"""The draft length that is chosen gains the most tokens per second, and notices when none pays."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core import LONG_MEMORY, Acceptance, RequestState
from sglang_ext.device import Mark
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.draft_length import HYSTERESIS, LOOK_SHARE, DraftLength, expected_tokens
from sglang_ext.managers.spec_decode.pace import Load, Pace, Spent
from sglang_ext.managers.spec_decode.round import Round


@given(st.floats(0, 1), st.integers(0, 64))
def test_expected_tokens_are_the_sum_over_accepted_lengths(p, drafts):
    assert expected_tokens(p, drafts) == pytest.approx(sum(p**k for k in range(drafts + 1)), rel=1e-6)


@pytest.mark.parametrize("p", [0.05, 0.4, 0.7, 0.9, 0.98])
def test_acceptance_finds_the_probability_per_token(p):
    # Fixed seeds: a search for the worst one finds noise.
    means = []
    for seed in range(10):
        noise, found, seen = random.Random(seed), Acceptance(), []
        for _ in range(400):
            accepted = 0
            while accepted < 16 and noise.random() < p:
                accepted += 1
            found.observe(16, accepted)
            seen.append(found.probability)
        means.append(sum(seen[100:]) / 300)
    assert means == pytest.approx([p] * 10, abs=0.08) and sum(means) / 10 == pytest.approx(p, abs=0.03)


def drive(chooser, times, p, iterations, batch=4, plain_steps=4):
    """Run iterations on a machine with these (step, draft, rest) seconds; lengths chosen, and their speed."""
    step, draft, rest = times
    load = Load.of([1000] * batch)
    lengths, tokens, seconds = [], 0.0, 0.0
    for _ in range(iterations):
        drafts = chooser.choose(load, [p] * batch).drafts
        steps = 0 if drafts else plain_steps
        whole = drafts * draft + rest if drafts else steps * step
        chooser.observe(load, Spent(drafts, steps, 0.0, drafts * draft, whole))
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
def test_where_nothing_pays_full_kv_is_served_and_looks_lose_no_more_than_their_share(times):
    chooser = DraftLength(16)
    drive(chooser, times, 0.2, 100)
    lengths, speed = drive(chooser, times, 0.2, 2000)
    assert (1 - LOOK_SHARE) * 0.995 < speed / 4 < 0.999
    assert sum(x > 0 for x in lengths) > 10


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_short_answer_of_a_hopeless_compressor_loses_little_even_at_first(batch):
    chooser = DraftLength(16)
    _, speed = drive(chooser, (1.0, 0.9, 1.6), 0.0, 64, batch)
    assert speed > 0.98 * batch


def test_a_length_is_kept_until_another_is_clearly_better():
    chooser = DraftLength(16)
    drive(chooser, (1.0, 0.3, 1.0), 0.8, 40)
    load = Load.of([1000] * 4)
    kept, rates = chooser.choose(load, [0.8] * 4).drafts, chooser._rates(chooser.times[load], [0.85] * 4)
    assert rates.argmax() != kept and rates.max() < HYSTERESIS * rates[kept]
    assert chooser.choose(load, [0.85] * 4).drafts == kept
    assert chooser.choose(load, [0.97] * 4).drafts > kept


class Requests:
    """A batch whose drafts are accepted with probability ``p``, and what is thought of them."""

    def __init__(self, p, count, typical, seed=0):
        self.p, self.noise, self.typical = p, random.Random(seed), typical
        self.found = [Acceptance.expecting(typical.probability) for _ in range(count)]

    def verify(self, drafts):
        """Tokens of all."""
        tokens = 0
        for request in self.found:
            accepted = 0
            while accepted < drafts and self.noise.random() < self.p:
                accepted += 1
            request.observe(drafts, accepted)
            self.typical.observe(drafts, accepted)
            tokens += accepted + 1
        return tokens


def serve(chooser, requests, times, tokens, copying, lag=2):
    """Decode so many tokens of each; seconds, times being known only ``lag`` iterations later; chosen lengths."""
    step, draft, rest = times
    load, copied, done, seconds, pending, lengths = Load.of([1000] * len(requests.found)), False, 0, 0.0, [], []
    while done < tokens * len(requests.found):
        drafts = chooser.choose(load, [r.probability for r in requests.found]).drafts
        copies = copying if drafts and not copied else 0.0
        copied, steps = copied or bool(drafts), 0 if drafts else 4
        whole = drafts * draft + rest if drafts else steps * step
        pending.append(Spent(drafts, steps, copies, drafts * draft, whole))
        if len(pending) > lag:
            chooser.observe(load, pending.pop(0))
        done += requests.verify(drafts) if drafts else steps * len(requests.found)
        seconds += whole + copies
        lengths.append(drafts)
    return seconds, lengths


# Steps, drafts and the rest of a round as measured on an H200 (docs/benchmarks.md), in milliseconds; copies of all.
LONG, SHORT = ((14.2, 5.9, 21.5), 48.0), ((6.7, 5.55, 9.0), 10.0)


@pytest.mark.parametrize(("times", "copying"), [LONG, SHORT], ids=["32k", "4k"])
@pytest.mark.parametrize("batch", [1, 8])
def test_waves_of_hopeless_requests_lose_little(times, copying, batch):
    chooser, typical = DraftLength(16), Acceptance(memory=LONG_MEMORY)
    for _ in range(6):
        seconds, _ = serve(chooser, Requests(0.0, batch, typical), times, 256, copying * batch / 8)
        assert 256 * times[0] / seconds > 0.97


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("before", [0.0, 0.3])
def test_a_rise_of_acceptance_is_found_within_three_waves(batch, before):
    (times, copying), typical, chooser = LONG, Acceptance(memory=LONG_MEMORY), DraftLength(16)
    for _ in range(6):
        serve(chooser, Requests(before, batch, typical), times, 256, copying * batch / 8)
    for _ in range(3):
        serve(chooser, Requests(0.99, batch, typical), times, 256, copying * batch / 8)
    seconds, _ = serve(chooser, Requests(0.99, batch, typical, seed=3), times, 256, copying * batch / 8)
    assert seconds < 0.75 * 256 * times[0]


@pytest.mark.parametrize("seed", range(4))
def test_one_unlucky_rejection_does_not_end_what_pays(seed):
    (times, copying), typical, chooser = LONG, Acceptance(memory=LONG_MEMORY), DraftLength(16)
    total = sum(serve(chooser, Requests(0.95, 1, typical, seed * 9 + i), times, 256, copying / 8)[0] for i in range(8))
    assert total < 0.85 * 8 * 256 * times[0]


def test_a_narrow_verification_makes_short_drafts_pay():
    chooser, load = DraftLength(16, (5, 17)), Load.of([1000])
    for spent in [Spent(0, 4, 0, 0, 56.0)] * 2 + [Spent(16, 0, 0, 96.0, 118.0)] * 2:
        chooser.observe(load, spent)
    times = chooser.times[load]
    assert times.seconds(4) == 4 * 6 + 22, "before it was seen it is thought to take as long"
    assert chooser.choose(load, [0.9]).drafts == 5
    chooser.observe(load, Spent(4, 0, 0, 24.0, 38.0))
    assert times.seconds(4) == pytest.approx(38) and times.seconds(5) == pytest.approx(5 * 6 + 22)
    assert chooser.choose(load, [0.9]).drafts == 4


def test_a_trial_with_few_copies_tells_what_drafts_would_take_with_copies_for_all():
    chooser, load = DraftLength(16), Load.of([1000] * 16)
    chooser.observe(load, Spent(0, 4, 0.0, 0.0, 40.0))
    # Half of the requests read a tenth of what they read in a plain step, whose weights take 4 of 10.
    chooser.observe(load, Spent(2, 0, 1.0, 2 * (4 + 3 + 0.3), 30.0, share=0.5))
    assert chooser.times[load].draft.seconds == pytest.approx(4 + 0.6)


@pytest.mark.parametrize("stalled", [0, 1, 2, 3], ids=["plain", "plain-again", "first-look", "first-wide-round"])
@pytest.mark.parametrize("p", [0.0, 0.95])
def test_a_round_that_stalls_as_when_a_kernel_is_compiled_spoils_no_choice(p, stalled):
    load, chooser, rounds = Load.of([1000] * 4), DraftLength(16, (5, 17)), 0
    for _ in range(24):
        drafts = chooser.choose(load, [p] * 4).drafts
        whole = drafts * 0.4 + 1.6 if drafts else 4.0
        stall = 200.0 if rounds == stalled else 0.0
        chooser.observe(load, Spent(drafts, 0 if drafts else 4, 0.0, drafts * (0.4 + stall), whole + (1 + drafts) * stall))
        rounds += 1
    lengths, speed = drive(chooser, (1.0, 0.4, 1.6), p, 100)
    assert speed / 4 > (0.97 if p == 0 else 0.95 * expected_tokens(p, 16) / 8)


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
        self.states = {n: [RequestState(rid=str(i), row=i, seed=0) for i in range(n)] for n in range(1, 9)}

    def iterate(self, drafts, planning, drafting, rest, batch=2, turnaround=0.0):
        states, lengths = self.states[batch], [500] * batch
        self.pace.begin(lengths, states)
        self.now += planning
        rows = list(range(len(states)))
        self.pace.planned(Round(states, drafts or 2, lengths, rows, rows, rows, rows, [] if drafts else rows, [40] * len(rows), [rows] if drafts else []))
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
    assert (times.draft.seconds, times.rests[0].seconds, times.step.seconds, times.copying.seconds) == pytest.approx((0.5, 1.0, 0.35, 50.0))


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
    seen = list(machine.times().rests[0].newest)
    assert seen[0] == pytest.approx(1.5 if other == "none" else 1.0)
    assert seen[1:] == pytest.approx([] if other == "other-batch" else [1.5])


def test_short_rounds_whose_drafts_gather_are_learned_from_together():
    seen, rows = [], [0, 1]
    pace = Pace(SimpleNamespace(observe=lambda load, spent: seen.append(spent)), torch.device("cpu"), KVMetrics("model"))
    states = [RequestState(rid=str(i), row=i, seed=0) for i in rows]

    def short(due):
        return Round(states, 1, [500, 500], rows, [8, 9], rows, [0, 0], answering=[1], left=[40, 40], parts=[[0]] if due else [], held=True)

    spent = Spent(drafts=1, steps=0, copying=0.1, drafting=1.0, whole=1.5)
    assert pace._gathered(short(False), spent) is pace._gathered(short(False), spent) is None
    found = pace._gathered(short(True), spent)
    assert (found.drafts, found.drafting, found.whole) == (3, 3.0, 4.5)
    assert pace._gathered(short(True), spent) == spent, "the next begins anew"
