"""A round: who drafts where, who answers, and what of it is accepted, counted and published."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from round_helpers import ROWS, ToyCompressedKV, batch, loop, plan, request, states
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.core import FALLBACK_REASONS, MIN_CONTEXT, NO_FREE_SLOTS, NO_QUERIES, SHORT_CONTEXT, SLOWER, RequestState
from sglang_ext.managers.spec_decode.draft import StepRunner, Verifier
from sglang_ext.managers.spec_decode.planner import PLAIN_STEPS, SHORT_ROUND, RoundPlan, RoundPlanner
from sglang_ext.managers.spec_decode.request_states import UnprocessedTokens
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider, RoundSetup
from sglang_ext.managers.spec_decode.round_timer import DraftLength, RoundTimer
from sglang_ext.managers.spec_decode.sampling import SampledTokens
from sglang_ext.mem_cache.compressed.policy import is_compression_near
from sglang_ext.mem_cache.compressed.queries import RecordedRows
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV

WITHOUT_GRAMMARS = SimpleNamespace(unprocessed_tokens=UnprocessedTokens())


def test_who_has_a_copy_drafts_on_it_and_who_has_none_answers_meanwhile():
    compressed_kv = ToyCompressedKV(full=(2,))
    planned = plan(batch([200, 300, 40]), states(3), 4, compressed_kv)
    assert (planned.num_draft_steps, planned.num_plain_steps, planned.width) == (4, 0, 5)
    assert planned.rows == [1 + ROWS, 2, 3]
    assert planned.row_lens == [50, 300, 40]
    assert planned.fallbacks == [0, NO_FREE_SLOTS, SHORT_CONTEXT]
    assert planned.full_kv_reqs == [1, 2] and planned.verify_batches == [[0]]
    assert compressed_kv.tails == [(1, 200)]


@pytest.mark.parametrize(("wanted", "tokens"), [(4, 5), (20, 9)])
def test_a_copy_leaves_the_slots_of_two_rounds_of_all_requests(wanted, tokens):
    compressed_kv = ToyCompressedKV()
    plan(batch([200, 300, 40]), states(3), wanted, compressed_kv)
    assert compressed_kv.headrooms == [2 * tokens * 3] * 2


def test_who_lacks_queries_drafts_on_full_kv_though_nobody_has_a_copy():
    """Its verification leaves the queries; steps that are captured would not."""
    alone = plan(batch([200, 40]), states(2), 4, ToyCompressedKV(lacking=(1,)))
    assert (alone.num_draft_steps, alone.rows, alone.on_full_kv) == (4, [1, 2], True)
    assert (alone.fallbacks, alone.verify_batches, alone.full_kv_reqs) == ([NO_QUERIES, SHORT_CONTEXT], [[0]], [1])
    beside = plan(batch([200, 300]), states(2), 4, ToyCompressedKV(lacking=(1,)))
    assert (beside.num_draft_steps, beside.rows, beside.fallbacks, beside.verify_batches) == (4, [1, 2 + ROWS], [NO_QUERIES, 0], [[0, 1]])
    assert plan(batch([200, 40]), states(2), 4, ToyCompressedKV(full=(1,))).num_draft_steps == 0, "for slots nobody drafts"
    compressed_kv = ToyCompressedKV(lacking=(1,))
    compressed_kv.queries = SimpleNamespace(can_record=lambda row: False)
    setup = RoundSetup(RoundPlanner(8, 8), compressed_kv, FullKVProvider())
    assert setup.plan(batch([200]), states(1), [200], 4).num_draft_steps == 0, "where no ring is left it would gain nothing"


def test_rounds_in_which_a_request_lacks_queries_tell_nothing_of_drafts():
    seen = []
    costs = SimpleNamespace(observe=lambda load, spent: seen.append(spent.num_draft_steps))
    round_timer = RoundTimer(DraftLength(4, is_fixed=True), torch.device("cpu"), costs=costs)
    for lacking in ((1,), (2,), ()):
        found = states(2)
        planned = plan(batch([200, 200]), found, round_timer.start_round([200, 200], found)[0], ToyCompressedKV(lacking=lacking))
        round_timer.on_planned(planned)
        round_timer.on_drafted()
        round_timer.on_launched()
    round_timer.interrupt()
    round_timer.start_round([200, 200], found)
    assert seen == [4], "all are on copies"


def test_the_rows_that_drafts_read_lead_to_the_slots_of_the_drafts():
    compressed_kv = ToyCompressedKV(full=(2,))
    found, asked = loop(compressed_kv), batch([200, 300])
    planned = plan(asked, states(2), 4, compressed_kv)
    slots = found.steps.slots(asked, planned.width, asked.seq_lens)
    table = compressed_kv.token_table.clone()
    assert torch.equal(slots, torch.stack([table[1, 200:205], table[2, 300:305]]).long())
    found.steps.extend_rows(asked, planned, slots)
    assert compressed_kv.token_table[1 + ROWS, 50:55].tolist() == slots[0].tolist()
    assert torch.equal(compressed_kv.token_table[2], table[2]), "a request without a copy reads its own row"
    assert compressed_kv.tails == [(1, 200), (1, 205)]


@pytest.mark.parametrize(
    ("fallback", "steps"), [("custom-logit-processor", 1), ("hidden-states", 1), ("grammar", 1), ("min-p", 4)]
)
def test_one_that_cannot_be_drafted_answers_while_the_others_draft(fallback, steps):
    reason = FALLBACK_REASONS.index(fallback)
    found = states(2, r2=reason)
    planned = plan(batch([200, 300]), found, 4)
    assert (planned.num_draft_steps, planned.rows, planned.row_lens) == (steps, [1 + ROWS, 2], [50, 300])
    assert (planned.fallbacks, planned.full_kv_reqs) == ([0, reason], [1])
    assert planned.is_shortened == (steps == 1) and planned.verify_batches == ([] if steps == 1 else [[0]])
    found[0].num_pending = 3
    assert plan(batch([200, 300]), found, 4).verify_batches == [[0]], "at x drafts"


@pytest.mark.parametrize("more", [{"custom_logit_processor": "p"}, {"return_hidden_states": True}], ids=["processor", "hidden states"])
def test_what_hides_behind_another_reason_is_looked_at_all_the_same(more):
    found = states(2, r2=FALLBACK_REASONS.index("min-p"))
    assert plan(batch([200, 300], [request(), request(**more)]), found, 4).num_steps == 1


def test_log_probabilities_of_answers_hold_nobody():
    planned = plan(batch([200, 40], [request(), request(return_logprob=True)]), states(2), 4)
    assert (planned.num_draft_steps, planned.full_kv_reqs, planned.is_shortened) == (4, [1], False)


@pytest.mark.parametrize("kind", [{"grammar": object()}], ids=["grammar"])
def test_what_is_looked_at_is_drafted_and_its_verification_looks(kind):
    reqs = [request(), request(**kind), request(**kind)]
    planned = plan(batch([200, 300, 40], reqs), states(3), 4)
    assert (planned.num_draft_steps, planned.rows) == (4, [1 + ROWS, 2 + ROWS, 3]) and planned.verify_batches == [[0, 1, 2]]
    assert planned.fallbacks == [0, 0, SHORT_CONTEXT], "its context is short: it drafts on full KV"
    alone = plan(batch([40], [request(**kind)]), states(1), 4)
    assert (alone.num_draft_steps, alone.num_plain_steps) == (0, 1), "where nobody drafts on a copy, that would gain nothing"


def test_where_steps_over_copies_round_otherwise_no_answer_comes_of_them():
    setup = RoundSetup(RoundPlanner(8, 8, separates_full_kv=True), ToyCompressedKV(full=(2,)), FullKVProvider())
    asked = batch([200, 300, 40, 300], [request(), request(), request(), request(1)])
    planned = setup.plan(asked, states(4), [200, 300, 40, 300], 4)
    assert planned.rows[0] == 1 + ROWS and (planned.full_kv_reqs, planned.verify_reqs) == ([], [0, 1, 2, 3]), "all are verified"
    beside = setup.plan(asked, states(4, r2=FALLBACK_REASONS.index("hidden-states")), [200, 300, 40, 300], 4)
    assert beside.on_full_kv and beside.full_kv_reqs == [0, 1, 2, 3], "who cannot be verified answers where nobody reads a copy"


def test_drafts_end_with_the_longest_output_and_lossy_drafts_none():
    assert plan(batch([200, 300], [request(2), request(3)]), states(2), 4).num_draft_steps == 2
    last = plan(batch([200], [request(1)]), states(1), 4)
    assert (last.num_draft_steps, last.num_plain_steps, last.rows, last.row_lens) == (0, 1, [1], [200]), "a last token is one of full KV"
    planned = plan(batch([200, 40]), states(2), 4, lossy=True)
    assert (planned.num_draft_steps, planned.num_plain_steps, planned.verify_batches) == (0, 4, [])
    assert planned.rows == [1 + ROWS, 2] and planned.row_lens == [50, 40] and planned.full_kv_reqs == [0, 1]


@pytest.mark.parametrize(("length", "steps"), [(120, 4), (125, 3), (127, 1), (128, 4), (200, 4)])
def test_a_lossy_round_ends_where_a_copy_is_due_whoever_else_is_served(length, steps):
    """Or the first tokens after that place would be of full KV beside some, and of a copy beside others."""
    assert plan(batch([length, 300]), states(2), 8, lossy=True).num_steps == steps
    assert plan(batch([length, 300]), states(2), 8).num_steps == 8, "what is verified is the same in any round"
    undrafted = states(2, r1=FALLBACK_REASONS.index("min-p"))
    assert plan(batch([length, 300]), undrafted, 8, lossy=True).num_steps == 4, "it never gets a copy"


@pytest.mark.parametrize("wanted", [0, 1, 2, 8])
def test_what_draft_lengths_say_does_nothing_in_lossy(wanted):
    assert plan(batch([200, 300]), states(2), wanted, lossy=True).num_steps == PLAIN_STEPS


def test_a_lossy_round_ends_where_a_copy_is_renewed():
    compressed_kv = ToyCompressedKV()
    compressed_kv.copies[1] = CompressedKV(torch.arange(50), 200)
    assert plan(batch([711]), states(1), 8, compressed_kv, lossy=True).num_steps == 2
    assert plan(batch([713]), states(1), 8, compressed_kv, lossy=True).num_steps == 4 and compressed_kv.copies[1].covered == 713


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 30), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 8), st.sampled_from(["", "hidden-states", "min-p"]),
)  # fmt: skip
def test_no_token_of_verified_decoding_comes_from_a_copy_alone(requests, wanted, fallback):
    found = states(len(requests))
    if fallback:
        found[0].fallback = FALLBACK_REASONS.index(fallback)
    compressed_kv = ToyCompressedKV(full=[state.row for state, (_, _, full) in zip(found, requests) if full])
    asked = batch([length for length, _, _ in requests], [request(missing) for _, missing, _ in requests])
    planned = plan(asked, found, wanted, compressed_kv)
    assert not any(planned.reads_compressed(i) for i in planned.full_kv_reqs)
    assert planned.num_draft_steps or planned.row_lens == planned.lengths
    assert planned.num_draft_steps <= wanted and planned.num_steps <= max(missing for _, missing, _ in requests)
    assert not {*planned.verify_reqs} & {*planned.full_kv_reqs}


def test_all_requests_get_their_first_copies_in_the_first_round_that_drafts():
    compressed_kv, count = ToyCompressedKV(), 7
    planned = plan(batch([200] * count), states(count), 0, compressed_kv)
    assert not compressed_kv.copies and planned.fallbacks == [SLOWER] * count
    planned = plan(batch([200] * count), states(count), 2, compressed_kv)
    assert planned.num_draft_steps == 2 and len(compressed_kv.copies) == count and not any(planned.fallbacks)


def test_without_drafts_a_few_tokens_are_decoded_at_once_where_nothing_forbids_it():
    planned = plan(batch([200, 300]), states(2), 0)
    assert (planned.num_draft_steps, planned.num_plain_steps, planned.width) == (0, PLAIN_STEPS, PLAIN_STEPS)
    assert planned.rows == [1, 2] and set(planned.fallbacks) == {SLOWER}
    assert plan(batch([5, 200]), states(2), 0).fallbacks == [SHORT_CONTEXT, SLOWER], "of five tokens none would be drafted either"
    assert plan(batch([200, 300], [request(1), request(2)]), states(2), 0).num_steps == 2
    assert plan(batch([200], [request(grammar=object())]), states(1), 0).num_steps == 1


def a_round(steps, drafts=True, verify_batches=((0,),), **more):
    """Of one request, which drafts or answers."""
    given = {"fallbacks": [0 if drafts else SLOWER], "full_kv_reqs": [] if drafts else [0], "remaining": [40], **more}
    batches = [list(part) for part in verify_batches] if drafts else []
    return RoundPlan(states(1), steps, [100], [0], [1 + ROWS if drafts else 1], [100], verify_batches=batches, **given)


def run(round_, tokens, answers=(), order=None):
    """The result of a round whose steps give ``tokens``, and its verification ``answers``."""
    found, published, asked = loop(), [] if order is None else order, batch([100])
    nothing = LogitsProcessorOutput(next_token_logits=None)
    found._plan = lambda batch, states: round_
    found.steps.slots = lambda *_: None
    found.steps.run = lambda *_: published.append("run") or [(nothing, sampled([token])) for token in tokens]
    found.steps.samplers = SimpleNamespace(get=lambda *_: SimpleNamespace(draw=lambda logits, positions: sampled(answers)))
    found.verifier._forward = lambda *_: (nothing, torch.zeros(len(answers)))
    found.round_timer = SimpleNamespace(
        on_first_step=lambda: None, on_drafted=lambda: None, on_launched=lambda: None, running=None
    )
    found.worker.requests.states_of = lambda batch: round_.states
    result = found.decode(asked, lambda lengths: published.append(lengths.tolist()))
    return found, result, published


def outcome(drafted, answers, width=None):
    """The result of a round of one request that drafted ``drafted`` and verified to ``answers``."""
    return run(a_round(len(drafted)), drafted, [*answers, *[0] * ((width or len(answers)) - len(answers))])


def sampled(tokens):
    return SampledTokens(torch.as_tensor(tokens), None, [], [])


def test_plain_steps_are_published_before_they_run():
    found, result, order = run(a_round(3, drafts=False), (5, 6, 7))
    assert order == [[103], "run"]
    assert result.next_token_ids.tolist() == [5, 6, 7] and result.accept_lens.tolist() == [3]
    assert result.next_draft_input.bonus_tokens.tolist() == [7]
    # SGLang's own decoding waits for the same event.
    assert found.worker.model_runner.war_fastpath_read_done_event == "earlier"


def test_drafts_that_gather_are_no_answers_and_the_next_round_goes_on_after_them():
    found, result, order = run(a_round(2, verify_batches=()), (5, 6))
    assert order == [[100], "run"] and result.accept_lens.tolist() == [0]
    assert result.next_draft_input.bonus_tokens.tolist() == [9] and result.plan.states[0].num_pending == 2
    assert found.pending_drafts.tokens[1, :2].tolist() == [5, 6]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7), st.integers(0, 2))
def test_accepted_is_what_one_by_one_decoding_gives(drafts, answers, spare):
    answers = answers[: len(drafts) + 1]
    expected = []
    for i, answer in enumerate(answers):
        expected.append(answer)
        if i == len(drafts) or drafts[i] != answer:
            break
    _, result, published = outcome(drafts, answers, len(answers) + spare)
    count = int(result.accept_lens)
    assert result.next_token_ids[:count].tolist() == expected
    assert result.next_draft_input.bonus_tokens.tolist() == [expected[-1]]
    assert result.speculative_num_draft_tokens == len(answers) + spare
    assert published[-1] == result.new_seq_lens.tolist() == [100 + count]


def test_queries_are_of_use_where_a_choice_is_near_or_made_in_each_round():
    compressed_kv, state = ToyCompressedKV(), RequestState(rid="r", row=1, seed=0)
    assert is_compression_near(compressed_kv, state, 400), "there is none yet"
    compressed_kv.compress(1, 400, 0)
    assert [is_compression_near(compressed_kv, state, end) for end in (401, 879, 880)] == [False, False, True]
    compressed_kv.each_round = True
    assert is_compression_near(compressed_kv, state, 401)


def test_steps_leave_queries_of_answers_and_of_drafts_by_which_the_next_step_is_chosen():
    compressed_kv, every = ToyCompressedKV(), {1: 0, 2: 1, 3: 1}
    anew = {"each_round": True, "follows_queries": True, "window": 1}
    compressed_kv.method = lambda row: SimpleNamespace(
        compressor=SimpleNamespace(every=every[row], **anew), unit=1, min_context=MIN_CONTEXT, recent=0
    )
    found = [RequestState(rid=f"r{row}", row=row, seed=0) for row in (1, 2, 3)]
    for state in found[:2]:
        compressed_kv.compress(state.row, 400, 0)
    round_ = RoundPlan(found, 3, [400] * 3, [0, 2, 0], [9, 10, 3], [100, 102, 400], [0, 0, 1], full_kv_reqs=[2], remaining=[50] * 3)
    steps = StepRunner(SimpleNamespace(compressed_kv=compressed_kv, model_runner=None))
    choosing = steps._selecting_reqs(round_)
    assert choosing == [1] and steps._recorded_queries(round_, 1, choosing) == (RecordedRows(2, 1, 2, 403), RecordedRows(3, 2, 3, 401))


def without_copies():
    """ToyCompressedKV of requests that may get a first copy soon."""
    method = SimpleNamespace(compressor=SimpleNamespace(window=32), unit=1, min_context=MIN_CONTEXT, recent=0)
    return SimpleNamespace(method=lambda row: method, get=lambda row: None, is_refused=lambda row: False)


def test_a_captured_verification_is_aimed_before_it_is_replayed():
    seen = []
    graph = SimpleNamespace(width=5, verify=lambda batch, inputs: seen.append("replay") or LogitsProcessorOutput(None))
    worker = SimpleNamespace(queries=SimpleNamespace(set_targets=seen.append), compressed_kv=without_copies(), requests=WITHOUT_GRAMMARS)
    draw = SimpleNamespace(draw=lambda logits, positions: sampled([1, 2, 3, 4, 5, 1, 2, 7, 0, 0]))
    steps = SimpleNamespace(slots=lambda *_: torch.zeros(2, 5), samplers=SimpleNamespace(get=lambda *_: draw))
    verifier = Verifier(worker, steps, SimpleNamespace(fit=lambda count, width: graph), None)
    planned = plan(asked := batch([200, 300]), states(2), 3)
    part = verifier.verify(asked, planned, [0, 1], torch.tensor([[1, 2, 3], [1, 2, 3]]), None, None)
    assert seen == [(RecordedRows(1, 0, 5, 200), RecordedRows(2, 5, 10, 300)), "replay"]
    assert part.num_output.tolist() == [4, 3] and part.width == 5, "the graph is wider than the drafts"


def test_the_last_token_does_not_hide_why_full_kv_gave_those_before():
    found = states(2)
    found[0].fallback = SHORT_CONTEXT
    planned = plan(batch([40, 200], [request(1), request(1)]), found, 4)
    assert planned.fallbacks == [SHORT_CONTEXT, 0] and planned.full_kv_reqs == [0, 1]


def test_an_answer_gets_no_more_tokens_than_it_lacks():
    asked = batch([200, 300, 40, 40], [request(2), request(9), request(2), request(0)])
    planned = plan(asked, states(4), 4)
    assert planned.num_steps == 4 and planned.remaining == [2, 9, 2, 0]
    assert planned.verify_reqs == [0, 1] and [planned.num_output_tokens(i) for i in planned.full_kv_reqs] == [2, 0]
    worker = SimpleNamespace(queries=SimpleNamespace(set_targets=lambda recorded: None), compressed_kv=without_copies(), requests=WITHOUT_GRAMMARS)
    graph = SimpleNamespace(width=5, verify=lambda batch, inputs: LogitsProcessorOutput(next_token_logits=None))
    draw = SimpleNamespace(draw=lambda logits, positions: sampled([1, 2, 3, 4, 5] * 2))
    steps = SimpleNamespace(slots=lambda *_: torch.zeros(2, 5), samplers=SimpleNamespace(get=lambda *_: draw))
    verifier = Verifier(worker, steps, SimpleNamespace(fit=lambda count, width: graph), None)
    part = verifier.verify(batch([200, 300]), planned, [0, 1], torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), None, None)
    assert part.num_output.tolist() == [2, 5]


def test_a_draft_after_the_end_of_an_output_counts_neither_as_right_nor_as_wrong():
    found, result, _ = outcome([1, 2], [1, 2, 0])
    result.accept_lens, result.finished_early = torch.tensor([2]), {0}
    found.report.account(batch([100]), result)
    state = result.plan.states[0]
    assert (state.verifies, state.offered, state.accepted) == (1, 1, 1)


def test_the_scheduler_does_not_take_an_earlier_event_for_the_end_of_the_round():
    found, _, _ = outcome([1], [1, 2])
    assert found.worker.model_runner.war_fastpath_read_done_event is None


def test_counts_leave_out_requests_that_ended_before():
    found, result, _ = outcome([1, 2], [1, 2, 0])
    ended = request()
    ended.finished = lambda: True
    found.report.account(batch([100], [ended]), result)
    assert result.plan.states[0].verifies == 0
    found.report.account(batch([100]), result)
    state = result.plan.states[0]
    assert (state.verifies, state.offered, state.accepted) == (1, 2, 2)


class Anchors(FullKVProvider):
    """Rows whose residual is on its way, and those of them where it came."""

    def __init__(self, early, here=()):
        self.early, self.here = set(early), set(here)

    def is_early(self, row):
        return row in self.early

    def has_arrived(self, row):
        return row in self.here

    def end_early_decoding(self, row):
        self.early.discard(row)


def plan_early(asked, found, wanted, full_kv, longest=8):
    return RoundSetup(RoundPlanner(longest, 8), ToyCompressedKV(), full_kv).plan(asked, found, asked.seq_lens.tolist(), wanted)


def test_who_has_an_anchor_alone_drafts_on_its_own_row_and_waits():
    found = states(2)
    found[0].num_pending = 3
    planned = plan_early(batch([200, 300]), found, 4, Anchors({1}))
    assert planned.rows == [1, 2 + ROWS] and planned.row_lens[0] == 203 and planned.num_pending == [3, 0]
    assert planned.early_reqs == [0] and planned.full_kv_reqs == [] and planned.verify_reqs == [1]
    assert planned.num_steps == 4 and planned.can_be_rejected(0) and not planned.reads_compressed(0)


def test_a_request_that_decodes_early_leaves_the_others_their_draft_length_and_is_verified_in_their_round():
    found, full_kv = states(3), Anchors({1}, here={1})
    found[0].num_pending = 3
    planned = plan_early(batch([200, 300, 400]), found, 4, full_kv)
    assert planned.num_steps == 4 and planned.verify_reqs == [0, 1, 2] and planned.num_draft_tokens(0) == 7 and planned.num_draft_tokens(1) == 4
    alone = plan_early(batch([200, 300]), states(2), 4, Anchors({1, 2}))
    assert alone.num_steps == SHORT_ROUND and alone.early_reqs == [0, 1]


def test_drafts_on_an_anchor_are_verified_in_the_round_after_the_rest_came():
    found, full_kv = states(1), Anchors({1}, here={1})
    found[0].num_pending = 3
    planned = plan_early(batch([200]), found, 4, full_kv)
    assert planned.verify_reqs == [0] and planned.num_draft_tokens(0) == 3 + SHORT_ROUND and planned.early_reqs == [0]
    assert not full_kv.is_early(1)
    # Now it is like any other: it gets a copy.
    found[0].num_pending = 0
    assert plan_early(batch([205]), found, 4, full_kv).rows == [1 + ROWS]


def test_where_the_rest_came_before_the_first_round_there_is_no_draft_on_an_anchor():
    full_kv = Anchors({1}, here={1})
    planned = plan_early(batch([200]), states(1), 4, full_kv)
    assert planned.early_reqs == [] and planned.rows == [1 + ROWS] and not full_kv.is_early(1)


def test_at_the_limit_of_pending_drafts_one_step_is_run_until_the_residual_arrives():
    found = states(1)
    found[0].num_pending = 8
    planned = plan_early(batch([200]), found, 4, Anchors({1}))
    assert planned.num_pending == [7] and planned.num_steps == 1 and planned.verify_reqs == []
    # Others go on at their own length, and the newest drafts are drafted again beside them.
    found = states(2)
    found[0].num_pending = 8
    planned = plan_early(batch([200, 300]), found, 4, Anchors({1}))
    assert planned.num_pending == [4, 0] and planned.num_steps == 4 and planned.verify_reqs == [1]


def test_others_answer_on_full_kv_where_drafts_do_not_pay_and_one_has_an_anchor_alone():
    planned = plan_early(batch([200, 300]), states(2), 0, Anchors({2}))
    assert planned.full_kv_reqs == [0] and planned.early_reqs == [1] and planned.verify_reqs == [] and planned.num_steps > SHORT_ROUND
