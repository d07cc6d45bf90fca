"""Pointers that each step's attention lets lead to pages of its own choice, by the step's query: Quest on a GPU (each_step/quest.py).

A page of Quest is one of SGLang's pool, or a part of it: its tokens lie in slots next to each other, so that a context's pages are those
of every sixteenth slot of its row. A copy covers whole pages, and keeps whole ones: all that is chosen fills pointers exactly. What else
a choice reads lies on the device, by row of the token table, so that one graph serves all requests.
"""

from dataclasses import dataclass, field
from typing import Self

import torch

from sglang_ext.core import CompressedKV, IntegrityError
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.page_extremes import PageExtremes, compute_extremes
from sglang_ext.mem_cache.compressors.each_step.quest import Quest


@dataclass(frozen=True)
class PagePointerLayout(PointerLayout):
    """Rows that begin with pointers, and among how many pages attention chooses where these lead.

    Attributes:
        pages: int32 [rows], of the context that a row's copy stands for; 0 for rows without a copy.
        chosen_at: int32 [layers, rows, kv_heads], tokens after a copy when it was chosen last; without rows where each step chooses.
        arrived: int32 [rows, kv_heads], zeros between launches: parts of a choice that are done.
        extremes: by which pages are bounded.
        every: steps between two choices.
        first, newest: pages that are chosen in any case.
        last_selections: what :attr:`chosen_at` holds of the rows whose turn has come since their copy was made, as the host knows it.
    """

    pages: torch.Tensor
    chosen_at: torch.Tensor
    arrived: torch.Tensor
    extremes: PageExtremes
    every: int
    first: int
    newest: int
    last_selections: dict[int, int] = field(default_factory=dict)

    chooses = True

    @classmethod
    def of_pool(cls, layout: Pointers, token_table: torch.Tensor, extremes: PageExtremes, method: Quest) -> Self:
        """None yet, of the rows of a token table."""
        layers, _, heads = extremes.held.shape[:3]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=token_table.device)

        rows, page = len(token_table), extremes.page
        counts, pages, arrived = zeros(rows), zeros(rows), zeros(rows, heads)
        chosen_at = zeros(layers, rows if method.every > 1 else 0, heads)
        always = (-(-tokens // page) for tokens in (method.sinks, method.recent))
        return cls(layout, counts, pages, chosen_at, arrived, extremes, method.every, *always)

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.extremes.page

    def begins(self, row: int, view: CompressedKV) -> None:
        """With pointers to so many tokens, of so many pages; its next step chooses."""
        super().begins(row, view)
        self.pages[row] = view.covered // self.page
        # Nothing is left of a launch that ended early for another request.
        self.arrived[row] = 0
        if self.every > 1:
            self.chosen_at[:, row] = -self.every
            self.last_selections.pop(row, None)

    def step_chooses(self, row: int, after: int) -> bool:
        """As :meth:`KVLayout.step_chooses`: what its kernel finds out by itself."""
        if self.every > 1:
            if after - self.last_selections.get(row, -self.every) < self.every:
                return False
            self.last_selections[row] = after
        return True

    def check(self, row: int, view: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that what a copy stands for, and what its pointers lead to, are whole pages, with the extremes of the keys in them."""
        super().check(row, view, covered, buffers)
        among = int(self.pages[row])
        if among * self.page != len(covered):
            raise IntegrityError(f"attention chooses among {among} pages for the draft row {row}, which stands for {len(covered)} tokens")
        pages = self._whole(covered, f"the draft row {row} stands for") // self.page
        for layer, keys, held in zip(buffers.layer_ids, buffers.keys, self.extremes.held):
            led = self.layout.read(keys, view.own, view.own_tokens)
            self._whole(led.flatten(), f"pointers of the draft row {row} in layer {layer} lead to")
            late = (held[pages] != compute_extremes(keys, self.page, pages)).flatten(1).any(1)
            if bool(late.any()):
                raise IntegrityError(
                    f"extremes of pages {pages[late].tolist()[:8]} of the request of the draft row {row} in layer {layer} are not those of "
                    "the keys that are in them"
                )

    def _whole(self, slots: torch.Tensor, what: str) -> torch.Tensor:
        """First slots of the pages that ``slots``, int64, are."""
        firsts = slots[:: self.page]
        whole = (firsts[:, None] + torch.arange(self.page, device=slots.device)).flatten()
        if len(slots) % self.page or not torch.equal(whole, slots) or bool((firsts % self.page).any()):
            raise IntegrityError(f"{what} slots that are no whole pages of {self.page}: {slots.tolist()[:8]}")
        return firsts

    @staticmethod
    def table_numbers(layers: int, kv_heads: int, every: int) -> int:
        """Numbers for each row, beside :attr:`counts`."""
        return 1 + kv_heads * (1 + (layers if every > 1 else 0))
