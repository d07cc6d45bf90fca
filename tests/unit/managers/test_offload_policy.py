"""How much full KV leaves the device follows from measured times: none where it does not pay or nothing is known."""

from types import SimpleNamespace

import pytest

from sglang_ext.managers.kv_offload.offload_policy import FIRST_DRAFTS, OffloadDecision, OffloadPolicy
from sglang_ext.managers.spec_decode.cost_model import RoundTimes

TOKEN, CONTEXT, BANDWIDTH, WEIGHTS = 147456, 32768, 4.35e12, 16.4e9
SHARE = 1 / 32


def policy(memory_contexts=8, tier="auto"):
    return OffloadPolicy(WEIGHTS, TOKEN, memory_contexts * CONTEXT, drafts=16, longest=256, requests=24, tier=tier)


def round_of(requests, verify_reqs, gathered=16):
    return SimpleNamespace(states=[None] * requests, lengths=[CONTEXT] * requests, verify_reqs=list(range(verify_reqs)), num_draft_tokens=lambda i: gathered)


def measured(found, requests=8, verify_reqs=8, gathered=16, token_seconds=0.0, more=0.0):
    """A round as bytes over bandwidths have it."""
    context = CONTEXT * TOKEN
    draft = (WEIGHTS + requests * context * SHARE) / BANDWIDTH
    verify = ((verify_reqs > 0) * WEIGHTS + verify_reqs * context) / BANDWIDTH + verify_reqs * (gathered + 1) * token_seconds
    found.observe(round_of(requests, verify_reqs, gathered), RoundTimes(16, 0, 0.0, 16 * draft, 16 * draft + verify + more))


def test_nothing_leaves_before_times_are_known():
    assert policy().choose(0.999, 50e9, SHARE) == OffloadDecision(0, FIRST_DRAFTS)
    found = policy()
    measured(found, verify_reqs=0)
    assert found.choose(0.999, 50e9, SHARE) == OffloadDecision(0, FIRST_DRAFTS)


@pytest.mark.parametrize(("probability", "link", "leaves"), [(0.999, 50e9, True), (0.9, 50e9, False), (0.999, 1e9, False), (0.99, 500e9, True)])
def test_full_kv_leaves_where_drafts_are_good_and_the_link_is_fast(probability, link, leaves):
    found = policy()
    measured(found)
    chosen = found.choose(probability, link, SHARE)
    assert (chosen.requests > 0) == leaves
    assert chosen.drafts % 16 == 0 and 16 <= chosen.drafts <= 256


def test_more_leaves_when_memory_is_short_than_when_all_fits():
    short, ample = policy(4), policy(64)
    for found in (short, ample):
        measured(found)
    assert short.choose(0.999, 100e9, SHARE).requests > ample.choose(0.999, 100e9, SHARE).requests == 0


@pytest.mark.parametrize("waited", [0.09, 5.0])
def test_rounds_that_waited_are_not_taken_for_slow_verifications(waited):
    found = policy(tier="host")
    for verify_reqs in (1, 2, 1, 2, 2):
        measured(found, 24, verify_reqs, 192)
    expected = found.choose(0.995, 50e9, SHARE)
    for verify_reqs in (2, 1, 2):
        measured(found, 24, verify_reqs, 192, more=waited)
    assert found.choose(0.995, 50e9, SHARE) == expected


def test_rounds_of_as_many_requests_as_now_tell_what_they_take():
    found, other = policy(tier="host"), policy(tier="host")
    for verify_reqs in (1, 2, 1, 2, 2):
        measured(found, requests=4, verify_reqs=verify_reqs, more=0.5)
    for verify_reqs in (1, 2, 1, 2, 2):
        for each in (found, other):
            measured(each, requests=24, verify_reqs=verify_reqs)
    assert found.choose(0.995, 100e9, SHARE) == other.choose(0.995, 100e9, SHARE)


def test_where_verified_tokens_take_long_to_compute_drafts_are_not_fewer_than_the_link_asks_for():
    """Time that a verification takes beside reading is not taken for a slow device."""
    quick, slow = policy(tier="host"), policy(tier="host")
    for verify_reqs in (2, 3, 2, 3):
        measured(quick, 24, verify_reqs, 192)
        measured(slow, 24, verify_reqs, 192, token_seconds=1e-4, more=5e-3)
    # 24 loads take 2.3 s, in which each request drafts more than 256 tokens, beside verifications too.
    assert [each.choose(0.99, 50e9, SHARE).drafts for each in (quick, slow)] == [256, 256]


def test_where_all_full_kv_leaves_the_optimum_says_after_how_many_drafts_it_comes_back():
    found = policy(tier="host")
    assert found.initial_decision == OffloadDecision(None, FIRST_DRAFTS)
    measured(found)
    chosen = {(p, link): found.choose(p, link, SHARE) for p in (0.9, 0.99) for link in (50e9, 1e12)}
    assert all(each.requests is None and 16 <= each.drafts <= 256 for each in chosen.values())
    assert chosen[0.9, 1e12].drafts < chosen[0.99, 1e12].drafts < chosen[0.99, 50e9].drafts


def test_where_acceptance_is_close_to_where_it_pays_full_kv_does_not_go_to_and_fro():
    found = policy()
    measured(found)
    ranked = [round(0.985 + i / 1000, 3) for i in range(15)]
    leaves = next(p for p in ranked if found.choose(p, 50e9, SHARE).requests)
    assert found.choose(leaves - 0.001, 50e9, SHARE).requests, "a little less than what lets it leave does not call it back"
    returned = found.choose(0.97, 50e9, SHARE)
    assert not returned.requests and not found.choose(leaves - 0.001, 50e9, SHARE).requests
    assert 16 < returned.drafts <= 256, "those whose full KV is away yet gather as many drafts as pay for a load"
