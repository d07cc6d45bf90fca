"""SGLang's prefix cache over a tree whose full KV is stored on the device, on the host, or both.

SGLang's page size is the unit throughout, and equals that of the host tier. A prefix match is a run of nodes that are ready on the device,
then a run of nodes that :meth:`TieredRadixCache.init_load_back` can make ready. The second run contains nodes on the host, quantized-only
nodes, and nodes on the device below one that is not. The match ends at the first node that is in neither tier and not quantized.
"""

import heapq
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_ext.mem_cache.prefix_cache import tree_integrity
from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode, path
from sglang_ext.mem_cache.prefix_cache.segments import Segment, Segments

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.host_tier.tier import HostTier
    from sglang_ext.mem_cache.prefix_cache.freed_full_kv import EarlyRequests, FreedFullKV
    from sglang_ext.mem_cache.prefix_cache.host_store import HostStore
    from sglang_ext.mem_cache.prefix_cache.residency import Residency
    from sglang_ext.mem_cache.prefix_cache.stored_prefixes import StoredPrefixes


class TieredRadixCache(RadixCache):
    """A radix cache whose nodes hold full KV on the device or the host, and shared segments of compressed KV.

    :func:`sglang_ext.plugin.create_tree` creates it. There :meth:`use_host` and :meth:`bind` are called, before the server is ready.

    Attributes:
        nodes, segments: The tree, and compressed chunks attached to its nodes.
        host: The nodes' KV on the host. None if full KV is stored on the device only.
        stored: Prefixes in a prefix store. None if the server has none.
        residency: Running requests whose full KV may leave the device. None if it stays.
        compressed_kv: The requests' own compressed KV, in the same pool. None if no request has any.
        early: Running requests that still receive a part of their full KV from another server. None if there are none.
        freed_full_kv: Full KV that was freed, because compressed KV or a cache rank holds it. None if full KV stays.
        recomputed: Running requests so far that lost their full KV and are computed again (freed_full_kv.py).
    """

    # SGLang reads it: whether prefetch_from_storage needs the hashes of all earlier pages.
    hicache_storage_pass_prefix_keys = False

    def __init__(self, params: CacheInitParams) -> None:
        self.segments = Segments(params.token_to_kv_pool_allocator, params.page_size)
        self.nodes = PrefixTree(params.token_to_kv_pool_allocator, params.page_size, self.segments, self._record_remove_event)
        self.host: "HostStore | None" = None
        self.stored: "StoredPrefixes | None" = None
        self.residency: "Residency | None" = None
        self.compressed_kv: "CompressedKVCache | None" = None
        self.early: "EarlyRequests | None" = None
        self.freed_full_kv: "FreedFullKV | None" = None
        self.recomputed = 0
        # The request that was matched last. SGLang passes only its id to prefetch_from_storage.
        self._matched: Any = None
        # The key of running requests whose embeddings replace tokens.
        self._own_keys: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._ended: Callable[[int], None] = lambda row: None
        self._inserts_outputs = True
        super().__init__(params)

    def use_host(self, tier: "HostTier", **options: Any) -> None:
        """Store full KV in ``tier`` too. The trees of all ranks do the same. ``options`` and errors are those of :class:`HostStore`."""
        from sglang_ext.mem_cache.prefix_cache.host_store import HostStore

        self.host = HostStore(self.nodes, tier, self.eviction_strategy.get_priority, self.allocate, **options)

    def bind(
        self,
        compressed_kv: "CompressedKVCache | None",
        ended: Callable[[int], None] = lambda row: None,
        inserts_outputs: bool = True,
        residency: "Residency | None" = None,
        early: "EarlyRequests | None" = None,
        freed_full_kv: "FreedFullKV | None" = None,
    ) -> None:
        """Set the compressed KV of requests, and its features. For the other arguments see the attributes.

        ``ended`` gets the row of a request that finished, was aborted or retracted, after its compressed KV was released. With
        ``inserts_outputs`` generated tokens enter the tree, not only prompts. In lossy mode their KV differs from that of the full cache.
        """
        self.compressed_kv, self._ended, self._inserts_outputs = compressed_kv, ended, inserts_outputs
        self.residency, self.early, self.freed_full_kv = residency, early, freed_full_kv

    def reset(self) -> None:
        """Clear the tree, all segments and all compressed KV, and free the host pages."""
        if self.compressed_kv is not None:
            self.compressed_kv.forget_all()
        if self.stored is not None:
            self.stored.clear()
        if self.residency is not None:
            self.residency.holders.clear()
        if self.freed_full_kv is not None:
            self.freed_full_kv.clear()
        self.nodes.clear()
        super().reset()
        self.root_node = root = self.nodes.root
        self._empty_match_result = self._empty_match_result._replace(last_device_node=root, last_host_node=root, best_match_node=root)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest prefix of the key that is in the tree.

        ``device_indices``, up to ``last_device_node``, are ready to be read. ``host_hit_length`` more tokens, up to ``best_match_node``
        (equal to ``last_host_node``), become ready with :meth:`init_load_back`.
        """
        self._matched = params.req
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        key = key.page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return self._empty_match_result
        # Split nodes only where segments can be split. The full KV of a node that no segment covers stays, and admission counts on its slots.
        found = self.nodes.walk(key) if self.freed_full_kv is None else self.nodes.walk(key, self.freed_full_kv.max_node_end)
        nodes = list(takewhile(lambda node: not node.is_void, found))
        ready = list(takewhile(lambda node: node.on_device, nodes))
        last = ready[-1] if ready else self.root_node
        best = nodes[-1] if nodes else self.root_node
        return MatchResult(
            device_indices=self._concat([node.value for node in ready]),
            last_device_node=last,
            last_host_node=best,
            best_match_node=best,
            host_hit_length=best.end - last.end,
        )

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TieredNode]:
        """Bring the part of a match that is not ready to the device, wait for it, and compare its checksums.

        Returns slots of the tokens after the match's ``device_indices``, int64, up to the first one without slots or with changed pages, and the
        node that they end in. For quantized-only nodes that a prompt attends to directly, these are slots in SGLang's padding page.
        """
        best, begin = params.best_match_node, params.best_match_node.end - params.host_hit_length
        nodes = [node for node in path(best) if node.start >= begin]
        parent = nodes[0].parent if nodes else best
        if best.dropped:
            nodes = []
        if nodes:
            self.inc_lock_ref(best)
            reads_quantized = self.freed_full_kv is not None and self.freed_full_kv.reads_quantized(params.req, best)
            if not reads_quantized:
                self._load(nodes, params.mem_quota)
            # Nodes were split at changed pages.
            nodes = [node for node in path(best) if node.start >= begin]
            nodes = list(takewhile(lambda node: node.on_device or (reads_quantized and node.is_quantized_only), nodes))
            self.dec_lock_ref(best)
        padding = [torch.arange(node.start, node.end, device=self.device) % self.page_size for node in nodes]
        slots = [node.value if node.on_device else padded for node, padded in zip(nodes, padding)]
        return self._concat(slots), nodes[-1] if nodes else parent

    def _concat(self, slots: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self._empty_match_result.device_indices, *slots])

    def _load(self, nodes: list[TieredNode], quota: int | None) -> None:
        nodes = list(takewhile(lambda node: not node.is_void, nodes))
        quantized = [node for node in nodes if node.is_quantized_only]
        if quantized and not self.freed_full_kv.restore(quantized, self.allocate):
            return
        missing = [node for node in nodes if node.value is None]
        if missing and (quota is None or sum(len(node.key) for node in missing) <= quota):
            self.host.load_back(missing)
        for load in dict.fromkeys(node.load for node in nodes if node.load is not None):
            self.host.finish(load)

    def cache_finished_req(self, req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """Insert the full KV of a finished request, up to ``kv_len_to_handle`` tokens, into the tree, free the rest, and unlock its path.

        The request owns the slots of its row from ``req.cache_protected_len`` up to ``req.kv.kv_allocated_len``. The first of them may be freed
        already (freed_full_kv.py). The tree frees all, and leaves none to SGLang, which would free those that the row points to from
        ``kv_len_to_handle`` on. With ``--strip-thinking-cache`` these begin at the first generated token, and may be the tree's (after a
        retraction) or in SGLang's padding page (full KV that was freed before).
        """
        own, own_start, allocated, index = req.cache_protected_len, 0, req.kv.kv_allocated_len, req.req_pool_idx
        if self.stored is not None:
            self.stored.compute.forget(req.rid)
        if self.freed_full_kv is not None:
            is_insert &= self.freed_full_kv.can_insert(index)
            own_start = self.freed_full_kv.own_start(index, 0)
            self.freed_full_kv.forget(index)
        if self.compressed_kv is not None:
            self.compressed_kv.release(index)
        self._ended(index)
        row = self.req_to_token_pool.req_to_token[index, :allocated]
        req.kv.kv_allocated_len = min(allocated, kv_len_to_handle)
        if self.disable:
            own = max(own_start, own)
            self.token_to_kv_pool_allocator.free_segment(row[own:], start_pos=own)
            return
        _, key = self._row_and_key(req, (req.origin_input_ids + req.output_ids)[:kv_len_to_handle])
        if not self._inserts_outputs:
            key = key[: len(req.origin_input_ids)].page_aligned(self.page_size)
        # The tree can have more than the prompt of a request that was prefilled again. The prompt can end within a quantized-only node.
        end = max(own, len(key))
        if is_insert and own < len(key) and not self.disable_finished_insert:
            slots = row[: len(key)].to(torch.int64, copy=True)
            last, unneeded = self._insert(req, key, slots)
            self._write_to_store(last)
        else:
            unneeded = [(own, end)]
        parts = [*unneeded, (end, allocated)]
        self._free_parts(row, [(max(start, own_start), stop) for start, stop in parts if stop > own_start])
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        """Let the tree own the full KV that a running request has so far, lock its path, and point its row to the tree's slots.

        Where the tree has freed device slots, the row keeps stale slots: the code that freed them loads the KV before a forward reads it. If the
        prefix cache is disabled, the next chunk starts after the tokens computed so far.
        """
        if self.disable:
            if chunked:
                row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(req.get_fill_ids())]
                req.prefix_indices = row.to(torch.int64, copy=True)
            return
        row, key = self._row_and_key(req, req.get_fill_ids())
        if chunked and self.freed_full_kv is not None:
            # Tokens that fill no block stay the request's own until the block is full: a node that ends within a block would keep them.
            key = key[: max(req.cache_protected_len, self.freed_full_kv.max_node_end(len(key)))]
        slots, own = row[: len(key)].to(torch.int64, copy=True), req.cache_protected_len
        last, unneeded = self._insert(req, key, slots, chunked)
        self._free_parts(row, unneeded)
        indices = self._concat([node.value if node.on_device else slots[node.start : node.end] for node in path(last)])
        self.req_to_token_pool.write((req.req_pool_idx, slice(own, len(indices))), indices[own:])
        if unneeded and self.compressed_kv is not None:
            self.compressed_kv.on_row_moved(req.req_pool_idx, unneeded[0][0])
        req.cache_protected_len = len(indices)
        # Lock first: otherwise a node that lost its KV would be dropped although the request's path contains it.
        self.inc_lock_ref(last)
        self.dec_lock_ref(req.last_node)
        req.prefix_indices = torch.cat([indices, row[len(indices) :].to(indices.dtype)])
        req.last_node = last
        if self.stored is not None:
            self.stored.compute.end(req.rid, len(key) - own)
        self._write_to_store(last)

    def _write_to_store(self, last: TieredNode) -> None:
        if self.stored is not None:
            self.stored.write(last)

    @property
    def cache_controller(self) -> "StoredPrefixes | None":
        """The prefix store. SGLang reads the class of its ``storage_backend``, for ``cached_tokens_details`` and a label of a metric."""
        return self.stored

    def is_backuped(self, node: TieredNode) -> bool:
        """True: a request may ask the prefix store for the pages after any node, wherever its KV is."""
        return True

    def get_last_hash_value(self, node: TieredNode) -> None:
        """None: pages of the prefix store are named by all tokens before them."""

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TieredNode,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
    ) -> None:
        """Ask the prefix store for the pages of a waiting request that follow ``last_host_node``."""
        # SGLang matches a request before it asks for its pages.
        if self.stored is not None and self._matched is not None and self._matched.rid == req_id:
            self.stored.start(self._matched, last_host_node, new_input_tokens)

    def check_prefetch_progress(self, req_id: str) -> bool:
        """Whether the request waits for no pages of the prefix store. Those that arrived are in the tree then."""
        return self.stored is None or self.stored.is_done(req_id)

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Tokens of the request that came from the prefix store. The next call returns 0."""
        return 0 if self.stored is None else self.stored.pop_loaded(req_id)

    def release_aborted_request(self, rid: str) -> None:
        """Stop reading pages for an aborted request."""
        if self.stored is not None:
            self.stored.abort(rid)

    terminate_prefetch = release_aborted_request

    def unlock_path(self, req) -> None:
        """Unlock the path of a request that no longer computes or reads. Its row may then point to others' slots, and its KV enters no tree."""
        if self.disable or req.last_node is None or req.last_node is self.root_node:
            return
        self.dec_lock_ref(req.last_node)
        req.last_node, req.skip_radix_cache_insert = self.root_node, True

    def _row_and_key(self, req, token_ids: array) -> tuple[torch.Tensor, RadixKey]:
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(token_ids)]
        return row, RadixKey(token_ids, self._extra_key(req), is_bigram=self.is_eagle).page_aligned(self.page_size)

    def _extra_key(self, req) -> str | None:
        """What a request's KV depends on besides token ids.

        A request whose embeddings replace tokens gets a key of its own. SGLang matches none of its tokens, but inserts its KV under plain token
        ids. There, other requests and the prefix store would take it.
        """
        if req.positional_embed_overrides is None:
            return req.extra_key
        return self._own_keys.setdefault(req, f"embeddings {uuid4().hex}")

    def _free_parts(self, row: torch.Tensor, parts: list[tuple[int, int]]) -> None:
        self.token_to_kv_pool_allocator.free_segments([(row[start:end], start) for start, end in parts])

    def _insert(self, req, key: RadixKey, slots: torch.Tensor, chunked: bool = False) -> tuple[TieredNode, list[tuple[int, int]]]:
        """Make the tree hold the KV of ``key``. ``slots``, int64 [tokens], are the request's own from ``req.cache_protected_len`` on.

        The tree takes those of nodes without device slots. Otherwise the request's row would point to freed slots. Returns the node that the key
        ends in, and ``(start, end)`` of each range of own tokens whose KV the tree already has.
        """
        own, priority = req.cache_protected_len, getattr(req, "priority", 0) or 0
        node, unneeded = self.root_node, []
        node.priority = max(node.priority, priority)
        for node in self.nodes.walk(key):
            node.priority = max(node.priority, priority)
            self._inc_hit_count(node, chunked)
            if node.start < own < node.end:
                self.nodes.split(node, own - node.start)
            if node.start >= own and node.on_device:
                unneeded.append((node.start, node.end))
            elif node.start >= own:
                # Abandon a load in progress: the caller's KV is original.
                self.nodes.free_value(node)
                self.nodes.set_value(node, slots[node.start : node.end])
        rest = key[node.end :]
        if len(rest) and (child := node.children.get(rest.child_key(self.page_size))) is not None:
            # The key diverges within a block of a quantized-only node. The caller has full KV of the tokens that they share.
            node = self.nodes.split(child, child.key.match(rest, page_size=self.page_size))
            self.nodes.set_value(node, slots[node.start : node.end])
        if node.end < len(key):
            node = self.nodes.add(node, key[node.end :], slots[node.end :], priority)
            self._inc_hit_count(node, chunked)
            self._record_store_event(node)
        return node, unneeded

    def inc_lock_ref(self, node: TieredNode) -> IncLockRefResult:
        """Lock the path to ``node``: it cannot be evicted, and its slots count as protected."""
        return IncLockRefResult(delta=0 if self.disable else self.nodes.lock(node))

    def dec_lock_ref(self, node: TieredNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo one :meth:`inc_lock_ref`. Nodes whose KV is lost are dropped when no request locks them."""
        return DecLockRefResult(delta=0 if self.disable else self.nodes.unlock(node))

    def evict(self, params: EvictParams) -> EvictResult:
        """Free device slots of segments and nodes. Take missing slots from running requests that need full KV for verification only."""
        if self.disable:
            return EvictResult()
        start_time = time.perf_counter()
        evicted = self._evict(params.num_tokens)
        if evicted < params.num_tokens and (held := self._held_by_drafts):
            self.stored.drafter.free_all()
            # Nodes that only drafts locked can be evicted now.
            evicted += held + self._evict(params.num_tokens - evicted - held)
        if evicted < params.num_tokens and self.residency is not None:
            evicted += self.residency.drop(params.num_tokens - evicted)
        self.update_eviction_metrics(evicted, start_time)
        return EvictResult(num_tokens_evicted=evicted)

    def _evict(self, wanted: int) -> int:
        """Free at least ``wanted`` slots, or all that can be freed, from the leaves up, and return their number.

        Candidates are in the order of SGLang's eviction policy. A segment has the age of its node and is evicted before it, but after all nodes
        that it covers if the host stores residuals. If segments replace a node's full KV, that is freed first, and the node is dropped with the
        first of them. Otherwise, if the host has space, the node stays there. All other nodes are dropped.
        """
        leaves, evicted = self.nodes.leaves, 0
        heap = [self._candidate(node, node.end, node.id) for node in leaves]
        anchors = self.host is not None and self.host.anchoring is not None
        # Each segment gets its own number, below those of nodes.
        numbers = count(1)
        for segment in self.segments.unused:
            node = segment.node
            if segment not in node.replacing_segments or node.value is None or node.lock_ref:
                heap.append(self._candidate(node, segment.start if anchors else node.end, -next(numbers), segment))
        heapq.heapify(heap)
        while evicted < wanted and heap:
            *_, node, segment = heapq.heappop(heap)
            if segment is not None:
                evicted += self.nodes.free_segment(segment)
            elif node in leaves:
                evicted += self._evict_node(node)
                for replacing in node.replacing_segments:
                    if not replacing.users:
                        heapq.heappush(heap, self._candidate(node, node.end, -next(numbers), replacing))
            if node.parent in leaves:
                heapq.heappush(heap, self._candidate(node.parent, node.parent.end, node.parent.id))
        return evicted

    def _candidate(self, node: TieredNode, depth: int, rank: int, segment: Segment | None = None) -> tuple:
        """An entry in the heap of eviction candidates, lowest priority first, then deepest. ``rank`` is unique."""
        # Evict these last: a prompt in progress restored full KV from them, and its compressed KV will read them.
        awaited = segment is not None and segment in node.replacing_segments and node.lock_ref > 0
        return awaited, self.eviction_strategy.get_priority(node), -depth, rank, node, segment

    def _evict_node(self, node: TieredNode) -> int:
        if self.host is not None and not node.replacing_segments:
            self.host.back_up(node)
        return self.nodes.drop(node) if node.host_value is None and not node.replacing_segments else self.nodes.free_value(node)

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Allocate ``tokens`` slots, int64, evicting if necessary. None if there are not enough."""
        evict_from_tree_cache(self, tokens)
        return self.token_to_kv_pool_allocator.alloc(tokens)

    def evictable_size(self) -> int:
        """Slots that :meth:`evict` can free: of unlocked nodes, unused segments, waiting requests' drafts, and running requests' full KV that may
        leave the device."""
        return self.unused_tokens + self._held_by_drafts + self._offered

    @property
    def unused_tokens(self) -> int:
        """Slots that no request needs: of unlocked nodes and unused segments."""
        return self.nodes.evictable + self.segments.unused_tokens

    def protected_size(self) -> int:
        """Slots of locked nodes that cannot leave the device."""
        return self.nodes.protected - self._offered

    @property
    def _held_by_drafts(self) -> int:
        """Slots of waiting requests that draft."""
        return 0 if self.stored is None or self.stored.drafter is None else self.stored.drafter.held_slots

    @property
    def _offered(self) -> int:
        return self.residency.droppable_tokens if self.residency is not None else 0

    def session_held_tokens(self, active_pool_idxs: set | None = None) -> int:
        """Slots of requests' own compressed KV and of segments in use, minus freed slots that rows still account for."""
        own = 0 if self.compressed_kv is None else self.compressed_kv.owned_slot_count
        own -= 0 if self.freed_full_kv is None else self.freed_full_kv.own_tokens
        return super().session_held_tokens(active_pool_idxs) + own + self.segments.held_tokens

    def total_size(self) -> int:
        """Slots that nodes own."""
        return sum(node.device_tokens for node in self.nodes)

    def all_values_flatten(self) -> torch.Tensor:
        """Slots that nodes own: int64 [total_size]."""
        return self._concat([node.value for node in self.nodes if node.value is not None])

    def cached_slots(self) -> torch.Tensor:
        """Slots that the tree owns, of nodes and segments: int64 [slots]."""
        return torch.cat([self.all_values_flatten(), *(segment.slots for segment in self.segments)])

    def check_integrity(self) -> None:
        """See :func:`tree_integrity.check`."""
        tree_integrity.check(self.nodes)
