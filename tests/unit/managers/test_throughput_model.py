"""The placement that is chosen is the best that the cost model knows, and the model adds up."""

from dataclasses import replace
from itertools import product

import pytest
from cost_helpers import machines, throughput
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.managers.kv_offload import throughput_model as costs_module
from sglang_ext.managers.kv_offload.throughput_model import (
    CostError,
    Costs,
    OffloadPlan,
    best_plan,
    plain_decoding_plan,
    round_seconds,
    verify_seconds,
)

# Qwen3-8B in bfloat16 at 32k tokens, memory for 8 of them, on an H200 (docs/benchmarks.md).
CONTEXT = 147456 * 32768.0
H200 = Costs(16.4e9, CONTEXT, 4.35e12, 53.7e9, 8 * CONTEXT, budget=0.125)

MACHINES = machines(recent=st.floats(0, 0.5))


def everything(costs, p, requests, longest):
    """Rates of all placements, by brute force."""
    drafts = range(costs.drafts, longest + 1, costs.drafts)
    for resident, offloaded in product(range(requests + 1), repeat=2):
        if 0 < resident + offloaded <= requests:
            for x_g, x_c in product(drafts if resident else [0], drafts if offloaded else [0]):
                yield throughput(costs, p, resident, offloaded, x_g, x_c)
    yield from (throughput(costs, p, resident, 0, 0, 0) for resident in range(requests + 1))


@given(MACHINES, st.floats(0, 1), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_the_best_is_that_of_all(costs, p, requests):
    found, longest = best_plan(costs, p, requests, longest=4 * costs.drafts), 4 * costs.drafts
    assert found.tokens_per_second == pytest.approx(max(everything(costs, p, requests, longest)))
    assert throughput(costs, p, *found[:4]) == pytest.approx(found.tokens_per_second)
    assert found.resident + found.offloaded <= requests
    for tier in ("device", "host"):
        assert best_plan(costs, p, requests, tier, longest).tokens_per_second <= found.tokens_per_second
    assert best_plan(costs, p, requests, "device", longest).offloaded == 0
    assert best_plan(costs, p, requests, "host", longest).resident == 0


@given(MACHINES, st.floats(0, 1), st.integers(1, 30), st.floats(1, 3), st.sampled_from(["memory", "link"]))
@settings(max_examples=60, deadline=None)
def test_more_memory_or_a_faster_link_never_costs(costs, p, requests, factor, name):
    richer = replace(costs, **{name: factor * getattr(costs, name)})
    shape = (min(requests, 5), requests - min(requests, 5), 2 * costs.drafts, 8 * costs.drafts)
    assert throughput(richer, p, *shape) >= throughput(costs, p, *shape) * (1 - 1e-9)
    assert best_plan(richer, p, 8).tokens_per_second >= best_plan(costs, p, 8).tokens_per_second * (1 - 1e-9)


def test_wide_ranges_are_searched_around_the_best_of_a_grid():
    large = replace(H200, memory=60 * CONTEXT, budget=0.25, drafts=1)
    found = best_plan(large, 0.99, 200, longest=64)
    for resident, offloaded, x_g, x_c in product((-2, -1, 0, 1, 2), repeat=4):
        near = (found.resident + resident, found.offloaded + offloaded, found.drafts_resident + x_g, found.drafts_offloaded + x_c)
        if min(near) >= 1 and sum(near[:2]) <= 200:
            assert throughput(large, 0.99, *near) <= found.tokens_per_second


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_where_drafts_are_hopeless_plain_decoding_is_placed(p):
    # Each round of 16 drafts gains at most 2 tokens.
    found = best_plan(H200, p, 24)
    assert found == OffloadPlan(8, 0, 0, 0, plain_decoding_plan(H200, 24).tokens_per_second)
    assert best_plan(H200, p, 3) == OffloadPlan(3, 0, 0, 0, plain_decoding_plan(H200, 3).tokens_per_second), "all fit"
    assert best_plan(H200, p, 24, "host").offloaded > 0, "where nothing may stay, something is placed nevertheless"
    assert best_plan(H200, p, 24, "host").tokens_per_second < found.tokens_per_second


def test_stock_reads_weights_and_contexts_of_what_fits():
    assert plain_decoding_plan(H200, 24).tokens_per_second == pytest.approx(8 / ((16.4e9 + 8 * CONTEXT) / 4.35e12))
    assert plain_decoding_plan(H200, 5).tokens_per_second == pytest.approx(5 / ((16.4e9 + 5 * CONTEXT) / 4.35e12))
    assert throughput(H200, 0.9, 8, 0, 0, 0) == pytest.approx(plain_decoding_plan(H200, 8).tokens_per_second)
    assert throughput(H200, 0.9, 9, 0, 0, 0) == 0 and plain_decoding_plan(replace(H200, memory=0.9 * CONTEXT), 4).tokens_per_second == 0


def test_a_round_of_residents_adds_up():
    # 4 requests draft 16 tokens over copies; every second round each verifies, 2 in a round on average.
    read = 16 * (16.4e9 + 4 * CONTEXT / 8) + 16.4e9 + 2 * CONTEXT
    costs = replace(H200, turnaround=0.002, token_seconds=1e-6)
    seconds = read / 4.35e12 + 0.002 + 2 * 33e-6
    assert round_seconds(costs, 4, 2, 66) == pytest.approx(seconds)
    tokens = 2 * sum(0.98**k for k in range(33))
    assert throughput(costs, 0.98, 4, 0, 32, 0) == pytest.approx(tokens / seconds)


def test_loads_bound_a_round_and_their_room_counts_until_they_are_verified():
    # 12 verifications in 4 rounds: 3 loads of 90 ms a round, longer than it takes to compute.
    tokens = sum(0.99**k for k in range(65))
    assert throughput(H200, 0.99, 0, 12, 0, 64) == pytest.approx(tokens / (CONTEXT / 53.7e9))
    # A round lasts 3 loads, so each load spans 1, and is held in 2: 6 of 12 contexts, beside 12 copies.
    enough = (6 + 12 / 8) * CONTEXT
    assert throughput(replace(H200, memory=enough), 0.99, 0, 12, 0, 64) > 0
    assert throughput(replace(H200, memory=enough * 0.999), 0.99, 0, 12, 0, 64) == 0
    # Over a link at a tenth, one load lasts longer than the drafts before it: 2 rounds last as long, then, and not 8.
    slow = replace(H200, link=5.37e9, memory=1e15)
    assert throughput(slow, 0.99, 0, 1, 0, 32) == pytest.approx(sum(0.99**k for k in range(33)) / slow.load_seconds)
    assert throughput(slow, 0.99, 0, 1, 0, 256) < sum(0.99**k for k in range(257)) / slow.load_seconds


def test_recent_tokens_stay_on_the_device_and_in_copies():
    costs = replace(H200, context=10.0, recent=2.0, budget=0.25)
    assert (costs.loaded, costs.compressed_bytes, costs.resident) == (8, 4, 12)


def test_rounds_without_a_verification_do_not_read_weights_for_one():
    assert verify_seconds(H200, 0.5) == pytest.approx(0.5 * verify_seconds(H200, 1))
    assert verify_seconds(H200, 2) - verify_seconds(H200, 1) == pytest.approx(CONTEXT / 4.35e12)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("weights", -1.0, "0 or above"), ("link", 0.0, "above 0"), ("bandwidth", float("inf"), "finite"), ("budget", 1.5, "up to 1"), ("drafts", 0, "at least 1"), ("recent", 2 * CONTEXT, "below the context's")],
)
def test_costs_out_of_range_are_named(name, value, allowed):
    with pytest.raises(CostError, match=f"{name} .*{allowed}"):
        replace(H200, **{name: value})


def test_fewer_drafts_than_a_round_has_are_refused():
    with pytest.raises(CostError, match="at most 8 drafts: pass at least 16"):
        best_plan(H200, 0.9, 4, longest=8)


def test_nothing_is_placed_where_nothing_fits():
    assert best_plan(replace(H200, memory=1e9), 0.9, 4) == OffloadPlan(0, 0, 0, 0, 0.0)
    assert costs_module.draft_seconds(H200, 0) == 16.4e9 / 4.35e12
