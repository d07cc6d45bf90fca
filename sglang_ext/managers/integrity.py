"""Checks of who may read and write which slot, before each forward.

They cost a pass over all live slots, so they run only where SGLang's own invariant checks are strict
(``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY``): in soak runs and tests.
"""

import torch
from sglang.srt.environ import envs

from sglang_ext.core import IntegrityError
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache


def is_strict() -> bool:
    """Whether SGLang was started with strict invariant checks."""
    return bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())


def check(exact_tokens: dict[int, range], written: torch.Tensor, compressed_kv: CompressedKVCache) -> None:
    """Check that a forward writes only slots of its own, that nothing live is free, and the prefix tree.

    Args:
        exact_tokens: by the request's row in the token table, positions whose full KV is in the pool.
        written: int64 [tokens], slots that it writes.
        compressed_kv: the compressed copies.

    Raises:
        IntegrityError: names the two owners and the slots.
    """
    exact = torch.cat([compressed_kv.token_table[row, at.start : at.stop] for row, at in exact_tokens.items()]).long()
    copies = compressed_kv.all_slots()
    page = compressed_kv.allocator.page_size
    free, cached = compressed_kv.free_slots(), compressed_kv.tree_cache.cached_slots()
    _require(written >= page, written, "a forward writes", "SGLang's padding page")
    _unique(written, "a forward writes", "two tokens of it")
    _unique(copies, "a compressed copy holds", "another copy")
    _unique(cached, "the prefix tree holds", "another node of it")
    _unique(exact[~torch.isin(exact, cached)], "a request's own KV lies in", "another request")
    _disjoint(written, exact, "a forward writes", "exact KV")
    _disjoint(written, copies, "a forward writes", "a compressed copy")
    _disjoint(copies, exact, "a compressed copy holds", "exact KV")
    _disjoint(written, cached, "a forward writes", "the prefix tree")
    _disjoint(copies, cached, "a compressed copy holds", "the prefix tree")
    for slots, what in (
        (written, "a forward writes"),
        (exact, "exact KV lies in"),
        (copies, "a copy holds"),
        (cached, "the prefix tree holds"),
    ):
        _disjoint(slots, free, what, "the free list")
    check_draft_rows(compressed_kv)
    check_compressed(compressed_kv)
    compressed_kv.tree_cache.check_integrity()


def check_draft_rows(compressed_kv: CompressedKVCache) -> None:
    """Check that after each copy its draft row leads where the request's own row does.

    Raises:
        IntegrityError: names a draft row that leads elsewhere, and from which position on.
    """
    table = compressed_kv.token_table
    for row, view in compressed_kv.copies():
        after = view.tail_end - view.covered
        own, draft = table[row, view.covered : view.tail_end], table[compressed_kv.draft_row(row), view.kept : view.kept + after]
        if not torch.equal(own, draft):
            first = int((own != draft).nonzero()[0])
            raise IntegrityError(
                f"the draft row {compressed_kv.draft_row(row)} leads to slot {int(draft[first])} for position {view.covered + first}, "
                f"whose KV the request in row {row} has in slot {int(own[first])}"
            )


def check_compressed(compressed_kv: CompressedKVCache) -> None:
    """Check that each copy reads only what its own method made, and that its row says what it holds.

    Raises:
        IntegrityError: names a copy of which that is not so.
    """
    for row, view in compressed_kv.copies():
        own = compressed_kv.method(row).name
        others = sorted({segment.method for segment in view.segments} - {own})
        if others:
            raise IntegrityError(f"the copy of row {row} is one of {own}; it reads segments of {', '.join(others)}")
        compressed_kv.layout.check(compressed_kv.draft_row(row), view, compressed_kv.token_table[row, : view.covered].long(), compressed_kv.buffers)


def _unique(slots: torch.Tensor, what: str, owner: str) -> None:
    values, counts = slots.unique(return_counts=True)
    _require(counts == 1, values, what, owner)


def _disjoint(slots: torch.Tensor, others: torch.Tensor, what: str, owner: str) -> None:
    _require(~torch.isin(slots, others), slots, what, owner)


def _require(good: torch.Tensor, slots: torch.Tensor, what: str, owner: str) -> None:
    if not bool(good.all()):
        raise IntegrityError(f"{what} slots {slots[~good].tolist()[:8]}, which belong to {owner}")
