"""Packed copies in SGLang's KV pool: how many slots they take, how they are written, how they are read.

A copy's blocks lie in ordinary slots, whose cells hold bytes instead of keys and values (block_layout.py). Each KV head's
bytes stay in its own cells, so that ranks that hold different heads need nothing of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import CompressedKV, IntegrityError
from sglang_ext.mem_cache.compressed.layouts.base import RowCountLayout, PlainSlots
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, BlockLayout, Quantized
from sglang_ext.mem_cache.compressed.layouts.rounding import lane, noise
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer, whole

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressors.catalogue import MethodSpec

# Tokens that are packed at once: their numbers lie in float32 meanwhile, several times. Whole blocks.
WRITTEN_TOKENS = 1 << 14


@dataclass(frozen=True)
class Packing:
    """How one pool holds the copies of one quantizer.

    Attributes:
        quantizer: gives the codes.
        keys, values: how a block lies in key cells, and in value cells.
        page_size: slots that the pool hands out together.
        rotary: the model's rotary embedding, for a quantizer that takes keys as they were before it.

    Raises:
        ValueError: the rotary embedding is missing.
    """

    quantizer: Quantizer
    keys: BlockLayout
    values: BlockLayout
    page_size: int
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        if self.keys.positions and self.rotary is None:
            raise ValueError("keys lie in blocks as before rotary embedding, and none is given: pass the model's")

    @classmethod
    def for_pool(cls, quantizer: Quantizer, buffers: KVBuffers, page_size: int, rotary: Rotary | None = None) -> "Packing":
        """For a pool with these buffers, of a model with this rotary embedding.

        Raises:
            ValueError: heads of this size cannot be packed so.
        """

        def layout(buffer: torch.Tensor, grid: Callable[[int], Grid], positions: bool) -> BlockLayout:
            dim, size = buffer.shape[-1], buffer.element_size()
            of_heads = dim, dim * size, grid(dim), quantizer.outliers(dim)
            return BlockLayout(quantizer.bits, quantizer.block, *of_heads, positions, quantizer.sums)

        keys = layout(buffers.keys[0], quantizer.key_grid, quantizer.before_rotary)
        return cls(quantizer, keys, layout(buffers.values[0], quantizer.value_grid, False), page_size, rotary)

    @property
    def recent(self) -> int:
        """Newest tokens of a context that copies leave as they are."""
        return self.quantizer.recent

    @property
    def sinks(self) -> int:
        """First tokens of a context that copies keep as they are, in whole pages."""
        return -(-self.quantizer.sinks // self.page_size) * self.page_size

    @property
    def stochastic(self) -> bool:
        """Whether numbers are rounded by seeds of their tokens."""
        return self.quantizer.stochastic

    @property
    def share(self) -> float:
        """Of the slots that the kept tokens have in full KV, those that their blocks take."""
        return self.block_slots / self.block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.keys.tokens

    @property
    def block_slots(self) -> int:
        """Slots of a block: each has a key cell and a value cell."""
        return max(self.keys.cells, self.values.cells)

    @property
    def unit(self) -> int:
        """Tokens of which a copy covers, shares and keeps whole multiples."""
        return lcm(self.block_tokens, self.page_size)

    def packed_slots(self, tokens: int) -> int:
        """Slots of ``tokens`` tokens' blocks; ``tokens`` is a multiple of :attr:`unit`."""
        return tokens // self.block_tokens * self.block_slots

    def held_slots(self, tokens: int) -> int:
        """The same in whole pages."""
        return -(-self.packed_slots(tokens) // self.page_size) * self.page_size

    def rotations(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of keys and of values, on ``device``, as :meth:`Quantizer.rotation` says; the same tensors each time."""
        return self.quantizer.rotation_on(device, self.keys.dim), self.quantizer.rotation_on(device, self.values.dim)

    def levels(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of keys and of values, on ``device``, as :meth:`Quantizer.levels` says; the same tensors each time."""
        return self.quantizer.levels_on(device, self.keys.dim), self.quantizer.levels_on(device, self.values.dim)

    def write(
        self,
        buffers: KVBuffers,
        kept: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> None:
        """Pack, for each layer and head, that head's kept tokens into ``targets``; does not wait for the device.

        Args:
            buffers: the pool's.
            kept: int64 [layers, kv_heads, tokens], counted in ``sources``; whole blocks.
            sources: int64, slots of the context, from its beginning: what is kept is counted by position.
            targets: int64 [held_slots(tokens)], on a GPU none of ``sources``; what fills up its last page stays as it is.
            seeds: int32, of the tokens in ``sources``, for a stochastic quantizer (rounding.py); None lets it round to the nearest code.
        """
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.packed.pack_blocks import pack_blocks, can_pack

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
        """What a layer's keys or values become in blocks.

        Args:
            numbers: float32 [heads, tokens, dim]; whole blocks.
            tokens: int64 [heads, tokens], positions.
            is_value: whether they are values.
            layer, first_head: which of the model's, by which noise is drawn.
            seeds: int32 [heads, tokens], by which it is drawn, too; None rounds to the nearest code.
        """
        layout, drawn = self.values if is_value else self.keys, None
        if seeds is not None:
            lanes = lane(layer, first_head, is_value) + 2 * torch.arange(len(numbers), device=numbers.device)
            drawn = noise(seeds, lanes, layout.dim)
        return self.quantized(numbers, tokens, layout, self.rotations(numbers.device)[is_value], drawn)

    def quantized(
        self,
        numbers: torch.Tensor,
        tokens: torch.Tensor,
        layout: BlockLayout,
        rotation: torch.Tensor | None,
        drawn: torch.Tensor | None = None,
    ) -> Quantized:
        """Codes of float32 [heads, tokens, dim] at positions ``tokens``, int64 [heads, tokens]; rotated (back) first.

        Drawn by noise of the same shape as the numbers, where there is some.
        """
        if layout.positions:
            numbers = self.rotary.rotated(numbers, -tokens)
        if rotation is not None:
            numbers = numbers @ rotation
        by = () if drawn is None else (drawn.view(len(numbers), -1, layout.tokens, layout.dim),)
        block = self.quantizer.quantize(numbers.view(len(numbers), -1, layout.tokens, layout.dim), layout.grid, *by)
        return block._replace(positions=tokens.view(block.codes.shape[:3])) if layout.positions else block

    def whole(
        self, block: Quantized, layout: BlockLayout, levels: torch.Tensor | None, rotation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What blocks mean, keys with rotary embedding at their positions: float32 [heads, tokens, dim]; turned back with ``rotation``."""
        numbers = whole(block, layout.grid, levels)
        if rotation is not None:
            numbers = numbers @ rotation.t()
        if layout.positions:
            numbers = self.rotary.rotated(numbers, block.positions)
        return numbers.flatten(1, 2)

    def restore(self, buffers: KVBuffers, blocks: torch.Tensor, first: int, targets: torch.Tensor) -> None:
        """Make full KV of blocks: what they mean, in the pool's dtype; does not wait for the device.

        Args:
            buffers: the pool's.
            blocks: int64, slots of packed blocks.
            first: of their tokens the first that is wanted.
            targets: int64 [tokens], slots for as many tokens from there on, none of ``blocks``.
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
                    numbers = self.whole(self.read(buffer, layout, packed), layout, levels[is_value], rotations[is_value])
                    buffer[slots] = numbers[:, start % size :][:, : len(slots)].transpose(0, 1).to(buffer.dtype)

    def read(self, buffer: torch.Tensor, layout: BlockLayout, slots: torch.Tensor) -> Quantized:
        """The blocks in ``slots``, int64 [packed], of a layer's key or value ``buffer``."""
        cells = as_bytes(buffer)[slots]
        return layout.unpack(cells.unflatten(0, (-1, self.block_slots)).permute(2, 0, 1, 3))


class QuantizedLayout(RowCountLayout[Packing]):
    """Rows that begin with packed blocks, and how many slots of each hold them."""

    def slot_layout(self, method: "MethodSpec", plain: PlainSlots) -> Packing | PlainSlots:
        """In blocks where a method packs, else as tokens."""
        return plain if method.quantizer is None else self.layout

    def begins(self, row: int, view: CompressedKV) -> None:
        """With the blocks of its copy."""
        self.counts[row] = view.packed

    def check(self, row: int, view: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that the row says how much of its copy is packed."""
        if int(self.counts[row]) != view.packed:
            raise IntegrityError(f"the copy of draft row {row} has {view.packed} packed slots, and the row says {int(self.counts[row])}")


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """A layer's buffer, [slots, kv_heads, head_dim], as uint8 [slots, kv_heads, cell_bytes] over the same memory."""
    return buffer.view(torch.uint8)
