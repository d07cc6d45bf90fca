"""Compressed chunks of contexts, shared by all requests whose paths lead through them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_ext.mem_cache.host_tier.transfers import Transfer


@dataclass(eq=False)
class Segment:
    """A compressed chunk that stands for tokens ``[start, end)`` of a path; its KV never changes.

    Attributes:
        start, end: positions from the root, in whole pages.
        slots: int64, in SGLang's pool, whole pages; the tree's from when it is attached.
        users: running requests that read it; the tree counts them.
        node: the node that holds position ``end - 1``; the tree sets it. None before it is attached and after that node was
            dropped: its users may read it still.
        tokens: tokens that it keeps.
        packed: slots, from the beginning of ``slots``, that hold packed blocks (quantized_blocks.py); 0 where each holds a token.
        method: name of the method that made it, whose copies alone may read it (compression_method.py).
        anchored_nodes: nodes whose loads bring less while it is there (anchors.py), in the order in which they were stored.
        stored, loaded: the newest transfers that read its slots; None for none.
    """

    start: int
    end: int
    slots: torch.Tensor
    users: int = 0
    node: TreeNode | None = None
    tokens: int = 0
    packed: int = 0
    method: str = ""
    anchored_nodes: dict[TreeNode, None] = field(default_factory=dict)
    stored: Transfer | None = None
    loaded: Transfer | None = None

    @property
    def whole(self) -> bool:
        """Whether its blocks hold all tokens for which it stands, so that full KV can be made of them."""
        return bool(self.packed) and self.tokens == self.end - self.start


class SegmentBlocks(NamedTuple):
    """Packed blocks of which segments can be parted.

    Attributes:
        tokens, slots: of a block.
        on_segment_split: told of a segment that took over the first blocks of another one, and of that, which keeps the rest: who reads the
            second reads both.
    """

    tokens: int
    slots: int
    on_segment_split: Callable[[Segment, Segment], None]


class Segments:
    """All segments of one tree: who uses them, and whose slots could be freed.

    Args:
        allocator: SGLang's slot allocator, which gets the slots back.
        page_size: tokens in a page.
        forgotten: told of a segment whose slots are given back.

    Attributes:
        held_tokens: slots of segments in use.
        unused_tokens: slots of the others, which may be evicted.
        added: segments so far.
        blocks: of segments that stand for nodes without full KV (quantized_only.py); None where none does.
    """

    def __init__(
        self, allocator: BaseTokenToKVPoolAllocator, page_size: int, forgotten: Callable[[Segment], None] = lambda segment: None
    ) -> None:
        self._allocator, self._page_size, self._forgotten = allocator, page_size, forgotten
        self.added = 0
        self.blocks: SegmentBlocks | None = None
        # In the order of attachment: ranks shall evict the same ones.
        self._all: dict[Segment, None] = {}
        self.held_tokens = self.unused_tokens = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._all

    @property
    def unused(self) -> list[Segment]:
        """Those that no running request reads."""
        return [segment for segment in self._all if not segment.users]

    def add(self, segment: Segment, nodes: Iterable[TreeNode]) -> None:
        """Attach ``segment`` to that of ``nodes``, a path from the root, which holds its last position.

        Raises:
            ValueError: it does not lie on the path, is attached already, or is not made of whole pages.
        """
        self._check(segment)
        owner = next((node for node in nodes if node.start < segment.end <= node.end), None)
        if owner is None:
            raise ValueError(
                f"a segment of tokens [{segment.start}, {segment.end}) does not lie on a path of "
                f"{max((node.end for node in nodes), default=0)} tokens; attach it where the tree holds its context"
            )
        segment.node = owner
        owner.segments.append(segment)
        self.update_codes(owner)
        self._all[segment] = None
        self.added += 1
        self._count(segment, len(segment.slots))

    def use(self, segment: Segment) -> None:
        """Count a running request that reads ``segment``, which stays until it is released.

        Raises:
            ValueError: the tree does not have it any more.
        """
        self._check_known(segment)
        self._count(segment, -len(segment.slots))
        segment.users += 1
        self._count(segment, len(segment.slots))

    def release(self, segment: Segment) -> None:
        """A running request reads ``segment`` no longer.

        Raises:
            ValueError: no request reads it.
        """
        self._check_known(segment)
        if not segment.users:
            raise ValueError(f"{_named(segment)} is released more often than it was used; release it once for each use")
        self._count(segment, -len(segment.slots))
        segment.users -= 1
        self._count(segment, len(segment.slots))
        if segment.node is None:
            self.free(segment)

    def free(self, segment: Segment) -> int:
        """Give back the slots of ``segment``, or, while requests read it, only take it from its node.

        Returns:
            Slots that were freed.
        """
        if segment not in self._all:
            return 0
        if segment.node is not None:
            segment.node.segments.remove(segment)
            self.update_codes(segment.node)
            segment.node = None
        if segment.users:
            return 0
        del self._all[segment]
        self._count(segment, -len(segment.slots))
        for transfer in (segment.stored, segment.loaded):
            if transfer is not None:
                transfer.wait()
        self._forgotten(segment)
        self._allocator.free(segment.slots)
        return len(segment.slots)

    def update_codes(self, node: TreeNode) -> None:
        """Note which of its segments stand for a node's full KV, after they changed."""
        node.codes = () if self.blocks is None else tiling(node)

    def boundary(self, segment: Segment, position: int) -> int:
        """The last position up to ``position``, in ``segment`` or at its end, where it can be parted: of blocks in whole pages.

        Its start where there is none.
        """
        if position >= segment.end:
            return segment.end
        tokens, slots, _ = self.blocks
        count = max(0, position - segment.start) // tokens
        while count and (count * slots % self._page_size or count * tokens % self._page_size):
            count -= 1
        return segment.start + count * tokens

    def part(self, segment: Segment, position: int, owner: TreeNode) -> None:
        """Let another segment, which hangs on ``owner``, take over the blocks of ``segment`` before ``position``, a boundary inside of it.

        Nothing moves: who reads ``segment`` reads both, one after the other.
        """
        self._check_known(segment)
        tokens, slots, on_segment_split = self.blocks
        count = (position - segment.start) // tokens
        first = Segment(
            segment.start, position, segment.slots[: count * slots], segment.users, owner, count * tokens, count * slots, segment.method
        )
        segment.start, segment.slots = position, segment.slots[count * slots :]
        segment.tokens, segment.packed = segment.tokens - count * tokens, segment.packed - count * slots
        owner.segments.append(first)
        self._all[first] = None
        for node in {owner, segment.node} - {None}:
            self.update_codes(node)
        on_segment_split(first, segment)

    def clear(self) -> None:
        """Forget all; the pool itself is being cleared."""
        self._all.clear()
        self.held_tokens = self.unused_tokens = 0

    def _count(self, segment: Segment, tokens: int) -> None:
        if segment.users:
            self.held_tokens += tokens
        else:
            self.unused_tokens += tokens

    def _check_known(self, segment: Segment) -> None:
        if segment not in self._all:
            raise ValueError(f"{_named(segment)} is not in the tree; use those that segments_to names now")

    def _check(self, segment: Segment) -> None:
        if segment in self._all:
            raise ValueError(f"{_named(segment)} is attached already; attach each segment once")
        whole = all(count % self._page_size == 0 for count in (segment.start, segment.end, len(segment.slots)))
        if not whole or not 0 <= segment.start < segment.end or not len(segment.slots) or segment.users < 0:
            raise ValueError(
                f"{_named(segment)} with {len(segment.slots)} slots and {segment.users} users; a segment stands for whole "
                f"pages of {self._page_size} tokens, in whole pages of slots"
            )


def tiling(node: TreeNode) -> tuple[Segment, ...]:
    """Segments of ``node`` that hold all its tokens as codes, one after another; the first may begin before it. () where they do not."""
    found: list[Segment] = []
    begin = node.end
    while begin > node.start:
        ends_there = [segment for segment in node.segments if segment.end == begin and segment.whole]
        if not ends_there:
            return ()
        found.append(min(ends_there, key=lambda segment: segment.start))
        begin = found[-1].start
    return tuple(found[::-1])


def covering_segments(nodes: Iterable[TreeNode], length: int, method: str = "", start: int = 0) -> list[Segment]:
    """Segments of ``method`` of a path that follow one another from position ``start``, and end at or before ``length``.

    Of those that begin at one position it takes the one that reaches farthest; it stops where none begins.
    """
    farthest: dict[int, Segment] = {}
    for node in nodes:
        for segment in node.segments:
            best = farthest.get(segment.start)
            if segment.method == method and segment.end <= length and (best is None or segment.end > best.end):
                farthest[segment.start] = segment
    found: list[Segment] = []
    while (segment := farthest.get(found[-1].end if found else start)) is not None:
        found.append(segment)
    return found


def free_slots(allocator: BaseTokenToKVPoolAllocator) -> torch.Tensor:
    """Slots that SGLang's allocator could hand out: int64 [free]."""
    pages = torch.cat([allocator.free_pages, allocator.release_pages])
    within = torch.arange(allocator.page_size, device=pages.device)
    return (pages[:, None] * allocator.page_size + within).flatten()


def _named(segment: Segment) -> str:
    return f"the segment of tokens [{segment.start}, {segment.end}){segment.method and f' of {segment.method}'}"
