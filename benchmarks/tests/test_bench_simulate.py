"""``sglang-ext-bench simulate``: times and memory follow the cost model, and each request gets exactly its output."""

import argparse
import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.simulating import simulate
from sglang_ext_bench.simulating.scenario import Scenario, SimulationError
from sglang_ext_bench.simulating.simulation import Simulation

SMALL = ("--requests", "16", "--concurrency", "8", "--input-len", "4000", "--output-len", "600", "--memory-tokens", "20000")


def arguments(*flags):
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return parser.parse_args(flags)


def results(*flags):
    return list(simulate.simulate_all(arguments(*flags)))


def simulation_of(*flags, policy="auto", p=0.98, staggered=True):
    args = arguments(*flags)
    costs = simulate.make_costs(args, float(args.memory_tokens), float(args.link_bandwidth))
    scenario = Scenario(costs, args.kv_token, p, policy, args.concurrency, staggered, args.longest, args.prefill_rate)
    return Simulation(scenario, simulate.make_requests(args))


@pytest.mark.parametrize("policy", simulate.POLICIES)
@pytest.mark.parametrize("more", [(), ("--sigma", "0.6", "--rate", "3", "--prefill-rate", "40000")], ids=["equal", "mixed"])
def test_each_request_gets_its_output_and_no_memory_is_used_twice(policy, more):
    simulation = simulation_of(*SMALL, "--memory-tokens", "40000", *more, policy=policy)
    while not simulation.is_finished:
        simulation.run_round()
        loading = simulation.scheduler.memory.reserved(0) if not simulation.is_plain else 0.0
        assert simulation.memory.used_tokens(simulation.running.values()) + loading <= simulation.memory.capacity * (1 + 1e-9)
    assert simulation.totals.all_rounds.tokens == sum(request.output_len for request in simulation.requests)
    assert all(request.generated == request.output_len for request in simulation.requests)
    assert simulation.totals.num_finished == 16
    assert simulation.now >= simulation.totals.all_rounds.seconds + simulation.totals.all_rounds.prefill_seconds - 1e-9


def test_stock_is_the_formula():
    (found,) = results("--policy", "stock")
    read = 16.4e9 + 8 * 147456 * (30720 + 1024)
    assert found.allowed == pytest.approx(8 * 4.35e12 / read)
    assert found.tokens_per_second == pytest.approx(found.allowed, rel=0.001)
    assert found.tokens == 96 * 2048 and found.requests_mean == pytest.approx(8)
    (alone,) = results("--policy", "stock", "--concurrency", "3")
    assert alone.requests_most == 3 and alone.tokens_per_second == pytest.approx(alone.allowed, rel=0.001)


@pytest.mark.parametrize("policy", ["resident", "host", "auto"])
@pytest.mark.parametrize("more", [("--memory-tokens", "262144"), ("--memory-tokens", "524288", "--link-bandwidth", "107e9")], ids=["H200", "twice"])
def test_the_steady_state_is_what_the_equations_say(policy, more):
    for found in results("--policy", policy, "--acceptance", "0.98,0.99", *more):
        assert 0.85 < found.ratio < 1.05, found
        assert found.link_used == pytest.approx(found.link_reserved, abs=0.05)


def test_accepted_drafts_are_drawn_with_the_probability_of_each():
    simulation, drafts, count = simulation_of(*SMALL, p=0.9), 20, 20000
    drawn = Counter(simulation.draw_accepted(drafts) for _ in range(count))
    for length in (0, 1, 5, drafts):
        expected = 0.9**length * (0.1 if length < drafts else 1)
        assert drawn[length] / count == pytest.approx(expected, abs=0.01)
    assert max(drawn) == drafts
    for p, accepted in ((0.0, 0), (1.0, drafts)):
        simulation.scenario = replace(simulation.scenario, acceptance=p)
        assert simulation.draw_accepted(drafts) == accepted


def test_staggered_verification_hides_loads_behind_drafts():
    flags = ("--policy", "host", "--acceptance", "0.99", "--staggered", "--lock-step")
    staggered, together = results(*flags)
    assert (staggered.schedule, together.schedule) == ("staggered", "lock-step")
    assert staggered.tokens_per_second > 1.5 * together.tokens_per_second
    assert staggered.link_used > 0.85 and together.link_used < 0.6


def test_all_verify_at_once_in_lock_step():
    simulation, seen = simulation_of(policy="host", p=0.99, staggered=False), []
    for _ in range(60):
        simulation.run_round()
        seen.append(len(simulation.scheduler.due()))
    rounds = simulation.placement.drafts_offloaded // 16
    assert sum(count > 0 for count in seen) <= 60 // rounds and max(seen) == len(simulation.running)


def test_loads_wait_for_the_link_and_for_nothing_else():
    (found,) = results("--policy", "host", "--acceptance", "0.98")
    alone = 1000 * 147456 * 30720 / 53.7e9
    assert alone <= found.load_ms < 2.5 * alone and 0 <= found.slack < 1
    (slow,) = results("--policy", "host", "--acceptance", "0.98", "--link-bandwidth", "26.85e9")
    assert slow.load_ms >= 2 * alone and slow.tokens_per_second < 0.7 * found.tokens_per_second


def test_loads_that_take_longer_than_planned_are_put_off(monkeypatch):
    simulation, plain = (simulation_of("--requests", "30", policy="host", p=0.98) for _ in range(2))
    plain.run()
    start = simulation._start_loads

    def slowly():
        before = simulation.link_free
        start()
        if simulation.link_free > before:
            simulation.link_free += 0.3
            for number in simulation.scheduler.loads_to_start():
                simulation.running[number].load_end += 0.3

    monkeypatch.setattr(simulation, "_start_loads", slowly)
    totals = simulation.run()
    assert simulation.scheduler.num_postponed > 2 * plain.scheduler.num_postponed
    assert totals.all_rounds.tokens == 30 * 2048


def test_equal_seeds_give_equal_figures_and_others_do_not():
    flags = (*SMALL, "--sigma", "0.5", "--acceptance", "0.98", "--policy", "auto")
    assert results(*flags) == results(*flags) != results(*flags, "--seed", "1")


def test_lengths_and_arrivals_have_the_means_that_were_asked_for():
    requests = simulate.make_requests(arguments("--requests", "4000", "--sigma", "0.5", "--rate", "8", "--input-len", "1000", "--output-len", "100"))
    assert sum(each.prompt_len for each in requests) / 4000 == pytest.approx(1000, rel=0.05)
    assert sum(each.output_len for each in requests) / 4000 == pytest.approx(100, rel=0.05)
    assert requests[-1].arrival == pytest.approx(500, rel=0.1)
    assert {each.arrival for each in simulate.make_requests(arguments(*SMALL))} == {0.0}


def test_prefill_counts_for_the_whole_run_alone():
    free, paid = (results(*SMALL, "--policy", "resident", "--acceptance", "0.98", "--prefill-rate", rate)[0] for rate in ("inf", "8000"))
    assert paid.tokens_per_second == pytest.approx(free.tokens_per_second, rel=0.01)
    assert 16 * 600 / paid.overall - 16 * 600 / free.overall == pytest.approx(16 * 0.5, rel=0.01)


def test_what_never_fits_is_said():
    with pytest.raises(SimulationError, match="4000 . 600 tokens does not fit in memory for 3000 tokens"):
        simulation_of(*SMALL, "--memory-tokens", "3000").run()
    assert main(["simulate", *SMALL, "--memory-tokens", "3000"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--policy", "disk"), "unknown policy disk: pass some of stock, resident"), (("--acceptance", "1.5"), "up to 1"), (("--requests", "0"), "at least 1"), (("--budget", "2"), "budget 2.0"), (("--link-bandwidth", "x"), "--link-bandwidth 'x'")],
)
def test_options_out_of_range_are_named(flags, words):
    with pytest.raises(CommandError, match=words):
        results(*flags)


def test_the_command_prints_a_table_and_writes_figures_and_a_plot(tmp_path, capsys):
    files = tmp_path / "out.json", tmp_path / "out.png"
    flags = ("--acceptance", "0.97,0.99", "--memory-tokens", "20000,30000", "--lock-step", "--staggered")
    assert main(["simulate", *SMALL, *flags, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    printed = capsys.readouterr().out
    assert "Simulated: 20000 tokens of memory, link 53.7 GB/s" in printed and "Simulated: 30000" in printed
    assert "host lock-step" in printed and "…" not in printed
    written = json.loads(files[0].read_text())
    assert written["simulated"] and len(written["results"]) == 2 * (1 + 3 * 2 * 2)
    first = written["results"][0]
    assert first["policy"] == "stock" and math.isclose(first["ratio"], first["tokens_per_second"] / first["allowed"])
    assert files[1].read_bytes().startswith(b"\x89PNG")
