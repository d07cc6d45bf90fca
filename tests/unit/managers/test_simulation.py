"""Forced acceptance is a probability for each token, and keeps output and KV in agreement."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.config import request_params
from sglang_ext.hooks import frontend
from sglang_ext.managers.spec_decode.draft import SimulatedAcceptance, Verifier


def simulation(probability):
    return SimulatedAcceptance.of(probability, torch.device("cpu"))


def test_without_the_flag_verification_decides():
    assert simulation(None) is None and simulation(0.0) is not None


@pytest.mark.parametrize("probability", [0.0, 0.6, 0.95, 1.0])
def test_accepted_lengths_have_the_mean_of_that_probability(probability):
    drafts = 8
    lucky = simulation(0.5).draw(torch.full((4000, drafts), 7), torch.full((4000,), probability))
    expected = sum(probability**k for k in range(1, drafts + 1))
    assert abs(lucky.long().cumprod(1).sum(1).double().mean().item() - expected) < 0.15


def test_each_request_is_drawn_by_its_own_probability():
    lucky = simulation(0.5).draw(torch.zeros(3, 200), torch.tensor([0.0, 1.0, 0.5])).float().mean(1)
    assert lucky[:2].tolist() == [0, 1] and 0.3 < lucky[2] < 0.7


ASKED = [None, {}, {"kv_acceptance": None}, "much", {"kv_acceptance": 0.25}, {"kv_acceptance": 0}]


def test_a_request_may_ask_for_its_own_probability():
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params)) for params in ASKED]
    assert simulation(0.9).probabilities(reqs) == [0.9, 0.9, 0.9, 0.9, 0.25, 0.0]


def check(forced, params):
    """Check a request's parameters, at a server that forces this acceptance or, where it is None, none."""
    args = SimpleNamespace(kv_compressor="snapkv", kv_budget=0.25, kv_more_compressors="", kv_bench_acceptance=forced)
    request_params.check_params(args, params)


@pytest.mark.parametrize("value", ["0.9", 1.5, -0.1, float("nan"), True, [0.9], {}])
def test_what_is_no_probability_is_refused_with_its_value(value):
    with pytest.raises(ValueError, match=r"kv_acceptance in .*; pass a number from 0 to 1, or .* server's 0.9") as raised:
        check(0.9, {"kv_acceptance": value})
    assert repr(value) in str(raised.value)


def test_a_server_on_which_verification_decides_forces_nothing():
    # "much" is no object, which is refused before (test_request_params.py).
    for params in (*ASKED[:3], *ASKED[4:]):
        check(0.9, params)
    for params in ASKED[:3]:
        check(None, params)
    for params in ASKED[4:]:
        with pytest.raises(ValueError, match="leave it out, or start a server for benchmarks with --kv-bench-acceptance"):
            check(None, params)


@pytest.mark.parametrize("preferred", [None, {"custom_params": {"kv_acceptance": 0.5}}])
def test_meta_info_tells_the_probability_that_was_used_and_only_where_one_was_forced(preferred):
    args = SimpleNamespace(kv_compressor="snapkv", kv_more_compressors=None, kv_budget=0.25, kv_bench_acceptance=None)
    states = {name: SimpleNamespace(obj=SimpleNamespace(sampling_params=params)) for name, params in {
        "silent": {}, "other": {"custom_params": {"kv_compressor": "snapkv"}}, "own": {"custom_params": {"kv_acceptance": 0}},
    }.items()}  # fmt: skip
    manager = SimpleNamespace(server_args=args, preferred_sampling_params=preferred, rid_to_state=states)
    told = SimpleNamespace(rids=list(states), spec_cap_lens_histogram=[])

    def fields(i):
        found = {}
        frontend.add_kv_fields(None, manager, found, told, i)
        return found

    assert not any("kv_simulated_acceptance" in fields(i) for i in range(3))
    args.kv_bench_acceptance = 0.9
    assert [fields(i)["kv_simulated_acceptance"] for i in range(3)] == [0.5 if preferred else 0.9, 0.9, 0.0]


def test_what_was_not_offered_or_a_grammar_refuses_is_not_forced():
    verifier = Verifier(None, None, None, simulation(1.0))
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))] * 3)
    answers, drafts = torch.full((3, 5), 3), torch.full((3, 4), 7)
    assert verifier._accepted_counts(batch, answers, drafts, [4, 2, 0]).tolist() == [4, 2, 0]
    assert answers.tolist() == [[7, 7, 7, 7, 3], [7, 7, 3, 3, 3], [3, 3, 3, 3, 3]]
