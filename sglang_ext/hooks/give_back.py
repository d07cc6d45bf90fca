"""A full pool: compressed copies go before SGLang retracts requests."""

from collections.abc import Callable

from sglang_ext.hooks.reserve import counting_to_the_end
from sglang_ext.mem_cache.prefix_cache.recompute import lost_requests


def give_back_when_full(original: Callable, batch, selected_indices: list[int] | None = None) -> bool:
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
