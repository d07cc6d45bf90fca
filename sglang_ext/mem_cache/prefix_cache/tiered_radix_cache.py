"""SGLang's prefix cache over a tree whose full KV may lie on the device, on the host, or both.

SGLang's page size is the unit throughout, and equals that of the host tier. A prefix match is a run of nodes on the device,
then a run of nodes that :meth:`TieredRadixCache.init_load_back` can bring there: from the host, or because they are on the
device already, below a node that is not. It ends at the first node that is in neither tier.

Here is what SGLang calls; below lie, class upon class, tiered_loads.py, tiered_stores.py, tiered_locks.py and tiered_tree.py.
"""

from array import array
from itertools import takewhile

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.mem_cache.prefix_cache import tree_integrity
from sglang_ext.mem_cache.prefix_cache.tiered_loads import TieredLoads
from sglang_ext.mem_cache.prefix_cache.tiered_node import TieredNode, joined, path


class TieredRadixCache(TieredLoads):
    """A radix cache whose nodes hold full KV on the device or the host, and compressed chunks of it."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of the key that is in the tree.

        Returns:
            ``device_indices``, up to ``last_device_node``, are ready to be read. ``host_hit_length`` tokens more, up to
            ``best_match_node`` (and ``last_host_node``, which is the same), become so by :meth:`init_load_back`.
        """
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        key = key.page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return self._empty_match_result
        nodes = list(takewhile(lambda node: not node.is_void, self._walk(key)))
        ready = list(takewhile(lambda node: node.on_device, nodes))
        last = ready[-1] if ready else self.root_node
        best = nodes[-1] if nodes else self.root_node
        return MatchResult(
            device_indices=joined([node.value for node in ready], self._empty_match_result.device_indices),
            last_device_node=last,
            last_host_node=best,
            best_match_node=best,
            host_hit_length=best.end - last.end,
        )

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TieredNode]:
        """Bring what a match found beyond the device to the device, and wait for it: its checksums are compared.

        Returns:
            Slots of the tokens after the match's ``device_indices``, int64, and the node that they end in: all of them, or,
            when slots lack or host pages changed, those before the first that is missing.
        """
        best, begin = params.best_match_node, params.best_match_node.end - params.host_hit_length
        nodes = [node for node in path(best) if node.start >= begin]
        anchor = nodes[0].parent if nodes else best
        if best.dropped:
            nodes = []
        if nodes:
            self.inc_lock_ref(best)
            self._bring(nodes, params.mem_quota)
            # Pages that changed split nodes.
            nodes = [node for node in path(best) if node.start >= begin]
            nodes = list(takewhile(lambda node: node.on_device, nodes))
            self.dec_lock_ref(best)
        indices = joined([node.value for node in nodes], self._empty_match_result.device_indices)
        return indices, nodes[-1] if nodes else anchor

    def _bring(self, nodes: list[TieredNode], quota: int | None) -> None:
        nodes = list(takewhile(lambda node: not node.is_void, nodes))
        missing = [node for node in nodes if node.value is None]
        if missing and (quota is None or sum(len(node.key) for node in missing) <= quota):
            self.load_back(missing)
        for load in dict.fromkeys(node.load for node in nodes if node.load is not None):
            self.arrivals.wait(load)
            self._take_in(load)

    def insert(self, params: InsertParams) -> InsertResult:
        """Let the tree own slots of a key whose caller owns all of them.

        Returns:
            The first ``prefix_len`` of the slots stay the caller's; the tree took the others.
        """
        if self.disable:
            return InsertResult(prefix_len=0)
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        key = key.page_aligned(self.page_size)
        slots = torch.tensor(key.raw_token_ids()) if params.value is None else params.value[: len(key)]
        prefix_len = max((node.end for node in self._walk(key) if node.on_device), default=0)
        last, _ = self._grow(key, slots, prefix_len, params.priority or 0, params.chunked)
        return InsertResult(prefix_len=prefix_len, last_device_node=last)

    def cache_finished_req(self, req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """Let the tree own the request's full KV, or free it, and unlock its path.

        Only slots from ``req.cache_protected_len`` on are the request's own: before, the tree has them, or dropped them.
        """
        if self.disable:
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
            return
        self._release_copy(req)
        token_ids = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
        row, key = self._row_and_key(req, token_ids)
        if is_insert and self.insert_generated and not self.disable_finished_insert:
            slots = row[: len(key)].to(torch.int64, copy=True)
            _, unneeded = self._grow(key, slots, req.cache_protected_len, getattr(req, "priority", 0) or 0)
        else:
            unneeded = [(req.cache_protected_len, len(key))]
        self._free_parts(row, [*unneeded, (len(key), len(row))])
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        """Let the tree own the full KV that a running request has so far, and lock its path.

        The request's row leads to the tree's slots afterwards. Parts that the tree dropped from the device meanwhile keep the
        stale slots of before: who dropped them knows, and has to load them before a forward reads them.
        """
        if self.disable:
            return
        row, key = self._row_and_key(req, req.get_fill_ids())
        slots, own = row[: len(key)].to(torch.int64, copy=True), req.cache_protected_len
        last, unneeded = self._grow(key, slots, own, getattr(req, "priority", 0) or 0, chunked)
        self._free_parts(row, unneeded)
        parts = [node.value if node.on_device else slots[node.start : node.end] for node in path(last)]
        indices = joined(parts, self._empty_match_result.device_indices)
        self.req_to_token_pool.write((req.req_pool_idx, slice(own, len(indices))), indices[own:])
        if unneeded and self.views is not None:
            self.views.row_moved(req.req_pool_idx, unneeded[0][0])
        req.cache_protected_len = len(indices)
        # In this order, or what lost its KV would go although the request leads through it.
        self.inc_lock_ref(last)
        self.dec_lock_ref(req.last_node)
        req.prefix_indices = torch.cat([indices, row[len(indices) :].to(indices.dtype)])
        req.last_node = last

    def _row_and_key(self, req, token_ids: array) -> tuple[torch.Tensor, RadixKey]:
        """A request's slots of ``token_ids``, and the key of those in whole pages."""
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(token_ids)]
        key = RadixKey(token_ids, req.extra_key, is_bigram=self.is_eagle)
        return row, key.page_aligned(self.page_size)

    def _free_parts(self, row: torch.Tensor, parts: list[tuple[int, int]]) -> None:
        self.token_to_kv_pool_allocator.free_segments([(row[start:end], start) for start, end in parts])

    def _grow(
        self, key: RadixKey, slots: torch.Tensor, own: int, priority: int, chunked: bool = False
    ) -> tuple[TieredNode, list[tuple[int, int]]]:
        """Make the tree hold the KV of ``key``, on the device from token ``own`` on.

        A node that is not on the device takes the slots: else the request's row would lead to slots that are freed.

        Args:
            slots: int64 [tokens]; from ``own`` on they are the caller's, and those that the tree takes are the tree's then.

        Returns:
            The node that the key ends in, and ``(start, end)`` of the slots from ``own`` on that the tree has already.
        """
        node, unneeded = self.root_node, []
        node.priority = max(node.priority, priority)
        for node in self._walk(key):
            node.priority = max(node.priority, priority)
            self._inc_hit_count(node, chunked)
            if node.start < own < node.end:
                self._split_node(node.key, node, own - node.start)
            if node.start >= own and node.on_device:
                unneeded.append((node.start, node.end))
            elif node.start >= own:
                # A load under way is given up: what the caller brings was not copied.
                self._free_value(node)
                self._set_value(node, slots[node.start : node.end])
        if node.end < len(key):
            node = self._add_child(node, key[node.end :], slots[node.end :], priority, chunked)
        return node, unneeded

    def _add_child(self, parent: TieredNode, key: RadixKey, slots: torch.Tensor, priority: int, chunked: bool) -> TieredNode:
        node = TieredNode(parent.end, priority=priority)
        node.parent, node.key = parent, key
        parent.children[key.child_key(self.page_size)] = node
        self._set_value(node, slots)
        self._inc_hit_count(node, chunked)
        self._record_store_event(node)
        return node

    def check_integrity(self) -> None:
        """Check the tree and what it owns, in a pass over all slots; not between SGLang's ``free_group_begin`` and ``end``.

        Raises:
            IntegrityError: names the node, and what is wrong with it.
        """
        tree_integrity.check(self)
