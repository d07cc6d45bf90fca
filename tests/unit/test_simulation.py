"""Forced acceptance is a probability for each token, and keeps output and KV in agreement."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.managers.simulation import VARIABLE, Simulation


def simulation(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    return Simulation.from_environment(torch.device("cpu"), "lockstep")


def test_without_the_variable_verification_decides(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Simulation.from_environment(torch.device("cpu"), "staggered") is None


def test_the_staggered_schedule_does_not_pretend_to_simulate(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.9")
    with pytest.raises(ValueError, match="--kv-schedule is staggered; use --kv-schedule lockstep"):
        Simulation.from_environment(torch.device("cpu"), "staggered")


@pytest.mark.parametrize("value", ["", "high", "1.5", "-0.1", "nan"])
def test_what_is_no_probability_is_refused_with_its_value(monkeypatch, value):
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{value}'.*from 0 to 1"):
        simulation(monkeypatch, value)


@pytest.mark.parametrize("probability", [0.0, 0.6, 0.95, 1.0])
def test_accepted_lengths_have_the_mean_of_that_probability(monkeypatch, probability):
    drafts = 8
    drafted = torch.full((4000, drafts), 7)
    answers = torch.full((4000, drafts + 1), 3)
    kept = simulation(monkeypatch, "0.5").accept(answers, drafted, torch.full((4000,), probability))
    expected = sum(probability**k for k in range(1, drafts + 1))
    assert abs(kept.double().mean().item() - expected) < 0.15
    places = torch.arange(drafts + 1)
    assert torch.equal(answers, torch.where(places < kept[:, None], 7, 3))


def test_a_request_may_ask_for_its_own_probability(monkeypatch):
    asked = [None, {}, {"kv_acceptance": 0.25}, {"kv_acceptance": "much"}]
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params)) for params in asked]
    assert simulation(monkeypatch, "0.9").probabilities(reqs) == [0.9, 0.9, 0.25, 0.9]
