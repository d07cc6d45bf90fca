"""Asynchronous selection: its interface, and the selection on a second stream of the same GPU (AsyncSpade on one device).

:class:`StreamSelector` selects for compressed KV that consists of pointers:

1. When a draft step ends a request's selection interval, the queries of that step start a selection on the second stream.
2. The selection is written to back slots of the compressed KV while the next steps run.
3. At the end of the next interval, the compressed KV points to the new selection, and the old slots become the back slots.

Each selection therefore has a whole interval to finish, and which step reads it depends on the request alone. The streams wait for each
other on the device only. Tokens that are newer than a selection follow the compressed KV in the draft row and are read exactly.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from sglang_ext.core import RequestState
from sglang_ext.device import SideStream, to_device
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import LayerObserver, QueryWindows
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.select_tokens import SelectionContexts


@dataclass
class FreeBlocks:
    """Free memory for new requests at several cache ranks: by rank the free blocks of ``size`` tokens, and the requests that it still accepts."""

    blocks: list[int]
    size: int
    requests: list[int]

    def take(self, tokens: int) -> bool:
        """Reserve memory for a request of ``tokens`` tokens at the rank with the most free blocks. Returns whether it fits."""
        needed = -(-tokens // self.size)
        most = max((i for i, more in enumerate(self.requests) if more), key=self.blocks.__getitem__, default=None)
        if most is None or needed > self.blocks[most]:
            return False
        self.blocks[most] -= needed
        self.requests[most] -= 1
        return True


class CompressedKVSource(Protocol):
    """The compressed KV of requests, as selectors use it. Members as :class:`~.cache.CompressedKVCache`'s."""

    num_compressions: Counter[str]
    state_of: Callable[[int], RequestState]

    def get(self, row: int) -> CompressedKV | None: ...

    def draft_row(self, row: int) -> int: ...

    def write_selection(self, row: int, layers: slice, kept: torch.Tensor) -> None: ...


class AsyncSelector(ABC):
    """Interface of selection that runs while steps run.

    It serves compressed KV of pointers, selected on a second stream of the same GPU or by cache ranks (managers/cache_rank/). It serves
    compressed KV of rows where cache ranks have the full KV, which this process then can free (remote_only.py).

    Attributes:
        in_place: Whether a selection overwrites the previous one between two steps. Otherwise it is written to back slots.
        sends_rows: Whether it holds its requests' full KV, and sends K and V of the selected tokens.
        processes: Numbers of running and of started processes, if other processes select.
    """

    in_place: ClassVar[bool] = False
    sends_rows: bool = False
    processes: tuple[int, int] = (0, 0)

    @abstractmethod
    def compile_kernels(self) -> None:
        """Run a dummy selection, so that no request waits for kernel compilation."""

    def on_round_start(self, forwards: int, interval: int) -> None:
        """Handle the start of a round of so many draft steps and verifications. ``interval`` is the selection interval, in steps."""

    def observe_step(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> LayerObserver | None:
        """Handle the start of a step. Returns the observer of its layers; None if none is needed. Arguments as :meth:`on_step_end`'s."""
        return None

    @abstractmethod
    def on_step_end(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> None:
        """Handle a launched step: apply selections of requests whose selection interval ends, and start new ones with the step's queries.

        Args:
            ends: Position after the step's token, by row, of requests that read their compressed KV.
            following: Steps until the full KV verifies them; None if nothing is verified.
        """

    @abstractmethod
    def flush(self, row: int) -> None:
        """Make the current stream wait for all work launched for the request in ``row``, before its compressed KV gets other slots or is freed."""

    def poll(self) -> None:
        """Poll the selecting processes: read their messages, and restart those that ended. Does not wait."""

    def must_read_full_kv(self, row: int, tokens: int) -> bool:
        """Whether the request must decode on its full KV: no cache rank can take its ``tokens`` tokens now. Counts a missing selection if so."""
        return False

    def num_held_tokens(self, row: int) -> int:
        """Number of a request's first tokens whose K and V it holds and sends; 0 if it cannot, or the compressed KV has no rows yet."""
        return 0

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        """Handle that slots of a request's full KV are about to be freed; with ``is_remote_only`` all, so that its keys cannot be sent again."""

    def is_lost(self, row: int) -> bool:
        """Whether a request's only full KV was lost with its process."""
        return False

    def free_blocks(self) -> FreeBlocks:
        """Free memory for requests that were not sent yet."""
        return FreeBlocks([], 1, [])

    def has_request(self, row: int) -> bool:
        """Whether the request was sent or is being sent, so that it needs no more memory."""
        return False

    def extend(self, row: int, slots: torch.Tensor) -> bool:
        """Send the tokens that a refresh will cover and that the rank lacks, for a request whose full KV is remote-only.

        ``slots``, int64 [tokens], are those of all tokens to cover. Returns whether all of them were sent. Does not wait.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def on_compressed(self, row: int, covered: int, kept: torch.Tensor) -> None:
        """Record new compressed KV of rows from full KV: its tokens, int64 [layers, kv_heads, keep], of the first ``covered``."""
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def plan_refresh(self, row: int, covered: int, keep: int) -> NewestRows:
        """Plan a refresh to ``covered`` tokens with ``keep`` per head, and return the rows to copy. Called after :meth:`extend` returned True."""
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def forget(self, row: int) -> None:
        """Forget the request in ``row``, which has ended. Its compressed KV was flushed."""

    @abstractmethod
    def forget_all(self) -> None:
        """Call :meth:`flush` and :meth:`forget` for all requests."""


def compile_lengths(method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, query_heads: int) -> None:
    """Compile kernels for all context lengths, so that no compression and no asynchronous selection waits for it. No-op on a CPU."""
    if token_table.is_cuda:
        from sglang_ext.layers.kernels.select_tokens import compile_ahead

        compile_ahead(buffers.keys[0], query_heads, (method.compressor.sinks, method.compressor.recent), token_table.shape[1])


class StreamSelector(AsyncSelector):
    """Asynchronous selections of a worker's requests, including those in progress.

    Args:
        method: The only compression method. Its compressor is :class:`~sglang_ext.mem_cache.compressors.step_selectors.Spade`.
        queries: The newest queries of each request. A ring is long enough that queries stay valid while a selection reads them.
        intervals: Selection intervals that rounds may have, in steps; by default only the one of ``method``.
    """

    def __init__(
        self,
        method: CompressionMethod,
        token_table: torch.Tensor,
        selector: GpuSelector,
        queries: QueryWindows,
        intervals: Sequence[int] = (),
    ):
        self._method, self._table, self._selector, self._queries = method, token_table, selector, queries
        self._side = SideStream(token_table.device)
        self._interval = method.compressor.every
        self._intervals = intervals or (self._interval,)
        # For each launched selection, the event after its pointers are written; None if they already are.
        self._in_progress: dict[int, torch.cuda.Event | None] = {}

    def compile_kernels(self) -> None:
        """Compile as :meth:`AsyncSelector.compile_kernels`, with row 0 of the table, which no request has."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        always = self._method.compressor.sinks, self._method.compressor.recent
        compile_lengths(self._method, self._table, self._selector.buffers, self._selector.query_heads)
        count, window = sum(always) + 1, self._method.compressor.window
        tokens, device = count + window, self._table.device
        targets = torch.zeros(self._method.packing.held_slots(count), dtype=torch.int64, device=device)
        contexts = SelectionContexts(self._table, to_device([[0, tokens, count, 0]], device), (tokens,), always, targets)
        places, positions = torch.zeros(1, window, dtype=torch.int64, device=device), torch.arange(window, device=device)[None]
        for interval in self._intervals:
            # Use the same distances as steps: the first rotation by a new distance makes the host wait for the device.
            self._side.wait(self._launch_on_side(contexts, places, positions, interval + 1))

    def on_round_start(self, forwards: int, interval: int) -> None:
        self._interval = interval

    def on_step_end(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> None:
        """Apply and start selections, as :meth:`AsyncSelector.on_step_end`. After a verification, compressed KV is refreshed anyway."""
        interval = self._interval
        due = {row: end for row, end in ends.items() if not (end - compressed_kv.get(row).covered) % interval}
        self._apply(compressed_kv, [row for row in due if row in self._in_progress])
        if following is not None and following <= interval:
            return  # no step would read it
        # By number of queries and distance: for each request its row, and places and positions of its queries.
        alike: dict[tuple[int, int], list[tuple[int, list[int], list[int]]]] = {}
        for row, end in due.items():
            places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
            if places:
                # The first step that reads this selection has the token at position end + every.
                alike.setdefault((len(places), end + interval - positions[-1]), []).append((row, places, positions))
        for (_, ahead), windows in alike.items():
            self._launch_requests(compressed_kv, windows, ahead)

    def flush(self, row: int) -> None:
        """Wait as :meth:`AsyncSelector.flush`, since the selection writes to back slots."""
        self._side.wait(self._in_progress.pop(row, None))

    def forget_all(self) -> None:
        for row in list(self._in_progress):
            self.flush(row)

    def _apply(self, compressed_kv: CompressedKVSource, rows: Sequence[int]) -> None:
        """Point compressed KV to the finished selections."""
        if not rows:
            return
        for row in rows:
            self.flush(row)
        heads, at = [], [[], []]
        for row in rows:
            compressed = compressed_kv.get(row)
            compressed.swap_back_slots()
            heads.append(compressed.own[: compressed.num_slots])
            at[0] += [compressed_kv.draft_row(row)] * compressed.num_slots
            at[1] += range(compressed.num_slots)
            compressed_kv.num_compressions[compressed.method] += 1
        where = to_device(at, self._table.device)
        self._table[where[0], where[1]] = torch.cat(heads).to(self._table.dtype)

    def _launch_requests(self, compressed_kv: CompressedKVSource, windows: Sequence[tuple[int, list[int], list[int]]], ahead: int) -> None:
        """Start one selection for requests with equally many queries, on the second stream, parallel to later work of the current one."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        rows, places, positions = zip(*windows)
        compressed_kvs, first, numbers = [compressed_kv.get(row) for row in rows], 0, []
        for row, compressed in zip(rows, compressed_kvs):
            numbers.append([row, compressed.covered, compressed.own_tokens, first])
            first += len(compressed.back_slots)
        targets = torch.cat([compressed.back_slots for compressed in compressed_kvs])
        always = self._method.compressor.sinks, self._method.compressor.recent
        lengths = tuple(compressed.covered for compressed in compressed_kvs)
        contexts = SelectionContexts(self._table, to_device(numbers, targets.device), lengths, always, targets)
        done = self._launch_on_side(contexts, *to_device([places, positions], targets.device), ahead)
        self._in_progress.update(dict.fromkeys(rows, done))

    def _launch_on_side(
        self, contexts: "SelectionContexts", places: torch.Tensor, positions: torch.Tensor, ahead: int
    ) -> torch.cuda.Event | None:
        """Select on the second stream. Returns the event after the pointers are written."""

        def choose() -> None:
            self._selector.choose(contexts, lambda requests, layers: self._queries.read(places[requests], layers), positions, ahead)

        return self._side.launch(choose, (contexts.numbers, contexts.targets, places, positions))
