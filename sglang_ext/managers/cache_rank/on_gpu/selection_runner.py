"""What a cache rank on a GPU does for questions that it answers together: it copies their queries out of the arena, chooses, and writes
what was chosen, or rows of that, and that it is there.

None of it waits for the host, or asks it: what differs from one time to the next is in memory of the device, which the host fills before.
So all launches for questions that come again and again, as many of them, in contexts about as long, are recorded as one CUDA graph, which
takes the host a moment where they took as long as the device. In a graph parts cost the host nothing: where rows are sent, those of some
layers travel while tokens are chosen in the next ones. On a CPU, for tests, kernels are launched anew, or PyTorch does their work.
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
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import QUESTION_NUMBERS
from sglang_ext.managers.cache_rank.on_gpu.gpu_keys import GpuKeys
from sglang_ext.managers.cache_rank.on_gpu.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.spade import Spade, attention
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector, ReadQueryBatch
from sglang_ext.mem_cache.selection.top_tokens import mark_always, top_tokens

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.select_tokens import SelectionContexts

logger = logging.getLogger(__name__)

# Launches in the current stream.
INLINE = SideStream(torch.device("cpu"))

# Times that questions of a form are answered before a graph is recorded for it, which takes longer than a step: while full KV travels more
# questions are asked at once every few turns. Graphs that are kept, each until so many answers did without it, and forms without one whose
# inputs are.
RECORDED_AFTER, MOST_GRAPHS, UNUSED, MOST_OTHERS = 8, 16, 1000, 4
# Numbers of a context, as kernels that choose take them (select_tokens.py:SelectionContexts).
CONTEXT_NUMBERS = 4
# Forms whose times are counted.
MOST_COUNTED = 1024
# Lengths of contexts are told apart by an eighth of the next power of two, or by so many tokens.
LEAST_APART = 128
# Tokens that heads keep are told apart by so many.
KEPT_APART = 128


class BatchShape(NamedTuple):
    """What questions have in common for which the same is launched.

    Attributes:
        count: of them.
        queries: of each.
        ahead: for which token after the newest query's is chosen.
        most: tokens that heads keep at most.
        longest: tokens of the longest context at most.
    """

    count: int
    queries: int
    ahead: int
    most: int
    longest: int

    @classmethod
    def build(cls, asks: Sequence[protocol.SelectionRequest], most: int) -> "BatchShape":
        """Of questions that are answered together, of heads that keep so many tokens at most."""
        longest = max(ask.covered for ask in asks)
        apart = max(LEAST_APART, (1 << (longest - 1).bit_length()) // 8)
        keep = min(most, -(-max(ask.keep for ask in asks) // KEPT_APART) * KEPT_APART)
        return cls(len(asks), len(asks[0].positions), asks[0].ahead, keep, -(-longest // apart) * apart)


@dataclass(frozen=True)
class BatchInputs:
    """What differs from one time to the next, on the device.

    Attributes:
        numbers: int64, of one piece: :attr:`contexts`, :attr:`asked` and :attr:`positions`; for kernels that take the first two these begin
            at multiples of 16 bytes, whatever the number of questions.
        there: int32 [questions], which of them are there.
        table: int32 [questions, longest], where their tokens lie.
        form: of the questions.
    """

    numbers: torch.Tensor
    there: torch.Tensor
    table: torch.Tensor
    form: BatchShape

    @classmethod
    def build(cls, form: BatchShape, device: torch.device) -> "BatchInputs":
        """Memory for questions of a form, none of which is there."""
        numbers = torch.zeros(form.count * (CONTEXT_NUMBERS + QUESTION_NUMBERS + form.queries), dtype=torch.int64, device=device)
        there = torch.zeros(form.count, dtype=torch.int32, device=device)
        return cls(numbers, there, torch.zeros(form.count, form.longest, dtype=torch.int32, device=device), form)

    @property
    def contexts(self) -> torch.Tensor:
        """int64 [questions, 4], as kernels that choose take them (select_tokens.py)."""
        return self.numbers[: CONTEXT_NUMBERS * self.form.count].view(-1, CONTEXT_NUMBERS)

    @property
    def asked(self) -> torch.Tensor:
        """int64 [questions, 3], lane, word, and tokens that each head keeps."""
        end = (CONTEXT_NUMBERS + QUESTION_NUMBERS) * self.form.count
        return self.numbers[CONTEXT_NUMBERS * self.form.count : end].view(-1, QUESTION_NUMBERS)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [questions, queries]."""
        return self.numbers[(CONTEXT_NUMBERS + QUESTION_NUMBERS) * self.form.count :].view(-1, self.form.queries)

    def fill(self, asks: Sequence[protocol.SelectionRequest], words: Sequence[int]) -> None:
        """With questions of the form, and their words; where their tokens lie is written apart."""
        asked = [number for ask, word in zip(asks, words) for number in (ask.lane, word, ask.keep)]
        contexts = [number for i, ask in enumerate(asks) for number in (i, ask.covered, ask.keep, 0)]
        positions = [position for ask in asks for position in ask.positions]
        self.numbers.copy_(sent(torch.tensor(contexts + asked + positions), self.numbers.device))


class SelectionRunner:
    """Answers questions.

    Args:
        memory: the arena.
        keys, store: that the rank holds.
        method: by which it chooses.
        rotary: embedding that was applied to keys and queries.
        device: on which is chosen.
        by_kernels: whether kernels do so; else PyTorch does.
    """

    def __init__(
        self, memory: MappedExchangeBuffer, keys: GpuKeys, store: KeyStore, method: Spade, rotary: Rotary, device: torch.device, by_kernels: bool
    ):
        self._memory, self._keys, self._store, self._method, self._rotary = memory, keys, store, method, rotary
        self._device, self._by_kernels, self._pool, self._records = device, by_kernels, None, True
        # Of what finds which rows come, and of what sends them.
        self._beside = SideStream(device, first=True), SideStream(device, first=True)
        # Of each lane, where its tokens lie, int32.
        self._places: dict[int, torch.Tensor] = {}
        # Of forms that come again and again, the newest last, and how often each came, of more than are kept; of the others that which came
        # last.
        self._known: dict[BatchShape, _Known] = {}
        self._times: Counter[BatchShape] = Counter()
        self._other: _Known | None = None
        self._answers = 0

    def hold(self, lane: int, places: torch.Tensor) -> None:
        """Let tokens of a lane lie at ``places``, int64 [tokens]."""
        self._places[lane] = places.int()

    def forget(self, lane: int) -> None:
        """Tokens of a lane lie elsewhere from here on."""
        self._places.pop(lane, None)
        for known in (*self._known.values(), *filter(None, [self._other])):
            known.table = None

    def prepare(self, asks: Sequence[protocol.SelectionRequest], words: Sequence[int], again: bool = False) -> "PreparedBatch":
        """What will answer questions; their numbers go to the device now.

        Args:
            asks: questions of as many queries each, for a token as far ahead, of a lane each.
            words: theirs.
            again: whether questions like these come again and again, so that a graph pays; else they are there.
        """
        # Refuses what no lane holds, before memory is taken for it.
        places = [self._held(ask) for ask in asks]
        form = BatchShape.build(asks, self._memory.shape.most)
        kept = self._known.get(form)
        # What was recorded serves questions that are there, too.
        known = self._known_of(form, again or (kept is not None and kept.replay is not None))
        known.inputs.fill(asks, words)
        if not again:
            known.inputs.there.fill_(1)
        lanes = [(ask.lane, ask.covered) for ask in asks]
        if known.table != lanes:
            for row, held in zip(known.inputs.table, places):
                row[: len(held)] = held
            known.table = lanes
        self._times[form] += again
        if known.replay is None and self._times[form] > RECORDED_AFTER and self._graph_has_room():
            known.replay = self._recorded(known.inputs)
            known.read = self._rotary.cached_rotations()
        return PreparedBatch(known.inputs, known.replay or (lambda: self._one_by_one(known.inputs)))

    def _known_of(self, form: BatchShape, again: bool) -> "_Known":
        if not again:
            if self._other is None or self._other.inputs.form != form:
                self._other = _Known(BatchInputs.build(form, self._device))
            return self._other
        known = self._known[form] = self._known.pop(form, None) or _Known(BatchInputs.build(form, self._device))
        self._answers += 1
        known.last = self._answers
        others = [each for each, found in self._known.items() if found.replay is None]
        for each in others[:-MOST_OTHERS]:
            del self._known[each]
        if len(self._times) > MOST_COUNTED:
            self._times.clear()
        return known

    def _graph_has_room(self) -> bool:
        """Whether one more may be recorded: beside as many as are kept, where the one that was not used for longest goes."""
        recorded = [form for form, known in self._known.items() if known.replay is not None]
        if len(recorded) < MOST_GRAPHS:
            return True
        if self._answers - self._known[recorded[0]].last < UNUSED:
            return False
        del self._known[recorded[0]]
        return True

    def _held(self, ask: protocol.SelectionRequest) -> torch.Tensor:
        """Where the tokens of a question lie: int32 [covered]."""
        known = self._places.get(ask.lane)
        if known is None or len(known) < ask.covered:
            known = self._store.slots(ask.lane, ask.covered).int().to(self._device)
            self._places[ask.lane] = known
        return known[: ask.covered]

    def _recorded(self, inputs: BatchInputs) -> Callable[[], None]:
        """What launches the same again."""
        if self._device.type != "cuda":
            return lambda: self._answer(inputs, beside=True)
        if not self._records:
            return lambda: self._one_by_one(inputs)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # What one graph works in another one may, too: they never run at once. With the last of its graphs a pool is gone, and PyTorch
        # refuses its name from then on, where anything of it is still held.
        if not any(known.replay for known in self._known.values()):
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._answer(inputs, beside=True)
        except Exception as error:
            logger.warning("sglang-ext: a cache rank launches one by one what chooses, as no graph was recorded: %s", error)
            self._give_up(stream)
            return lambda: self._one_by_one(inputs)
        return graph.replay

    def _give_up(self, stream: torch.cuda.Stream) -> None:
        """Record nothing from here on.

        Where a recording cannot be ended PyTorch leaves its stream as the current one, and its allocator (2.11) in the belief that it goes
        on: no cached memory is given back, not even for another allocation, until that is told.
        """
        self._records = False
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        torch.cuda.empty_cache()

    def _one_by_one(self, inputs: BatchInputs) -> None:
        """Launch all that a graph would, and give up graphs where it has no room beside them."""
        try:
            self._answer(inputs)
            return
        except torch.OutOfMemoryError as error:
            if not any(known.replay for known in self._known.values()):
                raise
            logger.warning("sglang-ext: a cache rank launches one by one what chooses, as beside graphs there is no room: %s", error)
        # Not before no frame of what failed holds memory. Nothing was said of it: all is written anew.
        self._records = False
        for known in self._known.values():
            known.replay = known.read = None
        torch.cuda.empty_cache()
        self._answer(inputs)

    def _answer(self, inputs: BatchInputs, beside: bool = False) -> None:
        """``beside``: where rows are sent, those of some layers while tokens are chosen in the next ones."""
        memory, asked, there, form = self._memory, inputs.asked, inputs.there, inputs.form
        if self._store.rows is None:
            memory.push_chosen(asked, there, self._chosen(inputs))
        elif self._by_kernels:
            streams, begun = (self._beside, current_event(self._device)) if beside else ((INLINE, INLINE), None)
            choice, *among = self._choice(inputs)
            with streams[0].after(begun):
                records = memory.records(asked, form.most)
            parts = choice.marked(*among, beside=beside)
            memory.push_rows(asked, there, parts, records, self._keys.sent, streams)
        else:
            memory.push_rows_on_cpu(asked, there, *self._scored(inputs), inputs.table, self._keys.sent)
        memory.answer(asked, there)

    def _chosen(self, inputs: BatchInputs) -> torch.Tensor:
        """Positions, int32 [layers, questions, kv_heads, most], ascending, of each question as many as it wants."""
        if not self._by_kernels:
            return self._scored(inputs)[0]
        choice, *among = self._choice(inputs)
        return choice.choose(*among, most=inputs.form.most)

    def _choice(self, inputs: BatchInputs) -> tuple[GpuSelector, "SelectionContexts", ReadQueryBatch, torch.Tensor, int]:
        """What chooses by kernels; among which tokens, by which queries at which positions, and for which token after them."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        form, queries = inputs.form, self._queries(inputs)
        # Each no longer than the longest may be: on the device they say themselves how long they are.
        lengths, always = (form.longest,) * form.count, (self._method.sinks, self._method.recent)
        choice = GpuSelector(self._method.predictor, self._keys.buffers, queries.shape[2], self._rotary)

        def read(requests: slice, layers: slice) -> torch.Tensor:
            return queries[requests, layers]

        return choice, SelectionContexts(inputs.table, inputs.contexts, lengths, always), read, inputs.positions, form.ahead

    def _queries(self, inputs: BatchInputs) -> torch.Tensor:
        """[questions, layers, query_heads, window, dim]."""
        return self._memory.pull_queries(inputs.asked, inputs.form.queries).transpose(2, 3)

    def _scored(self, inputs: BatchInputs) -> torch.Tensor:
        """By PyTorch, positions as :meth:`_chosen` has them, and bits of their scores: [2, ...]."""
        form, queries = inputs.form, self._queries(inputs)
        found = [self._chosen_here(inputs, i, queries[i, None]) for i in range(form.count)]
        return torch.stack([torch.nn.functional.pad(each, (0, form.most - each.shape[-1])) for each in found], -3)

    def _chosen_here(self, inputs: BatchInputs, number: int, queries: torch.Tensor) -> torch.Tensor:
        """Of one question, positions and bits of scores: int32 [2, layers, kv_heads, keep]."""
        _, covered, keep, _ = inputs.contexts[number].tolist()
        buffers, places = self._keys.buffers, inputs.table[number, :covered].long()
        predicted = self._method.predictor.predict(queries, inputs.positions[number, None], self._rotary, inputs.form.ahead)
        layers = enumerate(zip(predicted.unbind(1), buffers.scaling))
        scores = torch.stack([attention(query, buffers.scored(at, places), scaling) for at, (query, scaling) in layers])
        kept = top_tokens(scores[None], keep, self._method.sinks, self._method.recent)[0]
        marked = mark_always(scores, self._method.sinks, self._method.recent)
        return torch.stack([kept.int(), marked.gather(-1, kept).view(torch.int32)])


class PreparedBatch(NamedTuple):
    """Questions whose numbers are on the device, and what launches all that answers those of them that are there."""

    inputs: BatchInputs
    launch: Callable[[], None]


@dataclass
class _Known:
    """A form: its inputs, with whose lanes and tokens the table was written, which answer came last, what launches for it, and what that reads
    of what others may drop."""

    inputs: BatchInputs
    table: list[tuple[int, int]] | None = None
    last: int = 0
    replay: Callable[[], None] | None = None
    read: object = None
