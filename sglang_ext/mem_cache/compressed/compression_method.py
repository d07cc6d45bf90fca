"""How copies are made: what a method keeps, how much of it, how that lies in slots, and the writing of it.

A method chooses, what it chose is written to slots, and the draft row leads there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sglang_ext.core import MIN_CONTEXT, PLAIN_STEPS, CompressedKV
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, SlotLayout
from sglang_ext.mem_cache.compressed.layouts.rounding import token_seeds
from sglang_ext.mem_cache.compressed.row_exchange import ReceivedRows, RowExchange, NewestRows
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.synchronous_selector import initial_selection
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, kept_count
from sglang_ext.mem_cache.compressors.contracts.compressor import ScoresError, as_scores_error
from sglang_ext.mem_cache.compressors.contracts.registry import COMPRESSORS, USER_METHODS
from sglang_ext.mem_cache.prefix_cache.segments import Segment

# Tokens that a copy that packs all of them takes up at once, where full KV goes then: two blocks at least. Those that are there stay as
# they are, so that it costs little.
PACK_AFTER = 128


@dataclass(frozen=True)
class CompressionMethod:
    """One of the methods that requests of a server may ask for.

    Attributes:
        compressor: chooses what a copy keeps.
        budget: share of the covered tokens that a copy keeps.
        packing: how a copy lies in slots.
        name: as requests ask for it; no two methods of a server have one name.
        packs: name of the method that packs copies; empty for none.
        suffix: what tells it from others with its compressor, at the end of what copies are called.
        sparse_from: tokens of a context, below which no copy is asked for.
    """

    compressor: Compressor
    budget: float
    packing: SlotLayout
    name: str = ""
    packs: str = ""
    suffix: str = ""
    sparse_from: int = MIN_CONTEXT

    @property
    def recent(self) -> int:
        """Newest tokens of a context that copies leave as they are."""
        return self.packing.recent

    @property
    def sinks(self) -> int:
        """First tokens of a context that copies keep as they are, in slots of their own."""
        return self.packing.sinks

    @property
    def unit(self) -> int:
        """Tokens of which copies cover, share and keep whole multiples, after the sinks: those of a page, and of a block."""
        return self.packing.unit

    @property
    def packs_all(self) -> bool:
        """Whether copies hold all that they cover, in blocks but for the sinks."""
        return bool(self.packs) and self.compressor.keeps_all and self.budget == 1

    @property
    def pack_after(self) -> int:
        """Tokens that a copy that packs all of them takes up at once, where full KV goes then: two units at least."""
        return max(PACK_AFTER, 2 * self.unit)

    @property
    def max_exact_tail(self) -> int:
        """Tokens after such a copy at most, before it takes up new ones."""
        return self.recent + self.pack_after + PLAIN_STEPS - 1

    def due(self, reach: int) -> int:
        """Where such a copy, made over ``reach`` tokens, takes up new ones: as soon as :attr:`pack_after` of them are there, counted in
        whole rounds of the request, so that no round of others is cut for it."""
        missing = self.covered(reach) + self.pack_after - reach
        return reach + -(-missing // PLAIN_STEPS) * PLAIN_STEPS

    @property
    def share(self) -> float:
        """Of the slots of full KV, those that a copy takes, about."""
        return self.budget * self.packing.share

    @property
    def least(self) -> int:
        """Tokens that a copy covers at least; of fewer than it may keep, it would leave none out."""
        return max(self.sinks + self.unit, self.compressor.most + 1)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest context that a copy is made of."""
        return max(self.sparse_from, max(MIN_CONTEXT, self.least) + self.recent)

    def covered(self, tokens: int) -> int:
        """Of a context's first ``tokens`` tokens, those that a copy can stand for; 0 where they are too few."""
        return self.sinks + (tokens - self.sinks) // self.unit * self.unit if tokens >= self.least else 0

    def kept(self, tokens: int) -> int:
        """Tokens that a copy keeps of ``tokens`` after the sinks, a multiple of :attr:`unit`."""
        count = kept_count(tokens, self.budget, self.unit) if tokens else 0
        most = -(-self.compressor.most // self.unit) * self.unit
        return min(count, most) if most else count

    def own(self, view: CompressedKV, end: int, shared: int) -> int:
        """Tokens that ``view`` keeps of those from ``end`` on, where ``shared`` and its segments stand for those before.

        What is left of the budget, and the newest tokens in any case: they see what nobody has seen before.
        """
        before = shared + sum(segment.tokens for segment in view.segments)
        newest = -(-max(1, self.compressor.window) // self.unit) * self.unit if end > view.sinks else 0
        return min(view.covered - end, max(self.kept(view.covered - view.sinks) - before, newest))

    def called(self, chooser: Compressor) -> str:
        """What a copy is called whose tokens ``chooser`` chose, the compressor or the one that it leaves this context to."""
        # A helper that is in no catalogue chooses for its method.
        name = chooser.name if chooser.name in COMPRESSORS else self.compressor.name
        return "+".join(part for part in (name, self.packs) if part) + self.suffix


@dataclass(frozen=True)
class CompressedKVWriter:
    """Writes copies into the slots that they were given.

    Attributes:
        token_table: int32, SGLang's with the draft rows.
        buffers: the layers of SGLang's KV pool.
        queries: the newest queries of each request.
        rotary: the model's rotary embedding, for a compressor that needs it.
        prompt_of: token ids of the prompt of the request in a row.
        layout: in which copies lie in their slots.
    """

    token_table: torch.Tensor
    buffers: KVBuffers
    queries: QueryWindows
    rotary: Rotary | None
    prompt_of: Callable[[int], Sequence[int]]
    layout: KVLayout

    def compile_kernels(self, method: CompressionMethod, query_heads: int) -> None:
        """Compress with ``method`` what lies in slot 0, which no request owns.

        Raises:
            ScoresError: nothing can be chosen by the method's scores.
        """
        keys, window = self.buffers.keys[0], method.compressor.window
        tokens = 4 * window + max(64, method.unit)
        count = max(1, tokens // 2 // method.unit) * method.unit
        slots = torch.zeros(tokens, dtype=torch.int64, device=keys.device)
        queries = keys.new_zeros(len(self.buffers.keys), window, query_heads, keys.shape[-1])
        positions = torch.arange(tokens - window, tokens, device=keys.device)
        seeds = slots.int() if method.packing.stochastic else None
        context = ContextKV(self.buffers, slots, queries, positions, self.rotary, seeds=seeds)
        self._keep_sinks(slots, slots.new_zeros(method.sinks))
        targets = {Part(0, tokens, count): slots.new_zeros(method.packing.held_slots(count))}
        with self._reported(method):
            self.layout.fill(None, method.packing, method.compressor, context, targets)

    def write(
        self,
        method: CompressionMethod,
        row: int,
        draft_row: int,
        view: CompressedKV,
        made: Segment | None,
        done: int,
        tokens: int,
        renewed: bool,
        kept: torch.Tensor | RowExchange | NewestRows | None = None,
    ) -> None:
        """Gather the chosen KV of each layer into a copy's own slots, after ``done`` tokens there, and into a segment's.

        Writes the draft row, and says what it begins with.

        Args:
            method: makes the copy.
            row, draft_row: the request's rows of the token table.
            view: its copy, with all slots that it reads; it gets its name.
            made: of these, the segment that holds nothing yet; None for none.
            done: tokens that its own slots hold already.
            tokens: of the request, whose full KV is exact; of a copy that keeps all tokens that of those may be gone which it holds.
            renewed: whether its slots hold the first tokens already.
            kept: int64 [layers, kv_heads, count], positions that were chosen before; or what its own slots take in, which hold the
                rest already; None where the method chooses.

        Raises:
            ScoresError: nothing can be chosen by the method's scores; nothing was written.
        """
        source = self.token_table[row, : view.covered].long()
        rest = Part(view.shared_len + done, view.covered, view.own_tokens - done)
        targets = {rest: view.own[view.sinks + method.packing.packed_slots(done) :]}
        if made is not None:
            targets[Part(made.start, made.end, made.tokens)] = made.slots
        # The newest queries are of tokens that stay as they are, where blocks leave some out.
        context = self._context(row, method, source, tokens if view.packed else view.covered)
        with self._reported(method):
            chooser = method.compressor.for_context(context)
            if kept is None:
                self.layout.fill(draft_row, method.packing, chooser, context, targets)
            elif isinstance(kept, RowExchange):
                self.buffers.move_rows(kept, source, targets[rest])
            elif isinstance(kept, NewestRows):
                self.buffers.move_newest(kept, source, targets[rest])
            else:
                method.packing.write(self.buffers, kept, source, targets[rest])
        if not renewed:
            self._keep_sinks(source, view.own[: view.sinks])
        self.token_table[draft_row, : view.kept] = view.slots.to(self.token_table.dtype)
        self.layout.begins(draft_row, view)
        view.method = method.called(chooser)

    def chosen(self, method: CompressionMethod, row: int, view: CompressedKV) -> torch.Tensor:
        """What the method chooses for a copy, all its own, of the request in ``row``: int64 [layers, kv_heads, own tokens]."""
        context = self._context(row, method, self.token_table[row, : view.covered].long(), view.covered)
        return method.compressor.select(context, [Part(view.shared_len, view.covered, view.own_tokens)])[0]

    def write_selection(self, method: CompressionMethod, row: int, view: CompressedKV, layers: slice, kept: torch.Tensor | ReceivedRows) -> None:
        """Write over what ``view``, all its own, kept in some layers: as many tokens that others chose, int64 [layers, kv_heads, count]; or
        rows that they sent in the place of others."""
        if isinstance(kept, ReceivedRows):
            self.buffers.of_layers(layers).put_rows(kept, view.own)
            return
        source = self.token_table[row, : view.covered].long()
        method.packing.write(self.buffers.of_layers(layers), kept, source, view.own[view.sinks :])

    def choose_again(self, method: CompressionMethod, row: int, draft_row: int, view: CompressedKV) -> bool:
        """Write what ``view`` kept as it was made, by the same queries, once the row leads elsewhere; arguments as :meth:`write`'s. What
        its layers choose themselves they choose again.

        Returns:
            False where a round chooses anew in any case, the queries are gone, or the method's scores cannot be used any more.
        """
        found = self.queries.newest_places(row, view.covered, method.compressor.window)[0]
        if method.compressor.each_round or len(found) < method.compressor.window:
            return False
        kept = initial_selection(method.compressor, self.buffers, view.covered, view.own_tokens)
        try:
            self.write(method, row, draft_row, view, None, 0, view.covered, True, kept)
        except ScoresError:
            return False
        return True

    def reselect(self, method: CompressionMethod, row: int, draft_row: int, view: CompressedKV, end: int) -> None:
        """Write what the method keeps now over what it kept: as many of the tokens that ``view``, all its own, stands for.

        Args:
            method: makes the copy.
            row, draft_row: the request's rows of the token table.
            view: its copy.
            end: position before which queries count.

        Raises:
            ScoresError: nothing can be chosen by the method's scores; nothing was written.
        """
        context = self._context(row, method, self.token_table[row, : view.covered].long(), end)
        with self._reported(method):
            whole = Part(view.shared_len, view.covered, view.own_tokens)
            self.layout.fill(draft_row, method.packing, method.compressor, context, {whole: view.own[view.sinks :]})

    def _reported(self, method: CompressionMethod) -> AbstractContextManager[None]:
        return as_scores_error(method.compressor.name) if method.compressor.name in USER_METHODS else nullcontext()

    def _keep_sinks(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the first tokens of the context in slots ``source``, int64, as they are, to ``targets``, int64 [sinks]."""
        if not len(targets):
            return
        keys = self.buffers.keys
        first = torch.arange(len(targets), device=targets.device)
        self.buffers.copy_kept(first.repeat(len(keys), keys[0].shape[1], 1), source, targets)

    def _context(self, row: int, method: CompressionMethod, source: torch.Tensor, end: int) -> ContextKV:
        """What a method sees of the tokens in slots ``source``, with its newest queries before position ``end``."""
        found = self.queries.get(row, end, method.compressor.window)
        if found is None:
            key = self.buffers.keys[0]
            found = key.new_empty(len(self.buffers.keys), 0, *key.shape[1:]), source.new_empty(0)
        prompt, seeds = self.prompt_of(row), None
        if method.packing.stochastic:
            seeds = token_seeds(prompt, len(source), source.device)
        return ContextKV(self.buffers, source, *found, self.rotary, prompt, seeds)
