"""Room for the next round: slots that SGLang takes ahead of a request end where its answer does, and in a full pool copies go before
requests do.

SGLang takes two rounds' tokens ahead of each request whose tokens come together, so that a prompt which fits its pool by a few
tokens would not: nothing is left to retract, and the request ends with an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from sglang_ext.device import to_device
from sglang_ext.managers.spec_decode.requests import end_of_answer
from sglang_ext.mem_cache.prefix_cache.recompute import lost_requests

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def reserve_to_the_end(original: Callable, batch: "ScheduleBatch") -> None:
    """Hook around ``eagle_prepare_for_decode``, which takes slots: no more than the answers need.

    Rounds go on beyond the end of the shorter of their requests. Rows lead to SGLang's padding page there.
    """
    with counting_to_the_end(batch.reqs) as near:
        original(batch)
    if not near:
        return
    rows = to_device([req.req_pool_idx for req in near], batch.device)
    ends = to_device([req.kv.kv_allocated_len for req in near], batch.device)
    places = ends[:, None] + torch.arange(get_alloc_reserve_per_decode(), device=batch.device)
    batch.req_to_token_pool.req_to_token[rows[:, None], places] = 0


def give_back_when_full(original: Callable, batch: "ScheduleBatch", selected_indices: list[int] | None = None) -> bool:
    """Hook around ``ScheduleBatch.check_decode_mem``: copies go before requests are retracted; those that are lost go at once."""
    if selected_indices is None and lost_requests(batch):
        return False
    with counting_to_the_end(batch.reqs):
        fits = original(batch, selected_indices)
        copies = batch.tree_cache.copies
        while not fits and copies is not None and (row := copies.largest()) is not None:
            copies.release_copy(row)
            fits = original(batch, selected_indices)
    if batch.tree_cache.residency is not None:
        # SGLang looks for room again only when a request is done. Here it also comes as full KV leaves the device.
        batch.batch_is_full = False
    return fits


@contextmanager
def counting_to_the_end(reqs: list["Req"]) -> Iterator[list["Req"]]:
    """While it lasts, what SGLang reserves beyond the committed tokens of each request reaches to its answer's end at most.

    Yields:
        The requests whose answer ends before.
    """
    reserve = get_alloc_reserve_per_decode()
    near = [req for req in reqs if req.kv_committed_len + reserve > end_of_answer(req)]
    committed = [req.kv_committed_len for req in near]
    for req in near:
        req.kv_committed_len = end_of_answer(req) - reserve
    try:
        yield near
    finally:
        for req, count in zip(near, committed):
            req.kv_committed_len = count
