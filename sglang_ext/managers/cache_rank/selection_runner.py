"""Runs batches of selection requests on the device of a cache rank.

A batch copies its queries out of the exchange buffer, selects, writes the selections or their rows, and marks them as done.

No step waits for the host. The host first fills the inputs, which differ from batch to batch, in device memory. So all launches for
batches of a frequent shape, that is, equal request counts and similar context lengths, are recorded as one CUDA graph. A replay takes the
host little time, while single launches take it as long as the device. A graph can also be split into parts at no host cost: while tokens
of the next layers are selected, the rows of previous layers are sent. On a CPU, PyTorch does the work of the kernels, without graphs.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.device import SideStream, current_event, sent
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.key_store import KeyStore
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import QUESTION_NUMBERS
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.compressor import top_positions
from sglang_ext.mem_cache.compressors.step_selectors import Spade, attention
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector, ReadQueryBatch
from sglang_ext.mem_cache.selection.scoring import mark_always

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.select_tokens import SelectionContexts

logger = logging.getLogger(__name__)

# Launches on the current stream.
INLINE = SideStream(torch.device("cpu"))

# Batches of a shape before a graph is recorded, because recording takes longer than a step. During the transfer of full KV, batch sizes
# change every few selection intervals. Then: maximum graphs, batches without use after which a graph may be replaced, and maximum shapes
# without a graph whose inputs are kept.
RECORDED_AFTER, MOST_GRAPHS, UNUSED, MOST_OTHERS = 8, 16, 1000, 4
# Numbers of a context in the selection kernels' input (select_tokens.py:SelectionContexts).
CONTEXT_NUMBERS = 4
# Maximum shapes whose batches are counted.
MOST_COUNTED = 1024
# Context lengths are rounded up to an eighth of the next power of two, but at least to a multiple of this many tokens.
LEAST_APART = 128
# Kept tokens per head are rounded up to a multiple of this.
KEPT_APART = 128


class BatchShape(NamedTuple):
    """Properties of a batch that determine its launches: the number of selection requests, and of queries of each.

    The selection is for the token ``ahead`` positions after the newest query. A head keeps at most ``most`` tokens, of a context of at most
    ``longest``. The pack has ``layers`` from ``first`` on; on a GPU it has all.
    """

    count: int
    queries: int
    ahead: int
    most: int
    longest: int
    first: int
    layers: int

    @classmethod
    def build(cls, asks: Sequence[protocol.SelectionRequest], most: int) -> "BatchShape":
        """Return the shape of a batch. ``most``: maximum tokens that any head keeps."""
        longest = max(ask.covered for ask in asks)
        apart = max(LEAST_APART, (1 << (longest - 1).bit_length()) // 8)
        keep = min(most, -(-max(ask.keep for ask in asks) // KEPT_APART) * KEPT_APART)
        pack = asks[0].first, asks[0].count
        return cls(len(asks), len(asks[0].positions), asks[0].ahead, keep, -(-longest // apart) * apart, *pack)


@dataclass
class BatchInputs:
    """Inputs of the batches of a shape, on the device, and their graph.

    Attributes:
        form: Shape of the batch.
        numbers: int64, one contiguous piece: the next three. The first two begin at multiples of 16 bytes, whatever the batch size, for the
            kernels that read them.
        contexts: int64 [requests, 4], input of the selection kernels (select_tokens.py).
        asked: int64 [requests, 3]: index of the words, word, and tokens that each head keeps.
        positions: int64 [requests, queries].
        there: int32 [requests], 1 for each published selection request.
        table: int32 [requests, longest], slots of their tokens.
        lanes: Lanes and lengths in the table; None if it must be written again.
        last: Number of the last batch of this shape.
        replay: Replays the graph; None without one.
        read: Tensors that the graph also reads.
    """

    form: BatchShape
    numbers: torch.Tensor
    contexts: torch.Tensor
    asked: torch.Tensor
    positions: torch.Tensor
    there: torch.Tensor
    table: torch.Tensor
    lanes: list[tuple[int, int]] | None = None
    last: int = 0
    replay: Callable[[], None] | None = None
    read: object = None

    @classmethod
    def build(cls, form: BatchShape, device: torch.device) -> "BatchInputs":
        """Allocate inputs for a batch shape, none of them published."""
        widths = CONTEXT_NUMBERS, QUESTION_NUMBERS, form.queries
        numbers = torch.zeros(form.count * sum(widths), dtype=torch.int64, device=device)
        parts = (part.view(form.count, -1) for part in numbers.split([form.count * width for width in widths]))
        there = torch.zeros(form.count, dtype=torch.int32, device=device)
        return cls(form, numbers, *parts, there, torch.zeros(form.count, form.longest, dtype=torch.int32, device=device))

    def fill(self, asks: Sequence[protocol.SelectionRequest], entries: Sequence[int], words: Sequence[int]) -> None:
        """Write the numbers of selection requests of this shape, the indices of their words, and the words, but not the table."""
        asked = [number for ask, entry, word in zip(asks, entries, words) for number in (entry, word, ask.keep)]
        contexts = [number for i, ask in enumerate(asks) for number in (i, ask.covered, ask.keep, 0)]
        positions = [position for ask in asks for position in ask.positions]
        self.numbers.copy_(sent(torch.tensor(contexts + asked + positions), self.numbers.device))


class SelectionRunner:
    """Runs selections, by kernels, or by PyTorch if ``by_kernels`` is False. ``rotary`` is the rotary embedding of keys and queries."""

    def __init__(
        self, memory: MappedExchangeBuffer, store: KeyStore, method: Spade, rotary: Rotary, device: torch.device, by_kernels: bool
    ):
        self._memory, self._store, self._method, self._rotary = memory, store, method, rotary
        self._device, self._by_kernels, self._pool, self._records = device, by_kernels, None, True
        # Streams that find the rows to send, and that send them.
        self._row_streams = SideStream(device, first=True), SideStream(device, first=True)
        # Slots of each lane's tokens, int32.
        self._lane_slots: dict[int, torch.Tensor] = {}
        # Inputs of recent shapes, newest last, and frequent batches of each shape, including shapes no longer kept.
        self._known: dict[BatchShape, BatchInputs] = {}
        self._batch_counts: Counter[BatchShape] = Counter()
        self._num_batches = 0

    def forget(self, lane: int) -> None:
        """Forget the slots of a lane's tokens."""
        self._lane_slots.pop(lane, None)
        for known in self._known.values():
            known.lanes = None

    def prepare(
        self, asks: Sequence[protocol.SelectionRequest], words: Sequence[int], again: bool = False
    ) -> tuple[BatchInputs, Callable[[], None]]:
        """Copy the inputs of a batch to the device. Also return what launches the kernels that answer its published selection requests.

        ``asks``, with their ``words``, are for the same layers with equal numbers of queries and equal ``ahead``, one per lane. With ``again``
        they are whole batches before they are published, whose shape is frequent, so that a graph pays. Otherwise they are published.
        """
        # Checks that the lanes hold the tokens, before memory is allocated.
        places = [self._token_slots(ask) for ask in asks]
        form = BatchShape.build(asks, self._memory.shape.most)
        inputs = self._inputs(form)
        inputs.fill(asks, [self._memory.shape.entry(ask.lane, ask.first) for ask in asks], words)
        if not again:
            inputs.there.fill_(1)
        lanes = [(ask.lane, ask.covered) for ask in asks]
        if inputs.lanes != lanes:
            for row, held in zip(inputs.table, places):
                row[: len(held)] = held
            inputs.lanes = lanes
        self._batch_counts[form] += again
        if inputs.replay is None and self._batch_counts[form] > RECORDED_AFTER and self._can_add_graph():
            inputs.replay = self._record_graph(inputs)
            inputs.read = self._rotary.cached_rotations()
        return inputs, inputs.replay or (lambda: self._launch_without_graph(inputs))

    def _inputs(self, form: BatchShape) -> BatchInputs:
        """Return the inputs of a shape. Of shapes without a graph, the newest ones are kept."""
        known = self._known[form] = self._known.pop(form, None) or BatchInputs.build(form, self._device)
        self._num_batches += 1
        known.last = self._num_batches
        others = [each for each, found in self._known.items() if found.replay is None]
        for each in others[:-MOST_OTHERS]:
            del self._known[each]
        if len(self._batch_counts) > MOST_COUNTED:
            self._batch_counts.clear()
        return known

    def _can_add_graph(self) -> bool:
        """Whether another graph may be recorded. At the maximum, the graph that was unused for longest is dropped if it is old enough."""
        recorded = [form for form, known in self._known.items() if known.replay is not None]
        if len(recorded) < MOST_GRAPHS:
            return True
        if self._num_batches - self._known[recorded[0]].last < UNUSED:
            return False
        # Without a graph, the replay refers to its inputs.
        self._known.pop(recorded[0]).replay = None
        return True

    def _token_slots(self, ask: protocol.SelectionRequest) -> torch.Tensor:
        """Return the slots of a selection request's tokens: int32 [covered]."""
        known = self._lane_slots.get(ask.lane)
        if known is None or len(known) < ask.covered:
            known = self._lane_slots[ask.lane] = self._store.slots(ask.lane, ask.covered).int().to(self._device)
        return known[: ask.covered]

    def _record_graph(self, inputs: BatchInputs) -> Callable[[], None]:
        """Record the launches of a batch, and return a function that replays them."""
        if self._device.type != "cuda":
            return lambda: self._answer(inputs, beside=True)
        if not self._records:
            return lambda: self._launch_without_graph(inputs)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Graphs share one memory pool, because they never run at the same time. With its last graph a pool ends, and PyTorch then refuses
        # its id while any of its memory is held.
        if not any(known.replay for known in self._known.values()):
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._answer(inputs, beside=True)
        except Exception as error:
            logger.warning("sglang-ext: a cache rank launches selection kernels one by one; no CUDA graph could be recorded: %s", error)
            self._disable_graphs(stream)
            return lambda: self._launch_without_graph(inputs)
        return graph.replay

    def _disable_graphs(self, stream: torch.cuda.Stream) -> None:
        """Record no more graphs."""
        self._records = False
        # If a recording cannot be ended, PyTorch leaves its stream as the current one. Its allocator (2.11) still assumes a recording, and
        # frees no cached memory, even for another allocation. The private calls end that state.
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        torch.cuda.empty_cache()

    def _launch_without_graph(self, inputs: BatchInputs) -> None:
        """Launch the kernels of a batch without a graph. If graphs leave too little memory, drop them and retry."""
        try:
            self._answer(inputs)
            return
        except torch.OutOfMemoryError as error:
            if not any(known.replay for known in self._known.values()):
                raise
            logger.warning("sglang-ext: a cache rank launches selection kernels one by one; CUDA graphs leave too little memory: %s", error)
        # Outside of the except clause, so that no frame of the failed call holds memory. It published nothing, so everything is written
        # again.
        self._records = False
        for known in self._known.values():
            known.replay = known.read = None
        torch.cuda.empty_cache()
        self._answer(inputs)

    def _answer(self, inputs: BatchInputs, beside: bool = False) -> None:
        """Run a batch. ``beside``: with rows, send those of some layers while tokens of the next layers are selected."""
        memory, asked, there, held = self._memory, inputs.asked, inputs.there, self._store.sent
        if not self._by_kernels:
            chosen, bits = self._select_on_cpu(inputs)
            if held is None:
                memory.push_chosen(asked, there, chosen)
            else:
                memory.push_rows_on_cpu(asked, there, chosen, bits, inputs.table, held)
        else:
            # Records are copied while queries are.
            streams, begun = (self._row_streams, current_event(self._device)) if beside else ((INLINE, INLINE), None)
            choice, *among = self._build_selector(inputs)
            if held is None:
                memory.push_chosen(asked, there, choice.choose(*among, most=inputs.form.most))
            else:
                with streams[0].after(begun):
                    records = memory.records(asked, inputs.form.most)
                memory.push_rows(asked, there, choice.marked(*among, beside=beside), records, held, streams)
        memory.answer(asked, there)

    def _build_selector(self, inputs: BatchInputs) -> tuple[GpuSelector, "SelectionContexts", ReadQueryBatch, torch.Tensor, int]:
        """Return the kernel selector with its arguments: contexts, queries, their positions, and ``ahead``."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        form, queries = inputs.form, self._queries(inputs)
        # Upper bounds; the exact lengths are on the device.
        lengths, always = (form.longest,) * form.count, (self._method.sinks, self._method.recent)
        choice = GpuSelector(self._method.predictor, self._store.buffers, queries.shape[2], self._rotary)

        def read(requests: slice, layers: slice) -> torch.Tensor:
            return queries[requests, layers]

        return choice, SelectionContexts(inputs.table, inputs.contexts, lengths, always), read, inputs.positions, form.ahead

    def _queries(self, inputs: BatchInputs) -> torch.Tensor:
        """Return the queries: [requests, pack layers, query_heads, window, dim]."""
        return self._memory.pull_queries(inputs.asked, inputs.form.queries, inputs.form.layers).transpose(2, 3)

    def _select_on_cpu(self, inputs: BatchInputs) -> torch.Tensor:
        """Return positions and bits of their scores, by PyTorch: int32 [2, layers, requests, kv_heads, most].

        The first ``keep`` of each request are valid; their positions are ascending.
        """
        form, queries = inputs.form, self._queries(inputs)
        found = [self._select_request_on_cpu(inputs, i, queries[i, None]) for i in range(form.count)]
        return torch.stack([torch.nn.functional.pad(each, (0, form.most - each.shape[-1])) for each in found], -3)

    def _select_request_on_cpu(self, inputs: BatchInputs, number: int, queries: torch.Tensor) -> torch.Tensor:
        """Return positions and bits of scores of one selection request: int32 [2, pack layers, kv_heads, keep]."""
        _, covered, keep, _ = inputs.contexts[number].tolist()
        buffers, places = self._store.buffers, inputs.table[number, :covered].long()
        predicted = self._method.predictor.predict(queries, inputs.positions[number, None], self._rotary, inputs.form.ahead)
        first = inputs.form.first
        layers = enumerate(zip(predicted.unbind(1), buffers.scaling[first : first + inputs.form.layers]), first)
        scores = torch.stack([attention(query, buffers.scoring_keys(at, places), scaling) for at, (query, scaling) in layers])
        marked = mark_always(scores, self._method.sinks, self._method.recent)
        kept = top_positions(marked, keep)
        return torch.stack([kept.int(), marked.gather(-1, kept).view(torch.int32)])
