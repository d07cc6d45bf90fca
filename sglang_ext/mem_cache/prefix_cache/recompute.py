"""Requests whose full KV is lost are computed again: by SGLang's own way for requests that it takes out of a batch.

A load from the host whose checksums differ leaves a node of the prefix tree without KV. The requests that lead through it
give back all that they hold and wait in SGLang's queue; their prompt and what they answered so far is prefilled again. So are
requests whose KV another server sends, where the rest of it does not come, or their slots are needed before it came, or codes alone
are there of it: by that server. And so are requests of whose full KV a cache rank had all there was, whose process is gone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RecomputeSource(Protocol):
    """The rest of a request's full KV, which another server sends."""

    def prefill_again(self, req: "Req") -> None:
        """Let that server compute a request once more that gave its slots back."""


class EarlyRequests(Protocol):
    """Requests of whose full KV a part is on its way from another server, by row of the token table."""

    def is_lost(self, row: int) -> bool:
        """Whether the rest will not come."""

    def arrival(self, row: int) -> RecomputeSource | None:
        """The rest of a request's KV; None where all is there."""


def lost_requests(batch) -> list[int]:
    """Places in a running batch of the requests whose full KV is in no tier, does not come, or went with a cache rank, or that need a copy and
    have none."""
    tree = batch.tree_cache
    tellers = [each for each in (tree.residency, tree.early, tree.codes) if each is not None]
    return [i for i, req in enumerate(batch.reqs) if any(each.is_lost(req.req_pool_idx) for each in tellers)]


def retract_lost(original: Callable, batch, server_args) -> tuple[list, float, list]:
    """Hook around ``ScheduleBatch.retract_decode``: first those whose full KV is lost, then as SGLang does, if that is not enough.

    Returns:
        As SGLang's: requests that wait again, the ratio of new tokens that it expects, and requests to abort.
    """
    tellers = [each for each in (batch.tree_cache.early, batch.tree_cache.codes) if each is not None]
    sent = {req.rid: each.arrival(req.req_pool_idx) for req in batch.reqs for each in tellers}
    gone, ratio, aborted = _retract(original, batch, server_args)
    again = [req for req in gone if sent.get(req.rid) is not None]
    for req in again:
        # SGLang stored what was there, to go on with it.
        del req.kv_cache_cpu
        sent[req.rid].prefill_again(req)
    return [req for req in gone if req not in again], ratio, aborted


def _retract(original: Callable, batch, server_args) -> tuple[list, float, list]:
    lost = lost_requests(batch)
    if not lost:
        return original(batch, server_args)
    rest = [i for i in range(len(batch.reqs)) if i not in lost]
    gone = [batch.reqs[i] for i in lost]
    for i in lost:
        batch.release_req(i, len(rest), server_args)
    batch.tree_cache.recomputed += len(lost)
    batch.filter_batch(keep_indices=rest)
    if not batch.reqs or batch.check_decode_mem():
        return gone, NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs), []
    more, ratio, aborted = original(batch, server_args)
    return [*gone, *more], ratio, aborted
