"""Requests whose full KV is lost are computed again: by SGLang's own way for requests that it takes out of a batch.

A load from the host whose checksums differ leaves a node of the prefix tree without KV. The requests that lead through it
give back all that they hold and wait in SGLang's queue; their prompt and what they answered so far is prefilled again.
"""

from collections.abc import Callable

from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker


def lost_requests(batch) -> list[int]:
    """Places in a running batch of the requests whose full KV is in no tier."""
    residency = batch.tree_cache.residency
    if residency is None:
        return []
    return [i for i, req in enumerate(batch.reqs) if residency.is_lost(req.req_pool_idx)]


def retract_lost(original: Callable, batch, server_args) -> tuple[list, float, list]:
    """Hook around ``ScheduleBatch.retract_decode``: first those whose full KV is lost, then as SGLang does, if that is not enough.

    Returns:
        As SGLang's: requests that wait again, the ratio of new tokens that it expects, and requests to abort.
    """
    lost = lost_requests(batch)
    if not lost:
        return original(batch, server_args)
    rest = [i for i in range(len(batch.reqs)) if i not in lost]
    gone = [batch.reqs[i] for i in lost]
    for i in lost:
        batch.release_req(i, len(rest), server_args)
    batch.tree_cache.residency.recomputed += len(lost)
    batch.filter_batch(keep_indices=rest)
    if not batch.reqs or batch.check_decode_mem():
        return gone, NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs), []
    more, ratio, aborted = original(batch, server_args)
    return [*gone, *more], ratio, aborted
