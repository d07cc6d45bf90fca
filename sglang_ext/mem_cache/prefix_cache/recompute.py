"""Recomputes requests whose full KV is lost, with SGLang's mechanism for retracted requests.

A load from the host with wrong checksums leaves a node of the prefix tree without KV. The requests whose paths contain the node free all
their slots and wait in SGLang's queue. Their prompt and output tokens are prefilled again. Requests whose KV another server sends are
recomputed by that server: if the rest of the KV does not arrive, if their slots are needed before, or if only quantized KV exists. Requests
whose remote-only KV is lost with a cache rank's process are recomputed too.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RecomputeSource(Protocol):
    """The rest of a request's full KV, which another server sends."""

    def prefill_again(self, req: "Req") -> None:
        """Let the other server recompute a request that has freed its slots."""


class EarlyRequests(Protocol):
    """Requests that receive a part of their full KV from another server, by row of the token table."""

    def is_lost(self, row: int) -> bool:
        """Whether the rest will not arrive."""

    def recompute_source(self, row: int) -> RecomputeSource | None:
        """The source of the rest of a request's KV. None if all of it has arrived."""


def lost_requests(batch) -> list[int]:
    """Positions in a running batch of the requests to recompute.

    Their full KV is in no tier, will not arrive, or was lost with a cache rank, or they need compressed KV and have none.
    """
    tree = batch.tree_cache
    providers = [each for each in (tree.residency, tree.early, tree.freed_full_kv) if each is not None]
    return [i for i, req in enumerate(batch.reqs) if any(each.is_lost(req.req_pool_idx) for each in providers)]


def retract_lost(original: Callable, batch, server_args) -> tuple[list, float, list]:
    """Hook around ``ScheduleBatch.retract_decode``: retracts requests whose full KV is lost, then as SGLang does if that is not enough.

    Returns:
        As SGLang's: retracted requests, SGLang's new estimate of the new token ratio, and requests to abort.
    """
    providers = [each for each in (batch.tree_cache.early, batch.tree_cache.freed_full_kv) if each is not None]
    sent = {req.rid: each.recompute_source(req.req_pool_idx) for req in batch.reqs for each in providers}
    retracted, ratio, aborted = _retract(original, batch, server_args)
    again = [req for req in retracted if sent.get(req.rid) is not None]
    for req in again:
        # SGLang saved its KV on the CPU to resume with it.
        del req.kv_cache_cpu
        sent[req.rid].prefill_again(req)
    return [req for req in retracted if req not in again], ratio, aborted


def _retract(original: Callable, batch, server_args) -> tuple[list, float, list]:
    lost = lost_requests(batch)
    if not lost:
        return original(batch, server_args)
    rest = [i for i in range(len(batch.reqs)) if i not in lost]
    retracted = [batch.reqs[i] for i in lost]
    for i in lost:
        batch.release_req(i, len(rest), server_args)
    batch.tree_cache.recomputed += len(lost)
    batch.filter_batch(keep_indices=rest)
    if not batch.reqs or batch.check_decode_mem():
        return retracted, NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs), []
    more, ratio, aborted = original(batch, server_args)
    return [*retracted, *more], ratio, aborted
