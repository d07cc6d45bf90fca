"""Host memory for pages: pieces are apart, and what waits long holds no block of what goes soon."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from sglang_ext.managers.kv_transfer.progressive import manager, pool_buffers
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import HostBlocks
from sglang_ext.mem_cache.host_tier.host_memory import AvailableMemory


@pytest.fixture
def blocks(monkeypatch):
    """Of 1,024 bytes."""
    monkeypatch.setattr(pool_buffers, "BLOCK", 1024)
    return HostBlocks(torch.device("cpu"))


def test_what_one_lane_holds_leaves_the_others_blocks_to_be_cut_again(blocks):
    waiting = []
    for _ in range(6):
        # Half of what is taken goes at once.
        blocks.take(512)[:] = 1
        waiting.append(blocks.take(512, 1))
    assert len(blocks._kept) == 1 + 3


def test_pieces_of_one_lane_hold_all_blocks_where_some_wait(blocks):
    waiting = [blocks.take(512)[:] for _ in range(12)][::2]
    blocks.take(1024)
    assert len(waiting) == 6 and len(blocks._kept) == 7


def nothing_is_pinned():
    """Whether no thread pins blocks."""
    return all(thread.name != "kv-blocks" for thread in threading.enumerate())


@pytest.fixture
def made(monkeypatch):
    """Names of the threads that pin blocks of 1,024 bytes."""
    monkeypatch.setattr(pool_buffers, "BLOCK", 1024)
    made = []

    def pinned(device):
        made.append(threading.current_thread().name)
        return np.zeros(1024, np.uint8)

    monkeypatch.setattr(pool_buffers, "_pinned", pinned)
    return made


def test_what_is_expected_is_pinned_from_the_beginning_by_another_thread(made):
    blocks = HostBlocks(torch.device("cuda", 1))
    blocks.expect(1024 * (pool_buffers.KEPT + 7) + 1000)
    until(nothing_is_pinned)
    assert made[pool_buffers.KEPT :] == ["kv-blocks"] * 7
    waiting = [blocks.take(1024) for _ in range(pool_buffers.KEPT + 7 - pool_buffers.AHEAD)]
    assert len(made) == len(waiting) + pool_buffers.AHEAD
    blocks.expect(1 << 60)
    until(nothing_is_pinned)
    assert len(made) == pool_buffers.KEPT_PINNED
    on_cpu = HostBlocks(torch.device("cpu"))
    on_cpu.expect(1 << 60)
    assert len(made) == pool_buffers.KEPT_PINNED and not on_cpu._kept


def test_of_a_gpu_blocks_are_pinned_by_another_thread_before_they_are_needed(made):
    blocks = HostBlocks(torch.device("cuda", 1))
    assert len(made) == pool_buffers.KEPT
    waiting = [blocks.take(1024) for _ in range(pool_buffers.KEPT - pool_buffers.AHEAD)]
    assert len(made) == pool_buffers.KEPT, "enough are unused"
    for _ in range(6):
        waiting.append(blocks.take(1024))
        until(nothing_is_pinned)
    assert set(made[pool_buffers.KEPT :]) == {"kv-blocks"} and len(made) == len(waiting) + pool_buffers.AHEAD
    del waiting
    for _ in range(20):
        blocks.take(1024)
    assert nothing_is_pinned() and len(made) == pool_buffers.KEPT + 6, "those that are unused are cut again"
    # Where all are used and none may be added, memory that is not kept.
    waiting = [blocks.take(1024) for _ in range(pool_buffers.KEPT_PINNED + 5)]
    until(nothing_is_pinned)
    assert len(waiting) == pool_buffers.KEPT_PINNED + 5 and len(blocks._kept) == pool_buffers.KEPT_PINNED


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 2), st.booleans()), max_size=40))
def test_pieces_that_are_used_are_nobody_elses(wanted):
    blocks, held = HostBlocks(torch.device("cpu")), []
    for number, (size, lane, keep) in enumerate(wanted):
        piece = blocks.take(size, lane)
        piece[:] = number
        if keep:
            held.append((number, piece))
        assert len(piece) == size and all(np.all(mine == which) for which, mine in held)


def test_what_is_pinned_from_the_beginning_is_a_share_of_what_a_container_leaves(monkeypatch):
    monkeypatch.setattr(AvailableMemory, "find", lambda: AvailableMemory(8 << 30, "a group's limit"))
    assert manager.pinned_bytes(2) == 1 << 30
