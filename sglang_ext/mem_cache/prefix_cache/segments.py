"""Compressed KV of a request, and shared segments, which all requests with a common prefix read."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_ext.mem_cache.host_tier.transfers import Transfer


@dataclass(eq=False)
class Segment:
    """A shared segment: compressed KV of tokens ``[start, end)`` of a path in the tree, in whole pages. It never changes.

    Attributes:
        slots: int64, in SGLang's pool, whole pages. The tree owns them once the segment is attached.
        users: Running requests that read it.
        node: The node that holds position ``end - 1``. None before the segment is attached, and after that node was dropped.
        tokens: Tokens that it keeps.
        packed: Slots, from the beginning of ``slots``, that hold packed blocks (quantized_blocks.py). 0 if each slot holds a token.
        method: Name of the method that created it. Only compressed KV of this method may read it (compression_method.py).
        anchored_nodes: Nodes whose loads transfer fewer bytes while it exists (host_store.py), in the order in which they were stored.
        stored, loaded: The last transfers that read its slots.
    """

    start: int
    end: int
    slots: torch.Tensor
    users: int = 0
    node: "TreeNode | None" = None
    tokens: int = 0
    packed: int = 0
    method: str = ""
    anchored_nodes: "dict[TreeNode, None]" = field(default_factory=dict)
    stored: "Transfer | None" = None
    loaded: "Transfer | None" = None

    @property
    def holds_all_tokens(self) -> bool:
        """Whether its blocks hold all tokens that it covers, so that full KV can be restored from them."""
        return bool(self.packed) and self.tokens == self.end - self.start

    def __str__(self) -> str:
        return f"the segment of tokens [{self.start}, {self.end}){self.method and f' of {self.method}'}"


# For each page of a node, the segment with which it was stored on the host, if that still exists. () if none does.
PageSegments = tuple[Segment | None, ...]


@dataclass
class CompressedKV:
    """The compressed KV of a request. Attention reads it instead of the full KV of the first ``covered`` tokens, whole pages.

    Attributes:
        own: int64 [own slots], slots in SGLang's KV pool that only this request reads, in whole pages.
        segments: Parts that are shared with other requests; they follow the sinks. ``own`` holds the rest.
        tail_end: First position after ``covered`` for which the draft row has no slot yet; the code that extends the row sets it.
        method: Name of the method, after the compressor that selected the kept tokens; set when the slots are filled.
        sinks: Slots at the beginning of ``own`` with the first tokens of the context, before the tokens in blocks.
        own_tokens: Tokens that ``own`` keeps without the sinks; :class:`~sglang_ext.mem_cache.compressed.cache.CompressedKVCache` sets it.
        own_packed: Slots of ``own``, after the sinks, that hold packed blocks (quantized_blocks.py); 0 if it holds tokens.
        back_slots: int64, back slots for the next selection, as large as ``own``; the draft row does not point to it. Empty if a selection
            overwrites ``own``, on a second stream or within the steps. None if tokens are selected between steps.
        refresh_after: Context length at which it is refreshed, without the newest tokens. 0 if its size decides.
    """

    own: torch.Tensor
    covered: int
    segments: list[Segment] = field(default_factory=list)
    tail_end: int = 0
    method: str = ""
    sinks: int = 0
    own_tokens: int = 0
    own_packed: int = 0
    back_slots: torch.Tensor | None = None
    refresh_after: int = 0

    def __post_init__(self) -> None:
        self.tail_end = max(self.tail_end, self.covered)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of the compressed KV in the draft row, blocks first: int64 [kept]. Without the slots that pad blocks to pages."""
        sinks, own = self.own[: self.sinks], self.own[self.sinks :]
        shared = [segment.slots[: segment.packed or None] for segment in self.segments]
        return torch.cat([*shared, own[: self.own_packed or None], sinks])

    @property
    def owned_slots(self) -> torch.Tensor:
        """All slots that the request owns, the back slots last: int64."""
        return self.own if self.back_slots is None else torch.cat([self.own, self.back_slots])

    def swap_back_slots(self) -> None:
        """Swap ``own`` with the back slots, which holds the new selection."""
        self.own, self.back_slots = self.back_slots, self.own

    @property
    def shared_len(self) -> int:
        """Tokens of the full KV that the sinks and the segments replace."""
        return self.segments[-1].end if self.segments else self.sinks

    @property
    def has_all_tokens(self) -> bool:
        """Whether all covered tokens are kept, in blocks except for the sinks: the full KV could be restored from them."""
        kept = self.sinks + sum(segment.tokens for segment in self.segments) + self.own_tokens
        return self.num_packed_slots > 0 and kept == self.covered

    def detach_blocks(self, tokens: int, packed: int, end: int, method: str) -> Segment:
        """Turn the first ``tokens`` own tokens, ``packed`` slots, into a segment up to ``end`` that the request reads. Its draft row stays."""
        last = len(self.own) if tokens == self.own_tokens else self.sinks + packed
        slots, self.own = self.own[self.sinks : last].clone(), torch.cat([self.own[: self.sinks], self.own[last:]])
        self.own_tokens, self.own_packed = self.own_tokens - tokens, self.own_packed - packed
        segment = Segment(self.shared_len, end, slots, users=1, tokens=tokens, packed=packed, method=method)
        self.segments.append(segment)
        return segment

    @property
    def num_slots(self) -> int:
        """Slots of the compressed KV in the draft row."""
        own = self.own_packed + self.sinks if self.own_packed else len(self.own)
        return sum(segment.packed or len(segment.slots) for segment in self.segments) + own

    @property
    def num_packed_slots(self) -> int:
        """Slots among them with packed blocks: all but the sinks, or none."""
        return sum(segment.packed for segment in self.segments) + self.own_packed


class Segments:
    """All segments of one tree: their users, and the slots that could be freed.

    Attributes:
        held_tokens, unused_tokens: Slots of segments in use, and of the other segments, which may be evicted.
        added: Segments added so far.
        blocks: None if segments never replace full KV (quantized_only.py). Otherwise tokens and slots of a block, and a function that is called
            after a split, with the new segment and the old one. The new one has the first blocks. Readers of the old one then read both.
    """

    def __init__(self, allocator: "BaseTokenToKVPoolAllocator", page_size: int) -> None:
        self._allocator, self._page_size = allocator, page_size
        self.added = 0
        self.blocks: tuple[int, int, Callable[[Segment, Segment], None]] | None = None
        # In the order of attachment: all ranks must evict the same segments.
        self._all: dict[Segment, None] = {}
        self.held_tokens = self.unused_tokens = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._all

    @property
    def unused(self) -> list[Segment]:
        """Segments that no running request reads."""
        return [segment for segment in self._all if not segment.users]

    def add(self, segment: Segment, nodes: "Iterable[TreeNode]") -> None:
        """Attach ``segment`` to the one of ``nodes``, a path from the root, that holds its last position.

        Raises ValueError if it is not on the path, is attached already, or is not whole pages.
        """
        if segment in self._all:
            raise ValueError(f"{segment} is attached already; attach each segment once")
        whole = all(count % self._page_size == 0 for count in (segment.start, segment.end, len(segment.slots)))
        if not whole or not 0 <= segment.start < segment.end or not len(segment.slots) or segment.users < 0:
            raise ValueError(
                f"{segment} with {len(segment.slots)} slots and {segment.users} users; a segment covers whole "
                f"pages of {self._page_size} tokens, in whole pages of slots"
            )
        owner = next((node for node in nodes if node.start < segment.end <= node.end), None)
        if owner is None:
            raise ValueError(
                f"a segment of tokens [{segment.start}, {segment.end}) is not on a path of "
                f"{max((node.end for node in nodes), default=0)} tokens; attach it where the tree holds its context"
            )
        segment.node = owner
        owner.segments.append(segment)
        self.update_replacing_segments(owner)
        self._all[segment] = None
        self.added += 1
        self._count(segment, len(segment.slots))

    def use(self, segment: Segment) -> None:
        """Count a running request that reads ``segment``, until it is released. Raises ValueError if the tree no longer has it."""
        self._change_users(segment, 1)

    def release(self, segment: Segment) -> None:
        """Count a running request that no longer reads ``segment``. Raises ValueError if no request reads it."""
        self._change_users(segment, -1)
        if segment.node is None:
            self.free(segment)

    def _change_users(self, segment: Segment, change: int) -> None:
        if segment not in self._all:
            raise ValueError(f"{segment} is not in the tree; use those that segments_to names now")
        if segment.users + change < 0:
            raise ValueError(f"{segment} is released more often than it was used; release it once for each use")
        self._count(segment, -len(segment.slots))
        segment.users += change
        self._count(segment, len(segment.slots))

    def free(self, segment: Segment) -> int:
        """Free the slots of ``segment``. While requests read it, only detach it from its node. Return the number of freed slots."""
        if segment not in self._all:
            return 0
        if segment.node is not None:
            segment.node.segments.remove(segment)
            self.update_replacing_segments(segment.node)
            segment.node = None
        if segment.users:
            return 0
        del self._all[segment]
        self._count(segment, -len(segment.slots))
        for transfer in (segment.stored, segment.loaded):
            if transfer is not None:
                transfer.wait()
        # Later loads of pages stored with it transfer the anchor too.
        for node in list(segment.anchored_nodes):
            set_anchors(node, tuple(None if each is segment else each for each in node.anchors))
        self._allocator.free(segment.slots)
        return len(segment.slots)

    def update_replacing_segments(self, node: "TreeNode") -> None:
        """Update which of a node's segments replace its full KV, after they changed."""
        node.replacing_segments = () if self.blocks is None else tiling(node)

    def boundary(self, segment: Segment, position: int) -> int:
        """The last position up to ``position`` where ``segment`` can be split: a block boundary, in whole pages. Its start if none."""
        if position >= segment.end:
            return segment.end
        tokens, slots, _ = self.blocks
        count = max(0, position - segment.start) // tokens
        while count and (count * slots % self._page_size or count * tokens % self._page_size):
            count -= 1
        return segment.start + count * tokens

    def split(self, segment: Segment, position: int, owner: "TreeNode") -> None:
        """Move the blocks of ``segment`` before ``position``, a block boundary, to a new segment of ``owner``. Readers then read both."""
        tokens, slots, on_segment_split = self.blocks
        moved = position - segment.start
        packed = moved // tokens * slots
        first = Segment(segment.start, position, segment.slots[:packed], segment.users, owner, moved, packed, segment.method)
        segment.start, segment.slots = position, segment.slots[packed:]
        segment.tokens, segment.packed = segment.tokens - moved, segment.packed - packed
        owner.segments.append(first)
        self._all[first] = None
        for node in {owner, segment.node} - {None}:
            self.update_replacing_segments(node)
        on_segment_split(first, segment)

    def clear(self) -> None:
        """Remove all segments. The pool itself is being cleared."""
        self._all.clear()
        self.held_tokens = self.unused_tokens = 0

    def _count(self, segment: Segment, tokens: int) -> None:
        if segment.users:
            self.held_tokens += tokens
        else:
            self.unused_tokens += tokens


def tiling(node: "TreeNode") -> tuple[Segment, ...]:
    """The segments of ``node`` that hold all its tokens quantized, in order. The first may begin before it. () if they do not hold all."""
    found: list[Segment] = []
    begin = node.end
    while begin > node.start:
        ends_there = [segment for segment in node.segments if segment.end == begin and segment.holds_all_tokens]
        if not ends_there:
            return ()
        found.append(min(ends_there, key=lambda segment: segment.start))
        begin = found[-1].start
    return tuple(found[::-1])


def set_anchors(node: "TreeNode", anchors: PageSegments) -> None:
    """Set the anchors of a node's pages on the host, replacing the previous ones."""
    for segment in distinct_segments(node.anchors):
        del segment.anchored_nodes[node]
    node.anchors = anchors if any(anchors) else ()
    for segment in distinct_segments(anchors):
        segment.anchored_nodes[node] = None


def distinct_segments(anchors: PageSegments) -> list[Segment]:
    """The distinct segments among the anchors of pages."""
    return list(dict.fromkeys(segment for segment in anchors if segment is not None))


def free_slots(allocator: "BaseTokenToKVPoolAllocator") -> torch.Tensor:
    """Slots that SGLang's allocator has free: int64 [free]."""
    pages = torch.cat([allocator.free_pages, allocator.release_pages])
    within = torch.arange(allocator.page_size, device=pages.device)
    return (pages[:, None] * allocator.page_size + within).flatten()
