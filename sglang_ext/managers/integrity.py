"""Checks, before each forward, which request may read and write which slot.

The checks read all slots in use. So they run only if SGLang's own checks are strict (``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY``).
"""

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_ext.core import IntegrityError
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.prefix_cache.segments import free_slots


def check_round(reqs: Sequence[Req], plan: RoundPlan, provider: FullKVProvider, compressed_kv: CompressedKVCache) -> None:
    """Check the slots that the forwards of a round read and write, before they run (:func:`check`)."""
    table, verify_reqs = compressed_kv.token_table, set(plan.verify_reqs)
    written, exact = [], {}
    for i, (req, state, start) in enumerate(zip(reqs, plan.states, plan.starts)):
        # KV after the end of the output is written to SGLang's padding page.
        length, end = plan.lengths[i], min(start + plan.num_steps + (i in verify_reqs), output_end(req))
        written.append(table[state.row, length if i in verify_reqs else start : end].long())
        exact[state.row] = range(provider.full_kv_start(state.row, req.cache_protected_len), length)
    check(exact, torch.cat(written), compressed_kv)


def check(exact_tokens: dict[int, range], written: torch.Tensor, compressed_kv: CompressedKVCache) -> None:
    """Raise :class:`IntegrityError` unless a forward writes only its own slots, no slot in use is free, and the prefix tree is consistent.

    ``exact_tokens``: by the request's row, positions whose full KV is in the pool. ``written``: int64 [tokens], slots that it writes.
    """
    exact = torch.cat([compressed_kv.token_table[row, at.start : at.stop] for row, at in exact_tokens.items()]).long()
    compressed_slots = compressed_kv.all_slots()
    page = compressed_kv.allocator.page_size
    free, cached = free_slots(compressed_kv.allocator), compressed_kv.tree_cache.cached_slots()
    _require(written >= page, written, "a forward writes", "SGLang's padding page")
    _unique(written, "a forward writes", "two tokens of it")
    _unique(compressed_slots, "compressed KV holds", "the compressed KV of another request")
    _unique(cached, "the prefix tree holds", "another node of it")
    _unique(exact[~torch.isin(exact, cached)], "the full KV of a request is stored in", "another request")
    _disjoint(written, exact, "a forward writes", "full KV")
    _disjoint(written, compressed_slots, "a forward writes", "compressed KV")
    _disjoint(compressed_slots, exact, "compressed KV holds", "full KV")
    _disjoint(written, cached, "a forward writes", "the prefix tree")
    _disjoint(compressed_slots, cached, "compressed KV holds", "the prefix tree")
    for slots, what in (
        (written, "a forward writes"),
        (exact, "full KV is stored in"),
        (compressed_slots, "compressed KV holds"),
        (cached, "the prefix tree holds"),
    ):
        _disjoint(slots, free, what, "the free list")
    check_draft_rows(compressed_kv)
    check_compressed(compressed_kv)
    compressed_kv.tree_cache.check_integrity()


def check_draft_rows(compressed_kv: CompressedKVCache) -> None:
    """Raise :class:`IntegrityError` unless each draft row points to the slots of the request's own row after the compressed KV."""
    table = compressed_kv.token_table
    for row, kv in compressed_kv.items():
        after, draft_row = kv.tail_end - kv.covered, compressed_kv.draft_row(row)
        own, draft = table[row, kv.covered : kv.tail_end], table[draft_row, kv.num_slots : kv.num_slots + after]
        if not torch.equal(own, draft):
            first = int((own != draft).nonzero()[0])
            raise IntegrityError(
                f"the draft row {draft_row} points to slot {int(draft[first])} for position {kv.covered + first}, "
                f"whose KV the request in row {row} has in slot {int(own[first])}"
            )


def check_compressed(compressed_kv: CompressedKVCache) -> None:
    """Raise :class:`IntegrityError` unless compressed KV reads segments of its own method, and its table entry agrees with its slots."""
    for row, kv in compressed_kv.items():
        own = compressed_kv.method(row).name
        if others := sorted({segment.method for segment in kv.segments} - {own}):
            raise IntegrityError(f"the compressed KV of row {row} was made by {own}; it reads segments of {', '.join(others)}")
        full = compressed_kv.token_table[row, : kv.covered].long()
        compressed_kv.layout.check(compressed_kv.draft_row(row), kv, full, compressed_kv.buffers)


def _unique(slots: torch.Tensor, what: str, owner: str) -> None:
    values, counts = slots.unique(return_counts=True)
    _require(counts == 1, values, what, owner)


def _disjoint(slots: torch.Tensor, others: torch.Tensor, what: str, owner: str) -> None:
    _require(~torch.isin(slots, others), slots, what, owner)


def _require(good: torch.Tensor, slots: torch.Tensor, what: str, owner: str) -> None:
    if not bool(good.all()):
        raise IntegrityError(f"{what} slots {slots[~good].tolist()[:8]}, which belong to {owner}")
