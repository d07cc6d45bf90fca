"""Segments that make the loads of host pages smaller (anchors).

A shared segment that packs all tokens in blocks (compressors/lynx.py) is the anchor of these tokens' full KV. A page on the host is stored
as its residual and its anchor (host_tier/residuals.py). While the segment with which it was stored is on the device, a load transfers
only the residual, afterwards both. No other segment can be used, even if it covers the same tokens: it may have been packed from other
bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.host_tier.residuals import PageBlocks
from sglang_ext.mem_cache.prefix_cache.segments import Segment

if TYPE_CHECKING:
    from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode

# For each page of a node, the segment with which it was stored, if that still exists. () if none does.
PageSegments = tuple[Segment | None, ...]


@dataclass(frozen=True)
class Anchoring:
    """How segments of one method are anchors of host pages.

    Attributes:
        method: Name of the method, whose segments keep all tokens in packed blocks.
        page_size: Tokens per page, a multiple of ``block_tokens``.
        block_tokens: Tokens per packed block.
        block_slots: Slots per packed block.
        sinks: First tokens of a context, whole pages, that no segment covers.
    """

    method: str
    page_size: int
    block_tokens: int
    block_slots: int
    sinks: int

    @property
    def page_slots(self) -> int:
        """Slots of a page's blocks."""
        return self.page_size // self.block_tokens * self.block_slots

    def _first(self, node: "TieredNode") -> int:
        """The first page of a node that may have an anchor."""
        return max(0, self.sinks - node.start) // self.page_size

    def missing(self, node: "TieredNode") -> bool:
        """Whether a node has pages that could have an anchor on the device and have none."""
        pages = len(node.key) // self.page_size
        return None in node.anchors[self._first(node) :] if node.anchors else pages > self._first(node)

    def find(self, node: "TieredNode", below: Iterable["TieredNode"]) -> PageSegments:
        """Return the segments that cover pages of ``node``. They are attached to it, or to nodes ``below`` it."""
        first = self._first(node)
        found: list[Segment | None] = [None] * (len(node.key) // self.page_size)
        for each in chain([node], below):
            for segment in each.segments:
                if segment.method == self.method and segment.packed and segment.start < node.end:
                    begin, end = ((at - node.start) // self.page_size for at in (segment.start, segment.end))
                    for page in range(max(first, begin), min(len(found), end)):
                        found[page] = found[page] or segment
            if None not in found[first:]:
                break
        return tuple(found) if any(found) else ()

    def blocks(self, nodes: Sequence["TieredNode"]) -> PageBlocks | None:
        """Return the blocks of each page of ``nodes``, one node after another. None if there are no blocks."""
        of_pages = [node.anchors or (None,) * (len(node.key) // self.page_size) for node in nodes]
        there = [segment is not None for anchors in of_pages for segment in anchors]
        if not any(there):
            return None
        like = next(segment for anchors in of_pages for segment in anchors if segment is not None).slots
        parts = []
        for node, anchors in zip(nodes, of_pages):
            position = node.start
            for segment, pages in groupby(anchors):
                count = len(list(pages))
                parts.append(self._of_pages(segment, position, count, like))
                position += count * self.page_size
        return PageBlocks(torch.cat(parts), torch.tensor(there))

    def _of_pages(self, segment: Segment | None, position: int, pages: int, like: torch.Tensor) -> torch.Tensor:
        if segment is None:
            return like.new_full((pages, self.page_slots), -1)
        first = (position - segment.start) // self.page_size * self.page_slots
        return segment.slots[first : first + pages * self.page_slots].view(pages, self.page_slots)


def anchor(node: "TieredNode", anchors: PageSegments) -> None:
    """Set the anchors of a node's pages on the host, replacing the previous ones."""
    for segment in distinct_segments(node.anchors):
        del segment.anchored_nodes[node]
    node.anchors = anchors if any(anchors) else ()
    for segment in distinct_segments(anchors):
        segment.anchored_nodes[node] = None


def drop_anchors(segment: Segment) -> None:
    """Remove a segment whose slots are freed from all anchors. Later loads of pages stored with it transfer the anchor too."""
    for node in list(segment.anchored_nodes):
        anchor(node, tuple(None if each is segment else each for each in node.anchors))


def distinct_segments(anchors: PageSegments) -> list[Segment]:
    """The distinct segments among the anchors of pages."""
    return list(dict.fromkeys(segment for segment in anchors if segment is not None))
