"""Copies a piece of a transfer: between device slots and a buffer, and between that buffer and host pages."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.prefix_cache.pieces import Piece


@dataclass(frozen=True)
class PieceCopies:
    """Copies between one device's KV and one pool; each is launched in the current stream.

    A buffer is a ``half`` of what a pipe has (lanes.py): [rows, words].

    Attributes:
        rows: the device's KV, of keys of all layers before values: [slots, words] each.
        pool: the host pages.
    """

    rows: list[torch.Tensor]
    pool: HostPool

    def gather(self, piece: Piece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """From ``slots``, int64 [tokens of the transfer], to a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            torch.index_select(self.rows[buffer], 0, slots[piece.tokens], out=part)

    def scatter(self, piece: Piece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """From a buffer to ``slots``, int64 [tokens of the transfer]."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            self.rows[buffer].index_copy_(0, slots[piece.tokens], part)

    def to_host(self, piece: Piece, half: torch.Tensor) -> None:
        """From a buffer to host pages."""
        for of_host, of_device in self._blocks(piece, half):
            of_host.copy_(of_device, non_blocking=True)

    def from_host(self, piece: Piece, half: torch.Tensor) -> None:
        """From host pages to a buffer."""
        for of_host, of_device in self._blocks(piece, half):
            of_device.copy_(of_host, non_blocking=True)

    def _blocks(self, piece: Piece, half: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Blocks of memory on the host and in a buffer that belong together."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            of_host = self.pool.words[buffer]
            for run in piece.runs:
                yield of_host[run.first : run.first + run.count], part[run.place : run.place + run.count]
