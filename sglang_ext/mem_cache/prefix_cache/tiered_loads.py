"""Full KV of the prefix tree comes back from the host; what came back changed is forgotten."""

from collections.abc import Callable, Iterable

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_ext.mem_cache.host_tier.faults import Faults
from sglang_ext.mem_cache.host_tier.link_rate import LinkRate
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import Transfer
from sglang_ext.mem_cache.prefix_cache.tiered_node import TieredNode, below, path
from sglang_ext.mem_cache.prefix_cache.tiered_stores import TieredStores
from sglang_ext.ranks import Ranks


class TieredLoads(TieredStores):
    """A tree whose nodes are loaded back to the device.

    Attributes:
        failed_pages: host pages so far whose KV came back changed, and was forgotten.
        loaded_bytes: of full KV, so far, from the host.
        link: how fast loads are.
        faults: that a test asked for; None outside tests.
        on_load: told of the slots, int64 [tokens], that a load is about to write.
    """

    failed_pages: int = 0
    loaded_bytes: int = 0
    faults: Faults | None = None
    on_load: Callable[[torch.Tensor], None] = staticmethod(lambda slots: None)

    def __init__(self, params: CacheInitParams) -> None:
        self.link = LinkRate()
        super().__init__(params)

    def use_host(self, tier: HostTier, ranks: Ranks = Ranks(), faults: Faults | None = None) -> None:
        """Keep full KV in ``tier``, as :meth:`TieredStores.use_host` says, which loses some of it where ``faults`` ask for it."""
        super().use_host(tier, ranks)
        self.faults = faults

    def load_into(self, nodes: list[TieredNode], slots: torch.Tensor) -> Transfer:
        """Copy the host's KV of ``nodes`` to ``slots``, which stay the caller's.

        Once it is done, pass the transfer to :meth:`drop_failed`, and use the slots only when that answers 0.

        Args:
            nodes: whose tokens come one after another.
            slots: int64 [tokens of all nodes], on the device.

        Raises:
            ValueError: a node is not on the host, or the slots are not as many as the tokens.
        """
        for node in nodes:
            if node.host_value is None:
                raise ValueError(f"tokens [{node.start}, {node.end}) of a path are not on the host; back them up before")
        pages = torch.cat([node.host_value for node in nodes])
        if self.faults is not None:
            for node in nodes:
                node.store.synchronize()
            self.faults.strike(self.host_tier.pool, pages)
        self.on_load(slots)
        load = self.host_tier.load(pages, slots)
        self.loaded_bytes += load.size
        return load

    def load_back(self, nodes: list[TieredNode], slots: torch.Tensor | None = None) -> Transfer | None:
        """Copy the host's KV of ``nodes`` to device slots that the tree owns from now on.

        They count as on the device once the transfer is done and was settled (:meth:`settle`): only then may rows lead to
        them.

        Args:
            nodes: of one path, on the host and not on the device.
            slots: int64 [tokens of all nodes]; the tree takes them. None: it allocates, and evicts what it has to.

        Returns:
            None when the device lacks the slots; then nothing was loaded.

        Raises:
            ValueError: as of :meth:`load_into`, or a node has device slots, or they are not of one path.
        """
        for node in nodes:
            if node.value is not None:
                raise ValueError(f"tokens [{node.start}, {node.end}) of a path have device slots; load back those without")
        if slots is None:
            slots = self._allocate_slots(nodes)
        if slots is None:
            return None
        load = self.load_into(nodes, slots)
        for node, part in zip(nodes, slots.split([len(node.key) for node in nodes])):
            node.load = load
            self._loading[node] = None
            self._set_value(node, part)
        return load

    def settle(self, stores: Iterable[Transfer] = ()) -> int:
        """Take in the loads that are done: their nodes are on the device, but for those whose KV came back changed.

        Args:
            stores: to find out about, too.

        Returns:
            Host pages that were forgotten for that, as :meth:`drop_failed` does.
        """
        loads = list(dict.fromkeys(node.load for node in self._loading))
        self.arrivals.update([*loads, *stores])
        return sum(self._take_in(load) for load in loads if self.arrivals.done(load))

    def drop_failed(self, load: Transfer) -> int:
        """Forget host pages that ``load`` found changed, and what lies on the host below them.

        Nodes that nobody locks are dropped, others stay without KV (:attr:`TieredNode.is_void`) until their requests are
        gone or bring it again; no match reaches what is below them. Requests that lead through them must be recomputed.

        Returns:
            How many pages had changed.

        Raises:
            TransferError: the load is not done.
        """
        failed = self.arrivals.outcome(load).failed
        if failed:
            wrong = torch.tensor(failed)
            for node in list(below(self.root_node)):
                if node.host_value is not None and len(places := torch.isin(node.host_value, wrong).nonzero()):
                    self._lose(node, int(places[0]))
            self.failed_pages += len(failed)
        return len(failed)

    def _take_in(self, load: Transfer) -> int:
        lost = self.drop_failed(load)
        self.link.add(load.size, self.arrivals.outcome(load).seconds)
        for node in [node for node in self._loading if node.load is load]:
            node.load = None
            del self._loading[node]
        return lost

    def _lose(self, node: TieredNode, page: int) -> None:
        """Forget a node's host copy from its ``page`` on, and what depends on it."""
        if page:
            self._split_node(node.key, node, page * self.page_size)
        self._strip(node)
        if not node.is_void:
            return
        if node.lock_ref == 0:
            self._drop(node)
            return
        for child in list(node.children.values()):
            self._lose_below(child)

    def _lose_below(self, node: TieredNode) -> None:
        if node.lock_ref == 0:
            self._drop(node)
            return
        self._strip(node)
        for child in list(node.children.values()):
            self._lose_below(child)

    def _strip(self, node: TieredNode) -> None:
        """Forget a node's host copy, and what is being loaded from it."""
        if node.load is not None:
            self._free_value(node)
        self._free_host(node)

    def _allocate_slots(self, nodes: list[TieredNode]) -> torch.Tensor | None:
        """A slot for each token of ``nodes``, which stay whatever is evicted for it."""
        deepest = max(nodes, key=lambda node: node.end)
        if not set(nodes) <= set(path(deepest)):
            ends = [node.end for node in nodes][:8]
            raise ValueError(f"nodes that end at tokens {ends} are not of one path; load each path alone")
        tokens = sum(len(node.key) for node in nodes)
        self.inc_lock_ref(deepest)
        evict_from_tree_cache(self, tokens)
        self.dec_lock_ref(deepest)
        return self.token_to_kv_pool_allocator.alloc(tokens)
