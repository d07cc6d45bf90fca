"""A lockstep round: who drafts where, and what of it is accepted, counted and published."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.core import FALLBACK_REASONS, Acceptance, CompressedView, RequestState
from sglang_ext.managers.draft_length import Choice, FixedLength
from sglang_ext.managers.lockstep import Lockstep
from sglang_ext.managers.pace import Pace
from sglang_ext.metrics import KVMetrics
from sglang_ext.managers.planner import NEIGHBOUR, NO_FREE_SLOTS, NO_QUERIES, SHORT_CONTEXT, SLOWER, copy_is_near
from sglang_ext.managers.round_plan import PLAIN_STEPS, TRIAL_COPIES, Round, RoundPlanner
from sglang_ext.managers.sampling import Sampled
from sglang_ext.managers.steps import Drafted, Steps
from sglang_ext.managers.verify_pass import VerifyPass
from sglang_ext.mem_cache.query_window import Recorded
from sglang_ext.platforms.plain_cpu import without_pinning

ROWS = 8


class Views:
    """Copies of a quarter; none for requests in ``full``."""

    recent, share, each_round = 0, 0.25, False

    def method(self, row):
        compressor = SimpleNamespace(each_round=self.each_round, window=32)
        return SimpleNamespace(recent=self.recent, least=1, unit=1, compressor=compressor)

    def is_refused(self, row):
        return False

    def has_queries(self, row):
        return row not in self.lacking

    def __init__(self, full=(), lacking=()):
        self.full, self.lacking, self.tails, self.copies = full, lacking, [], {}
        self.token_table = torch.arange(2 * ROWS * 600, dtype=torch.int32).view(2 * ROWS, 600)

    def get(self, row):
        return self.copies.get(row)

    def compress(self, row, tokens, headroom, prefix=None):
        if row in self.full:
            return False
        self.copies[row] = CompressedView(torch.arange(tokens // 4), tokens)
        return True

    def write_tail(self, row, end):
        self.tails.append((row, end))

    def tail_written(self, row, end):
        self.tails.append((row, end))

    def reach(self, row, tokens):
        return tokens

    def draft_row(self, row):
        return row + ROWS


def request(missing=40, **more):
    params = SimpleNamespace(max_new_tokens=missing)
    state = {"grammar": None, "is_retracted": False, "spec_cap_lens_histogram": [], **more}
    return SimpleNamespace(sampling_params=params, output_ids=[], finished=lambda: False, **state)


def schedule(views=None, lossy=False, stride=5):
    metrics = SimpleNamespace(
        count_drafts=lambda n, f: None, count_verify=lambda n: None, count_fallback=lambda r, n: None,
        observe_pool=lambda v: None,
    )
    worker = SimpleNamespace(
        views=views or Views(), lossy=lossy, stride=stride, strict=False, metrics=metrics,
        requests=SimpleNamespace(typical=Acceptance()),
        model_runner=SimpleNamespace(war_fastpath_read_done_event="earlier", decode_cuda_graph_runner=None),
    )
    pace = Pace(FixedLength(worker.stride - 1), torch.device("cpu"), KVMetrics("model"))
    steps = Steps(worker)
    return Lockstep(worker, pace, steps, VerifyPass(worker, steps, None, None))


def plan(asked, found, wanted, views=None, lossy=False):
    choice = wanted if isinstance(wanted, Choice) else Choice(wanted)
    return RoundPlanner(views or Views(), 5, lossy).plan(asked, found, asked.seq_lens.tolist(), choice)


def batch(lengths, reqs=None):
    reqs = reqs or [request() for _ in lengths]
    return SimpleNamespace(
        reqs=reqs, seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths), return_logprob=False,
        req_pool_indices=torch.arange(1, len(lengths) + 1),
    )


def states(count, **fallback):
    return [RequestState(rid=str(i), row=i, seed=0, fallback=fallback.get(f"r{i}", 0)) for i in range(1, count + 1)]


def test_each_drafts_on_its_copy_and_without_one_on_its_full_kv():
    views = Views(full=(2,))
    planned = plan(batch([200, 300, 40]), states(3), 4, views)
    assert planned.drafts == 4
    assert planned.rows == [1 + ROWS, 2, 3]
    assert planned.viewed == [50, 300, 40]
    assert planned.fallbacks == [0, NO_FREE_SLOTS, SHORT_CONTEXT]
    assert views.tails == [(1, 200)]


def test_who_lacks_queries_drafts_on_full_kv_though_nobody_has_a_copy():
    """Its verification leaves the queries; plain steps that are captured would not."""
    alone = plan(batch([200, 40]), states(2), 4, Views(lacking=(1,)))
    assert (alone.drafts, alone.rows, alone.on_full_kv) == (4, [1, 2], True)
    assert alone.fallbacks == [NO_QUERIES, SHORT_CONTEXT]
    beside = plan(batch([200, 300]), states(2), 4, Views(lacking=(1,)))
    assert (beside.drafts, beside.rows, beside.fallbacks) == (4, [1, 2 + ROWS], [NO_QUERIES, 0])
    assert plan(batch([200, 40]), states(2), 4, Views(full=(1,))).drafts == 0, "for slots nobody drafts"


def test_a_look_in_which_all_lack_queries_tells_nothing_of_drafts():
    seen = []
    pace = Pace(SimpleNamespace(observe=lambda load, spent: seen.append(spent.drafts)), torch.device("cpu"), KVMetrics("model"))
    pace.lengths.choose = lambda load, probabilities: Choice(4, trial=True)
    for lacking in ((1,), ()):
        found = states(1)
        planned = plan(batch([200]), found, pace.begin([200], found), Views(lacking=lacking))
        pace.planned(planned)
        pace.drafted()
        pace.ended()
    pace.interrupt()
    pace.begin([200], found)
    assert seen == [4], "on a copy"


def test_the_rows_that_drafts_read_lead_to_the_slots_of_the_drafts():
    views = Views(full=(2,))
    found, asked = schedule(views), batch([200, 300])
    planned = plan(asked, states(2), 4, views)
    slots = found.steps.slots(asked, planned.width)
    table = views.token_table.clone()
    assert torch.equal(slots, torch.stack([table[1, 200:205], table[2, 300:305]]).long())
    found.steps.extend_rows(asked, planned, slots)
    assert views.token_table[1 + ROWS, 50:55].tolist() == slots[0].tolist()
    assert torch.equal(views.token_table[2], table[2]), "a request without a copy reads its own row"
    assert views.tails == [(1, 200), (1, 205)]


@pytest.mark.parametrize(
    ("reqs", "fallback"),
    [([request(), request(grammar=object())], {}), ([request(), request()], {"r2": FALLBACK_REASONS.index("penalty")})],
    ids=["grammar", "penalty"],
)
def test_one_that_cannot_draft_has_all_decode_one_token_with_full_kv(reqs, fallback):
    planned = plan(batch([200, 300], reqs), states(2, **fallback), 4)
    assert (planned.drafts, planned.steps) == (0, 1) and planned.rows == [1, 2] and planned.viewed == [200, 300]
    assert planned.fallbacks == [NEIGHBOUR, fallback.get("r2", NEIGHBOUR)]


def test_drafts_end_with_the_longest_output_and_lossy_drafts_none():
    assert plan(batch([200, 300], [request(2), request(3)]), states(2), 4).drafts == 2
    last = plan(batch([200], [request(1)]), states(1), 4)
    assert (last.drafts, last.steps, last.rows, last.viewed) == (0, 1, [1], [200]), "a last token is one of full KV"
    planned = plan(batch([200]), states(1), 4, lossy=True)
    assert planned.drafts == 0 and planned.rows == [1 + ROWS] and planned.viewed == [50]


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 30), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 8), st.sampled_from(["", "penalty", "min-p"]),
)  # fmt: skip
def test_no_token_of_verified_decoding_comes_from_a_copy_alone(requests, wanted, fallback):
    found = states(len(requests))
    if fallback:
        found[0].fallback = FALLBACK_REASONS.index(fallback)
    views = Views(full=[state.row for state, (_, _, full) in zip(found, requests) if full])
    asked = batch([length for length, _, _ in requests], [request(missing) for _, missing, _ in requests])
    planned = plan(asked, found, wanted, views)
    assert bool(planned.drafts) != bool(planned.steps)
    assert planned.drafts or (planned.on_full_kv and planned.viewed == planned.lengths)
    assert planned.drafts <= wanted and planned.width <= max(missing for _, missing, _ in requests)


def test_a_trial_makes_few_copies_and_the_others_draft_on_full_kv():
    views, count = Views(), TRIAL_COPIES + 3
    views.token_table = torch.zeros(2, 2)
    planned = plan(batch([200] * count), states(count), Choice(2, trial=True), views)
    assert planned.drafts == 2 and len(views.copies) == TRIAL_COPIES
    assert planned.fallbacks == [0] * TRIAL_COPIES + [SLOWER] * 3 and planned.rows[-3:] == [count - 2, count - 1, count]
    assert planned.trial and planned.share_on_copies == TRIAL_COPIES / count
    everybody = plan(batch([200] * count), states(count), Choice(2), views)
    assert not everybody.trial and len(views.copies) == count and not any(everybody.fallbacks)


def test_without_drafts_a_few_tokens_are_decoded_at_once_where_nothing_forbids_it():
    planned = plan(batch([200, 300]), states(2), 0)
    assert (planned.drafts, planned.steps, planned.width) == (0, PLAIN_STEPS, PLAIN_STEPS)
    assert planned.rows == [1, 2] and set(planned.fallbacks) == {SLOWER}
    assert plan(batch([200, 300], [request(1), request(2)]), states(2), 0).steps == 2
    with_logprobs = batch([200])
    with_logprobs.return_logprob = True
    assert plan(with_logprobs, states(1), 0).steps == 1


def outcome(drafted, answers, width=None):
    """The result of a round of one request that drafted ``drafted`` and verified to ``answers``."""
    found, published, asked = schedule(), [], batch([100])
    round_ = Round(states(1), len(drafted), 0, [100], [1], [100], [0])
    tokens = torch.tensor([*answers, *[0] * ((width or len(answers)) - len(answers))])
    nothing = LogitsProcessorOutput(next_token_logits=None)
    found.steps.draft = lambda *_: Drafted(torch.tensor([drafted]))
    found.verify_pass.forward = lambda *_: (nothing, sampled(tokens))
    found.pace = SimpleNamespace(drafted=lambda: None)
    slots = torch.zeros(1, 1 + len(drafted))
    result = found._draft_and_verify(asked, round_, torch.tensor([9]), slots, published.append)
    return found, result, published


def sampled(tokens):
    return Sampled(torch.as_tensor(tokens), None, [], [])


def test_plain_steps_are_published_before_they_run():
    found, order = schedule(), []
    nothing = LogitsProcessorOutput(next_token_logits=None)
    found.steps.one_by_one = lambda *_: order.append("run") or [(nothing, sampled([token])) for token in (5, 6, 7)]
    found.pace = SimpleNamespace(drafted=lambda: None)
    round_ = Round(states(1), 0, 3, [100], [1], [100], [SLOWER])
    result = found._decode_plainly(
        batch([100]), round_, torch.tensor([9]), torch.zeros(1, 3), lambda n: order.append(n.tolist())
    )
    assert order == [[103], "run"]
    assert result.next_token_ids.tolist() == [5, 6, 7] and result.accept_lens.tolist() == [3]
    assert result.next_draft_input.bonus_tokens.tolist() == [7]
    # SGLang's own decoding waits for the same event.
    assert found.worker.model_runner.war_fastpath_read_done_event == "earlier"


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
    assert published[0].tolist() == result.new_seq_lens.tolist() == [100 + count]


def test_queries_are_of_use_where_a_choice_is_near_or_made_in_each_round():
    views, state = Views(), RequestState(rid="r", row=1, seed=0)
    assert copy_is_near(views, state, 400), "there is none yet"
    views.compress(1, 400, 0)
    assert [copy_is_near(views, state, end) for end in (401, 879, 880)] == [False, False, True]
    views.each_round = True
    assert copy_is_near(views, state, 401)


def test_a_captured_verification_is_aimed_before_it_is_replayed():
    seen = []
    graph = SimpleNamespace(width=5, verify=lambda batch, inputs: seen.append("replay") or LogitsProcessorOutput(None))
    worker = SimpleNamespace(queries=SimpleNamespace(aim=seen.append))
    verify_pass = VerifyPass(worker, None, SimpleNamespace(fit=lambda count, width: graph), None)
    planned = plan(asked := batch([200, 300]), states(2), 4)
    sampling = SimpleNamespace(draw=lambda logits, positions: "sampled")
    _, sampled = verify_pass.forward(asked, planned, torch.zeros(2, 5), torch.zeros(2, 5), lambda width: sampling)
    assert seen == [(Recorded(1, 0, 5, 200), Recorded(2, 5, 10, 300)), "replay"] and sampled == "sampled"


def test_the_scheduler_does_not_take_an_earlier_event_for_the_end_of_the_round():
    found, _, _ = outcome([1], [1, 2])
    assert found.worker.model_runner.war_fastpath_read_done_event is None


def test_counts_leave_out_requests_that_ended_before():
    found, result, _ = outcome([1, 2], [1, 2, 0])
    ended = request()
    ended.finished = lambda: True
    found.account(batch([100], [ended]), result)
    assert result.round.states[0].verifies == 0
    found.account(batch([100]), result)
    state = result.round.states[0]
    assert (state.verifies, state.offered, state.accepted) == (1, 2, 2)


def test_of_drafts_that_ngrams_proposed_only_those_offered_are_accepted_and_counted():
    found, seen = schedule(), []
    found.checked = SimpleNamespace(
        history=SimpleNamespace(put=lambda *_: None), observe=lambda *n: seen.append(n),
        draft=lambda *_: Drafted(torch.tensor([[1, 2, 3]]), torch.tensor([2]), torch.tensor([1])),
    )  # fmt: skip
    nothing = LogitsProcessorOutput(next_token_logits=None)
    found.verify_pass.forward = lambda *_: (nothing, sampled([1, 2, 3, 4]))
    found.pace = SimpleNamespace(drafted=lambda: None)
    round_ = Round(states(1), 3, 0, [100], [1], [100], [0])
    result = found._draft_and_verify(batch([100]), round_, torch.tensor([9]), torch.zeros(1, 4), None)
    # The third draft was never checked: the verifier's own token stands in its place.
    assert result.accept_lens.tolist() == [3] and result.next_token_ids[:3].tolist() == [1, 2, 3]
    order = []
    result.copy_done = SimpleNamespace(record=lambda: order.append(result.counted is not None))
    without_pinning(result.copy_to_cpu, return_logprob=False)
    assert order == [True], "SGLang waits for its mark alone"
    found.account(batch([100]), result)
    state = round_.states[0]
    assert (state.verifies, state.offered, state.accepted, seen) == (1, 2, 2, [(2, 1)])
