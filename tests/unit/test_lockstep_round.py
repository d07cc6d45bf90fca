"""A lockstep round: who drafts where, and what of it is accepted, counted and published."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.core import FALLBACK_REASONS, CompressedView, RequestState
from sglang_ext.managers.draft_length import FixedLength
from sglang_ext.managers.lockstep import Lockstep, Round
from sglang_ext.managers.pace import Pace
from sglang_ext.metrics import KVMetrics
from sglang_ext.managers.planner import NEIGHBOUR, NO_FREE_SLOTS, SHORT_CONTEXT
from sglang_ext.managers.sampling import Sampled

ROWS = 8


class Views:
    """Copies of a quarter; none for requests in ``full``."""

    def __init__(self, full=()):
        self.full, self.tails, self.copies = full, [], {}
        self.token_table = torch.arange(2 * ROWS * 600, dtype=torch.int32).view(2 * ROWS, 600)

    def get(self, row):
        return self.copies.get(row)

    def compress(self, row, tokens, headroom):
        if row in self.full:
            return False
        self.copies[row] = CompressedView(torch.arange(tokens // 4), tokens)
        return True

    def write_tail(self, row, end):
        self.tails.append((row, end))

    def tail_written(self, row, end):
        self.tails.append((row, end))

    def draft_row(self, row):
        return row + ROWS


def request(missing=40, **more):
    params = SimpleNamespace(max_new_tokens=missing)
    state = {"grammar": None, "is_retracted": False, "spec_cap_lens_histogram": [], **more}
    return SimpleNamespace(sampling_params=params, output_ids=[], finished=lambda: False, **state)


def schedule(views=None, lossy=False, stride=5):
    metrics = SimpleNamespace(
        count_drafts=lambda n: None, count_verify=lambda n: None, count_fallback=lambda r, n: None,
        observe_pool=lambda v: None,
    )
    worker = SimpleNamespace(
        views=views or Views(), lossy=lossy, stride=stride, strict=False, metrics=metrics,
        model_runner=SimpleNamespace(war_fastpath_read_done_event="earlier"),
    )
    pace = Pace(FixedLength(worker.stride - 1), torch.device("cpu"), KVMetrics("model"))
    return Lockstep(worker, None, None, pace)


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
    planned = schedule(views)._plan(batch([200, 300, 40]), states(3), 4)
    assert planned.drafts == 4
    assert planned.rows == [1 + ROWS, 2, 3]
    assert planned.viewed == [50, 300, 40]
    assert planned.fallbacks == [0, NO_FREE_SLOTS, SHORT_CONTEXT]
    assert views.tails == [(1, 200)]


def test_the_rows_that_drafts_read_lead_to_the_slots_of_the_drafts():
    views = Views(full=(2,))
    found, asked = schedule(views), batch([200, 300])
    planned = found._plan(asked, states(2), 4)
    slots = found._slots(asked, planned.drafts + 1)
    table = views.token_table.clone()
    assert torch.equal(slots, torch.stack([table[1, 200:205], table[2, 300:305]]).long())
    found._extend_rows(planned, slots)
    assert views.token_table[1 + ROWS, 50:55].tolist() == slots[0].tolist()
    assert torch.equal(views.token_table[2], table[2]), "a request without a copy reads its own row"
    assert views.tails == [(1, 200), (1, 205)]


@pytest.mark.parametrize(
    ("reqs", "fallback"),
    [([request(), request(grammar=object())], {}), ([request(), request()], {"r2": FALLBACK_REASONS.index("penalty")})],
    ids=["grammar", "penalty"],
)
def test_one_that_cannot_draft_has_all_decode_one_token_with_full_kv(reqs, fallback):
    planned = schedule()._plan(batch([200, 300], reqs), states(2, **fallback), 4)
    assert planned.drafts == 0 and planned.rows == [1, 2] and planned.viewed == [200, 300]
    assert planned.fallbacks == [NEIGHBOUR, fallback.get("r2", NEIGHBOUR)]


def test_drafts_end_with_the_longest_output_and_lossy_drafts_none():
    assert schedule()._plan(batch([200, 300], [request(2), request(3)]), states(2), 4).drafts == 2
    assert schedule()._plan(batch([200], [request(1)]), states(1), 4).drafts == 0
    planned = schedule(lossy=True)._plan(batch([200]), states(1), 4)
    assert planned.drafts == 0 and planned.rows == [1 + ROWS] and planned.viewed == [50]


def outcome(drafted, answers, width=None):
    """The result of a round of one request that drafted ``drafted`` and verified to ``answers``."""
    found, published = schedule(), []
    round_ = Round(states(1), len(drafted), [100], [1], [100], [0])
    tokens = torch.tensor([*answers, *[0] * ((width or len(answers)) - len(answers))])
    sampled = Sampled(tokens, None, [], [])
    result = found._result(
        batch([100]), round_, torch.tensor([drafted], dtype=torch.int64).view(1, -1),
        LogitsProcessorOutput(next_token_logits=None), sampled, published.append,
    )
    return found, result, published


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7), st.integers(0, 2))
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
