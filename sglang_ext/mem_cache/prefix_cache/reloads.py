"""Full KV of the prefix tree comes back from the host, how fast was measured; what came back changed is forgotten."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import TransferTracker, Transfer, TransferError
from sglang_ext.mem_cache.prefix_cache.host_store import HostStore
from sglang_ext.mem_cache.prefix_cache.anchors import distinct_segments
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path


@dataclass
class FaultInjector:
    """Host memory that loses bits, for tests: before every so many loads a bit of the first page is flipped.

    Attributes:
        every: of so many loads one finds a changed page.
        loads: so far, and its start: the tensor-parallel rank, so that each loses a page in another load.
    """

    every: int
    loads: int = 0

    @torch.inference_mode()
    def flip_bit(self, pool: HostPool, pages: torch.Tensor) -> None:
        """A load of ``pages``, whose stores are done, is about to begin."""
        self.loads += 1
        if self.loads % self.every == 0:
            pool.flip(int(pages[0]))


@dataclass
class LinkBandwidth:
    """Bandwidth in one direction over the transfers that ended, newer ones counting more.

    Attributes:
        decay: what is left of a transfer's weight when the next one ends.
        loads, seconds: that were counted, and how long they took.
    """

    decay: float = 0.9
    loads: int = 0
    seconds: float = 0.0
    _bytes: float = 0.0
    _restored: float = 0.0
    _seconds: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None until a transfer was counted."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    @property
    def restored(self) -> float | None:
        """Bytes of full KV per second: more than travel where the host holds residuals. None until a transfer was counted."""
        return self._restored / self._seconds if self._seconds > 0 else None

    def add(self, size: int, seconds: float, restored: int | None = None) -> None:
        """Count a load of ``size`` bytes that took so long; ``restored``: bytes of full KV that it gave, where that is not the same."""
        self._bytes = self.decay * self._bytes + size
        self._restored = self.decay * self._restored + (size if restored is None else restored)
        self._seconds = self.decay * self._seconds + seconds
        self.loads += 1
        self.seconds += seconds

    def measure(self, tier: HostTier, slots: torch.Tensor, arrivals: TransferTracker) -> float:
        """Count one load of what lies in ``slots``, waiting for it, and give the bandwidth.

        Stores it first, and loads it once more before, since a first load waits for compilers. For the start of a
        server: the more slots, the less the launches count.

        Args:
            tier: a tier with room for so many pages.
            slots: int64 [pages * page_size], on the device, that nobody writes meanwhile; they may repeat.
            arrivals: tell when all ranks are done.

        Raises:
            TransferError: the host has too few free pages, or the loads did not bring back what was stored.
        """
        pages = tier.pool.pages.allocate(max(1, len(slots) // tier.pool.page_size))
        if pages is None:
            raise TransferError(
                f"{len(slots)} tokens do not fit in the {tier.pool.pages.free_pages} free pages of host memory; measure with "
                "fewer slots, or raise --kv-host-gb"
            )
        try:
            for transfer in (tier.store(slots, pages), tier.load(pages, slots), last := tier.load(pages, slots)):
                arrivals.wait(transfer)
        finally:
            tier.pool.pages.free(pages)
        seconds, failed, _ = arrivals.outcome(last)
        if failed:
            raise TransferError(
                f"host pages {failed[:8]} came back changed; the link or the memory is broken: do not serve from it"
            )
        self.add(last.size, seconds)
        return self.bandwidth


class Reloads:
    """Loads of a tree's nodes from their host copies to the device.

    Args:
        host: the copies.
        allocate: so many device slots, int64, for which the tree evicts what it has to; None when they are not to be had.
        faults: that a test asked for; None outside tests.
        about_to_write, arrived: told of the slots, int64 [tokens], that a load is about to write, and that the tree has from one.

    Attributes:
        link: how fast loads are.
        loaded_bytes, restored_bytes: that came from the host so far, by loads that are done, and full KV that they gave.
        failed_pages: host pages so far whose KV came back changed, and was forgotten.
    """

    def __init__(
        self,
        host: HostStore,
        allocate: Callable[[int], torch.Tensor | None],
        faults: FaultInjector | None = None,
        about_to_write: Callable[[torch.Tensor], None] = lambda slots: None,
        arrived: Callable[[torch.Tensor], None] = lambda slots: None,
    ) -> None:
        self.host, self._nodes, self._allocate = host, host.nodes, allocate
        self.faults, self._about_to_write, self._arrived = faults, about_to_write, arrived
        self.link = LinkBandwidth()
        self.loaded_bytes = self.restored_bytes = self.failed_pages = 0

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
            self.faults.flip_bit(self.host.tier.pool, pages)
        self._about_to_write(slots)
        load = self.host.tier.load(pages, slots, self.host.blocks(nodes))
        for segment in distinct_segments(tuple(chain.from_iterable(node.anchors for node in nodes))):
            segment.loaded = load
        return load

    def load_back(self, nodes: list[TieredNode]) -> Transfer | None:
        """Copy the host's KV of ``nodes`` to device slots that the tree owns from now on; for them it evicts what it has to.

        They count as on the device once the transfer is done and was settled (:meth:`collect_loads`): only then may rows lead to
        them.

        Args:
            nodes: of one path, on the host and not on the device.

        Returns:
            None when the device lacks the slots; then nothing was loaded.

        Raises:
            ValueError: as of :meth:`load_into`, or a node has device slots, or they are not of one path.
        """
        for node in nodes:
            if node.value is not None:
                raise ValueError(f"tokens [{node.start}, {node.end}) of a path have device slots; load back those without")
        slots = self._slots_for(nodes)
        if slots is None:
            return None
        load = self.load_into(nodes, slots)
        for node, part in zip(nodes, slots.split([len(node.key) for node in nodes])):
            node.load = load
            self._nodes.loading[node] = None
            self._nodes.set_value(node, part)
        return load

    def finish(self, load: Transfer) -> int:
        """Wait for a load, and take it in as :meth:`collect_loads` does."""
        self.host.arrivals.wait(load)
        return self._take_in(load)

    def collect_loads(self, stores: Iterable[Transfer] = ()) -> int:
        """Take in the loads that are done: their nodes are on the device, but for those whose KV came back changed.

        Args:
            stores: to find out about, too.

        Returns:
            Host pages that were forgotten for that, as :meth:`drop_failed` does.
        """
        loads = list(dict.fromkeys(node.load for node in self._nodes.loading))
        self.host.arrivals.update([*loads, *stores])
        return sum(self._take_in(load) for load in loads if self.host.arrivals.done(load))

    def drop_failed(self, load: Transfer) -> int:
        """Forget host pages that ``load`` found changed, and what lies on the host below them.

        Nodes that nobody locks are dropped, others stay without KV (:attr:`TieredNode.is_void`) until their requests are
        gone or bring it again; no match reaches what is below them. Requests that lead through them must be recomputed.

        Returns:
            How many pages had changed.

        Raises:
            TransferError: the load is not done.
        """
        _, failed, size = self.host.arrivals.outcome(load)
        self.loaded_bytes += size
        self.restored_bytes += load.size
        if failed:
            wrong = torch.tensor(failed)
            for node in list(self._nodes):
                if node.host_value is not None and len(places := torch.isin(node.host_value, wrong).nonzero()):
                    self._lose(node, int(places[0]))
            self.failed_pages += len(failed)
        return len(failed)

    def _take_in(self, load: Transfer) -> int:
        lost = self.drop_failed(load)
        outcome = self.host.arrivals.outcome(load)
        self.link.add(outcome.size, outcome.seconds, load.size)
        loading = self._nodes.loading
        there = [node for node in loading if node.load is load]
        for node in there:
            node.load = None
            del loading[node]
        if there:
            self._arrived(torch.cat([node.value for node in there]))
        return lost

    def _lose(self, node: TieredNode, page: int) -> None:
        """Forget a node's host copy from its ``page`` on, and what depends on it."""
        if page:
            self._nodes.split(node, page * self._nodes.page_size)
        self._strip(node)
        if not node.is_void:
            return
        if node.lock_ref == 0:
            self._nodes.drop(node)
            return
        for child in list(node.children.values()):
            self._lose_below(child)

    def _lose_below(self, node: TieredNode) -> None:
        if node.lock_ref == 0:
            self._nodes.drop(node)
            return
        self._strip(node)
        for child in list(node.children.values()):
            self._lose_below(child)

    def _strip(self, node: TieredNode) -> None:
        """Forget a node's host copy, and what is being loaded from it."""
        if node.load is not None:
            self._nodes.free_value(node)
        self._nodes.free_host(node)

    def _slots_for(self, nodes: list[TieredNode]) -> torch.Tensor | None:
        """A slot for each token of ``nodes``, which stay whatever is evicted for it."""
        deepest = max(nodes, key=lambda node: node.end)
        if not set(nodes) <= set(path(deepest)):
            ends = [node.end for node in nodes][:8]
            raise ValueError(f"nodes that end at tokens {ends} are not of one path; load each path alone")
        self._nodes.lock(deepest)
        slots = self._allocate(sum(len(node.key) for node in nodes))
        self._nodes.unlock(deepest)
        return slots
