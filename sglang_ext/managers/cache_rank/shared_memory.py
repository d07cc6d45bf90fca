"""Memory that an inference rank and one cache rank both map. Queries, keys and values are sent one way, selected tokens and their rows
the other.

The inference rank allocates the memory without a file name and passes its descriptor to the process that it starts. So an ended process
leaves nothing behind, and no process of an earlier epoch can write here. Each lane and layer has two slots for queries and two for
selected tokens, by the parity of the selection request's sequence number. One slot is read while the other is written. A slot is written
again only after the previous selection request in that slot was answered.

Ranks on GPUs use a similar layout in device memory mapped over CUDA IPC, the exchange buffer (on_gpu/exchange_buffer.py).
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from sglang_ext.managers.cache_rank.protocol import BLOCK, StagedTokens, BufferShape
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Indices into the head of a reply, int64 each.
EPOCH, SEQUENCE, COVERED, KEPT = range(4)
ALIGNED = 64


class StaleSelection(Exception):
    """Shared memory does not hold the reply to this selection request. The text states the difference."""


@dataclass(frozen=True)
class SharedMemory:
    """Views of mapped memory. Both sides create them from the same :class:`~.protocol.BufferShape`.

    Attributes:
        shape: Sizes of the memory.
        queries: [lanes, 2, layers, window, query_heads, dim], oldest first. A selection request with fewer queries uses the beginning.
        keys: [places, layers, block, kv_heads, dim], staging slots.
        heads: int64 [lanes, 2, layers, 4], heads of replies: epoch, sequence, covered tokens, kept tokens.
        chosen: int32 [lanes, 2, layers, kv_heads * most], selected positions. A reply is the first ``kv_heads * kept``, by head.
        values: Like ``keys``. This and the following are empty without :attr:`~.protocol.BufferShape.rows`.
        held: int32, shape of ``chosen``: for a selection request, positions of the rows in the compressed KV.
        fresh: bool, shape of ``chosen``: for a reply, whether the compressed KV lacks the position.
        row_keys, row_values: [lanes, 2, layers, kv_heads, most, dim], K and V of the fresh positions, at the index of each position.
    """

    shape: BufferShape
    queries: torch.Tensor
    keys: torch.Tensor
    heads: torch.Tensor
    chosen: torch.Tensor
    values: torch.Tensor
    held: torch.Tensor
    fresh: torch.Tensor
    row_keys: torch.Tensor
    row_values: torch.Tensor

    @classmethod
    def from_mmap(cls, shape: BufferShape, mapped: mmap.mmap) -> "SharedMemory":
        """Create the views in mapped memory of :func:`shared_memory_bytes` bytes."""
        parts, begin = [], 0
        for sizes, dtype in _parts(shape):
            count = prod(sizes)
            part = torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin) if count else torch.empty(0, dtype=dtype)
            parts.append(part.view(sizes))
            begin += _aligned(prod(sizes) * dtype.itemsize)
        return cls(shape, *parts)

    def put_queries(self, lane: int, sequence: int, first: int, queries: torch.Tensor) -> None:
        """Write the queries of a selection request, [pack layers, up to window, query_heads, dim], from layer ``first`` on."""
        layers, count = queries.shape[:2]
        self.queries[lane, sequence % 2, first : first + layers, :count] = queries

    def get_queries(self, lane: int, sequence: int, layers: slice, count: int) -> torch.Tensor:
        """Return a view of the queries, [pack layers, count, query_heads, dim]."""
        return self.queries[lane, sequence % 2, layers, :count]

    def put_keys(self, puts: Sequence[StagedTokens], buffers: KVBuffers, slots: torch.Tensor) -> int:
        """Copy the keys at pool ``slots``, int64 [tokens], and with rows their values, to staging slots. Each of ``puts`` starts at its
        own index of ``slots``.

        Returns 0, because the message sent afterwards is the barrier.
        """
        for travels, of_layers in [(self.keys, buffers.keys), (self.values, buffers.values)][: 1 + self.shape.rows]:
            copy_tokens(puts, of_layers, slots, travels)
        return 0

    def put_selection(self, epoch: int, lane: int, sequence: int, first: int, covered: int, kept: torch.Tensor) -> None:
        """Write a selection, int64 [pack layers, kv_heads, kept]; its head last."""
        layers, count = slice(first, first + len(kept)), kept.shape[-1]
        self._by_head(self.chosen, lane, sequence, layers, count).copy_(kept)
        head = torch.tensor([epoch, sequence, covered, count])
        self.heads[lane, sequence % 2, layers] = head

    def get_selection(self, epoch: int, lane: int, sequence: int, layers: slice, covered: int, kept: int) -> torch.Tensor:
        """Return a copy of a selection: int64 [pack layers, kv_heads, kept], ascending positions below ``covered``.

        Raises:
            StaleSelection: It belongs to another epoch or selection request, or its positions are invalid.
        """
        expected, heads = [epoch, sequence, covered, kept], self.heads[lane, sequence % 2, layers]
        if wrong := [head for head in heads.tolist() if head != expected]:
            raise StaleSelection(f"epoch, sequence, covered and kept tokens are {wrong[0]}, and {expected} were asked for")
        found = self._by_head(self.chosen, lane, sequence, layers, kept).long()
        if not bool((found[..., 0] >= 0).all() & (found[..., -1] < covered).all() & (found.diff(dim=-1) > 0).all()):
            raise StaleSelection(f"positions are not ascending from 0 to below {covered}")
        return found

    def put_held(self, lane: int, sequence: int, first: int, held: torch.Tensor) -> None:
        """Write the positions that the compressed KV holds, int64 [pack layers, kv_heads, keep], from layer ``first`` on, for a selection
        request."""
        self._by_head(self.held, lane, sequence, slice(first, first + len(held)), held.shape[-1]).copy_(held)

    def get_held(self, lane: int, sequence: int, layers: slice, keep: int) -> torch.Tensor:
        """Return these positions: int64 [pack layers, kv_heads, keep]."""
        return self._by_head(self.held, lane, sequence, layers, keep).long()

    def put_fresh(self, lane: int, sequence: int, first: int, fresh: torch.Tensor) -> None:
        """Write which positions of a selection have rows: bool [pack layers, kv_heads, kept]."""
        self._by_head(self.fresh, lane, sequence, slice(first, first + len(fresh)), fresh.shape[-1]).copy_(fresh)

    def get_fresh(self, lane: int, sequence: int, layers: slice, kept: int) -> torch.Tensor:
        """Return a view of these flags, bool [pack layers, kv_heads, kept]."""
        return self._by_head(self.fresh, lane, sequence, layers, kept)

    def _by_head(self, part: torch.Tensor, lane: int, sequence: int, layers: slice, count: int) -> torch.Tensor:
        """Return a view, [pack layers, kv_heads, count], of a part shaped like ``chosen``: ``count`` numbers for each KV head."""
        heads = self.shape.kv_heads
        return part[lane, sequence % 2, layers, : heads * count].unflatten(-1, (heads, count))

    def rows(self, lane: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a reply's K and V, [layers, kv_heads, most, dim] each, for reading or writing."""
        return self.row_keys[lane, sequence % 2], self.row_values[lane, sequence % 2]


def copy_tokens(puts: Sequence[StagedTokens], of_layers: Sequence[torch.Tensor], slots: torch.Tensor, places: torch.Tensor) -> None:
    """Copy tokens of each layer to staging slots, [places, layers, block, kv_heads, dim].

    Args:
        puts: The staging slots to fill, each from its own index of ``slots`` on.
        of_layers: Buffer of each layer, [slots, kv_heads, dim].
        slots: int64 [tokens], pool slots of the tokens.
        places: The staging slots.
    """
    for place, tokens, first in puts:
        for into, of_layer in zip(places[place], of_layers):
            torch.index_select(of_layer, 0, slots[first : first + tokens], out=into[:tokens])


def shared_memory_bytes(shape: BufferShape) -> int:
    """Return the bytes of the memory. Pages without a write use no memory."""
    return sum(_aligned(prod(sizes) * dtype.itemsize) for sizes, dtype in _parts(shape))


def allocate(shape: BufferShape) -> int:
    """Allocate memory and return its descriptor, which other processes inherit. The caller closes it.

    Raises:
        OSError: The system has no memory.
    """
    descriptor = os.memfd_create("kv-cache-rank", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, shared_memory_bytes(shape))
    return descriptor


def map_memory(shape: BufferShape, descriptor: int) -> SharedMemory:
    """Return views of the memory behind a descriptor, which may be closed afterwards.

    Raises:
        ValueError: The memory has another size.
    """
    size, found = shared_memory_bytes(shape), os.fstat(descriptor).st_size
    if size != found:
        raise ValueError(f"shared memory has {found} bytes, and this shape {size}: both sides must be of one version of sglang-ext")
    return SharedMemory.from_mmap(shape, mmap.mmap(descriptor, size))


def _parts(shape: BufferShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
    dtype = getattr(torch, shape.dtype)
    by_lane, places = (shape.lanes, 2, shape.layers), (shape.places, shape.layers, BLOCK, shape.kv_heads, shape.dim)
    chosen, rows = (*by_lane, shape.kv_heads * shape.most), (*by_lane, shape.kv_heads, shape.most, shape.dim)
    of_rows = [(places, dtype), (chosen, torch.int32), (chosen, torch.bool), (rows, dtype), (rows, dtype)]
    return [
        ((*by_lane, shape.window, shape.query_heads, shape.dim), dtype),
        (places, dtype),
        ((*by_lane, 4), torch.int64),
        (chosen, torch.int32),
        *(((sizes if shape.rows else (0, *sizes[1:])), of_part) for sizes, of_part in of_rows),
    ]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
