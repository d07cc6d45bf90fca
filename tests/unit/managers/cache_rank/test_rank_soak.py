"""Many requests at once that come, step and are aborted at random: nothing of them is left, neither here nor in a rank's process."""

import random
import time
from pathlib import Path

import torch
from rank_helpers import LAYERS, TOKENS, Ranks, attach, queries

from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.remote_selector import StepRequest

REQUESTS, SECONDS = 100, 6.0


def resident(pid):
    """Bytes of memory that a process holds."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return 1024 * int(fields["VmRSS"].split()[0])


def traffic(made, seconds, draw):
    """Begin, step, lengthen and abort up to :data:`REQUESTS` requests at random; how many began, and how many steps they had.

    Args:
        made: the ranks.
        seconds: for how long.
        draw: a random generator.
    """
    choices, running, began, steps = made.choices, {}, 0, 0
    slots = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        row = draw.randrange(REQUESTS)
        tokens = running.get(row)
        if tokens is not None and draw.random() < 0.25:
            choices.forget(row)
            del running[row]
            continue
        if tokens is None:
            began += 1
            tokens = draw.randrange(80, 200)
        running[row] = tokens = min(TOKENS, tokens + draw.randrange(3))
        # Half of them share their first tokens, and so blocks.
        own = slots[:tokens] if row % 2 else slots.roll(row)[:tokens]
        keep = tokens // 2
        if choices.request_selection(row, own, keep, queries(1, row), torch.tensor([tokens - 1])):
            choices.last_selection(row, tokens, keep)
            told = StepRequest(row, tokens, keep, tokens + 1, True)
            watch = choices.step([told], lambda *asked: (queries(1, row)[asked[2]], torch.tensor([tokens])), lambda *written: None)
            for layer in range(LAYERS):
                watch.on_layer_start(layer)
                watch.on_queries_recorded(layer)
            steps += 1
    for row in list(running):
        choices.forget(row)
    return began, steps


def soak(seconds, seed=0):
    """All of it; what it showed."""
    made = Ranks(told=attach(blocks=600, lanes=REQUESTS, places=16)).ready()
    try:
        draw, (link,) = random.Random(seed), made.choices.links
        traffic(made, seconds / 3, draw)
        before = resident(link.pid)
        began, steps = traffic(made, seconds * 2 / 3, draw)
        # A rank hears what was said before it is asked how much it holds.
        made.until(lambda: len(link._free_places) == link.settings.attach.shape.places, 10)
        leases = made.choices._leases[link]
        assert made.choices.held_tokens == 0 and leases.free_blocks == 600 and len(leases._lanes) == REQUESTS
        assert not leases._by_name and not leases._names and not made.choices._requests and not made.choices._lanes
        assert link.starts == 1, "the process that began has served all"
        assert not {"ended", "silent", "wrong"} & set(made.choices.missed)
        return began, steps, resident(link.pid) - before, dict(made.choices.missed)
    finally:
        made.choices.end()


def test_aborted_requests_leave_nothing_behind_in_any_process():
    began, steps, grown, missed = soak(SECONDS)
    assert began > REQUESTS // 2 and steps > 20, (began, steps, missed)
    # Of 600 blocks of keys nearly all were written before; what a rank keeps beside them is bounded.
    assert grown < 600 * BLOCK * LAYERS * 2 * 8 * 4 + (16 << 20), f"{grown} bytes"
