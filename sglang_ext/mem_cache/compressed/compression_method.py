"""How compressed KV is made: which tokens a method keeps, how many, in which layout, and the writes.

The method selects tokens, the writer stores them in slots, and the draft row points to these slots.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.core import MIN_CONTEXT, PLAIN_STEPS, RequestState
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, SlotLayout
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, kept_count
from sglang_ext.mem_cache.compressors.compressor import ScoresError, as_scores_error
from sglang_ext.mem_cache.compressors.registry import COMPRESSORS, USER_METHODS
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV, Segment

# Minimum of CompressionMethod.pack_after. Packed tokens stay as they are, so that packing few tokens at once costs little.
PACK_AFTER = 128


@dataclass(frozen=True)
class CompressionMethod:
    """One of the compression methods that requests of a server may ask for by its ``name``.

    Attributes:
        budget: Share of the covered tokens to keep.
        packing: Layout of the compressed KV in slots.
        packs: Name of the quantizer that packs the compressed KV; empty for none.
        suffix: Ending of the compressed KV's name that tells this method from others with the same compressor.
        sparse_from: Smallest context, in tokens, that is compressed.
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
        """Newest tokens of a context that stay exact."""
        return self.packing.recent

    @property
    def sinks(self) -> int:
        """First tokens of a context that are stored unchanged, in separate slots."""
        return self.packing.sinks

    @cached_property
    def unit(self) -> int:
        """Tokens covered, shared and kept after the sinks are multiples of it: those of a page and of a block."""
        return self.packing.unit

    @property
    def packs_all(self) -> bool:
        """Whether compressed KV holds all covered tokens, all but the sinks in blocks."""
        return bool(self.packs) and self.compressor.keeps_all and self.budget == 1

    @property
    def pack_after(self) -> int:
        """Tokens packed at once if compressed KV packs all tokens and full KV is freed then: at least two units."""
        return max(PACK_AFTER, 2 * self.unit)

    @property
    def max_exact_tail(self) -> int:
        """Maximum exact tokens after compressed KV that packs all tokens, before it packs new ones."""
        return self.recent + self.pack_after + PLAIN_STEPS - 1

    def next_refresh(self, max_covered: int) -> int:
        """Context length at which compressed KV that packs all tokens is refreshed; ``max_covered`` counts the tokens without the newest ones.

        That is as soon as :attr:`pack_after` new tokens exist, rounded up to whole rounds of the request. So the refresh shortens no round.
        """
        missing = self.covered(max_covered) + self.pack_after - max_covered
        return max_covered + -(-missing // PLAIN_STEPS) * PLAIN_STEPS

    @property
    def share(self) -> float:
        """Approximate slots of compressed KV, as a share of full KV's."""
        return self.budget * self.packing.share

    @property
    def min_covered(self) -> int:
        """Minimum tokens that compressed KV covers. A context of fewer tokens than the method keeps would lose none."""
        return max(self.sinks + self.unit, self.compressor.most + 1)

    @property
    def min_context(self) -> int:
        """Tokens of the shortest context that is compressed."""
        return max(self.sparse_from, max(MIN_CONTEXT, self.min_covered) + self.recent)

    def covered(self, tokens: int) -> int:
        """How many of a context's first ``tokens`` tokens compressed KV can cover; 0 if they are too few."""
        return self.sinks + (tokens - self.sinks) // self.unit * self.unit if tokens >= self.min_covered else 0

    def num_kept(self, tokens: int) -> int:
        """Tokens kept of ``tokens`` tokens after the sinks, a multiple of :attr:`unit`."""
        count = kept_count(tokens, self.budget, self.unit) if tokens else 0
        most = -(-self.compressor.most // self.unit) * self.unit
        return min(count, most) if most else count

    def num_own_tokens(self, compressed: CompressedKV, end: int, shared: int) -> int:
        """Tokens from ``end`` on that ``compressed`` keeps in owned slots. ``shared`` tokens and the segments' cover the positions before.

        This is the rest of the budget, and at least the newest tokens: their queries attend to tokens that no earlier query attended to.
        """
        before = shared + sum(segment.tokens for segment in compressed.segments)
        newest = -(-max(1, self.compressor.window) // self.unit) * self.unit if end > compressed.sinks else 0
        return min(compressed.covered - end, max(self.num_kept(compressed.covered - compressed.sinks) - before, newest))

    def full_name(self, compressor: Compressor) -> str:
        """Name of the compressed KV. ``compressor`` selected its tokens: the method's compressor, or the one that it delegates to."""
        # ``for_context`` may return a helper without a name of its own. Then use the method's name.
        name = compressor.name if compressor.name in COMPRESSORS else self.compressor.name
        return "+".join(part for part in (name, self.packs) if part) + self.suffix


@dataclass(frozen=True)
class CompressedKVWriter:
    """Writes compressed KV to its allocated slots, and the draft rows. Attributes as :class:`~.cache.CompressedKVCache`'s."""

    token_table: torch.Tensor
    rows: int
    buffers: KVBuffers
    queries: QueryWindows
    rotary: Rotary | None
    state_of: Callable[[int], RequestState]
    layout: KVLayout

    def compile_kernels(self, method: CompressionMethod, query_heads: int) -> None:
        """Compress slot 0, which no request owns, with ``method``, to compile its kernels. Raises ScoresError as :meth:`write`."""
        keys, window = self.buffers.keys[0], method.compressor.window
        tokens = 4 * window + max(64, method.unit)
        count = max(1, tokens // 2 // method.unit) * method.unit
        slots = torch.zeros(tokens, dtype=torch.int64, device=keys.device)
        queries = keys.new_zeros(len(self.buffers.keys), window, query_heads, keys.shape[-1])
        positions = torch.arange(tokens - window, tokens, device=keys.device)
        seeds = slots.int() if method.packing.stochastic else None
        context = ContextKV(self.buffers, slots, queries, positions, self.rotary, seeds=seeds)
        self._copy_sinks(slots, slots.new_zeros(method.sinks))
        targets = {Part(0, tokens, count): slots.new_zeros(method.packing.held_slots(count))}
        with self._raising_scores_error(method):
            self.layout.fill(None, method.packing, method.compressor, context, targets)

    def write(
        self,
        method: CompressionMethod,
        row: int,
        compressed: CompressedKV,
        new_segment: Segment | None,
        num_filled: int,
        tokens: int,
        has_sinks: bool,
        kept: torch.Tensor | NewestRows | None = None,
    ) -> None:
        """Copy the selected KV of each layer to the owned slots, from token ``num_filled`` on, and to a new segment's slots.

        Also writes the draft row, and sets the compressed KV's name. ``new_segment`` is the one of its segments that is still empty. ``kept`` are
        the positions to keep, int64 [layers, kv_heads, count], if the selection exists, or the rows that change. The full KV of the first
        ``tokens`` tokens is exact. If all tokens are kept, the full KV of those that the compressed KV already holds may be freed.

        Raises:
            ScoresError: The method's scores cannot be used for a selection. Nothing was written.
        """
        draft_row, source = row + self.rows, self.token_table[row, : compressed.covered].long()
        rest = Part(compressed.shared_len + num_filled, compressed.covered, compressed.own_tokens - num_filled)
        targets = {rest: compressed.own[compressed.sinks + method.packing.packed_slots(num_filled) :]}
        if new_segment is not None:
            targets[Part(new_segment.start, new_segment.end, new_segment.tokens)] = new_segment.slots
        # With packed blocks the newest tokens stay exact, so use queries up to the end of the context.
        context = self._context(row, method, source, tokens if compressed.num_packed_slots else compressed.covered)
        with self._raising_scores_error(method):
            compressor = method.compressor.for_context(context)
            if kept is None:
                self.layout.fill(draft_row, method.packing, compressor, context, targets)
            elif isinstance(kept, torch.Tensor):
                method.packing.write(self.buffers, kept, source, targets[rest])
            else:
                self.buffers.move_newest(kept, source, targets[rest])
        if not has_sinks:
            self._copy_sinks(source, compressed.own[: compressed.sinks])
        self.token_table[draft_row, : compressed.num_slots] = compressed.slots.to(self.token_table.dtype)
        self.layout.on_filled(draft_row, compressed)
        compressed.method = method.full_name(compressor)

    def select(self, method: CompressionMethod, row: int, compressed: CompressedKV) -> torch.Tensor:
        """The method's selection for compressed KV that shares nothing: int64 [layers, kv_heads, own tokens]."""
        context = self._context(row, method, self.token_table[row, : compressed.covered].long(), compressed.covered)
        return method.compressor.select(context, [Part(compressed.shared_len, compressed.covered, compressed.own_tokens)])[0]

    def rewrite_selection(self, method: CompressionMethod, row: int, compressed: CompressedKV) -> bool:
        """Write the first selection of ``compressed`` again, by the same queries, after the row's slots have changed.

        Layers that select by themselves repeat their selection. Returns False if a round selects again in any case, the queries are gone, or
        the method's scores cannot be used any more.
        """
        found = self.queries.newest_places(row, compressed.covered, method.compressor.window)[0]
        if method.compressor.each_round or len(found) < method.compressor.window:
            return False
        kept = initial_selection(method.compressor, self.buffers, compressed.covered, compressed.own_tokens)
        try:
            self.write(method, row, compressed, None, 0, compressed.covered, True, kept)
        except ScoresError:
            return False
        return True

    def reselect(self, method: CompressionMethod, row: int, compressed: CompressedKV, end: int) -> None:
        """Overwrite the selection of ``compressed``, which shares nothing, by queries before ``end``. Raises ScoresError as :meth:`write`."""
        context = self._context(row, method, self.token_table[row, : compressed.covered].long(), end)
        with self._raising_scores_error(method):
            whole = Part(compressed.shared_len, compressed.covered, compressed.own_tokens)
            self.layout.fill(row + self.rows, method.packing, method.compressor, context, {whole: compressed.own[compressed.sinks :]})

    def _raising_scores_error(self, method: CompressionMethod) -> AbstractContextManager[None]:
        return as_scores_error(method.compressor.name) if method.compressor.name in USER_METHODS else nullcontext()

    def _copy_sinks(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the context's first tokens, in slots ``source``, int64, unchanged to ``targets``, int64 [sinks]."""
        if not len(targets):
            return
        keys = self.buffers.keys
        first = torch.arange(len(targets), device=targets.device)
        self.buffers.copy_kept(first.repeat(len(keys), keys[0].shape[1], 1), source, targets)

    def _context(self, row: int, method: CompressionMethod, source: torch.Tensor, end: int) -> ContextKV:
        """The KV of the tokens in slots ``source``, with the newest queries before position ``end``."""
        found = self.queries.get(row, end, method.compressor.window)
        if found is None:
            key = self.buffers.keys[0]
            found = key.new_empty(len(self.buffers.keys), 0, *key.shape[1:]), source.new_empty(0)
        prompt, seeds = self.state_of(row).prompt, None
        if method.packing.stochastic:
            seeds = token_seeds(prompt, len(source), source.device)
        return ContextKV(self.buffers, source, *found, self.rotary, prompt, seeds)


def initial_selection(chooser: Compressor, buffers: KVBuffers, covered: int, keep: int) -> torch.Tensor | None:
    """First selection, of ``keep`` tokens per head, of a method whose layers select in the step: the newest of the ``covered`` tokens.

    None if it selects with recorded queries instead.
    """
    if not chooser.synchronous or (chooser.every > 1 and chooser.window):
        return None
    keys = buffers.keys[0]
    return torch.arange(covered - keep, covered, device=keys.device).expand(len(buffers.keys), keys.shape[1], keep)
