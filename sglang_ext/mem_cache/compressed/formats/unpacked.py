"""Copies in SGLang's KV pool that keep tokens as they are."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


@dataclass(frozen=True)
class Unpacked:
    """Copies that keep tokens as they are, a slot each: what :class:`~sglang_ext.mem_cache.compressed.formats.packing.Packing` says of others.

    Attributes:
        unit: tokens of a page.
    """

    unit: int
    recent: ClassVar[int] = 0
    sinks: ClassVar[int] = 0
    share: ClassVar[float] = 1.0
    stochastic: ClassVar[bool] = False

    def packed_slots(self, tokens: int) -> int:
        """None hold blocks."""
        return 0

    def held_slots(self, tokens: int) -> int:
        """One for each token."""
        return tokens

    def write(
        self,
        buffers: KVBuffers,
        kept: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> None:
        """Copy what each head keeps; arguments as ``Packing.write``'s."""
        buffers.copy_kept(kept, sources, targets)
