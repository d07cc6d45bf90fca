"""The strict check stops a forward that would write what another token's KV needs."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.managers.integrity import IntegrityError, check
from sglang_ext.mem_cache.compressed.layouts.base import PlainLayout

TABLE = torch.tensor([[0] * 6, [1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 10]])  # two requests share 1 and 2


def compressed_kv(copies=(11, 12), free=(13, 14), cached=(1, 2, 15), page_size=1):
    return SimpleNamespace(
        token_table=TABLE,
        layout=PlainLayout(),
        items=lambda: (),
        all_slots=lambda: torch.tensor(copies, dtype=torch.int64),
        allocator=SimpleNamespace(
            page_size=page_size, free_pages=torch.tensor(free, dtype=torch.int64), release_pages=torch.empty(0, dtype=torch.int64)
        ),
        tree_cache=SimpleNamespace(
            cached_slots=lambda: torch.tensor(cached, dtype=torch.int64), check_integrity=lambda: None
        ),
    )


# Positions of each row whose KV is exact.
EXACT = {1: range(4), 2: range(4)}
WRITTEN = torch.tensor([5, 6, 10])


def test_own_slots_pass_and_a_shared_prefix_too():
    check(EXACT, WRITTEN, compressed_kv())


@pytest.mark.parametrize(
    ("written", "found", "owner"),
    [
        ([5, 6, 0], compressed_kv(), "padding page"),
        ([5, 6, 5], compressed_kv(), "two tokens"),
        ([5, 6, 8], compressed_kv(), "full KV"),
        ([5, 6, 11], compressed_kv(), "compressed KV"),
        ([5, 6, 13], compressed_kv(), "free list"),
        ([5, 6, 10], compressed_kv(copies=(11, 11)), "another request"),
        ([5, 6, 10], compressed_kv(copies=(2, 11)), "full KV"),
        ([5, 6, 10], compressed_kv(copies=(11, 13)), "free list"),
        ([5, 6, 10], compressed_kv(free=(3,)), "free list"),
        ([5, 6, 10], compressed_kv(cached=()), "another request"),
        ([5, 6, 10], compressed_kv(cached=(1, 2, 2)), "another node"),
        ([5, 6, 15], compressed_kv(), "the prefix tree"),
        ([5, 6, 10], compressed_kv(cached=(1, 2, 12)), "the prefix tree"),
        ([5, 6, 10], compressed_kv(cached=(1, 2, 14)), "free list"),
        ([15, 16, 17], compressed_kv(page_size=16), "padding page"),
    ],
)
def test_a_slot_with_two_owners_is_named(written, found, owner):
    with pytest.raises(IntegrityError, match=owner):
        check(EXACT, torch.tensor(written), found)
