"""The making of copies: a method chooses, what it chose is written to slots, and the draft row leads there."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.formats.kv_format import KVFormat, PlainTokens
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.query_window import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.contracts.check import ScoresError, reported
from sglang_ext.mem_cache.compressors.contracts.registry import OWN
from sglang_ext.mem_cache.prefix_cache.segments import Segment

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CopyWriter:
    """Writes copies into the slots that they were given.

    Attributes:
        methods: that requests may ask for, the one of those that ask for none first.
        token_table: int32 [2 * rows, width], ordinary rows first, draft rows after.
        rows: number of ordinary rows.
        buffers: the layers of SGLang's KV pool.
        queries: the newest queries of each request.
        rotary: the model's rotary embedding, for a compressor that needs it.
        asked_by: place in :attr:`methods` of what the request in a row asked for.
        prompt_of: token ids of the prompt of the request in a row.
        made: copies that were made or renewed, by what they are called.
        refused: names of the compressors whose scores cannot be used, of which no copy is made any more.
        form: in which copies lie in their slots.
    """

    methods: tuple[CopyMethod, ...]
    token_table: torch.Tensor
    rows: int
    buffers: KVBuffers
    queries: QueryWindows
    rotary: Rotary | None = None
    asked_by: Callable[[int], int] = lambda row: 0
    prompt_of: Callable[[int], Sequence[int]] = lambda row: ()
    made: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)
    form: KVFormat = PlainTokens()

    def method(self, row: int) -> CopyMethod:
        """What makes the copies of the request in ``row``."""
        return self.methods[self.asked_by(row)]

    def draft_row(self, row: int) -> int:
        """Index of the draft row of the request in ``row``."""
        return row + self.rows

    def reach(self, row: int, tokens: int) -> int:
        """Of a request's first ``tokens`` tokens, those that a copy made now would cover, before it counts in units.

        What came after the newest queries that were kept, nobody attended to: where a method scores by queries it stays
        exact instead, as recent tokens do.
        """
        method = self.method(row)
        newest = self.queries.newest(row) if method.compressor.window else None
        oldest = max(0, tokens - method.recent)
        return oldest if newest is None else min(oldest, newest)

    def has_queries(self, row: int) -> bool:
        """Whether as many queries are kept of the request in ``row`` as its method scores by."""
        return self.queries.enough(row, self.method(row).compressor.window)

    def compile_kernels(self, query_heads: int) -> None:
        """Compress with each method what lies in slot 0, which no request owns, so that no request waits for compilers."""
        for method in self.methods:
            try:
                self._compile(method, query_heads)
            except ScoresError as error:
                self.refuse(method, error)

    def refuse(self, method: CopyMethod, error: ScoresError) -> None:
        """Make no copies with ``method`` any more, and say why, once."""
        if method.compressor.name not in self.refused:
            self.refused.add(method.compressor.name)
            logger.error("sglang-ext: %s. Until then its requests are served with full KV.", error)

    def is_refused(self, row: int) -> bool:
        """Whether no copy can be made of the request in ``row``, by its method's scores."""
        return self.method(row).compressor.name in self.refused

    def _compile(self, method: CopyMethod, query_heads: int) -> None:
        keys, window = self.buffers.keys[0], method.compressor.window
        tokens = 4 * window + max(64, method.unit)
        count = max(1, tokens // 2 // method.unit) * method.unit
        slots = torch.zeros(tokens, dtype=torch.int64, device=keys.device)
        queries = keys.new_zeros(len(self.buffers.keys), window, query_heads, keys.shape[-1])
        positions = torch.arange(tokens - window, tokens, device=keys.device)
        context = ContextKV(self.buffers, slots, queries, positions, self.rotary)
        self._keep_sinks(slots, slots.new_zeros(method.sinks))
        targets = {Part(0, tokens, count): slots.new_zeros(method.packing.held_slots(count))}
        with self._reported(method):
            self.form.fill(None, method.packing, method.compressor, context, targets)

    def write(self, row: int, view: CompressedView, made: Segment | None, done: int, tokens: int) -> None:
        """Gather the chosen KV of each layer into a copy's own slots, after ``done`` tokens there, and into a segment's.

        Writes the draft row, and says what it begins with.

        Args:
            row: the request's.
            view: its copy, with all slots that it reads.
            made: of these, the segment that holds nothing yet; None for none.
            done: tokens that its own slots hold already.
            tokens: of the request, whose full KV is exact.

        Raises:
            ScoresError: nothing can be chosen by the method's scores; nothing was written.
        """
        method, source = self.method(row), self.token_table[row, : view.covered].long()
        rest = Part(view.shared + done, view.covered, view.own_tokens - done)
        targets = {rest: view.own[view.sinks + method.packing.packed_slots(done) :]}
        if made is not None:
            targets[Part(made.start, made.end, made.tokens)] = made.slots
        # The newest queries are of tokens that stay as they are, where blocks leave some out.
        context = self._context(row, method, source, tokens if view.packed else view.covered)
        with self._reported(method):
            chooser = method.compressor.for_context(context)
            self.form.fill(self.draft_row(row), method.packing, chooser, context, targets)
        self._keep_sinks(source, view.own[: view.sinks])
        self.token_table[self.draft_row(row), : view.kept] = view.slots.to(self.token_table.dtype)
        self.form.begins(self.draft_row(row), view)
        view.method = method.called(chooser)
        self.made[view.method] += 1

    def _reported(self, method: CopyMethod) -> AbstractContextManager[None]:
        return reported(method.compressor.name) if method.compressor.name in OWN else nullcontext()

    def _keep_sinks(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the first tokens of the context in slots ``source``, int64, as they are, to ``targets``, int64 [sinks]."""
        if not len(targets):
            return
        keys = self.buffers.keys
        first = torch.arange(len(targets), device=targets.device)
        self.buffers.copy_kept(first.repeat(len(keys), keys[0].shape[1], 1), source, targets)

    def _context(self, row: int, method: CopyMethod, source: torch.Tensor, end: int) -> ContextKV:
        """What a method sees of the tokens in slots ``source``, with its newest queries before position ``end``."""
        found = self.queries.get(row, end, method.compressor.window)
        if found is None:
            key = self.buffers.keys[0]
            found = key.new_empty(len(self.buffers.keys), 0, *key.shape[1:]), source.new_empty(0)
        return ContextKV(self.buffers, source, *found, self.rotary, self.prompt_of(row))
