"""Interfaces for how compressed KV is stored in slots of SGLang's pool, and the plain layouts, which store tokens unchanged.

A draft row of the token table begins with the slots of the compressed KV. The layout defines their content. It also has a table with the amount of
compressed KV in each draft row. layers/attention/ has the attention over rows of each layout.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.compressor import Compressor, ContextKV, Part
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV


class SlotLayout(ABC):
    """How compressed KV of one method is stored in slots.

    Attributes:
        recent: Newest tokens of a context that stay exact.
        sinks: First tokens of a context that are stored unchanged, in separate slots.
        share: Approximate slots used, as a share of the slots of the kept tokens.
        stochastic: Whether numbers are rounded stochastically, with seeds from their tokens (block_layout.py).
        page_size: Slots that the pool allocates together.
    """

    recent: int = 0
    sinks: int = 0
    share: float
    stochastic: bool = False
    page_size: int

    @property
    def unit(self) -> int:
        """Tokens covered, shared and kept are multiples of it."""
        return self.page_size

    @abstractmethod
    def packed_slots(self, tokens: int) -> int:
        """Slots that store this many tokens in packed form."""

    def held_slots(self, tokens: int) -> int:
        """Slots that this many tokens take, rounded up to whole pages."""
        return -(-self.packed_slots(tokens) // self.page_size) * self.page_size

    @abstractmethod
    def write(
        self, buffers: KVBuffers, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, seeds: torch.Tensor | None = None
    ) -> None:
        """Store the kept tokens of each head in slots. On a GPU it does not wait for the device.

        Args:
            buffers: The pool's buffers.
            kept: int64 [layers, kv_heads, count], indices into ``sources``.
            sources: int64 [tokens], slots of the context from its first token on, so that indices are positions. On a GPU disjoint from
                ``targets``.
            targets: int64 [held_slots(count)]. Slots that pad the last page stay unchanged.
            seeds: int32 [tokens], rounding seeds if the layout is ``stochastic``; None rounds to the nearest code.
        """


@dataclass(frozen=True)
class PlainSlots(SlotLayout):
    """Stores tokens unchanged, one slot each, for methods that do not pack."""

    page_size: int
    share: ClassVar[float] = 1.0

    def packed_slots(self, tokens: int) -> int:
        return 0

    def held_slots(self, tokens: int) -> int:
        return tokens

    def write(
        self, buffers: KVBuffers, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, seeds: torch.Tensor | None = None
    ) -> None:
        buffers.copy_kept(kept, sources, targets)


class KVLayout(ABC):
    """One layout of compressed KV, and which draft rows begin with it. Captured CUDA graphs read that table.

    Attributes:
        shareable: Whether several requests may read the compressed KV of a shared prefix.
        points_to_full_kv: Whether compressed KV becomes useless when its request's full KV moves to other slots.
        selects_in_attention: Whether attention selects the tokens during a step, without the host.
    """

    shareable: ClassVar[bool] = True
    points_to_full_kv: ClassVar[bool] = False
    selects_in_attention: ClassVar[bool] = False

    @property
    def key_derived_data(self) -> PageExtremes | None:
        """Data beside the pool by which attention selects pages; None if it selects none."""
        return None

    def record_step(self, row: int, after: int) -> bool:
        """Record a launched step over ``row``, once for each. Returns whether its attention selects tokens.

        ``after`` counts the tokens after the compressed KV, including the step's own. Only layouts that :attr:`selects_in_attention` have this.
        """
        raise NotImplementedError(f"attention selects no tokens in {type(self).__name__}")

    def fill(
        self, row: int | None, slot_layout: SlotLayout, compressor: Compressor, context: ContextKV, targets: dict[Part, torch.Tensor]
    ) -> None:
        """Let ``compressor`` select the tokens of each part of ``context``, and store them in the part's slots, int64.

        ``row`` is the draft row that will begin with these slots; None for none.

        Raises:
            ScoresError: The scores cannot be used for a selection. Nothing was written.
        """
        parts = [part for part in targets if part.count]
        for part, kept in zip(parts, compressor.select(context, parts)):
            slot_layout.write(context.buffers, kept, context.slots, targets[part], context.seeds)

    def on_filled(self, row: int, compressed: CompressedKV) -> None:
        """Record that ``row``, a draft row of the token table, begins with the filled compressed KV ``compressed``."""

    @abstractmethod
    def compressed_lengths(self, rows: torch.Tensor) -> list[int]:
        """How much compressed KV each of ``rows``, int64 [batch], begins with; 0 for none. Waits for the device."""

    def check(self, row: int, compressed: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that a draft row agrees with its compressed KV. ``covered``, int64, are the slots of the covered tokens' full KV.

        Raises:
            IntegrityError: They disagree. The message has the row and its values.
        """


class PlainLayout(KVLayout):
    """Stores tokens unchanged, so that any attention backend can read them."""

    def compressed_lengths(self, rows: torch.Tensor) -> list[int]:
        return [0] * len(rows)


class ExchangedRowLayout(PlainLayout):
    """Each slot stores K and V of one token per layer and KV head. Another process replaces these rows with others (compressed/row_exchange.py)."""

    shareable = False


@dataclass(frozen=True)
class RowCountLayout(KVLayout):
    """A layout with a table of the amount of compressed KV in each draft row.

    Attributes:
        layout: How compressed KV is stored in slots, for methods that pack tokens or point to them.
        counts: int32 [rows], how much compressed KV each row begins with; 0 for none. Captured CUDA graphs read it.
    """

    layout: SlotLayout
    counts: torch.Tensor

    @classmethod
    def for_table(cls, layout: SlotLayout, token_table: torch.Tensor) -> Self:
        """Create the table for the rows of a token table, all 0."""
        return cls(layout, torch.zeros(len(token_table), dtype=torch.int32, device=token_table.device))

    def compressed_lengths(self, rows: torch.Tensor) -> list[int]:
        return self.counts[rows].tolist()
