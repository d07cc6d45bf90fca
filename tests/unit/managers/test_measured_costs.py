"""Costs that rounds tell are those of the machine that ran them."""

import pytest
from cost_helpers import machines
from hypothesis import assume, given, settings, strategies as st

from sglang_ext.managers.kv_offload.throughput_model import CostError, Costs, draft_seconds, verify_seconds
from sglang_ext.managers.kv_offload.offload_policy import VerifyTiming, fit_costs

MACHINES = machines(weights=st.floats(1, 20), token_seconds=st.floats(1e-5, 0.001))


def rest(costs, requests, tokens):
    return VerifyTiming(requests, tokens, float(verify_seconds(costs, requests, tokens)) + costs.turnaround)


def told(costs, drafting, rests, weights=None):
    known = Costs(weights or costs.weights, costs.context, 1.0, costs.link, costs.memory, costs.budget, costs.drafts)
    return fit_costs(known, drafting, draft_seconds(costs, drafting), rests)


@given(MACHINES, st.integers(1, 20), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 256)), min_size=3, max_size=20))
@settings(deadline=None)
def test_a_machine_that_was_seen_in_different_rounds_is_told(costs, drafting, verified):
    rests = [rest(costs, 0, 0), *(rest(costs, requests, requests * tokens) for requests, tokens in verified)]
    found = told(costs, drafting, rests)
    assert found.bandwidth == pytest.approx(costs.bandwidth, rel=1e-3)
    assert found.weights == pytest.approx(costs.weights, rel=1e-3)
    assert found.turnaround == pytest.approx(costs.turnaround, abs=1e-4)
    assert found.token_seconds == pytest.approx(costs.token_seconds, rel=1e-2)


@given(MACHINES, st.integers(1, 20), st.integers(1, 4), st.integers(1, 256), st.floats(0.001, 100))
@settings(deadline=None)
def test_what_was_seen_again_and_again_is_foretold_whatever_the_weights_are_said_to_be(costs, drafting, requests, tokens, factor):
    """One kind of round does not tell reading from computing, but it tells itself."""
    # One that reads less than a draft may take no longer than that: a forward's weights are what a draft tells.
    assume(requests * costs.context >= drafting * costs.compressed_bytes)
    seen = rest(costs, requests, requests * tokens)
    found = told(costs, drafting, [seen] * 4, weights=factor * costs.weights)
    foretold = verify_seconds(found, requests, requests * tokens) + found.turnaround
    assert draft_seconds(found, drafting) == pytest.approx(draft_seconds(costs, drafting), rel=1e-6)
    assert foretold == pytest.approx(seen.seconds, rel=1e-3)


def test_a_verification_that_takes_less_than_a_draft_leads_to_a_fast_device():
    """Launches of a small model: reading full KV costs next to nothing."""
    found = fit_costs(Costs(1e6, 1e6, 1.0, 1e9, 1e8, 0.25), 8, 0.02, [VerifyTiming(4, 68, 0.021)] * 3)
    assert draft_seconds(found, 8) == pytest.approx(0.02)
    assert verify_seconds(found, 4, 68) + found.turnaround == pytest.approx(0.021, rel=1e-3)


def test_no_time_at_all_is_refused():
    with pytest.raises(CostError, match="bandwidth"):
        fit_costs(Costs(1e9, 1e9, 1.0, 1e9, 1e10, 0.25), 8, 0.0, [VerifyTiming(1, 17, 0.1)])
