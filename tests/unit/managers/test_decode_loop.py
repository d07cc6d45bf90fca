"""The decode loop: whoever is verified when, the tokens are those that full KV gives, and only full KV that is there is read."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_helpers import ToyCompressedKV, request
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.core import FALLBACK_REASONS, SLOWER, AcceptanceTracker, RequestState, TPRanks
from sglang_ext.managers.kv_offload.offloaded_full_kv import OffloadedFullKV
from sglang_ext.managers.kv_offload.offload_policy import OffloadDecision
from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.cost_model import RoundCosts
from sglang_ext.managers.spec_decode.decode_loop import DecodeLoop
from sglang_ext.managers.spec_decode.draft import Verifier
from sglang_ext.managers.spec_decode.request_states import UnprocessedTokens
from sglang_ext.managers.spec_decode.planner import PLAIN_STEPS, RoundPlanner
from sglang_ext.managers.spec_decode.round_report import RoundReport
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider, RoundSetup
from sglang_ext.managers.spec_decode.round_timer import DraftLength, RoundTimer
from sglang_ext.managers.spec_decode.sampling import SampledTokens
from sglang_ext.managers.spec_decode.round_result import KVDraftInput
from sglang_ext.platforms.plain_cpu import run_without_pinning
from sglang_ext_bench.timelines import read_timeline

DRAFTS, LONGEST, PROMPT = 3, 9, 200


def truth(sequence):
    """The token that full KV gives after a sequence."""
    return hash((len(sequence), *sequence[-3:])) % 97


def guess(sequence):
    """What a copy drafts: mostly the same."""
    return truth(sequence) if hash((7, *sequence[-2:])) % 4 else 96


class FakeResidency:
    """Full KV of rows in ``away`` has to be loaded, which takes some rounds; after a verification it leaves again.

    Unless it ``stays`` until a load takes its place.
    """

    def __init__(self, away, rounds, bandwidth=1e12, stays=False):
        self.away, self.rounds, self.stays = set(away), rounds, stays
        self.missing, self.loading, self.pinned, self.stale, self.lost = set(away), {}, set(), set(away), set()
        tier = SimpleNamespace(defer_transfers=nullcontext)
        self.host = SimpleNamespace(link=SimpleNamespace(restored=bandwidth), tier=tier)
        self.load_capacity = 10**6

    def collect_loads(self):
        self.loading = {row: left - 1 for row, left in self.loading.items() if left > 1}

    def update(self, running):
        self.running = running

    def is_offloaded(self, row):
        return row in self.stale

    def is_lost(self, row):
        return row in self.lost

    def missing_tokens(self, row):
        return PROMPT * (row in self.missing)

    def load(self, row):
        if row in self.missing:
            for other in self.away - self.pinned - self.missing - self.loading.keys() if self.stays else ():
                self.leave(other)
            self.missing.discard(row)
            self.loading[row] = self.rounds
        self.pinned.add(row)
        return True

    def ready(self, row):
        return row in self.pinned and row not in self.missing and row not in self.loading

    def is_loaded(self, row):
        return self.ready(row)

    def restore(self, row):
        assert self.ready(row)
        self.stale.discard(row)

    def pin_while_reading(self, row):
        return nullcontext()

    def release(self, row):
        self.pinned.discard(row)
        if row in self.away and not self.stays:
            self.leave(row)

    def leave(self, row):
        self.missing.add(row)
        self.stale.add(row)
        self.loading.pop(row, None)

    def forget(self, row):
        self.away.discard(row)


class Toy(DecodeLoop):
    """Rounds of a model whose tokens are :func:`truth`; full KV may be away where a ``residency`` is given."""

    def __init__(self, count, residency, compressed_kv, drafts=DRAFTS, longest=LONGEST):
        metrics = KVMetrics("model")
        worker = SimpleNamespace(
            compressed_kv=compressed_kv, lossy=False, features=(), metrics=metrics,
            requests=SimpleNamespace(
                count_verify=RequestState.count_verify, overall_acceptance=AcceptanceTracker(), unprocessed_tokens=UnprocessedTokens()
            ),
            model_runner=SimpleNamespace(war_fastpath_read_done_event="earlier", decode_cuda_graph_runner=None),
            queries=SimpleNamespace(drop_rejected=lambda row, length: None), ranks=TPRanks(),
        )
        compressed_kv.rows = count + 1
        full_kv = FullKVProvider()
        if residency is not None:
            scheduler = VerificationScheduler(PROMPT, residency.load_capacity, horizon=8)
            policy = SimpleNamespace(observe=lambda round_, spent: None, choose=lambda p, link, share: OffloadDecision(None, longest))
            full_kv = OffloadedFullKV(scheduler, residency, 1, longest, policy)
        steps = SimpleNamespace(
            table=compressed_kv.token_table, slots=lambda *args: torch.zeros(1), run=self.draw,
            samplers=SimpleNamespace(get=lambda *args: SimpleNamespace(draw=lambda logits, positions: self.answers)),
        )
        lengths = DraftLength(drafts, is_fixed=True)
        round_timer, report = RoundTimer(lengths, torch.device("cpu")), RoundReport(lengths, RoundCosts(), metrics, worker.requests)
        verifier = Verifier(worker, steps, None, None)
        verifier._forward = self.verify
        super().__init__(worker, round_timer, steps, verifier, RoundSetup(RoundPlanner(longest, drafts), compressed_kv, full_kv), report)
        self.residency = residency
        self.committed = {row: [row] * (PROMPT + 1) for row in range(1, count + 1)}

    def draw(self, batch, round_, tokens, slots, starts, penalized, on_first_step):
        drawn = []
        for i, state in enumerate(round_.states):
            before = self.pending_drafts.tokens[state.row, : round_.num_pending[i]].tolist()
            sequence = [*self.committed[state.row], *before]
            assert int(tokens[i]) == sequence[-1] and int(starts[i]) == len(sequence) - 1 == round_.starts[i]
            exact = not round_.reads_compressed(i)
            assert exact or i not in round_.full_kv_reqs
            assert not (exact and self.residency is not None and state.row in self.residency.stale)
            for _ in range(round_.num_steps):
                sequence.append(truth(sequence) if exact else guess(sequence))
            drawn.append(sequence[-round_.num_steps :])
        output = LogitsProcessorOutput(next_token_logits=None)
        return [(output, SampledTokens(column, None, [], [])) for column in torch.tensor(drawn).T]

    def verify(self, batch, states, lengths, tokens):
        answers = []
        for state_row, row in zip((state.row for state in states), tokens.tolist()):
            if self.residency is not None:
                assert self.residency.ready(state_row) and state_row not in self.residency.stale
            before = self.committed[state_row]
            assert row[0] == before[-1]
            answers += [truth([*before, *row[1 : j + 1]]) for j in range(len(row))]
        self.answers = SampledTokens(torch.tensor(answers), None, [], [])
        return LogitsProcessorOutput(next_token_logits=None), torch.zeros(tokens.numel())


def rounds(toy, states, reqs, count, late=False):
    """Run rounds; the drafts offered and accepted by each verification. ``late``: outcomes are told a round later, as in SGLang's
    overlapped loop."""
    seen, waiting = [], []
    toy.worker.requests.states_of = lambda batch: states
    with run_without_pinning(lambda: nullcontext()):
        for _ in range(count):
            lengths = torch.tensor([len(toy.committed[s.row]) - 1 for s in states])
            batch = SimpleNamespace(
                reqs=reqs, seq_lens=lengths, seq_lens_cpu=lengths, return_logprob=False,
                req_pool_indices=torch.tensor([s.row for s in states]),
                spec_info=KVDraftInput(torch.tensor([toy.committed[s.row][-1] for s in states])),
            )
            result = toy.decode(batch)
            width = result.speculative_num_draft_tokens
            for i, state in enumerate(states):
                accepted = int(result.accept_lens[i])
                toy.committed[state.row] += result.next_token_ids.view(-1, width)[i, :accepted].tolist()
                assert int(result.next_draft_input.bonus_tokens[i]) == toy.committed[state.row][-1]
                if i in result.plan.verify_reqs:
                    seen.append((state.row, result.plan.num_draft_tokens(i), accepted - 1))
                else:
                    assert accepted == result.plan.num_output_tokens(i) * (i in result.plan.full_kv_reqs)
            assert result.new_seq_lens.tolist() == [len(toy.committed[s.row]) - 1 for s in states]
            waiting.append((batch, result))
            if not late or len(waiting) > 1:
                toy.report.account(*waiting.pop(0))
    return seen


def asked(missing=10**6):
    return request(missing, PROMPT, last_node=None, cache_protected_len=PROMPT)


def make(count, away=(), rounds=1, full=(), bandwidth=1e12, stays=False, drafts=DRAFTS, longest=LONGEST):
    """``away`` is None where all full KV is on the device for good."""
    compressed_kv = ToyCompressedKV(full=full)
    residency = None if away is None else FakeResidency(away, rounds, bandwidth, stays)
    toy = Toy(count, residency, compressed_kv, drafts, longest)
    states = [RequestState(rid=str(row), row=row, seed=0) for row in range(1, count + 1)]
    for row in away or ():
        compressed_kv.compress(row, PROMPT, 0)
    return toy, states, [asked() for _ in states]


def correct(toy):
    for row, tokens in toy.committed.items():
        expected = [row] * (PROMPT + 1)
        while len(expected) < len(tokens):
            expected.append(truth(expected))
        assert tokens == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.data())
def test_the_tokens_are_those_of_full_kv(count, data):
    rows = st.sets(st.integers(1, count))
    full = data.draw(rows)
    away = data.draw(rows) - full
    drafts, times = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    toy, states, reqs = make(count, away, data.draw(st.integers(1, 4)), full, drafts=drafts, longest=drafts * times)
    seen = rounds(toy, states, reqs, 24)
    correct(toy)
    assert {row for row, *_ in seen} == set(range(1, count + 1)) - full
    assert all(len(tokens) > PROMPT + 1 for tokens in toy.committed.values())
    assert {offered for row, offered, _ in seen if row not in away} <= {drafts}


class Choices:
    """Draft lengths one after another, whatever was measured."""

    def __init__(self, choices, afterwards=DRAFTS):
        self.choices = list(choices)
        self.afterwards = afterwards

    def choose(self, costs, load, probabilities):
        return self.choices.pop() if self.choices else self.afterwards

    def observe(self, spent):
        pass


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.data())
def test_with_lengths_chosen_as_it_goes_the_tokens_are_those_of_full_kv(count, data):
    away = data.draw(st.sets(st.integers(1, count)))
    # As with --kv-max-burst 2: a single draft is all that ever gathers.
    drafts, times = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    choices = st.integers(0, drafts)
    toy, states, reqs = make(
        count, away, data.draw(st.integers(1, 3)), stays=data.draw(st.booleans()), drafts=drafts, longest=drafts * times
    )
    toy.round_timer.draft_length = Choices(data.draw(st.lists(choices, min_size=20, max_size=20)), drafts)
    rounds(toy, states, reqs, 24)
    correct(toy)


def test_where_drafts_are_not_wanted_those_on_the_device_decode_plainly_and_stay():
    toy, states, reqs = make(2, away=[2], stays=True)
    toy.round_timer.draft_length = Choices([0] * 12)
    seen = rounds(toy, states, reqs, 12)
    assert len(toy.committed[1]) == PROMPT + 1 + 12 * PLAIN_STEPS and states[0].fallback == SLOWER
    assert [row for row, *_ in seen] == [2], "its drafts are verified, then it decodes plainly, too"
    assert len(toy.committed[2]) > PROMPT + 1 + 5 * PLAIN_STEPS
    correct(toy)


def test_a_load_does_not_take_the_place_of_what_is_read_in_the_round():
    toy, states, reqs = make(2, away=[1, 2], stays=True)
    toy.residency.missing, toy.residency.stale = {2}, {2}
    toy.round_timer.draft_length = Choices([0] * 8)
    seen = rounds(toy, states, reqs, 8)
    assert 2 in {row for row, *_ in seen}
    assert len(toy.committed[1]) == PROMPT + 1 + 8 * PLAIN_STEPS
    correct(toy)


class Crowded(FakeResidency):
    """On the device there is room for the full KV of two; a load takes the place of one that nobody reads."""

    def load(self, row):
        here = self.away - self.missing
        if row in self.missing and len(here) >= 2:
            free = sorted(here - self.pinned - self.loading.keys())
            if not free:
                return False
            self.leave(free[0])
        return super().load(row)


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 6), st.integers(1, 3))
def test_those_on_the_device_make_room_for_the_loads_of_the_others(count, took):
    rows = range(1, count + 1)
    toy, states, reqs = make(count, away=rows)
    residency = toy.residency = toy.provider.residency = Crowded(rows, took, stays=True)
    residency.missing, residency.stale = set(rows[2:]), set(rows[2:])
    residency.load_capacity = 2 * PROMPT
    seen = [row for row, *_ in rounds(toy, states, reqs, 30 * count)]
    assert min(seen.count(row) for row in rows) >= 5, "none waits for good"
    correct(toy)


def test_what_has_to_be_loaded_gathers_drafts_first_and_the_others_verify_in_each_round():
    toy, states, reqs = make(2, away=[2], rounds=1)
    seen = rounds(toy, states, reqs, 12)
    assert [row for row, *_ in seen].count(1) == 12
    assert {offered for row, offered, _ in seen if row == 2} == {LONGEST}
    assert states[1].verifies == 4 and states[1].offered == 4 * LONGEST


def test_drafts_stop_at_the_longest_while_the_link_is_busy():
    toy, states, reqs = make(1, away=[1], rounds=6)
    seen = rounds(toy, states, reqs, 20)
    assert seen and all(offered == LONGEST for _, offered, _ in seen) and toy.provider.scheduler.num_postponed > 0
    correct(toy)


def test_a_load_that_takes_longer_than_all_that_is_planned_happens_all_the_same():
    toy, states, reqs = make(2, away=[1, 2], rounds=2, bandwidth=1e-9)
    seen = rounds(toy, states, reqs, 40)
    assert {row for row, *_ in seen} == {1, 2}
    correct(toy)


def test_one_that_cannot_be_drafted_answers_in_the_steps_in_which_the_others_draft():
    toy, states, reqs = make(3, away=[2])
    states[2].fallback = FALLBACK_REASONS.index("custom-logit-processor")
    seen = rounds(toy, states, reqs, 14)
    assert len(toy.committed[3]) == PROMPT + 1 + 14, "token by token"
    assert {offered for row, offered, _ in seen if row == 1} == {DRAFTS}, "verified at x drafts all the same"
    assert {row for row, *_ in seen} == {1, 2}
    correct(toy)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 5), st.data())
def test_in_any_company_the_tokens_are_those_of_full_kv(count, data):
    kinds = data.draw(st.lists(st.sampled_from(["", "", "custom-logit-processor", "min-p", "no copy", "last"]), min_size=count, max_size=count))
    full = [row for row, kind in enumerate(kinds, 1) if kind == "no copy"]
    drafts = data.draw(st.integers(1, 6))
    toy, states, reqs = make(count, None, full=full, drafts=drafts, longest=drafts)
    for state, kind in zip(states, kinds):
        state.fallback = FALLBACK_REASONS.index(kind) if kind in FALLBACK_REASONS else 0
    choices = st.integers(0, drafts)
    toy.round_timer.draft_length = Choices(data.draw(st.lists(choices, max_size=20)), drafts)
    late = data.draw(st.booleans())
    for i in range(12):
        # Who must be looked at comes and goes.
        states[0].fallback = FALLBACK_REASONS.index("custom-logit-processor") if data.draw(st.booleans()) else 0
        for kind, state, req in zip(kinds, states, reqs):
            given = len(toy.committed[state.row]) - 1 - PROMPT
            req.sampling_params.max_new_tokens = given + data.draw(st.integers(0, 3)) if kind == "last" else 10**6
        if data.draw(st.booleans()):
            toy.worker.compressed_kv.copies.pop(data.draw(st.integers(1, count)), None)
        rounds(toy, states, reqs, 2, late)
    correct(toy)


def test_a_copy_taken_away_while_drafts_gather_costs_no_token():
    toy, states, reqs = make(2, None)
    states[1].fallback = FALLBACK_REASONS.index("custom-logit-processor")
    rounds(toy, states, reqs, 2)
    assert states[0].num_pending == 2
    toy.worker.compressed_kv.copies.clear()
    toy.worker.compressed_kv.full = (1,)
    rounds(toy, states, reqs, 2)
    assert states[0].num_pending == 0 and states[0].fallback
    correct(toy)


def test_one_whose_full_kv_is_lost_does_not_verify_any_more():
    toy, states, reqs = make(2, away=[2])
    toy.residency.lost.add(2)
    seen = rounds(toy, states, reqs, 6)
    assert {row for row, *_ in seen} == {1} and len(toy.committed[2]) == PROMPT + 1


def test_a_copy_that_cannot_be_renewed_at_its_turn_costs_no_token():
    toy, states, reqs = make(2, away=[1, 2], rounds=1)
    compressed_kv, compress = toy.worker.compressed_kv, toy.worker.compressed_kv.compress

    def fail(row, tokens, headroom, prefix=None):
        if row == 1 and tokens > PROMPT:
            compressed_kv.copies.pop(row, None)
            # Full KV of a request without a copy stays.
            toy.residency.away.discard(row)
            return False
        return compress(row, tokens, headroom, prefix)

    compressed_kv.each_round, compressed_kv.compress = True, fail
    seen = rounds(toy, states, reqs, 30)
    assert {row for row, *_ in seen} == {1, 2} and states[0].fallback and len(toy.committed[1]) > PROMPT + 10
    correct(toy)


def test_gone_requests_give_back_what_was_reserved():
    toy, states, reqs = make(3, away=[1, 2, 3], rounds=3)
    rounds(toy, states, reqs, 2)
    assert toy.provider.scheduler.memory.occupancy() > 0
    for state in states:
        toy.forget(state.row)
    assert toy.provider.scheduler.memory.peak == 0 and not toy.provider.verifying_rows


@pytest.mark.parametrize("left", [1, 2, 5])
def test_near_the_end_of_an_output_nothing_is_gathered_that_cannot_count(left):
    toy, states, reqs = make(1, away=[1])
    reqs[0] = asked(left)
    seen = rounds(toy, states, reqs, 3)
    assert seen[0][1] <= max(2 * DRAFTS, left + DRAFTS)


def test_loads_that_are_planned_take_as_long_as_the_link_needs_now():
    residency = FakeResidency({1}, 1, bandwidth=PROMPT / 2)
    admission = VerificationScheduler(iteration_seconds=1.0, memory=10**6, horizon=16)
    verifications = OffloadedFullKV(admission, residency, bytes_per_token=1, drafts_per_load=8)
    verifications.on_round_start([], {}, None)
    verifications.schedule_verifications({1: 8}, set())

    def reserved():
        return sum(admission.link.free(i) < 1 for i in range(1, 16))

    assert reserved() == 2
    residency.host.link.restored *= 1.05
    verifications.on_round_start([], {}, None)
    before = admission.link.mean_occupancy
    residency.host.link.restored /= 4.2
    verifications.on_round_start([], {}, None)
    assert admission.link.mean_occupancy == pytest.approx(4 * before), "small changes are not followed, this one is"


def test_the_timeline_has_each_rounds_drafts_and_what_became_of_them(tmp_path):
    toy, states, reqs = make(2, full=[2])
    for room, req in enumerate(reqs):
        req.bootstrap_room = room
    toy.report.timeline = TransferTimeline(tmp_path / "times")
    seen = rounds(toy, states, reqs, 4)
    events = read_timeline(tmp_path / "times")
    drafted, verified = ([event for event in events if event.kind == kind] for kind in ("drafted", "verified"))
    assert [(event.number, event.of) for event in drafted] == [(DRAFTS, DRAFTS)] * 4
    assert [(event.room, event.of, event.number) for event in verified] == [(row - 1, offered, accepted) for row, offered, accepted in seen]
    assert all(draft.at <= verify.at for draft, verify in zip(drafted, verified, strict=True)) and not any(event.early for event in events)
    assert [event.number for event in events if event.kind == "answered" and event.room == 1] == [DRAFTS] * 4
