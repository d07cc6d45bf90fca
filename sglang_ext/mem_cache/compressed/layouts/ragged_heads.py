"""Compressed KV whose heads keep different numbers of tokens, in SGLang's KV pool.

A slot of the pool has one *cell*, a key and a value, per layer and KV head. In compressed KV of S slots, a cell may store a token of any
head of any layer, so that no cell stays empty. Cells are numbered buffer by buffer. With H heads, cell ``c`` has this address:

- the buffer of layer ``c // (S * H)``,
- slot ``c % (S * H) // H`` of the compressed KV,
- the column of head ``c % H``.

The tokens of the heads follow one another, layer by layer and head by head.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch

from sglang_ext.core import IntegrityError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, SlotLayout
from sglang_ext.mem_cache.compressors.compressor import Compressor, ContextKV, Part, RaggedSelection
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV


@dataclass(frozen=True)
class RaggedHeadLayout(KVLayout):
    """The draft rows that begin with ragged compressed KV, and the cells of each head.

    How many tokens a head keeps of a prefix depends on the tokens after it. Requests therefore cannot share it.

    Attributes:
        buffers: The pool's buffers. All layers have the same number of heads.
        bounds: int32 [rows, layers * kv_heads + 1], as in :class:`RaggedSelection`; zeros for rows without ragged compressed KV. Its
            address never changes.
    """

    buffers: KVBuffers
    bounds: torch.Tensor
    shareable: ClassVar[bool] = False

    @classmethod
    def of(cls, buffers: KVBuffers, rows: int) -> "RaggedHeadLayout":
        """Create the layout for a token table of ``rows`` rows."""
        keys = buffers.keys[0]
        bounds = torch.zeros(rows, len(buffers.keys) * keys.shape[1] + 1, dtype=torch.int32, device=keys.device)
        return cls(buffers, bounds)

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.buffers.keys[0].shape[1]

    def compressed_lengths(self, rows: torch.Tensor) -> list[int]:
        return (self.bounds[rows, -1] // (self.bounds.shape[1] - 1)).tolist()

    @cached_property
    def _layers(self) -> dict[int, int]:
        return {buffer.data_ptr(): index for index, buffer in enumerate(self.buffers.keys)}

    def layer_bounds(self, row: int, keys: torch.Tensor) -> list[int]:
        """Bounds of the heads of the layer with key buffer ``keys``: kv_heads + 1 numbers, on the host."""
        first = self._layers[keys.data_ptr()] * self.kv_heads
        return self.bounds[row, first : first + self.kv_heads + 1].tolist()

    def fill(
        self, row: int | None, slot_layout: SlotLayout, compressor: Compressor, context: ContextKV, targets: dict[Part, torch.Tensor]
    ) -> None:
        """Fill as :meth:`KVLayout.fill`, with exactly one part. Also records the heads' cells."""
        ((part, slots),) = targets.items()
        self.write(row, compressor.select_ragged(context, part), context.slots, slots)

    def check(self, row: int, compressed: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that the heads partition the cells of the compressed KV."""
        bounds = self.bounds[row]
        cells = len(compressed.own) * (len(bounds) - 1)
        if not (bounds[0] == 0 and bool((bounds.diff() >= 0).all()) and bounds[-1] == cells):
            raise IntegrityError(
                f"heads of draft row {row} begin and end at cells {bounds.tolist()[:8]}..., which do not partition the {cells} cells "
                f"of its {len(compressed.own)} slots"
            )

    def write(self, row: int | None, kept: RaggedSelection, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy each head's kept tokens, which fill all cells of the slots ``targets``, int64, and record their cells for ``row``, unless None.

        ``sources``, int64 [tokens], are the context's slots, disjoint from ``targets``. On a GPU it does not wait for the device.
        """
        if row is not None:
            self.bounds[row] = kept.bounds
        if self.buffers.on_gpu:
            from sglang_ext.layers.kernels.kv_copies import scatter_cells

            tables, layer = (self.buffers.key_table, self.buffers.value_table), (self.buffers.keys[0], self.buffers.values[0])
            scatter_cells(*tables, *layer, kept.tokens, kept.bounds, sources, targets)
            return
        layers, heads = len(self.buffers.keys), self.kv_heads
        columns = torch.arange(layers * heads, device=sources.device).repeat_interleave(kept.bounds.diff()) % heads
        read, ends = sources[kept.tokens], kept.bounds[::heads].tolist()
        for kind in (self.buffers.keys, self.buffers.values):
            # Read all before writing any. Refreshed compressed KV is not among its sources.
            found = torch.cat([of[read[a:b], columns[a:b]] for of, (a, b) in zip(kind, pairwise(ends))])
            for buffer, whole in zip(kind, found.view(layers, len(targets), heads, -1)):
                buffer[targets] = whole

    def read(self, kind: tuple[torch.Tensor, ...], slots: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Read the cells ``[first, last)`` of compressed KV in ``slots``, int64: [cells, head_dim]. ``kind``: the key or the value buffers."""
        heads, each = self.kv_heads, len(slots) * self.kv_heads
        found = [kind[0].new_empty(0, kind[0].shape[-1])]
        for index in range(first // each, -(-last // each)):
            begin, end = max(first - index * each, 0), min(last - index * each, each)
            whole = kind[index].index_select(0, slots[begin // heads : -(-end // heads)]).flatten(0, 1)
            found.append(whole[begin % heads : begin % heads + end - begin])
        return torch.cat(found)
