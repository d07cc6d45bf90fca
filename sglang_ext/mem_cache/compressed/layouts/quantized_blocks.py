"""Quantized blocks in SGLang's KV pool: their number of slots, writing and reading.

Blocks are stored in ordinary slots, whose cells contain bytes instead of keys and values (block_layout.py). Each KV head's bytes stay in
the head's own cells, so that ranks with different heads need no data of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

import torch

from sglang_ext.core import IntegrityError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import RowCountLayout, SlotLayout
from sglang_ext.mem_cache.compressed.layouts.block_layout import BlockLayout, Grid, Quantized, as_bytes, lane, noise
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.quantizer import Quantizer, whole
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV

# Tokens packed at once. Several float32 tensors of their numbers exist while they are packed. A multiple of a block.
WRITTEN_TOKENS = 1 << 14


@dataclass(frozen=True)
class Packing(SlotLayout):
    """How one pool stores the compressed KV of one quantizer: the layouts of a block in key cells, and in value cells.

    Raises:
        ValueError: The rotary embedding is missing.
    """

    quantizer: Quantizer
    keys: BlockLayout
    values: BlockLayout
    page_size: int
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        if self.keys.positions and self.rotary is None:
            raise ValueError("blocks store keys as before rotary embedding, but no rotary embedding is given: pass the model's")

    @classmethod
    def for_pool(cls, quantizer: Quantizer, buffers: KVBuffers, page_size: int, rotary: Rotary | None = None) -> "Packing":
        """Create the packing for a pool with these buffers, and a model with this rotary embedding.

        Raises:
            ValueError: Heads of this size cannot be packed with this quantizer.
        """

        def layout(buffer: torch.Tensor, grid: Callable[[int], Grid], positions: bool) -> BlockLayout:
            dim, size = buffer.shape[-1], buffer.element_size()
            of_heads = dim, dim * size, grid(dim), quantizer.outliers(dim)
            return BlockLayout(quantizer.bits, quantizer.block, *of_heads, positions, quantizer.sums)

        keys = layout(buffers.keys[0], quantizer.key_grid, quantizer.before_rotary)
        return cls(quantizer, keys, layout(buffers.values[0], quantizer.value_grid, False), page_size, rotary)

    @property
    def recent(self) -> int:
        return self.quantizer.recent

    @property
    def sinks(self) -> int:
        return -(-self.quantizer.sinks // self.page_size) * self.page_size

    @property
    def stochastic(self) -> bool:
        return self.quantizer.stochastic

    @property
    def share(self) -> float:
        return self.block_slots / self.block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.keys.tokens

    @property
    def block_slots(self) -> int:
        """Slots of a block. Each slot has a key cell and a value cell."""
        return max(self.keys.cells, self.values.cells)

    @property
    def unit(self) -> int:
        return lcm(self.block_tokens, self.page_size)

    def packed_slots(self, tokens: int) -> int:
        return tokens // self.block_tokens * self.block_slots

    def rotations(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """:meth:`Quantizer.rotation` of keys and of values, on ``device``. Returns the same tensors each time."""
        return self.quantizer.rotation_on(device, self.keys.dim), self.quantizer.rotation_on(device, self.values.dim)

    def levels(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """:meth:`Quantizer.levels` of keys and of values, on ``device``. Returns the same tensors each time."""
        return self.quantizer.levels_on(device, self.keys.dim), self.quantizer.levels_on(device, self.values.dim)

    def write(
        self, buffers: KVBuffers, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, seeds: torch.Tensor | None = None
    ) -> None:
        """Pack whole blocks of each head's kept tokens, in all layers, as :meth:`SlotLayout.write`."""
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.packed.pack_blocks import can_pack, pack_blocks

            if can_pack(self, buffers):
                pack_blocks(self, buffers, kept, sources, targets, seeds)
                return
        targets = targets[: self.packed_slots(kept.shape[-1])].split(self.packed_slots(WRITTEN_TOKENS))
        heads = torch.arange(kept.shape[1], device=kept.device)[:, None]
        for layer, of_layer in enumerate(kept):
            place = buffers.layer_ids[layer], buffers.first_head
            for tokens, slots in zip(of_layer.split(WRITTEN_TOKENS, dim=-1), targets):
                read, of_tokens = sources[tokens], None if seeds is None else seeds[tokens]
                for is_value, kind in enumerate((buffers.keys, buffers.values)):
                    numbers = kind[layer][read, heads].float()
                    block = self.codes(numbers, tokens, bool(is_value), *place, of_tokens)
                    cells = (self.values if is_value else self.keys).pack(block, self.block_slots)
                    as_bytes(kind[layer])[slots] = cells.flatten(1, 2).transpose(0, 1)

    def codes(
        self, numbers: torch.Tensor, tokens: torch.Tensor, is_value: bool, layer: int, first_head: int, seeds: torch.Tensor | None
    ) -> Quantized:
        """Quantize a layer's keys or values into blocks. Keys lose their rotary embedding first, if blocks store positions.

        Args:
            numbers: float32 [heads, tokens, dim]; whole blocks.
            tokens: int64 [heads, tokens], positions.
            is_value: Whether the numbers are values.
            layer, first_head: In the model. The noise depends on them.
            seeds: int32 [heads, tokens], of the noise; None rounds to the nearest code.
        """
        layout, rotation, given = self.values if is_value else self.keys, self.rotations(numbers.device)[is_value], ()
        shape = len(numbers), -1, layout.tokens, layout.dim
        if seeds is not None:
            lanes = lane(layer, first_head, is_value) + 2 * torch.arange(len(numbers), device=numbers.device)
            given = (noise(seeds, lanes, layout.dim).view(shape),)
        if layout.positions:
            numbers = self.rotary.rotate(numbers, -tokens)
        if rotation is not None:
            numbers = numbers @ rotation
        block = self.quantizer.quantize(numbers.view(shape), layout.grid, *given)
        return block._replace(positions=tokens.view(block.codes.shape[:3])) if layout.positions else block

    def dequantize(
        self, block: Quantized, layout: BlockLayout, levels: torch.Tensor | None, rotation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Dequantize blocks: float32 [heads, tokens, dim]. ``rotation`` is undone. Keys get rotary embedding at their positions."""
        numbers = whole(block, layout.grid, levels)
        if rotation is not None:
            numbers = numbers @ rotation.t()
        if layout.positions:
            numbers = self.rotary.rotate(numbers, block.positions)
        return numbers.flatten(1, 2)

    def restore(self, buffers: KVBuffers, blocks: torch.Tensor, first: int, targets: torch.Tensor) -> None:
        """Write full KV from the packed blocks in slots ``blocks``, int64: the dequantized numbers, in the pool's dtype.

        The tokens from index ``first`` on are written to ``targets``, int64 [tokens], disjoint from ``blocks``. Does not wait for the device.
        """
        size = self.block_tokens
        for begin in range(0, len(targets), WRITTEN_TOKENS):
            slots = targets[begin : begin + WRITTEN_TOKENS]
            start, end = first + begin, first + begin + len(slots)
            packed = blocks[self.packed_slots(start) : self.packed_slots(-(-end // size) * size)]
            rotations, levels = self.rotations(slots.device), self.levels(slots.device)
            for is_value, kind in enumerate((buffers.keys, buffers.values)):
                layout = self.values if is_value else self.keys
                for buffer in kind:
                    numbers = self.dequantize(self.read(buffer, layout, packed), layout, levels[is_value], rotations[is_value])
                    buffer[slots] = numbers[:, start % size :][:, : len(slots)].transpose(0, 1).to(buffer.dtype)

    def read(self, buffer: torch.Tensor, layout: BlockLayout, slots: torch.Tensor) -> Quantized:
        """Read the blocks in ``slots``, int64 [packed], of a layer's key or value ``buffer``."""
        cells = as_bytes(buffer)[slots]
        return layout.unpack(cells.unflatten(0, (-1, self.block_slots)).permute(2, 0, 1, 3))


@dataclass(frozen=True)
class QuantizedLayout(RowCountLayout):
    """Draft rows that begin with quantized blocks, and the number of slots with blocks in each row."""

    layout: Packing

    def on_filled(self, row: int, compressed: CompressedKV) -> None:
        self.counts[row] = compressed.num_packed_slots

    def check(self, row: int, compressed: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that the row's count agrees with its compressed KV."""
        count = int(self.counts[row])
        if count != compressed.num_packed_slots:
            raise IntegrityError(
                f"the compressed KV of draft row {row} has {compressed.num_packed_slots} packed slots, but the row's count is {count}"
            )
