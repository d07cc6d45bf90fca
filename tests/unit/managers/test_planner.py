"""The planner: plans follow from views of the requests alone."""

from copy import deepcopy

from hypothesis import given, strategies as st

from sglang_ext.core import FALLBACK_REASONS, NO_FREE_SLOTS, NO_QUERIES, NO_SELECTION, RETRYABLE, SLOWER, RequestState
from sglang_ext.managers.spec_decode.planner import SHORT_ROUND, RequestView, RoundPlanner

MAX_PENDING, NARROW, ROWS = 12, 8, 100


@st.composite
def view(draw, row):
    """A view of any request that the provider of offloaded or of arriving full KV can have."""
    pending = draw(st.integers(0, MAX_PENDING))
    is_early = draw(st.booleans())
    offloaded = draw(st.booleans()) and not is_early
    state = RequestState(rid=str(row), row=row, seed=0, fallback=draw(st.sampled_from(range(len(FALLBACK_REASONS)))), num_pending=pending)
    return RequestView(
        state, draw(st.integers(1, 5000)), draw(st.integers(0, 40)), draw(st.booleans()), draw(st.booleans()),
        has_compressed=offloaded or draw(st.booleans()), can_get_queries=draw(st.booleans()), is_early=is_early,
        has_arrived=draw(st.booleans()), is_offloaded=offloaded, is_lost=draw(st.booleans()), tokens_until_refresh=draw(st.integers(0, 9)),
    )  # fmt: skip


@st.composite
def round_of(draw):
    """A planner, the views of a batch, a draft length, and the outcomes of compressions."""
    views = [draw(view(row)) for row in range(1, draw(st.integers(1, 5)) + 1)]
    planner = RoundPlanner(MAX_PENDING, NARROW, draw(st.booleans()), draw(st.booleans()))
    wanted = draw(st.integers(0, MAX_PENDING))
    outcomes = {
        i: draw(st.sampled_from((0, NO_FREE_SLOTS, NO_QUERIES, NO_SELECTION)))
        for i, each in enumerate(views)
        if planner.may_compress([view.state for view in views], wanted) and each.is_open and (each.remaining > 1 or planner.lossy)
    }
    return planner, views, wanted, outcomes


def complete(planner, drafts, ready=frozenset(), failed=None):
    rows = {each.row: (each.row + ROWS, -each.length // 2) for each in drafts.views}
    return planner.verify(drafts, ready, failed or {}, rows)


@given(round_of(), st.data())
def test_plans_change_no_state_and_keep_within_what_requests_have(found, data):
    planner, views, wanted, outcomes = found
    before = deepcopy([each.state for each in views])
    drafts = planner.draft(views, wanted, outcomes)
    ready = {each.row for each in views if data.draw(st.booleans())}
    plan = complete(planner, drafts, ready)
    assert [each.state for each in views] == before
    assert plan == complete(planner, planner.draft(views, wanted, outcomes), ready)
    assert 1 <= plan.num_steps <= planner.max_steps(wanted)
    verified = set(plan.verify_reqs)
    assert len(plan.verify_reqs) == len(verified), "no request is verified twice"
    for i, each in enumerate(views):
        assert plan.num_pending[i] + plan.num_steps <= MAX_PENDING
        on_full_kv = i in plan.full_kv_reqs
        assert not (on_full_kv and (i in verified or plan.num_pending[i])), "tokens of full KV are output tokens"
        assert plan.reads_compressed(i) == (plan.rows[i] == each.row + ROWS)
        if each.state.fallback not in RETRYABLE:
            assert on_full_kv and not plan.reads_compressed(i)
        if outcomes.get(i):
            assert not plan.reads_compressed(i) and plan.fallbacks[i] == outcomes[i]
        drafts_on_full_kv = not on_full_kv and not plan.reads_compressed(i) and i not in plan.early_reqs
        assert not drafts_on_full_kv or i in verified, "drafts on full KV never stay pending"


@given(round_of())
def test_a_failed_refresh_drafts_again_on_full_kv_and_is_verified(found):
    planner, views, wanted, outcomes = found
    drafts = planner.draft(views, wanted, outcomes)
    for i in drafts.on_compressed:
        plan = complete(planner, drafts, {views[i].row}, {i: NO_FREE_SLOTS})
        assert not plan.reads_compressed(i) and plan.num_pending[i] == 0 and i in plan.verify_reqs and plan.fallbacks[i] == NO_FREE_SLOTS


def plain(row, **more):
    return RequestView(RequestState(rid=str(row), row=row, seed=0), 1000, 40, **more)


def test_a_request_that_is_checked_token_by_token_shortens_the_round_of_all():
    planner, outcomes = RoundPlanner(MAX_PENDING, NARROW), {0: 0}
    others = [plain(1), RequestView(RequestState("2", 2, 0, fallback=FALLBACK_REASONS.index("hidden-states")), 1000, 40, True)]
    assert planner.draft([plain(1)], 6, outcomes).num_steps == 6
    drafts = planner.draft(others, 6, outcomes)
    assert drafts.num_steps == 1 and drafts.is_shortened


def test_requests_that_all_wait_for_their_residual_have_short_rounds():
    planner = RoundPlanner(MAX_PENDING, NARROW)
    early = [plain(row, is_early=True, has_arrived=False) for row in (1, 2)]
    assert planner.draft(early, 6, {}).num_steps == SHORT_ROUND
    assert complete(planner, planner.draft(early, 6, {})).verify_batches == []


def test_nothing_is_compressed_in_plain_rounds():
    planner = RoundPlanner(MAX_PENDING, NARROW)
    assert not planner.may_compress([plain(1).state], 0) and planner.may_compress([plain(1).state], 4)
    plan = complete(planner, planner.draft([plain(1)], 0, {}))
    assert plan.num_plain_steps > 0 and plan.fallbacks == [SLOWER]
