"""Running requests without full KV: the interface of mode lossy, which frees full KV that other KV replaces, and recomputing of lost KV.

Full KV is lost if a load from the host has wrong checksums, a cache rank's process ends, or KV from another server does not arrive.
The requests free all their slots, wait in SGLang's queue as retracted requests do, and are prefilled again with their output. If
another server sends a request's KV, that server recomputes it, even if it is retracted only because slots are missing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode
from sglang_ext.mem_cache.prefix_cache.segments import Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache


# Lets another server recompute a request that has freed its slots.
RemotePrefill = Callable[["Req"], None]


class EarlyRequests(Protocol):
    """Requests that receive a part of their full KV from another server."""

    def is_lost(self, row: int) -> bool:
        """Whether the rest will not arrive."""

    def remote_prefill(self, row: int) -> RemotePrefill | None:
        """Recomputes a request whose KV has not arrived completely. None if all of it has arrived."""


@dataclass(frozen=True)
class SlotDemand:
    """Pool slots that a request will need.

    Attributes:
        compressed_slots: Slots for its compressed KV, or for the next refresh of it, while its full KV still exists.
        own_slots_freed: Slots of its own full KV that are freed after that.
        path_slots_freed: Slots of nodes on its path that it no longer needs after that. Freed when no request that locks the node does.
        growth: Slots that the remaining output needs.
        new_segments: Segments of the tree that its compressed KV will include and that have no users yet, so that they count as evictable.
    """

    compressed_slots: int = 0
    own_slots_freed: int = 0
    path_slots_freed: Mapping[TieredNode, int] = field(default_factory=dict)
    growth: float = 0
    new_segments: tuple[Segment, ...] = ()


@dataclass
class FreedFullKV(ABC):
    """The full KV that one scheduler process has freed. Rows point to SGLang's padding page there. ``nodes`` is the prefix tree."""

    nodes: PrefixTree
    compressed_kv: "CompressedKVCache"
    # By row: positions of the request's own tokens without full KV, because it was freed or never written.
    _own: dict[int, range] = field(default_factory=dict, init=False)

    @property
    def own_tokens(self) -> int:
        """Running requests' own tokens whose slots were freed, or never existed."""
        return sum(map(len, self._own.values()))

    def own_start(self, row: int, protected: int) -> int:
        """The position where a row's own slots begin. Slots before it are the tree's, ``protected`` tokens, or were freed."""
        return self._own[row].stop if row in self._own else protected

    def _free_own_slots(self, row: int, protected: int, covered: int) -> None:
        """Free the slots of a request's own tokens, after the tree's ``protected`` ones, that its compressed KV covers."""
        begin = self.own_start(row, protected)
        if covered <= begin:
            return
        slots = self.compressed_kv.token_table[row, begin:covered]
        self.nodes.allocator.free_segment(slots.to(torch.int64, copy=True), start_pos=begin)
        slots.zero_()
        self._own[row] = range(self._own[row].start if row in self._own else begin, covered)

    @abstractmethod
    def free_full_kv(self, requests: "Sequence[Req]", compressed: Mapping[int, tuple[TieredNode, int]]) -> None:
        """Free full KV that its replacement holds, at the start of a round of ``requests``, whose prompts the prefix tree owns.

        ``compressed`` has those with compressed KV by row: the last node of the path, and the number of tokens covered.
        """

    @abstractmethod
    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which a request's row points to its own full KV."""

    @abstractmethod
    def can_lack_full_kv(self, row: int) -> bool:
        """Whether the request in ``row`` may lack full KV, so that it depends on its compressed KV."""

    @abstractmethod
    def slot_demands(self, requests: "Iterable[tuple[Req, int]]", share: float) -> list[SlotDemand]:
        """Pool slots that each request will need in addition to its prompt's full KV, in order of admission.

        Each comes with the maximum number of tokens left to generate. ``share`` of them is expected. Space that a request takes outside the
        pool is not free for later ones.
        """

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended."""
        self._own.pop(row, None)

    def clear(self) -> None:
        """Remove all requests. The pool is being cleared."""
        self._own.clear()

    def on_admitted(self, req: "Req") -> None:
        """Record that a waiting request begins in the next forward."""

    def peak_slots(self, req: "Req", rest: int) -> int:
        """Maximum slots for full KV of a prompt's last ``rest`` tokens while they are computed, in addition to the slots that it has."""
        return rest

    def reads_quantized(self, req: "Req | None", best: TieredNode) -> bool:
        """Whether a prompt attends to all quantized-only KV on the path to ``best`` directly, so that it needs no slots for it."""
        return False

    def begin_prompts(self, prompts: "Iterable[tuple[Req, int, int]]") -> None:
        """Prepare the next tokens of admitted ``prompts``, which have a row, and slots for the tokens.

        Each comes with its number of tokens that were in the tree at its arrival, and of tokens before the next ones, which the tree owns.
        """

    def block_slots(self, row: int) -> torch.Tensor | None:
        """Slots of the blocks after the sinks that a prompt attends to: int64, whole blocks. None if it attends to full KV."""
        return None

    def can_insert(self, row: int) -> bool:
        """Whether a finished request's prompt may enter the tree: its row points to all full KV that the tree lacks."""
        return True

    def is_lost(self, row: int) -> bool:
        """Whether a request lacks full KV and its replacement, so that it must be recomputed."""
        return False

    def remote_prefill(self, row: int) -> RemotePrefill | None:
        """Recomputes a request without full KV. None if it has all full KV, or is recomputed here."""
        return None

    def max_node_end(self, tokens: int) -> int:
        """The last position, of a context's first ``tokens`` tokens, where chunks of prompts and partial matches may end a tree node."""
        return tokens

    def write_restored(self) -> None:
        """Write full KV that the next forward reads and that must be restored from its replacement."""


def lost_requests(batch) -> list[int]:
    """Positions in a running batch of the requests to recompute: their full KV is lost, or they need compressed KV and have none."""
    tree = batch.tree_cache
    providers = [each for each in (tree.residency, tree.early, tree.freed_full_kv) if each is not None]
    return [i for i, req in enumerate(batch.reqs) if any(each.is_lost(req.req_pool_idx) for each in providers)]


def retract_lost(original: Callable, batch, server_args) -> tuple[list, float, list]:
    """Hook around ``ScheduleBatch.retract_decode``: retracts requests whose full KV is lost, then as SGLang does if that is not enough."""
    providers = [each for each in (batch.tree_cache.early, batch.tree_cache.freed_full_kv) if each is not None]
    remote = {req.rid: each.remote_prefill(req.req_pool_idx) for req in batch.reqs for each in providers}
    lost, aborted = lost_requests(batch), []
    retracted = [batch.reqs[i] for i in lost]
    if lost:
        rest = [i for i in range(len(batch.reqs)) if i not in lost]
        for i in lost:
            batch.release_req(i, len(rest), server_args)
        batch.tree_cache.recomputed += len(lost)
        batch.filter_batch(keep_indices=rest)
    if lost and (not batch.reqs or batch.check_decode_mem()):
        ratio = NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs)
    else:
        more, ratio, aborted = original(batch, server_args)
        retracted += more
    again = [req for req in retracted if remote.get(req.rid) is not None]
    for req in again:
        # SGLang saved its KV on the CPU to resume with it.
        del req.kv_cache_cpu
        remote[req.rid](req)
    return [req for req in retracted if req not in again], ratio, aborted
