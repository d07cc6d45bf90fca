"""Tokens that are chosen on a second stream of the GPU while steps run, for copies of pointers: AsyncSpade on one device.

After a step in which a request's turn has come, its queries are there; what they choose is written to spare slots of its copy while the
next steps run. When its turn comes again, as many steps later, the copy leads to those slots, and the others are spare. So each
choice has all the time between two of them, and which step reads it depends on nothing but the request. The streams wait for each
other on the device alone. Tokens that came after a choice follow the copy in the draft row, and are read exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from sglang_ext.device import SideStream, to_device
from sglang_ext.mem_cache.compressed.remote_selector import RowSender
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.select_tokens import SelectionContexts
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache


class QueryWindow(NamedTuple):
    """A request's newest queries: places in the pool of :class:`QueryWindows`, and positions, ascending."""

    row: int
    places: list[int]
    positions: list[int]


class AsyncSelector(RowSender, ABC):
    """The contract of tokens that are chosen on a GPU beside steps, for copies of pointers: on a second stream of the same GPU, or by
    cache ranks on others (managers/cache_rank/on_gpu/); for copies of rows, where these have full KV.

    Attributes:
        in_place: whether what is chosen is written over what a copy led to, between two steps; else to spare slots of it.
    """

    in_place: ClassVar[bool] = False

    @abstractmethod
    def compile_kernels(self) -> None:
        """Choose once for nobody, so that no request waits for compilers."""

    def on_round_start(self, forwards: int, every: int) -> None:
        """A round begins.

        Args:
            forwards: its steps and verifications.
            every: selection interval, in steps.
        """

    @abstractmethod
    def on_step_end(self, compressed_kv: "CompressedKVCache", ends: dict[int, int], following: int | None) -> None:
        """A step was launched: take what was chosen for the requests whose turn has come, and let more be chosen by its queries.

        Args:
            compressed_kv: the copies.
            ends: position after the step's token, by row, of requests that read their copies.
            following: steps that follow before full KV verifies them; None where nothing is verified.
        """

    @abstractmethod
    def flush(self, row: int) -> None:
        """The copy of the request in ``row`` gets other slots, or none: what the current stream is given from now on comes after
        all that was launched for it. No-op where nothing is."""

    @abstractmethod
    def flush_all(self) -> None:
        """As :meth:`flush`, of all requests."""

    def poll(self) -> None:
        """Look after those that choose in other processes. Waits for nothing."""

    def extend(self, row: int, slots: torch.Tensor) -> bool:
        """Before a copy of rows is renewed whose request has no full KV here: hand over what is new in ``slots``, int64 [tokens], of all
        that it would stand for; whether all of it was. Waits for nothing."""
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def made(self, row: int, covered: int, kept: torch.Tensor) -> None:
        """A copy of rows is being made of full KV here: of which tokens among the first ``covered``, int64 [layers, kv_heads, keep]."""
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def renewed(self, row: int, covered: int, keep: int) -> NewestRows:
        """Such a copy, of which :meth:`extend` said that it can be renewed, is to stand for ``covered`` tokens, and to hold ``keep`` for
        each head: what it takes in."""
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone; its copy was settled."""

    def forget_all(self) -> None:
        """All requests are gone."""
        self.flush_all()


def compile_lengths(method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, query_heads: int) -> None:
    """Let no copy, and no choice beside steps, wait for compilers in a context of another length than those before; nothing on a CPU."""
    if token_table.is_cuda:
        from sglang_ext.layers.kernels.select_tokens import compile_ahead

        compile_ahead(buffers.keys[0], query_heads, (method.compressor.sinks, method.compressor.recent), token_table.shape[1])


class StreamSelector(AsyncSelector):
    """Choices of a worker's requests, those under way among them.

    Args:
        method: of all copies; its compressor is :class:`~sglang_ext.mem_cache.compressors.spade.Spade`.
        token_table: int32, SGLang's with the draft rows.
        choice: chooses.
        queries: the newest queries of each request, of which steps spare as many as lie between two choices.
        intervals: selection intervals that rounds may have, in steps; those of ``method`` alone by default.
    """

    def __init__(
        self, method: CompressionMethod, token_table: torch.Tensor, choice: GpuSelector, queries: QueryWindows, intervals: Sequence[int] = ()
    ):
        self._method, self._table, self._choice, self._queries = method, token_table, choice, queries
        self._side = SideStream(token_table.device)
        self._every = method.compressor.every
        self._intervals = intervals or (self._every,)
        # Of choices that were launched, what is reached when their pointers are written; None where they are.
        self._under_way: dict[int, torch.cuda.Event | None] = {}

    def compile_kernels(self) -> None:
        """As :meth:`AsyncSelector.compile_kernels`: in row 0 of the table, which is no request's."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        always = self._method.compressor.sinks, self._method.compressor.recent
        compile_lengths(self._method, self._table, self._choice.buffers, self._choice.query_heads)
        count, window = sum(always) + 1, self._method.compressor.window
        tokens, device = count + window, self._table.device
        targets = torch.zeros(self._method.packing.held_slots(count), dtype=torch.int64, device=device)
        contexts = SelectionContexts(self._table, to_device([[0, tokens, count, 0]], device), (tokens,), always, targets)
        places, positions = torch.zeros(1, window, dtype=torch.int64, device=device), torch.arange(window, device=device)[None]
        for every in self._intervals:
            # As far ahead as steps ask: the host waits for the device where queries are first rotated so far.
            self._side.wait(self._launched(contexts, places, positions, every + 1))

    def on_round_start(self, forwards: int, every: int) -> None:
        """As :meth:`AsyncSelector.on_round_start`."""
        self._every = every

    def on_step_end(self, compressed_kv: "CompressedKVCache", ends: dict[int, int], following: int | None) -> None:
        """As :meth:`AsyncSelector.on_step_end`; where steps are verified, copies are made anew afterwards."""
        every = self._every
        due = {row: end for row, end in ends.items() if not (end - compressed_kv.get(row).covered) % every}
        self._take(compressed_kv, [row for row in due if row in self._under_way])
        if following is not None and following <= every:
            return  # nobody would read it
        alike: dict[tuple[int, int], list[QueryWindow]] = {}
        for row, end in due.items():
            places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
            if places:
                # The first step that reads the choice has the token at position end + every.
                alike.setdefault((len(places), end + every - positions[-1]), []).append(QueryWindow(row, places, positions))
        for (_, ahead), windows in alike.items():
            self._launch(compressed_kv, windows, ahead)

    def flush(self, row: int) -> None:
        """As :meth:`AsyncSelector.flush`: spare slots are written to."""
        self._side.wait(self._under_way.pop(row, None))

    def flush_all(self) -> None:
        """As :meth:`AsyncSelector.flush_all`."""
        for row in list(self._under_way):
            self.flush(row)

    def _take(self, compressed_kv: "CompressedKVCache", rows: Sequence[int]) -> None:
        """Let copies lead to what was chosen for them, once it is."""
        if not rows:
            return
        for row in rows:
            self.flush(row)
        heads, at = [], [[], []]
        for row in rows:
            view = compressed_kv.get(row)
            view.swap_back_slots()
            heads.append(view.own[: view.kept])
            at[0] += [compressed_kv.draft_row(row)] * view.kept
            at[1] += range(view.kept)
            compressed_kv.made[view.method] += 1
        where = to_device(at, self._table.device)
        self._table[where[0], where[1]] = torch.cat(heads).to(self._table.dtype)

    def _launch(self, compressed_kv: "CompressedKVCache", windows: Sequence[QueryWindow], ahead: int) -> None:
        """Choose for some requests, of which as many queries are there, beside what the current stream is given from now on."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        copies, first, numbers = [compressed_kv.get(window.row) for window in windows], 0, []
        for window, view in zip(windows, copies):
            numbers.append([window.row, view.covered, view.own_tokens, first])
            first += len(view.back_slots)
        targets = torch.cat([view.back_slots for view in copies])
        always = self._method.compressor.sinks, self._method.compressor.recent
        lengths = tuple(view.covered for view in copies)
        contexts = SelectionContexts(self._table, to_device(numbers, targets.device), lengths, always, targets)
        places, positions = to_device([[each.places for each in windows], [each.positions for each in windows]], targets.device)
        done = self._launched(contexts, places, positions, ahead)
        for window in windows:
            self._under_way[window.row] = done

    def _launched(self, contexts: "SelectionContexts", places: torch.Tensor, positions: torch.Tensor, ahead: int) -> torch.cuda.Event | None:
        """Choose on the second stream; what is reached when the pointers are written."""

        def choose() -> None:
            self._choice.choose(contexts, lambda requests, layers: self._queries.at(places[requests], layers), positions, ahead)

        return self._side.launch(choose, (contexts.numbers, contexts.targets, places, positions))


def create_stream_selector(
    method: CompressionMethod,
    token_table: torch.Tensor,
    buffers: KVBuffers,
    query_heads: int,
    queries: QueryWindows,
    rotary: Rotary | None,
    intervals: Sequence[int] = (),
) -> StreamSelector | None:
    """Who chooses for the copies of ``method`` beside steps, on a GPU; None where it does not choose by queries of steps, or on a CPU."""
    if not buffers.on_gpu or not isinstance(method.compressor, Spade):
        return None
    choice = GpuSelector(method.compressor.predictor, buffers, query_heads, rotary)
    return StreamSelector(method, token_table, choice, queries, intervals)
