"""Loads full KV of the prefix tree from the host, measures the bandwidth, and drops pages that came back changed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import TransferTracker, Transfer, TransferError
from sglang_ext.mem_cache.prefix_cache.host_store import HostStore
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, distinct_segments, path


@dataclass
class FaultInjector:
    """Simulates host memory that loses bits, for tests: flips a bit of the first page before every ``every``-th load.

    Attributes:
        every: Loads per injected fault.
        loads: Loads so far. It starts at the tensor-parallel rank, so that each rank has its fault in another load.
    """

    every: int
    loads: int = 0

    @torch.inference_mode()
    def flip_bit(self, pool: HostPool, pages: torch.Tensor) -> None:
        """Count a load of ``pages`` that is about to begin. Their stores must be complete."""
        self.loads += 1
        if self.loads % self.every == 0:
            pool.flip(int(pages[0]))


@dataclass
class TransferBandwidth:
    """Bandwidth of completed transfers in one direction, weighted towards recent ones.

    Attributes:
        decay: Factor applied to all earlier transfers' weights when a transfer is added.
        loads, seconds: Number of counted transfers, and their total duration.
    """

    decay: float = 0.9
    loads: int = 0
    seconds: float = 0.0
    _bytes: float = 0.0
    _restored: float = 0.0
    _seconds: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second. None until a transfer was counted."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    @property
    def restored(self) -> float | None:
        """Bytes of full KV per second. More than are transferred if the host stores residuals. None until a transfer was counted."""
        return self._restored / self._seconds if self._seconds > 0 else None

    def add(self, size: int, seconds: float, restored: int | None = None) -> None:
        """Count a load of ``size`` bytes. ``restored``: bytes of full KV that it produced, if different."""
        self._bytes = self.decay * self._bytes + size
        self._restored = self.decay * self._restored + (size if restored is None else restored)
        self._seconds = self.decay * self._seconds + seconds
        self.loads += 1
        self.seconds += seconds

    def measure(self, tier: HostTier, slots: torch.Tensor, arrivals: TransferTracker) -> float:
        """Store and load the KV in ``slots``, wait for it, and return the measured bandwidth.

        It loads twice and counts the second load, because the first waits for compilers. Call it when the server starts. With more slots,
        the launches count less.

        Args:
            tier: The host tier, with space for the pages.
            slots: int64 [pages * page_size], on the device. Nothing may write them during the call. They may repeat.
            arrivals: Tracks when all ranks are done.

        Raises:
            TransferError: The host has too few free pages, or the loaded KV differs from the stored KV.
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
    """Loads a tree's nodes from the host to the device.

    Args:
        host: The nodes' KV on the host.
        allocate: Returns this many device slots, int64, evicting from the tree if necessary. None if there are not enough.
        faults: Fault injection for tests. None otherwise.
        on_load_start, on_load_done: Called with slots, int64 [tokens]: those that a load is about to write, and those of a completed load.

    Attributes:
        link: Measured bandwidth of loads.
        loaded_bytes, restored_bytes: Bytes transferred by completed loads so far, and bytes of full KV that they produced.
        failed_pages: Host pages dropped so far because their KV came back changed.
    """

    def __init__(
        self,
        host: HostStore,
        allocate: Callable[[int], torch.Tensor | None],
        faults: FaultInjector | None = None,
        on_load_start: Callable[[torch.Tensor], None] = lambda slots: None,
        on_load_done: Callable[[torch.Tensor], None] = lambda slots: None,
    ) -> None:
        self.host, self._nodes, self._allocate = host, host.nodes, allocate
        self.faults, self._on_load_start, self._on_load_done = faults, on_load_start, on_load_done
        self.link = TransferBandwidth()
        self.loaded_bytes = self.restored_bytes = self.failed_pages = 0

    def load_into(self, nodes: list[TieredNode], slots: torch.Tensor) -> Transfer:
        """Copy the host's KV of ``nodes`` to ``slots``, which remain the caller's.

        When the load is done, pass the transfer to :meth:`drop_failed`. Use the slots only if it returns 0.

        Args:
            nodes: Nodes whose tokens follow one another.
            slots: int64 [tokens of all nodes], on the device.

        Raises:
            ValueError: A node is not on the host, or the number of slots differs from the number of tokens.
        """
        for node in nodes:
            if node.host_value is None:
                raise ValueError(f"tokens [{node.start}, {node.end}) of a path are not on the host; back them up before")
        pages = torch.cat([node.host_value for node in nodes])
        if self.faults is not None:
            for node in nodes:
                node.store.synchronize()
            self.faults.flip_bit(self.host.tier.pool, pages)
        self._on_load_start(slots)
        load = self.host.tier.load(pages, slots, self.host.blocks(nodes))
        for segment in distinct_segments(tuple(chain.from_iterable(node.anchors for node in nodes))):
            segment.loaded = load
        return load

    def load_back(self, nodes: list[TieredNode]) -> Transfer | None:
        """Copy the host's KV of ``nodes`` to device slots that the tree then owns, evicting if necessary.

        The nodes count as on the device when the transfer is done and :meth:`collect_loads` has processed it. Only then may rows point to
        them.

        Args:
            nodes: Nodes of one path that are on the host and not on the device.

        Returns:
            None if there are too few device slots. Nothing is loaded then.

        Raises:
            ValueError: As in :meth:`load_into`, or a node has device slots, or the nodes are not on one path.
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
        """Wait for a load, and process it as :meth:`collect_loads` does."""
        self.host.arrivals.wait(load)
        return self._complete(load)

    def collect_loads(self, stores: Iterable[Transfer] = ()) -> int:
        """Process the completed loads. Their nodes are then on the device, except those whose KV came back changed.

        Args:
            stores: Stores to check for completion too.

        Returns:
            Host pages dropped because they had changed, see :meth:`drop_failed`.
        """
        loads = list(dict.fromkeys(node.load for node in self._nodes.loading))
        self.host.arrivals.update([*loads, *stores])
        return sum(self._complete(load) for load in loads if self.host.arrivals.done(load))

    def drop_failed(self, load: Transfer) -> int:
        """Drop host pages that ``load`` found changed, and the host's KV of nodes below them.

        Unlocked nodes are dropped. Locked ones stay without KV (:attr:`TieredNode.is_void`) until their requests end or provide it again.
        No match reaches the nodes below them. Requests whose paths contain them must be recomputed.

        Returns:
            The number of changed pages.

        Raises:
            TransferError: The load is not done.
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

    def _complete(self, load: Transfer) -> int:
        lost = self.drop_failed(load)
        outcome = self.host.arrivals.outcome(load)
        self.link.add(outcome.size, outcome.seconds, load.size)
        loading = self._nodes.loading
        there = [node for node in loading if node.load is load]
        for node in there:
            node.load = None
            del loading[node]
        if there:
            self._on_load_done(torch.cat([node.value for node in there]))
        return lost

    def _lose(self, node: TieredNode, page: int) -> None:
        """Drop a node's KV on the host from its ``page`` on, and what depends on it."""
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
        """Drop a node's KV on the host, and the device slots of an unfinished load from it."""
        if node.load is not None:
            self._nodes.free_value(node)
        self._nodes.free_host(node)

    def _slots_for(self, nodes: list[TieredNode]) -> torch.Tensor | None:
        """Allocate a slot for each token of ``nodes``. The nodes are not evicted for it."""
        deepest = max(nodes, key=lambda node: node.end)
        if not set(nodes) <= set(path(deepest)):
            ends = [node.end for node in nodes][:8]
            raise ValueError(f"nodes that end at tokens {ends} are not of one path; load each path alone")
        self._nodes.lock(deepest)
        slots = self._allocate(sum(len(node.key) for node in nodes))
        self._nodes.unlock(deepest)
        return slots
