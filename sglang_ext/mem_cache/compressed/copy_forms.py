"""What rows of the token table may begin with besides plain tokens: the forms in which one server's copies lie in its pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressors.catalogue import Method
from sglang_ext.mem_cache.compressed.formats.head_cells import HeadCells
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.formats.packing import PackedRows, Packing
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressed.formats.slot_pointers import PointerRows, Pointers


@dataclass(frozen=True)
class CopyForms:
    """Of each form how it lies in slots, and which rows begin with it; None where no copy has it.

    Attributes:
        packed_rows: packed blocks.
        head_cells: cells of heads that keep different numbers of tokens.
        pointer_rows: pointers into full KV.
    """

    packed_rows: PackedRows | None = None
    head_cells: HeadCells | None = None
    pointer_rows: PointerRows | None = None

    @property
    def shareable(self) -> bool:
        """Whether requests may read one copy of what they begin with.

        How much each uneven head keeps of a beginning depends on what follows it; pointers are chosen anew in each round.
        """
        return self.head_cells is None and self.pointer_rows is None

    def begins(self, row: int, view: CompressedView) -> None:
        """Note what ``row`` of the token table, a draft row, begins with: its copy ``view``, whose cells are known."""
        if self.packed_rows is not None:
            self.packed_rows.counts[row] = view.packed
        if self.pointer_rows is not None:
            self.pointer_rows.counts[row] = view.own_tokens

    @classmethod
    def of(
        cls,
        methods: Sequence[Method],
        adaptive: bool,
        buffers: KVBuffers,
        page_size: int,
        token_table: torch.Tensor,
        rotary: Rotary | None,
    ) -> "CopyForms":
        """Those that the copies of ``methods`` have.

        Captured graphs read what rows begin with, so that this comes before any is captured.

        Args:
            methods: of the server.
            adaptive: whether heads keep different numbers of tokens.
            buffers: the pool's.
            page_size: slots that the pool hands out together.
            token_table: int32 [rows, width], with the draft rows.
            rotary: the model's rotary embedding, where a method needs it.

        Raises:
            ValueError: heads of this size cannot be packed so.
        """
        packed_rows = pointer_rows = None
        quantizer = next((method.quantizer for method in methods if method.quantizer is not None), None)
        if quantizer is not None:
            packed_rows = PackedRows.of_table(Packing.of(quantizer, buffers, page_size, rotary), token_table)
        if any(method.compressor.points for method in methods):
            pointer_rows = PointerRows.of_table(Pointers.of(buffers, page_size), token_table)
        return cls(packed_rows, HeadCells.of(buffers, len(token_table)) if adaptive else None, pointer_rows)
