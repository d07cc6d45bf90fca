"""Tensor-parallel ranks take rank 0's choices, and notice where they differ."""

from types import SimpleNamespace

import pytest

from sglang_ext.core import RankError, TPRanks


def group(size, rank=0, others=()):
    """SGLang's group of ranks, in which rank 0 says 7 and all ranks together what ``others`` lists."""
    return SimpleNamespace(
        world_size=size, rank_in_group=rank,
        broadcast_object=lambda value, src: value if rank == src else 7,
        all_gather_object=lambda value: [value, *others],
    )  # fmt: skip


def test_a_single_rank_decides_alone():
    alone = TPRanks.from_group(group(1))
    alone.check_equal("a round", 3)
    assert alone.first and alone.agree(3) == 3


def test_all_take_rank_zeros_choice():
    assert TPRanks.from_group(group(2)).agree(5) == 5
    second = TPRanks.from_group(group(2, rank=1))
    assert second.agree(5) == 7 and not second.first


def test_a_difference_is_named():
    TPRanks.from_group(group(2, others=[(16, [1])])).check_equal("a round", (16, [1]))
    with pytest.raises(RankError, match=r"a round differs.*\[\(16, \[1\]\), \(16, \[2\]\)\]"):
        TPRanks.from_group(group(2, others=[(16, [2])])).check_equal("a round", (16, [1]))
