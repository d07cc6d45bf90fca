"""Checks that the prefix tree's records match its nodes and segments, and that no slot or page is owned twice."""

import logging
from collections import Counter
from collections.abc import Callable

import torch
from sglang.srt.environ import envs

from sglang_ext.core import IntegrityError
from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode
from sglang_ext.mem_cache.prefix_cache.segments import Segment, free_slots, tiling

logger = logging.getLogger(__name__)


def check_when_idle(original: Callable, checker) -> None:
    """Hook around SGLang's check of an idle scheduler's tree: checks the tree once after changes, and polls the cache ranks.

    Raises :class:`IntegrityError` if the tree is inconsistent and SGLang's own idle checks are strict. If they are not, it is logged.
    """
    original(checker)
    tree = checker.tree_cache
    if tree.compressed_kv is not None:
        tree.compressed_kv.poll()
    if not tree.nodes.changed:
        return
    tree.nodes.changed = False
    try:
        check(tree.nodes)
    except IntegrityError as error:
        if envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get():
            raise
        logger.error("sglang-ext: the prefix tree is inconsistent: %s", error)


def check(tree: PrefixTree) -> None:
    """Check nodes and segments, in a pass over all slots, outside SGLang's ``free_group``. Raises :class:`IntegrityError`, naming the fault."""
    nodes = list(tree)
    for node in nodes:
        _check_links(tree, node)
        _check_tiers(tree, node)
        _check_sets(tree, node)
        for segment in node.segments:
            _check_segment(tree, node, segment)
    _check_sizes(tree, nodes)
    _check_owners(tree, nodes)


def _check_links(tree: PrefixTree, node: TieredNode) -> None:
    parent, page = node.parent, tree.page_size
    child = parent.children.get(node.key.child_key(page))
    _require(child is node, node, "its parent does not find it by its key")
    _require(node.start == parent.end, node, f"its parent ends at token {parent.end}")
    _require(len(node.key) > 0 and len(node.key) % page == 0, node, f"it is not whole pages of {page} tokens")
    _require(not node.dropped, node, "it was dropped")
    _require(node.lock_ref >= 0, node, f"{node.lock_ref} requests lock it")
    locks = sum(child.lock_ref for child in node.children.values())
    _require(node.lock_ref >= locks, node, f"{node.lock_ref} requests lock it, {locks} lock its children")


def _check_tiers(tree: PrefixTree, node: TieredNode) -> None:
    tokens = len(node.key)
    if node.value is not None:
        _require(node.value.shape == (tokens,), node, f"it has {len(node.value)} device slots")
    if node.host_value is not None:
        _require(node.host_value.shape == (tokens // tree.page_size,), node, f"it has {len(node.host_value)} host pages")
    _require(not node.is_void or node.lock_ref > 0, node, "its KV is in no tier, and nobody locks it")
    loading = node.load is not None
    _require(loading == (node in tree.loading), node, "its load and the list of loads disagree")
    both = node.value is not None and node.host_value is not None
    _require(not loading or both, node, "it is loading, but has no host pages or no device slots")
    _require(len(node.anchors) in (0, 0 if node.host_value is None else len(node.host_value)), node, "it has anchors of other pages")
    for page, segment in enumerate(node.anchors):
        if segment is not None:
            begin = node.start + page * tree.page_size
            there = segment in tree.segments and segment.start <= begin and begin + tree.page_size <= segment.end
            _require(there and node in segment.anchored_nodes, node, f"the anchor of its page {page} is gone")
    _require((node.store is None) == (node.host_value is None), node, "it has host pages without a store, or the reverse")


def _check_sets(tree: PrefixTree, node: TieredNode) -> None:
    expected = tiling(node) if tree.segments.blocks is not None else ()
    _require(node.replacing_segments == expected, node, "the recorded segments that replace its full KV are not those that cover it")
    for belongs, nodes, what in (
        (node.is_quantized_only, tree.quantized_only, "the quantized-only nodes"),
        (node.is_device_leaf, tree.leaves, "the leaves that may be evicted"),
        (node.is_host_leaf, tree.host_leaves, "the leaves of the host"),
    ):
        _require(belongs == (node in nodes), node, f"it is {'not ' * belongs}among {what}")


def _check_segment(tree: PrefixTree, node: TieredNode, segment: Segment) -> None:
    name = f"its segment of tokens [{segment.start}, {segment.end})"
    _require(segment.node is node and segment in tree.segments, node, f"{name} refers to another node, or is not in the tree")
    _require(0 <= segment.start < segment.end, node, f"{name} is empty")
    _require(node.start < segment.end <= node.end, node, f"{name} ends elsewhere")
    _require(segment.users >= 0, node, f"{name} has {segment.users} users")


def _check_sizes(tree: PrefixTree, nodes: list[TieredNode]) -> None:
    leaves = tree.leaves | tree.host_leaves | tree.quantized_only
    sizes = {
        "evictable": (tree.evictable, sum(node.device_tokens for node in nodes if not node.lock_ref)),
        "protected": (tree.protected, sum(node.device_tokens for node in nodes if node.lock_ref)),
        "unused by segments": (tree.segments.unused_tokens, sum(len(s.slots) for s in tree.segments if not s.users)),
        "held by segments": (tree.segments.held_tokens, sum(len(s.slots) for s in tree.segments if s.users)),
        "of leaves": (len(leaves), len(leaves & set(nodes))),
    }
    for what, (counted, found) in sizes.items():
        _require(counted == found, tree.root, f"{counted} {what} are counted, {found} are there")
    for segment in tree.segments:
        lost = segment.node is None and not segment.users
        _require(not lost, tree.root, f"a segment of tokens [{segment.start}, {segment.end}) has neither node nor users")


def _check_owners(tree: PrefixTree, nodes: list[TieredNode]) -> None:
    held = [(node, node.value) for node in nodes if node.value is not None]
    held += [(segment.node or tree.root, segment.slots) for segment in tree.segments]
    pages = [(node, node.host_value) for node in nodes if node.host_value is not None]
    for what, owned in (("slots", held), ("host pages", pages)):
        twice = {number for number, count in Counter(n for _, part in owned for n in part.tolist()).items() if count > 1}
        for node, part in owned:
            _require(not twice & set(part.tolist()), node, f"its {what} {sorted(twice)[:8]} are owned twice")
    free = free_slots(tree.allocator)
    for node, slots in held:
        wrong = slots[torch.isin(slots, free)].tolist()
        _require(not wrong, node, f"its slots {wrong[:8]} are free")
    for node, part in pages:
        try:
            tree.host_pages.check_owned(part)
        except ValueError as error:
            _require(False, node, str(error))


def _require(good: bool, node: TieredNode, what: str) -> None:
    if not good:
        raise IntegrityError(f"node {node.id} of the prefix tree, tokens [{node.start}, {node.end}): {what}")
