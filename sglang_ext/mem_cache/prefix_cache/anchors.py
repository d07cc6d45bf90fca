"""Which segments shorten the loads of which pages of nodes.

A shared copy that packs all tokens in blocks (compressors/lynx.py) is the anchor of these tokens' full KV. On the host a page lies as its
residual and its anchor (host_tier/residuals.py): as long as the segment with which it was stored is on the device, a load brings the
residual alone, afterwards both. No other segment will do, though it stands for the same tokens: it may have been packed of other bits.
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

# Of each page of a node the segment with which it was stored, and which is still there; () where there is none at all.
PageSegments = tuple[Segment | None, ...]


@dataclass(frozen=True)
class Anchoring:
    """How segments of one method are anchors of host pages.

    Attributes:
        method: name of the method, whose segments keep all tokens in packed blocks.
        page_size: tokens of a page: a multiple of ``block_tokens``.
        block_tokens: tokens of a packed block.
        block_slots: slots of one.
        sinks: first tokens of a context, whole pages, that no segment stands for.
    """

    method: str
    page_size: int
    block_tokens: int
    block_slots: int
    sinks: int

    @property
    def page_slots(self) -> int:
        """Slots of the blocks of a page."""
        return self.page_size // self.block_tokens * self.block_slots

    def _first(self, node: "TieredNode") -> int:
        """The first page of a node that may have an anchor."""
        return max(0, self.sinks - node.start) // self.page_size

    def missing(self, node: "TieredNode") -> bool:
        """Whether pages of a node have no anchor on the device that could have one."""
        pages = len(node.key) // self.page_size
        return None in node.anchors[self._first(node) :] if node.anchors else pages > self._first(node)

    def find(self, node: "TieredNode", below: Iterable["TieredNode"]) -> PageSegments:
        """Segments that stand for pages of ``node``: they hang on it, or on nodes ``below`` it."""
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
        """The blocks of each page of ``nodes``, one node after another; None where there are none at all."""
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
    """Note that the pages of ``node`` on the host have ``anchors`` from now on, in place of those from before."""
    for segment in distinct_segments(node.anchors):
        del segment.anchored_nodes[node]
    node.anchors = anchors if any(anchors) else ()
    for segment in distinct_segments(anchors):
        segment.anchored_nodes[node] = None


def drop_anchors(segment: Segment) -> None:
    """A segment's slots are given back: loads of what was stored with it bring its anchor, too."""
    for node in list(segment.anchored_nodes):
        anchor(node, tuple(None if each is segment else each for each in node.anchors))


def distinct_segments(anchors: PageSegments) -> list[Segment]:
    """The segments among the anchors of pages, each once."""
    return list(dict.fromkeys(segment for segment in anchors if segment is not None))
