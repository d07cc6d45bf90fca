"""Real processes of cache ranks, over the keys of a made-up model: what they choose, and what becomes of requests as they fail."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from rank_helpers import DIM, HEADS, LAYERS, TOKENS, Ranks, attach, chosen_here, queries, signalled, state_of

from sglang_ext.managers.cache_rank import rank_link as links
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.selection.scoring_keys import KeySpec, scoring_keys
from sglang_ext.mem_cache.selection.top_tokens import overlap

SLOTS = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
NEWEST = torch.tensor([299])


@pytest.fixture
def ranks(monkeypatch):
    """Starts ranks; all processes end with the test."""
    monkeypatch.setattr(links, "RESTART_SECONDS", 0.05)
    made = []

    def start(**given):
        made.append(Ranks(**given))
        return made[-1].ready()

    yield start
    for each in made:
        each.choices.end()


def gone(pid):
    """Whether no process of that id runs."""
    return state_of(pid) == "Z"


@pytest.mark.parametrize(("predictor", "window"), [("current", 1), ("regressed", 17)])
def test_a_rank_chooses_bit_for_bit_what_the_method_does_between_steps(ranks, predictor, window):
    made, tokens = ranks(told=attach(predictor=predictor, window=window)), 200
    for round_ in range(3):
        # The context grows over the end of a block, and the number of its tokens that are chosen with it.
        tokens, keep = tokens + 30, 40 + round_
        asked, positions = queries(window, tokens), torch.arange(tokens - window, tokens)
        expected = chosen_here(made.buffers, SLOTS[:tokens], keep, asked, positions, predictor)
        made.prepared(1, SLOTS[:tokens], keep, asked, positions)
        # What was carried from the last round may be read first.
        found = [torch.empty(0)]

        def arrived():
            made.choices.request_selection(1, SLOTS[:tokens], keep, asked, positions)
            found[0] = made.choices.last_selection(1, tokens, keep)
            return torch.equal(found[0], expected)

        made.until(arrived, 20)


@pytest.mark.parametrize(("bits", "least"), [(8, 0.95), (4, 0.6)])
def test_a_rank_that_holds_codes_chooses_by_what_they_mean(ranks, bits, least):
    made, asked = ranks(told=attach(bits=bits)), queries(1, 5)
    held = scoring_keys(KeySpec(LAYERS, HEADS, DIM, torch.float32, bits), 300)
    held.write(0, torch.stack(made.buffers.keys)[:, SLOTS[:300]])
    meant = tuple(held.read(layer, torch.arange(300)) for layer in range(LAYERS))
    found = made.prepared(1, SLOTS[:300], 70, asked, NEWEST)
    assert torch.equal(found, chosen_here(replace(made.buffers, keys=meant), torch.arange(300), 70, asked, NEWEST))
    exact = chosen_here(made.buffers, SLOTS[:300], 70, asked, NEWEST)
    assert float(overlap(exact, found, 300).mean()) > least
    assert bits == 8 or not torch.equal(exact, found), "it would be no codes that chose"


def test_requests_are_shared_out_and_what_they_share_is_held_once(ranks):
    made = ranks(count=2)
    for row in range(4):
        kept = made.prepared(row, SLOTS[:300], 64, queries(1, row), NEWEST)
        assert torch.equal(kept, chosen_here(made.buffers, SLOTS[:300], 64, queries(1, row), NEWEST))
    # Two at each: four full blocks that both read, and a last one of each.
    assert made.choices.held_tokens == 2 * (4 + 2) * BLOCK
    made.choices.forget_all()
    assert made.choices.held_tokens == 0


def test_a_rank_that_is_killed_costs_choices_until_another_has_the_keys(ranks):
    made = ranks()
    made.prepared(1, SLOTS[:300], 64, queries(1, 1), NEWEST)
    killed = made.choices.links[0].pid
    os.kill(killed, signal.SIGKILL)
    made.until(lambda: not made.choices.ready, 10)
    assert not made.choices.request_selection(1, SLOTS[:300], 64, queries(1, 1), NEWEST) and made.choices.missed["ended"] == 1
    kept = made.prepared(1, SLOTS[:300], 64, queries(1, 2), NEWEST, 60)
    assert torch.equal(kept, chosen_here(made.buffers, SLOTS[:300], 64, queries(1, 2), NEWEST))
    assert made.choices.starts == 2 and made.choices.links[0].pid != killed and gone(killed)


def test_a_rank_that_is_stopped_delays_no_round_and_is_ended_once_it_is_silent(ranks, monkeypatch):
    made = ranks(silence=2.0)
    made.prepared(1, SLOTS[:300], 64, queries(1, 1), NEWEST)
    wait, waits, read, stopped, end = links.RankLink.wait, [], [], made.choices.links[0].pid, time.monotonic() + 150
    monkeypatch.setattr(links.RankLink, "wait", lambda link, seconds: (waits.append(seconds), wait(link, seconds)))
    signalled(stopped, signal.SIGSTOP)

    def prepare():
        assert time.monotonic() < end, f"{len(read)} rounds; missed: {dict(made.choices.missed)}"
        read.append(made.choices.request_selection(1, SLOTS[:300], 64, queries(1, 1), NEWEST))
        time.sleep(0.02)

    while not gone(stopped):
        prepare()
    assert not any(waits), "a round was held up for a rank that says nothing"
    while not made.choices.ready:
        prepare()
    # Messages of the next one are timed, each for so long at most.
    assert max(waits, default=0.0) <= links.PING_SECONDS and len(waits) < 100 and made.choices.waited == 0.0
    assert read[0] and not all(read), "at first the last choice is read, then full KV"
    assert made.choices.missed["silent"] + made.choices.missed["starting"] >= 1
    made.prepared(1, SLOTS[:300], 64, queries(1, 1), NEWEST, 60)


def test_a_rank_ends_with_its_parent_and_when_it_is_told_to(ranks):
    made = ranks()
    pid = made.choices.links[0].pid
    os.kill(pid, signal.SIGTERM)
    made.until(lambda: not made.choices.ready, 10)
    assert gone(pid)
    program = (
        "import os, sys, rank_helpers; made = rank_helpers.Ranks().ready(); "
        "print(made.choices.links[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    # Helpers are found where pytest lets this process find them.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    orphan, end = int(done.stdout), time.monotonic() + 10
    while not gone(orphan):
        assert time.monotonic() < end, "it outlives its parent"
        time.sleep(0.05)


class Broken:
    """A process that has ended."""

    pid, ended = 1, 7

    def __init__(self, *given):
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.DEALER)

    def end(self):
        self.socket.close(0)


@pytest.mark.parametrize(("seconds", "has_given_up"), [(links.SETTLED_SECONDS, False), (links.SETTLED_SECONDS - 5, True)])
def test_processes_that_were_ready_for_a_while_are_not_counted_though_nobody_asked_them(seconds, has_given_up):
    link = links.RankLink(links.RankSettings(attach()), Broken)
    for _ in range(4 * links.MAX_STARTS):
        link._restart_time = 0.0
        link.packs, link._ready_since = links.split_into_packs(4, 2), time.monotonic() - seconds
        link.poll()
    assert link.has_given_up == has_given_up and (link.starts == links.MAX_STARTS) == has_given_up


def test_after_processes_that_never_answer_no_more_are_started(caplog):
    link = links.RankLink(links.RankSettings(attach()), Broken)
    for _ in range(3 * links.MAX_STARTS):
        link._restart_time = 0.0
        link.poll()
    assert link.starts == links.MAX_STARTS and link.has_given_up and link.down_reason == "ended"
    assert f"{links.MAX_STARTS} processes ended before they answered; no more are started" in caplog.text
    assert "requests go without it until the server is restarted" in caplog.text


@pytest.mark.parametrize(("layers", "count", "sizes"), [(30, 6, [6] * 5), (30, 7, [6] * 5), (5, 2, [1, 2, 2]), (4, 12, [4])])
def test_packs_are_even_and_hold_all_layers(layers, count, sizes):
    packs = links.split_into_packs(layers, count)
    assert [pack.count for pack in packs] == sizes and sum(pack.count for pack in packs) == layers
    assert [pack.first for pack in packs] == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize(("message", "layer", "count"), [(1e-4, 1e-3, 4), (8e-4, 1e-3, 8), (1.0, 1e-3, 12), (1e-4, 0.0, 12)])
def test_a_pack_is_as_large_as_messages_and_choosing_ask_for(message, layer, count):
    assert links.choose_pack_size(message, layer) == count
