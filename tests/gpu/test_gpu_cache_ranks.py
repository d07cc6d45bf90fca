"""Cache ranks beside a GPU, on another one where there are two: what steps are led to, that a rank that is gone or late costs choices and
nothing else, and that verified answers are stock's.

With one GPU both processes share it, in turns that the driver hands out, so that choices take longer there than between two.
"""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from device_rank_helpers import RankWorld
from servers import STRICT, greedy
from test_gpu_decoding import DRAFTS, EXACT, QUICK
from test_gpu_packed import accept_length

from sglang_ext.mem_cache.selection.predictors import Current, Regressed

TWO = torch.cuda.device_count() > 1
RANK_DEVICE = "cuda:1" if TWO else "cuda:0"
RANKS = ("--kv-compressor", "spade", "--kv-cache-ranks", "1", *(() if TWO else ("--kv-cache-rank-gpu", "0")), "--enable-metrics")
VERIFIED = ("--kv-mode", "verified", "--kv-budget", "0.25", *DRAFTS, *RANKS)
LOSSY = ("--kv-mode", "lossy", "--kv-select", "0.25", *RANKS)
CHOICES = 'sglang_ext:copies_total{compressor="spade"'


def rank_world(**given):
    """A rank on a GPU that can be asked."""
    return RankWorld("cuda:0", RANK_DEVICE, **{"patience": 2.0, "places": 16} | given).ready()


def led_as_chosen(world, row, length):
    """Whether the copy leads to what the queries of the step before the last choose, but for rounding."""
    torch.cuda.synchronize()
    return world.overlap(row, world.ends[row] - 1, length) > 0.97


@pytest.mark.parametrize("predictor", [Current(), Regressed()], ids=lambda each: each.name)
def test_each_step_reads_what_the_queries_of_the_one_before_the_last_choose(predictor):
    world = rank_world(predictor=predictor)
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    world.step()
    for _ in range(6):
        world.step()
        assert led_as_chosen(world, 1, 300) and led_as_chosen(world, 2, 150), world.arenas[0].counters.tolist()
    world.until(lambda: world.views.made["spade"] == 12)
    assert not +world.steps.missed
    world.steps.end()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rank_that_holds_few_bits_chooses_by_what_they_mean(bits):
    world = rank_world(bits=bits)
    world.score_in_bits(bits)
    world.begin(1, 300, 64)
    for number in range(6):
        world.step()
        assert number < 2 or led_as_chosen(world, 1, 300)
    assert not +world.steps.missed
    world.steps.end()


def test_the_host_waits_for_no_choice():
    world = rank_world()
    world.begin(1, 300, 64)
    for _ in range(4):
        world.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    for _ in range(3):
        world.step()
        world.steps.tend()
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    assert led_as_chosen(world, 1, 300)
    world.steps.end()


def test_a_rank_that_is_killed_costs_choices_and_another_takes_its_place():
    world = rank_world(patience=0.05)
    world.begin(1, 200, 48)
    world.step(), world.step()
    torch.cuda.synchronize()
    os.kill(world.links[0].pid, signal.SIGKILL)
    time.sleep(0.5)
    begun = time.monotonic()
    for _ in range(6):
        world.step()
    torch.cuda.synchronize()
    assert time.monotonic() - begun < 2, "waits end"
    world.until(lambda: world.steps.ready == 0, 5)
    world.step()
    assert world.steps.missed["ended"] >= 1
    world.until(lambda: world.steps.ready == 1)
    assert world.steps.starts == 2
    world.steps._patience = 2.0
    world.step(), world.step()
    assert led_as_chosen(world, 1, 200)
    world.steps.end()


def test_a_rank_that_is_stopped_is_waited_for_twice_and_ended_after_its_silence():
    world = rank_world(patience=0.1, silence=3.0)
    world.begin(1, 200, 48)
    world.step(), world.step()
    torch.cuda.synchronize()
    os.kill(world.links[0].pid, signal.SIGSTOP)
    time.sleep(0.3)
    begun = time.monotonic()
    for _ in range(20):
        world.step()
    torch.cuda.synchronize()
    assert time.monotonic() - begun < 1.5, "one wait for each place, and none for what found no place"
    world.until(lambda: world.steps.missed["late"] >= 15, 5)
    world.until(lambda: world.steps.ready == 0, 15)
    world.step()
    assert world.steps.missed["silent"] == 1
    world.steps.end()


def metric(server, name, label=""):
    """Sum of the samples of a metric that have a label."""
    lines = server.request("metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sglang_ext:{name}") and label in line)


def rank_pid(server):
    """The process of its cache rank, of which the log tells the newest."""
    return int(re.findall(r"cache rank \d+ \(process (\d+)\) is ready", Path(server.log).read_text())[-1])


@pytest.mark.server
def test_verified_answers_in_deterministic_mode_are_stocks_whatever_becomes_of_the_rank(launch, prompts):
    expected = [r["output_ids"] for r in launch(*EXACT).ask_all(prompts, 1, **greedy(64))]
    server = launch(*EXACT, *VERIFIED, env=STRICT)
    for workers in (1, 4):
        found = server.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == expected
        assert accept_length(found) > 1.5
    print("choices", server.metric(CHOICES), "missed", metric(server, "missed_selections_total"), "waited",
          metric(server, "selection_wait_seconds"), "choosing", metric(server, "choosing_seconds"))  # fmt: skip
    # Beside those of copies that are made: two of each request.
    assert server.metric(CHOICES) > 4 * len(prompts) + 20
    os.kill(rank_pid(server), signal.SIGSTOP)
    assert [r["output_ids"] for r in server.ask_all(prompts, 4, **greedy(64))] == expected
    with suppress(ProcessLookupError):  # it was ended for its silence, and the next is not ready
        os.kill(rank_pid(server), signal.SIGKILL)
    assert [r["output_ids"] for r in server.ask_all(prompts, 4, **greedy(64))] == expected
    assert metric(server, "missed_selections_total") > 0


@pytest.mark.server
def test_lossy_steps_in_graphs_are_led_by_a_rank(launch, prompts):
    server = launch(*QUICK, *LOSSY, "--attention-backend", "flashinfer", env=STRICT)
    for _ in range(2):
        found = server.ask_all(prompts, 4, **greedy(64))
        assert all(len(r["output_ids"]) == 64 for r in found)
    assert server.metric(CHOICES) > 4 * len(prompts) + 20
    assert metric(server, "missed_selections_total", 'reason="wrong"') == 0 and metric(server, "cache_ranks_ready") == 1
