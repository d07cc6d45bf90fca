"""Cache ranks beside a GPU, on another one where there are two: what steps are led to, or which rows copies hold, that a rank that is gone
or late costs choices and nothing else, that verified answers are stock's, and that in lossy more contexts run than full KV of them would
fit.

With one GPU both processes share it, in turns that the driver hands out, so that choices take longer there than between two.
"""

import concurrent.futures
import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from device_rank_helpers import RankWorld
from servers import STRICT, greedy, sampled
from test_gpu_decoding import DRAFTS, EXACT, QUICK
from test_gpu_packed import accept_length

from sglang_ext.mem_cache.compressed.row_exchange import missing_mask
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery

TWO = torch.cuda.device_count() > 1
RANK_DEVICE = "cuda:1" if TWO else "cuda:0"
RANKS = ("--kv-compressor", "spade", "--kv-cache-ranks", "1", *(() if TWO else ("--kv-cache-rank-gpu", "0")), "--enable-metrics")
VERIFIED = ("--kv-mode", "verified", "--kv-budget", "0.25", *DRAFTS, *RANKS)
LOSSY = ("--kv-mode", "lossy", "--kv-select", "0.25", *RANKS)
# A pool of three of the contexts that are asked for.
PROMPT, ANSWER, POOL = 1500, 240, 6000
SMALL = (
    *("--kv-mode", "lossy", "--kv-select", "0.125", *RANKS, "--max-total-tokens", str(POOL), "--chunked-prefill-size", "2048"),
    *("--max-running-requests", "16", "--cuda-graph-max-bs", "16", "--decode-log-interval", "4", "--attention-backend", "flashinfer"),
)
CHOICES = 'sglang_ext:copies_total{compressor="spade"'


def rank_world(**given):
    """A rank on a GPU that can be asked."""
    return RankWorld("cuda:0", RANK_DEVICE, **{"patience": 2.0, "places": 16} | given).ready()


def led_as_chosen(world, row, length):
    """Whether the copy leads to what the queries of the step before the last choose, but for rounding."""
    torch.cuda.synchronize()
    return world.overlap(row, world.ends[row] - 1, length) > 0.97


@pytest.mark.parametrize("predictor", [CurrentQuery(), RegressedQuery()], ids=lambda each: each.name)
def test_each_step_reads_what_the_queries_of_the_one_before_the_last_choose(predictor):
    world = rank_world(predictor=predictor)
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    world.step()
    for _ in range(6):
        world.step()
        assert led_as_chosen(world, 1, 300) and led_as_chosen(world, 2, 150), world.arenas[0].counters.tolist()
    world.until(lambda: world.compressed_kv.num_compressions["spade"] == 12)
    assert not +world.steps.missed
    world.steps.end()


def test_a_rank_chooses_ahead_of_questions_and_each_step_reads_what_it_would_read():
    # As between two GPUs, where its own may wait.
    world = rank_world(apart=True)
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    world.step()
    for _ in range(6):
        # The host tells of questions before the device comes to them.
        torch.cuda._sleep(40_000_000)
        world.step()
        assert led_as_chosen(world, 1, 300) and led_as_chosen(world, 2, 150), world.arenas[0].counters.tolist()
    assert not +world.steps.missed
    world.steps.end()


def test_requests_that_begin_alike_share_what_the_rank_holds_of_them():
    world = rank_world()
    world.begin(1, 300, 64), world.begin(2, 400, 64, like=1, first=290)
    world.step()
    for _ in range(6):
        world.step()
        assert led_as_chosen(world, 1, 300) and led_as_chosen(world, 2, 400), world.arenas[0].counters.tolist()
    assert world.sent == 300 + 400 - 256 and not +world.steps.missed
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
        world.steps.poll()
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
    assert world.steps.processes[1] == 2
    world.steps.max_wait_seconds = 2.0
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


@pytest.mark.parametrize("fresh", [256, 6])
def test_copies_hold_the_rows_of_their_records_and_what_the_queries_of_the_step_before_the_last_choose(fresh):
    world = rank_world(fresh=fresh)
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    world.step()
    for _ in range(6):
        before = {row: world.positions(row) for row in (1, 2)}
        world.step()
        for row, length in ((1, 300), (2, 150)):
            found = world.positions(row)
            new = missing_mask(found, before[row]).sum(-1)
            assert new.min() > 0 and new.max() <= fresh
            assert fresh < 256 or led_as_chosen(world, row, length), world.arenas[0].counters.tolist()
    world.until(lambda: world.compressed_kv.num_compressions["spade"] == 12)
    assert not +world.steps.missed and world.steps.rows > 0
    world.steps.end()


def test_copies_of_rows_go_on_where_full_kv_was_given_back_and_are_renewed_without_it():
    world = rank_world(fresh=256)
    world.begin(1, 200, 48)
    world.step()
    world.give_back(1)
    for _ in range(3):
        world.step()
        world.positions(1)
        assert led_as_chosen(world, 1, 200)
    world.ends[1] = 290
    assert world.renew(1, 60)
    assert torch.equal(world.positions(1)[..., -32:], torch.arange(258, 290).expand(5, 2, -1))
    world.give_back(1)
    for _ in range(4):
        world.step()
        world.positions(1)
    assert led_as_chosen(world, 1, 290)
    os.kill(world.links[0].pid, signal.SIGKILL)
    world.until(lambda: world.steps.ready == 0, 20)
    assert world.steps.is_lost(1) and world.steps.num_held_tokens(1) == 0
    world.steps.end()


def test_the_host_waits_for_no_rows():
    world = rank_world(fresh=256)
    world.begin(1, 300, 64)
    for _ in range(4):
        world.step()
    world.ends[1] = 340
    assert world.renew(1, 64)
    world.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    for _ in range(3):
        world.step()
        world.steps.poll()
    world.steps.on_slots_freed(1, is_remote_only=True)
    world.ends[1] = 380
    assert world.renew(1, 64)
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    torch.cuda.synchronize()
    world.positions(1)
    world.steps.end()


def metric(server, name, label=""):
    """Sum of the samples of a metric that have a label."""
    lines = server.request("metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sglang_ext:{name}") and label in line)


def rank_pid(server):
    """The process of its cache rank, of which the log tells the newest."""
    return int(re.findall(r"cache rank \(process (\d+), start \d+\) is ready", Path(server.log).read_text())[-1])


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
    missed = [line for line in server.request("metrics").splitlines() if line.startswith("sglang_ext:missed_selections_total")]
    print("choices", server.metric(CHOICES), "steps between two", metric(server, "selection_steps"), *missed)
    assert server.metric(CHOICES) > 4 * len(prompts) + 20
    assert metric(server, "missed_selections_total", 'reason="wrong"') == 0 and metric(server, "cache_ranks_ready") == 1


@pytest.fixture
def contexts():
    """Sixteen, of random tokens."""
    draw = random.Random(0)
    return [[draw.randrange(100, 20000) for _ in range(PROMPT)] for _ in range(16)]


@pytest.mark.server
def test_in_lossy_more_contexts_run_than_the_pool_holds_in_full(launch, contexts):
    server = launch(*QUICK, *SMALL, env=STRICT)
    with sampled(server, "sglang:num_running_reqs") as running, sampled(server, "sglang_ext:rank_alone_tokens") as alone:
        found = server.ask_all(contexts, len(contexts), **greedy(ANSWER))
    print("ran at once", max(running), "alone at the rank", max(alone), "rows", metric(server, "selection_rows_total"), "missed",
          metric(server, "missed_selections_total"), "waited", metric(server, "selection_wait_seconds"))  # fmt: skip
    assert all(len(r["output_ids"]) == ANSWER for r in found)
    assert {r["meta_info"]["kv_compressor"] for r in found} == {"spade"}
    assert max(running) > 2 * (POOL // (PROMPT + ANSWER)) and max(alone) > POOL
    assert metric(server, "selection_rows_total") > 0 and metric(server, "missed_selections_total", 'reason="wrong"') == 0
    server.flush_cache()
    assert metric(server, "rank_alone_tokens") == metric(server, "compressed_bytes") == metric(server, "cache_rank_tokens") == 0


@pytest.mark.server
def test_in_lossy_requests_of_a_rank_that_is_killed_are_computed_again(launch, contexts):
    server = launch(*QUICK, *SMALL, env=STRICT)
    before = metric(server, "recomputed_requests_total")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.ask, input_ids=ids, **greedy(1200)) for ids in contexts[:4]]
        end = time.monotonic() + 60
        while metric(server, "rank_alone_tokens") < 2 * PROMPT:
            assert time.monotonic() < end, "no full KV was given back"
            time.sleep(0.02)
        os.kill(rank_pid(server), signal.SIGKILL)
        found = [each.result() for each in asked]
    assert [len(r["output_ids"]) for r in found] == [1200] * 4
    # It takes no messages any more before it has ended, which beside a GPU takes a while: whichever is found first is told.
    missed = sum(metric(server, "missed_selections_total", f'reason="{why}"') for why in ("ended", "silent"))
    assert metric(server, "recomputed_requests_total") > before and missed > 0
    server.flush_cache()
    assert metric(server, "rank_alone_tokens") == 0 and server.alive()
