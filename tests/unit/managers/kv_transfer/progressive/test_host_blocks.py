"""Host memory for pages: pieces are apart, and what waits long holds no block of what goes soon.

Blocks are of full size. Their memory is taken when it is written to, which these tests do not.
"""

import logging
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from sglang_ext.managers.kv_transfer.progressive import pool_buffers
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import BLOCK, HostBlocks


def blocks_of(pieces):
    """Ids of the blocks that pieces were cut from."""
    return {id(piece if piece.base is None else piece.base) for piece in pieces}


def test_what_one_lane_holds_leaves_the_others_blocks_to_be_cut_again():
    blocks, waiting, passing = HostBlocks(torch.device("cpu")), [], set()
    for _ in range(6):
        # Half of what is taken goes at once.
        passing |= blocks_of([blocks.take(BLOCK // 2)])
        waiting.append(blocks.take(BLOCK // 2, 1))
    assert len(passing) == 1 and len(blocks_of(waiting)) == 3 and not passing & blocks_of(waiting)


def test_pieces_of_one_lane_hold_all_blocks_where_some_wait():
    blocks = HostBlocks(torch.device("cpu"))
    waiting = [blocks.take(BLOCK // 2)[:] for _ in range(12)][::2]
    assert len(waiting) == 6 and len(blocks_of([*waiting, blocks.take(BLOCK)])) == 7


def nothing_is_pinned():
    """Whether no thread pins blocks."""
    return all(thread.name != "kv-blocks" for thread in threading.enumerate())


@pytest.fixture
def made():
    """Names of the threads that pin blocks. There is no second GPU here, so that each block is an ordinary one, with a warning."""
    if torch.cuda.device_count() > 1:
        pytest.skip("blocks would be pinned")
    names, handler = [], logging.Handler()
    handler.emit = lambda record: names.append(record.threadName)
    pool_buffers.logger.addHandler(handler)
    yield names
    pool_buffers.logger.removeHandler(handler)


def test_what_is_expected_is_pinned_from_the_beginning_by_another_thread(made):
    blocks = HostBlocks(torch.device("cuda", 1))
    blocks.expect(BLOCK * (pool_buffers.KEPT + 7) + 1000)
    until(nothing_is_pinned)
    assert made[pool_buffers.KEPT :] == ["kv-blocks"] * 7
    waiting = [blocks.take(BLOCK) for _ in range(pool_buffers.KEPT + 7 - pool_buffers.AHEAD)]
    assert len(made) == len(waiting) + pool_buffers.AHEAD
    blocks.expect(1 << 60)
    until(nothing_is_pinned)
    assert len(made) == pool_buffers.KEPT_PINNED
    on_cpu = HostBlocks(torch.device("cpu"))
    on_cpu.expect(1 << 60)
    assert nothing_is_pinned() and len(made) == pool_buffers.KEPT_PINNED


def test_of_a_gpu_blocks_are_pinned_by_another_thread_before_they_are_needed(made):
    blocks = HostBlocks(torch.device("cuda", 1))
    assert len(made) == pool_buffers.KEPT
    waiting = [blocks.take(BLOCK) for _ in range(pool_buffers.KEPT - pool_buffers.AHEAD)]
    assert len(made) == pool_buffers.KEPT, "enough are unused"
    for _ in range(6):
        waiting.append(blocks.take(BLOCK))
        until(nothing_is_pinned)
    assert set(made[pool_buffers.KEPT :]) == {"kv-blocks"} and len(made) == len(waiting) + pool_buffers.AHEAD
    del waiting
    for _ in range(20):
        blocks.take(BLOCK)
    assert nothing_is_pinned() and len(made) == pool_buffers.KEPT + 6, "those that are unused are cut again"
    # Where all are used and none may be added, memory that is not kept.
    waiting = [blocks.take(BLOCK) for _ in range(pool_buffers.KEPT_PINNED + 5)]
    until(nothing_is_pinned)
    assert len(blocks_of(waiting)) == pool_buffers.KEPT_PINNED + 5 and len(made) == pool_buffers.KEPT_PINNED


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 2), st.booleans()), max_size=40))
def test_pieces_that_are_used_are_nobody_elses(wanted):
    blocks, held = HostBlocks(torch.device("cpu")), []
    for number, (size, lane, keep) in enumerate(wanted):
        piece = blocks.take(size, lane)
        piece[:] = number
        if keep:
            held.append((number, piece))
        assert len(piece) == size and all(np.all(mine == which) for which, mine in held)
