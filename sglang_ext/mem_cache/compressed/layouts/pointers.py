"""Compressed KV without KV data: for each layer and KV head, pointers to the full-KV slots of the kept tokens.

A pointer is a slot number, int32. The pointers of a head are stored one after another in the head's key cells of the compressed KV's
slots in SGLang's pool, in each layer. With heads of 128 numbers of 16 bits, a slot stores 64 pointers per head. Pointers thus take little
memory next to full KV, and the pool accounts for them. Full KV of a running request is locked, so that its slots do not change.

Attention itself may select pages in each step by the step's query: Quest on a GPU. A Quest page is a pool page of SGLang, or a part of one: 16 tokens
in consecutive slots. Compressed KV covers and keeps whole pages, and a selection fills the pointers exactly. The other inputs of a selection are
stored on the device by row of the token table, so that one CUDA graph serves all requests.
"""

from dataclasses import dataclass, field
from typing import Self

import torch

from sglang_ext.core import IntegrityError
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes, compute_extremes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import RowCountLayout, SlotLayout
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV


@dataclass(frozen=True)
class Pointers(SlotLayout):
    """How pointers are stored in slots of one pool. In one slot, a head has ``per_slot`` pointers per layer."""

    per_slot: int
    page_size: int

    @classmethod
    def for_pool(cls, buffers: KVBuffers, page_size: int) -> "Pointers":
        return cls(as_pointers(buffers.keys[0]).shape[-1], page_size)

    @property
    def share(self) -> float:
        return 1 / self.per_slot

    def packed_slots(self, tokens: int) -> int:
        return -(-tokens // self.per_slot)

    def write(
        self, buffers: KVBuffers, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, seeds: torch.Tensor | None = None
    ) -> None:
        """Point the compressed KV to each head's kept tokens, as :meth:`SlotLayout.write`."""
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.kv_copies import write_pointers

            write_pointers(buffers.key_table, buffers.keys[0], kept, sources, targets)
            return
        held = self.packed_slots(kept.shape[-1])
        for buffer, of_layer in zip(buffers.keys, sources[kept]):
            filled = torch.nn.functional.pad(of_layer, (0, held * self.per_slot - of_layer.shape[-1]))
            as_pointers(buffer)[targets[:held]] = filled.unflatten(-1, (held, -1)).transpose(0, 1).int()

    def read(self, keys: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        """Slots of the ``count`` tokens that each of a layer's heads keeps: int64 [kv_heads, count].

        ``keys`` is the layer's key buffer, ``slots``, int64, are those of the compressed KV, in order.
        """
        held = as_pointers(keys).index_select(0, slots[: self.packed_slots(count)])
        return held.transpose(0, 1).flatten(1)[:, :count].long()


@dataclass(frozen=True)
class PointerLayout(RowCountLayout):
    """Draft rows that begin with pointers, and the number of pointers per head. They are selected again in each round."""

    layout: Pointers
    shareable = False
    points_to_full_kv = True

    def on_filled(self, row: int, compressed: CompressedKV) -> None:
        self.counts[row] = compressed.own_tokens

    def check(self, row: int, compressed: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that all pointers point to tokens of the request."""
        mine = torch.zeros(len(buffers.keys[0]), dtype=torch.bool, device=covered.device)
        mine[covered] = True
        for layer, keys in zip(buffers.layer_ids, buffers.keys):
            targets = self.layout.read(keys, compressed.own, compressed.own_tokens).flatten()
            if not bool(mine[targets].all()):
                raise IntegrityError(
                    f"pointers of draft row {row} in layer {layer} point to slots {targets[~mine[targets]].tolist()[:8]}, which belong to no "
                    "token of its request"
                )


def as_pointers(keys: torch.Tensor) -> torch.Tensor:
    """A layer's key buffer, [slots, kv_heads, head_dim], viewed as int32 [slots, kv_heads, per_slot]."""
    return keys.view(torch.int32)


@dataclass(frozen=True)
class PagePointerLayout(PointerLayout):
    """Draft rows that begin with pointers, and the pages from which attention selects.

    Attributes:
        pages: int32 [rows], pages of the context that a row's compressed KV covers; 0 for rows without it.
        selected_at: int32 [layers, rows, kv_heads], tokens after the compressed KV at the last selection; no rows if each step selects.
        finished_parts: int32 [rows, kv_heads], finished parts of a selection; zeros between launches.
        extremes: The extremes that bound the scores of pages.
        every: Selection interval, in steps.
        first, newest: Numbers of first and newest pages that are always selected.
        last_selections: The host's copy of :attr:`selected_at`, for rows that selected since their compressed KV was made.
    """

    pages: torch.Tensor
    selected_at: torch.Tensor
    finished_parts: torch.Tensor
    extremes: PageExtremes
    every: int
    first: int
    newest: int
    last_selections: dict[int, int] = field(default_factory=dict)

    selects_in_attention = True

    @classmethod
    def of_pool(cls, layout: Pointers, token_table: torch.Tensor, extremes: PageExtremes, method: Quest) -> Self:
        """Create an empty layout for the rows of a token table."""
        layers, _, heads = extremes.held.shape[:3]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=token_table.device)

        rows, page = len(token_table), extremes.page
        counts, pages, finished_parts = zeros(rows), zeros(rows), zeros(rows, heads)
        selected_at = zeros(layers, rows if method.every > 1 else 0, heads)
        always = (-(-tokens // page) for tokens in (method.sinks, method.recent))
        return cls(layout, counts, pages, selected_at, finished_parts, extremes, method.every, *always)

    @property
    def key_derived_data(self) -> PageExtremes:
        return self.extremes

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.extremes.page

    def on_filled(self, row: int, compressed: CompressedKV) -> None:
        """Record the numbers of pointers and pages. The row's next step selects."""
        super().on_filled(row, compressed)
        self.pages[row] = compressed.covered // self.page
        # Clear counts that a launch left if it ended early for another request.
        self.finished_parts[row] = 0
        if self.every > 1:
            self.selected_at[:, row] = -self.every
            self.last_selections.pop(row, None)

    def record_step(self, row: int, after: int) -> bool:
        # This predicts what the kernel decides by itself.
        if self.every > 1:
            if after - self.last_selections.get(row, -self.every) < self.every:
                return False
            self.last_selections[row] = after
        return True

    def check(self, row: int, compressed: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that the covered tokens and the pointers' targets are whole pages, and that their extremes match the stored keys."""
        super().check(row, compressed, covered, buffers)
        among = int(self.pages[row])
        if among * self.page != len(covered):
            raise IntegrityError(f"attention selects among {among} pages for draft row {row}, which covers {len(covered)} tokens")
        pages = self._page_starts(covered, f"draft row {row} covers") // self.page
        for layer, keys, held in zip(buffers.layer_ids, buffers.keys, self.extremes.held):
            targets = self.layout.read(keys, compressed.own, compressed.own_tokens)
            self._page_starts(targets.flatten(), f"pointers of draft row {row} in layer {layer} point to")
            is_stale = (held[pages] != compute_extremes(keys, self.page, pages)).flatten(1).any(1)
            if bool(is_stale.any()):
                raise IntegrityError(
                    f"extremes of pages {pages[is_stale].tolist()[:8]} of the request of draft row {row} in layer {layer} do not match the "
                    "keys that are stored there"
                )

    def _page_starts(self, slots: torch.Tensor, what: str) -> torch.Tensor:
        """First slots of the pages that consist of ``slots``, int64."""
        firsts = slots[:: self.page]
        whole = (firsts[:, None] + torch.arange(self.page, device=slots.device)).flatten()
        if len(slots) % self.page or not torch.equal(whole, slots) or bool((firsts % self.page).any()):
            raise IntegrityError(f"{what} slots that are not whole pages of {self.page}: {slots.tolist()[:8]}")
        return firsts

    @staticmethod
    def table_numbers(layers: int, kv_heads: int, every: int) -> int:
        """Numbers that the layout's tables have per row, in addition to :attr:`counts`."""
        return 1 + kv_heads * (1 + (layers if every > 1 else 0))
