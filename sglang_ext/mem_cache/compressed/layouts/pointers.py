"""Copies that hold no KV: for each layer and KV head, the slots of full KV where the tokens lie that the head keeps.

A pointer is the int32 number of a slot. Those of a head lie one after the other in its key cells of the copy's own slots in
SGLang's pool, in each layer; for heads of 128 numbers in 16 bits a slot holds 64 of each head. So they take next to nothing
beside full KV, and the pool counts them. Full KV of a running request is locked: its slots stay where they are.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang_ext.core import CompressedKV, IntegrityError
from sglang_ext.mem_cache.compressed.layouts.base import RowCountLayout, PlainSlots
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressors.catalogue import MethodSpec


@dataclass(frozen=True)
class Pointers:
    """How pointers lie in the slots of one pool; says of them what :class:`~.packing.Packing` says of packed blocks.

    Attributes:
        per_slot: pointers of a layer and head in one slot.
        page_size: slots that the pool hands out together.
    """

    per_slot: int
    page_size: int
    recent: ClassVar[int] = 0
    sinks: ClassVar[int] = 0
    stochastic: ClassVar[bool] = False

    @classmethod
    def for_pool(cls, buffers: KVBuffers, page_size: int) -> "Pointers":
        """For a pool with these buffers."""
        return cls(as_pointers(buffers.keys[0]).shape[-1], page_size)

    @property
    def unit(self) -> int:
        """Tokens of which copies cover and keep whole multiples."""
        return self.page_size

    @property
    def share(self) -> float:
        """Slots that they take, of those of the tokens that they lead to."""
        return 1 / self.per_slot

    def packed_slots(self, tokens: int) -> int:
        """Slots that hold pointers to so many tokens."""
        return -(-tokens // self.per_slot)

    def held_slots(self, tokens: int) -> int:
        """The same, filled up to whole pages."""
        return -(-self.packed_slots(tokens) // self.page_size) * self.page_size

    def write(
        self,
        buffers: KVBuffers,
        kept: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> None:
        """Let the copy lead to what each head keeps; on a GPU without waiting for it.

        Args:
            buffers: the pool's.
            kept: int64 [layers, kv_heads, count], tokens counted in ``sources``.
            sources: int64 [tokens], slots of the context.
            targets: int64, the copy's slots, at least :meth:`packed_slots` of ``count``.
            seeds: of no use.
        """
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.compressed.write_pointers import write_pointers

            write_pointers(buffers.key_table, buffers.keys[0], kept, sources, targets)
            return
        held = self.packed_slots(kept.shape[-1])
        for buffer, of_layer in zip(buffers.keys, sources[kept]):
            filled = torch.nn.functional.pad(of_layer, (0, held * self.per_slot - of_layer.shape[-1]))
            as_pointers(buffer)[targets[:held]] = filled.unflatten(-1, (held, -1)).transpose(0, 1).int()

    def read(self, keys: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        """Where the tokens lie that the heads of a layer keep: int64 [kv_heads, count].

        Args:
            keys: the layer's key buffer.
            slots: int64, the copy's, in their order.
            count: tokens that each head keeps.
        """
        held = as_pointers(keys).index_select(0, slots[: self.packed_slots(count)])
        return held.transpose(0, 1).flatten(1)[:, :count].long()


class PointerLayout(RowCountLayout[Pointers]):
    """Rows that begin with pointers, and to how many tokens each head's lead; they are chosen anew in each round."""

    shareable = False
    points_to_full_kv = True

    def slot_layout(self, method: "MethodSpec", plain: PlainSlots) -> Pointers:
        """As pointers."""
        return self.layout

    def begins(self, row: int, view: CompressedKV) -> None:
        """With pointers to so many tokens."""
        self.counts[row] = view.own_tokens

    def check(self, row: int, view: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check that all pointers lead to the request's own tokens."""
        mine = torch.zeros(len(buffers.keys[0]), dtype=torch.bool, device=covered.device)
        mine[covered] = True
        for layer, keys in zip(buffers.layer_ids, buffers.keys):
            led = self.layout.read(keys, view.own, view.own_tokens).flatten()
            if not bool(mine[led].all()):
                raise IntegrityError(
                    f"pointers of the draft row {row} in layer {layer} lead to slots {led[~mine[led]].tolist()[:8]}, which belong to no "
                    "token of its request"
                )


def as_pointers(keys: torch.Tensor) -> torch.Tensor:
    """A layer's key buffer, [slots, kv_heads, head_dim], as int32 [slots, kv_heads, per_slot] over the same memory."""
    return keys.view(torch.int32)
