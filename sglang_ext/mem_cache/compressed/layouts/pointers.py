"""Compressed KV without KV data: for each layer and KV head, pointers to the full-KV slots of the kept tokens.

A pointer is a slot number, int32. The pointers of a head are stored one after another in the head's key cells of the compressed KV's
slots in SGLang's pool, in each layer. With heads of 128 numbers of 16 bits, a slot stores 64 pointers per head. Pointers thus take little
memory next to full KV, and the pool accounts for them. Full KV of a running request is locked, so that its slots do not change.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang_ext.core import CompressedKV, IntegrityError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots, RowCountLayout

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressors.catalogue import MethodSpec


@dataclass(frozen=True)
class Pointers:
    """How pointers are stored in slots of one pool. It is a :class:`~.base.SlotLayout`.

    Attributes:
        per_slot: Pointers per layer and head in one slot.
        page_size: Slots that the pool allocates together.
    """

    per_slot: int
    page_size: int
    recent: ClassVar[int] = 0
    sinks: ClassVar[int] = 0
    stochastic: ClassVar[bool] = False

    @classmethod
    def for_pool(cls, buffers: KVBuffers, page_size: int) -> "Pointers":
        """Create the layout for a pool with these buffers."""
        return cls(as_pointers(buffers.keys[0]).shape[-1], page_size)

    @property
    def unit(self) -> int:
        """Tokens covered and kept are multiples of it."""
        return self.page_size

    @property
    def share(self) -> float:
        """Slots of pointers, as a share of the slots of the tokens that they point to."""
        return 1 / self.per_slot

    def packed_slots(self, tokens: int) -> int:
        """Slots of the pointers to this many tokens."""
        return -(-tokens // self.per_slot)

    def held_slots(self, tokens: int) -> int:
        """:meth:`packed_slots`, rounded up to whole pages."""
        return -(-self.packed_slots(tokens) // self.page_size) * self.page_size

    def write(
        self,
        buffers: KVBuffers,
        kept: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> None:
        """Point the compressed KV to each head's kept tokens. On a GPU it does not wait for the device.

        Args:
            buffers: The pool's buffers.
            kept: int64 [layers, kv_heads, count], indices into ``sources``.
            sources: int64 [tokens], slots of the context.
            targets: int64, slots of the compressed KV, at least :meth:`packed_slots` of ``count``.
            seeds: Unused.
        """
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.kv_copies import write_pointers

            write_pointers(buffers.key_table, buffers.keys[0], kept, sources, targets)
            return
        held = self.packed_slots(kept.shape[-1])
        for buffer, of_layer in zip(buffers.keys, sources[kept]):
            filled = torch.nn.functional.pad(of_layer, (0, held * self.per_slot - of_layer.shape[-1]))
            as_pointers(buffer)[targets[:held]] = filled.unflatten(-1, (held, -1)).transpose(0, 1).int()

    def read(self, keys: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        """Slots of the tokens that a layer's heads keep: int64 [kv_heads, count].

        Args:
            keys: The layer's key buffer.
            slots: int64, slots of the compressed KV, in order.
            count: Tokens that each head keeps.
        """
        held = as_pointers(keys).index_select(0, slots[: self.packed_slots(count)])
        return held.transpose(0, 1).flatten(1)[:, :count].long()


class PointerLayout(RowCountLayout[Pointers]):
    """Draft rows that begin with pointers, and the number of pointers per head. They are selected again in each round."""

    shareable = False
    points_to_full_kv = True

    def slot_layout(self, method: "MethodSpec", plain: PlainSlots) -> Pointers:
        """The pointer layout, for all methods."""
        return self.layout

    def on_filled(self, row: int, compressed: CompressedKV) -> None:
        """Record the number of pointers per head."""
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
