"""The keys that a cache rank holds, as the inference rank says where: blocks that requests share, and which request has which."""

import torch

from sglang_ext.managers.cache_rank.protocol import BLOCK, Append, Lease, ProtocolError, Shape
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


class KeyStore:
    """Blocks of keys, in buffers like those of SGLang's pool; memory is taken as they are written.

    Who has which block is the inference rank's to know, so that what is full it notices before it sends.

    Attributes:
        buffers: of each layer, keys [tokens, kv_heads, dim], and nothing but keys.
    """

    def __init__(self, shape: Shape, blocks: int, scaling: tuple[float, ...]):
        if len(scaling) != shape.layers:
            raise ProtocolError(f"{len(scaling)} factors were told of {shape.layers} layers: both sides must be of one version")
        sizes, dtype = (blocks * BLOCK, shape.kv_heads, shape.dim), getattr(torch, shape.dtype)
        keys = tuple(torch.empty(sizes, dtype=dtype) for _ in scaling)
        self.buffers = KVBuffers(tuple(range(shape.layers)), scaling, keys, keys)
        self.blocks = blocks
        self._leased: dict[int, list[int]] = {}

    def lease(self, told: Lease) -> None:
        """The request of a lane has further blocks, or other ones.

        Raises:
            ProtocolError: there is no such block, or one before it is missing.
        """
        if told.blocks and max(told.blocks) >= self.blocks:
            raise ProtocolError(f"block {max(told.blocks)} was leased, of {self.blocks}")
        held = self._leased.setdefault(told.lane, [])
        if told.first > len(held):
            raise ProtocolError(f"blocks from {told.first} on were leased in lane {told.lane}, which has {len(held)}")
        held[told.first :] = told.blocks

    def free(self, lane: int) -> None:
        """The request of a lane is gone."""
        self._leased.pop(lane, None)

    def append(self, told: Append, keys: torch.Tensor) -> None:
        """Copy keys, [layers, block, kv_heads, dim], of which the first ``told.tokens`` count, into a block.

        Raises:
            ProtocolError: they do not fit there.
        """
        if told.block >= self.blocks or told.offset + told.tokens > BLOCK:
            place = f"block {told.block}, of {self.blocks} of {BLOCK}"
            raise ProtocolError(f"{told.tokens} tokens from {told.offset} on do not fit into {place}")
        start = told.block * BLOCK + told.offset
        for buffer, new in zip(self.buffers.keys, keys):
            buffer[start : start + told.tokens] = new[: told.tokens]

    def slots(self, lane: int, tokens: int) -> torch.Tensor:
        """Where the first tokens of a lane's request lie: int64 [tokens].

        Raises:
            ProtocolError: it has fewer.
        """
        held = self._leased.get(lane, [])
        if tokens > len(held) * BLOCK:
            raise ProtocolError(f"{tokens} tokens were asked for in lane {lane}, whose {len(held)} blocks hold {len(held) * BLOCK}")
        first = torch.tensor(held[: -(-tokens // BLOCK)])[:, None] * BLOCK
        return (first + torch.arange(BLOCK)).flatten()[:tokens]
