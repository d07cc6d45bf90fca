"""The writing of copies: a method chooses, what it chose is written to slots, and the draft row leads there."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.formats.kv_format import KVFormat
from sglang_ext.mem_cache.compressed.formats.rounding import token_seeds
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.query_window import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.contracts.check import reported
from sglang_ext.mem_cache.compressors.contracts.registry import OWN
from sglang_ext.mem_cache.prefix_cache.segments import Segment


@dataclass(frozen=True)
class CopyWriter:
    """Writes copies into the slots that they were given.

    Attributes:
        token_table: int32, SGLang's with the draft rows.
        buffers: the layers of SGLang's KV pool.
        queries: the newest queries of each request.
        rotary: the model's rotary embedding, for a compressor that needs it.
        prompt_of: token ids of the prompt of the request in a row.
        form: in which copies lie in their slots.
    """

    token_table: torch.Tensor
    buffers: KVBuffers
    queries: QueryWindows
    rotary: Rotary | None
    prompt_of: Callable[[int], Sequence[int]]
    form: KVFormat

    def compile_kernels(self, method: CopyMethod, query_heads: int) -> None:
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
            self.form.fill(None, method.packing, method.compressor, context, targets)

    def write(
        self, method: CopyMethod, row: int, draft_row: int, view: CompressedView, made: Segment | None, done: int, tokens: int
    ) -> None:
        """Gather the chosen KV of each layer into a copy's own slots, after ``done`` tokens there, and into a segment's.

        Writes the draft row, and says what it begins with.

        Args:
            method: makes the copy.
            row, draft_row: the request's rows of the token table.
            view: its copy, with all slots that it reads; it gets its name.
            made: of these, the segment that holds nothing yet; None for none.
            done: tokens that its own slots hold already.
            tokens: of the request, whose full KV is exact.

        Raises:
            ScoresError: nothing can be chosen by the method's scores; nothing was written.
        """
        source = self.token_table[row, : view.covered].long()
        rest = Part(view.shared + done, view.covered, view.own_tokens - done)
        targets = {rest: view.own[view.sinks + method.packing.packed_slots(done) :]}
        if made is not None:
            targets[Part(made.start, made.end, made.tokens)] = made.slots
        # The newest queries are of tokens that stay as they are, where blocks leave some out.
        context = self._context(row, method, source, tokens if view.packed else view.covered)
        with self._reported(method):
            chooser = method.compressor.for_context(context)
            self.form.fill(draft_row, method.packing, chooser, context, targets)
        self._keep_sinks(source, view.own[: view.sinks])
        self.token_table[draft_row, : view.kept] = view.slots.to(self.token_table.dtype)
        self.form.begins(draft_row, view)
        view.method = method.called(chooser)

    def choose_anew(self, method: CopyMethod, row: int, draft_row: int, view: CompressedView, end: int) -> None:
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
            whole = Part(view.shared, view.covered, view.own_tokens)
            self.form.fill(draft_row, method.packing, method.compressor, context, {whole: view.own[view.sinks :]})

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
        prompt, seeds = self.prompt_of(row), None
        if method.packing.stochastic:
            seeds = token_seeds(prompt, len(source), source.device)
        return ContextKV(self.buffers, source, *found, self.rotary, prompt, seeds)
