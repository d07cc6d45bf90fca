"""Many requests at once that come, step and are aborted at random: nothing of them is left, neither here nor in a rank's process."""

import random
import time
from pathlib import Path

from device_rank_helpers import RankWorld
from held_entries import held_entries
from rank_helpers import LAYERS

from sglang_ext.managers.cache_rank.protocol import BLOCK

REQUESTS, SECONDS, MOST_SECONDS = 5, 6.0, 90.0
LEAST = 20
"""Requests and steps on a busy machine, too."""


def resident(pid):
    """Bytes of memory that a process holds."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return 1024 * int(fields["VmRSS"].split()[0])


def traffic(world, seconds, draw, least=0):
    """Begin, step and abort up to :data:`REQUESTS` requests at random; how many began, and how many steps they had.

    Args:
        world: requests and their rank.
        seconds: for how long.
        draw: a random generator.
        least: goes on until more requests began, and more steps read a selection.
    """
    began, steps, begin = 0, 0, time.monotonic()
    while time.monotonic() < begin + (seconds if min(began, world.steps.taken) > least else MOST_SECONDS):
        row = draw.randrange(1, REQUESTS + 1)
        if row in world.copies and (draw.random() < 0.25 or world.ends[row] > 480):
            world.leave(row)
        elif row not in world.copies:
            began += 1
            # Half of them share their first tokens, and so blocks.
            like = draw.choice([None, *world.copies])
            length = draw.randrange(80, 400)
            world.next_slot = 800 + 12 * row
            world.begin(row, length, draw.randrange(40, 60), like, 0 if like is None else min(length, len(world.prompts[like])) // 2)
        world.steps.poll()
        if world.copies:
            world.step()
            steps += 1
    for row in list(world.copies):
        world.leave(row)
    return began, steps


def test_aborted_requests_leave_nothing_behind_in_any_process():
    world = RankWorld(pack=2, patience=0.02, blocks=600, lanes=REQUESTS - 1, places=16).ready()
    try:
        draw, (link,) = random.Random(0), world.links
        # Until each row was used: what is kept for it counts as held. Free places count, too.
        traffic(world, SECONDS / 3, draw, LEAST)
        world.until_places_are_free()
        before, entries = resident(link.pid), held_entries(world.steps) - len(world.steps.missed)
        began, steps = traffic(world, SECONDS * 2 / 3, draw, LEAST)
        # A rank hears what was said before it is asked how much it holds.
        world.until_places_are_free()
        free, missed = world.steps.free_blocks(), +world.steps.missed
        assert world.steps.held_tokens == 0 and free.blocks == [600] and free.requests == [REQUESTS - 1]
        world.until(lambda: held_entries(world.steps) - len(world.steps.missed) <= entries)
        assert not any(map(world.steps.has_request, range(1, REQUESTS + 1)))
        assert link.epoch == 1, "the process that began has served all"
        assert not {"ended", "silent", "wrong"} & set(missed)
        assert began > LEAST and steps > LEAST < world.steps.taken, (began, steps, missed)
        # Of the blocks of keys nearly all were written before; what a rank keeps beside them is bounded.
        assert resident(link.pid) - before < 600 * BLOCK * LAYERS * 2 * 8 * 4 + (16 << 20)
    finally:
        world.steps.end()
