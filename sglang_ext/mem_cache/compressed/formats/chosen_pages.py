"""Pointers that each step's attention lets lead to pages of its own choice, by the step's query: Quest on a GPU (each_step/quest.py).

A page of Quest is one of SGLang's pool, or a part of it: its tokens lie in slots next to each other, so that a context's pages are those
of every sixteenth slot of its row. A copy covers whole pages, and keeps whole ones: all that is chosen fills pointers exactly. What else
a choice reads lies on the device, by row of the token table, so that one graph serves all requests.
"""

from dataclasses import dataclass
from typing import Self

import torch

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressed.formats.slot_pointers import PointerRows, Pointers
from sglang_ext.mem_cache.compressed.page_extremes import PageExtremes
from sglang_ext.mem_cache.compressors.each_step.quest import Quest


@dataclass(frozen=True)
class ChosenPages(PointerRows):
    """Rows that begin with pointers, and among how many pages attention chooses where these lead.

    Attributes:
        pages: int32 [rows], of the context that a row's copy stands for; 0 for rows without a copy.
        chosen_at: int32 [layers, rows, kv_heads], tokens after a copy when it was chosen last; without rows where each step chooses.
        arrived: int32 [rows, kv_heads], zeros between launches: parts of a choice that are done.
        extremes: by which pages are bounded.
        every: steps between two choices.
        first, newest: pages that are chosen in any case.
    """

    pages: torch.Tensor
    chosen_at: torch.Tensor
    arrived: torch.Tensor
    extremes: PageExtremes
    every: int
    first: int
    newest: int

    chooses = True

    @classmethod
    def of_pool(cls, form: Pointers, token_table: torch.Tensor, extremes: PageExtremes, method: Quest) -> Self:
        """None yet, of the rows of a token table."""
        layers, _, heads = extremes.held.shape[:3]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=token_table.device)

        rows, page = len(token_table), extremes.page
        counts, pages, arrived = zeros(rows), zeros(rows), zeros(rows, heads)
        chosen_at = zeros(layers, rows if method.every > 1 else 0, heads)
        always = (-(-tokens // page) for tokens in (method.sinks, method.recent))
        return cls(form, counts, pages, chosen_at, arrived, extremes, method.every, *always)

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.extremes.page

    def begins(self, row: int, view: CompressedView) -> None:
        """With pointers to so many tokens, of so many pages; its next step chooses."""
        super().begins(row, view)
        self.pages[row] = view.covered // self.page
        if self.every > 1:
            self.chosen_at[:, row] = -self.every

    @staticmethod
    def table_numbers(layers: int, kv_heads: int, every: int) -> int:
        """Numbers for each row, beside :attr:`counts`."""
        return 1 + kv_heads * (1 + (layers if every > 1 else 0))
