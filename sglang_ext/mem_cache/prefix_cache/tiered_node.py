"""A node of the prefix tree whose KV may lie on the device, on the host, or both."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_ext.mem_cache.host_tier.host_pages import HostPages
from sglang_ext.mem_cache.host_tier.transfers import Transfer
from sglang_ext.mem_cache.prefix_cache.segments import Segment


class TieredNode(TreeNode):
    """Tokens ``[start, end)`` of every path that leads through it, in whole pages.

    Of SGLang's fields, ``value`` is int64 [tokens], slots on the device, and ``host_value`` is int64 [tokens / page_size],
    pages of the host tier; each is None where the KV does not lie there. The tree alone writes all fields.

    Attributes:
        start: tokens before it on its path; of the root, 0.
        host_pages: whose pages ``host_value`` names.
        segments: compressed chunks that end in it.
        store: the transfer that filled ``host_value``; it may be under way.
        load: the transfer that fills ``value``, until its checksums were compared; None when ``value`` holds exact KV.
        dropped: whether it was taken out of the tree.
    """

    parent: "TieredNode"
    children: dict[object, "TieredNode"]

    def __init__(self, start: int, priority: int = 0) -> None:
        super().__init__(priority=priority)
        self.start = start
        self.host_pages: HostPages | None = None
        self.segments: list[Segment] = []
        self.store: Transfer | None = None
        self.load: Transfer | None = None
        self.dropped = False

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + len(self.key)

    @property
    def on_device(self) -> bool:
        """Whether ``value`` holds its exact KV, now or for what the current stream is given next."""
        return self.value is not None and self.load is None

    @property
    def device_tokens(self) -> int:
        """Slots that it owns."""
        return 0 if self.value is None else len(self.value)

    @property
    def is_void(self) -> bool:
        """Whether its KV is lost: it is in no tier, but requests lead through it."""
        return self.value is None and self.host_value is None

    @property
    def is_device_leaf(self) -> bool:
        """Whether its device slots may be evicted next: nobody needs them, and no node below it has any."""
        return self.value is not None and self.lock_ref == 0 and all(child.value is None for child in self.children.values())

    @property
    def is_host_leaf(self) -> bool:
        """Whether the host may forget it: nobody needs it, nothing hangs on it."""
        return self.value is None and self.host_value is not None and self.lock_ref == 0 and not self.children

    def split_tiers(self, upper: "TieredNode", tokens: int, page_size: int) -> None:
        """Give the first ``tokens``, whole pages, of what it holds in each tier to ``upper``.

        A segment that reaches over the cut stays: it is valid on every path through this node.
        """
        if self.value is not None:
            upper.value, self.value = self.value[:tokens].clone(), self.value[tokens:].clone()
        if self.host_value is not None:
            pages = tokens // page_size
            upper.host_value, self.host_value = self.host_value[:pages].clone(), self.host_value[pages:].clone()
        upper.store, upper.load, upper.host_pages = self.store, self.load, self.host_pages
        self.start += tokens
        for segment in [segment for segment in self.segments if segment.end <= self.start]:
            self.segments.remove(segment)
            upper.segments.append(segment)
            segment.node = upper


class Prefix(NamedTuple):
    """The beginning of a context with which others began before.

    Attributes:
        node: of the prefix tree, locked; the beginning lies on its path.
        tokens: of the beginning.
    """

    node: TieredNode
    tokens: int


def path(node: TieredNode) -> list[TieredNode]:
    """The nodes from the root's child down to ``node``; none for the root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def below(node: TieredNode) -> Iterator[TieredNode]:
    """All nodes under ``node``, parents before their children; the tree must stay as it is meanwhile."""
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        yield child
        stack.extend(child.children.values())


def joined(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """``parts`` one after another; empty, and like ``like``, when there are none."""
    return torch.cat(parts) if parts else like.new_empty(0)
