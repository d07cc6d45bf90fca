"""What a cache rank holds, as the inference rank says where: blocks of keys, and of values, that requests share, and who has which."""

import torch

from sglang_ext.managers.cache_rank.protocol import BLOCK, Lease, KeyPiece, ProtocolError, BufferShape
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, ExactKVRows, KeySpec, scoring_keys


class KeyStore:
    """Blocks of keys, as they are or in few bits, and with :attr:`BufferShape.rows` exact keys and values; memory is taken as they are written.

    Who has which block is the inference rank's to know, so that what is full it notices before it sends.

    Attributes:
        held: the keys that are scored, each block's tokens in a row.
        rows: K and V that are sent back; None where positions alone are.
        blocks: how many there are.
    """

    def __init__(
        self, shape: BufferShape, blocks: int, scaling: tuple[float, ...], bits: int = EXACT, device: torch.device = torch.device("cpu")
    ):
        if len(scaling) != shape.layers:
            raise ProtocolError(f"{len(scaling)} factors were told of {shape.layers} layers: both sides must be of one version")
        sizes = KeySpec(shape.layers, shape.kv_heads, shape.dim, getattr(torch, shape.dtype), bits)
        self.held = scoring_keys(sizes, blocks * BLOCK, device)
        self.rows = ExactKVRows(sizes, blocks * BLOCK, self.held, device) if shape.rows else None
        self.blocks = blocks
        self._scaling = scaling
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

    def append(self, told: KeyPiece, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Copy keys, [layers, block, kv_heads, dim], of which the first ``told.tokens`` count, and values like them, into a block.

        Raises:
            ProtocolError: they do not fit there.
        """
        first_slot = self.first_slot(told)
        self.held.write(first_slot, keys[:, : told.tokens])
        if self.rows is not None:
            self.rows.write(first_slot, keys[:, : told.tokens], values[:, : told.tokens])

    def first_slot(self, told: KeyPiece) -> int:
        """Where the first of some tokens lies.

        Raises:
            ProtocolError: they do not fit there.
        """
        if told.block >= self.blocks or told.offset + told.tokens > BLOCK:
            place = f"block {told.block}, of {self.blocks} of {BLOCK}"
            raise ProtocolError(f"{told.tokens} tokens from {told.offset} on do not fit into {place}")
        return told.block * BLOCK + told.offset

    def gather_keys(self, layers: slice, slots: torch.Tensor) -> KVBuffers:
        """The keys of some layers in ``slots``, int64 [tokens], one after another: buffers like those of SGLang's pool, without values."""
        places = tuple(range(len(self._scaling)))[layers]
        keys = tuple(self.held.read(layer, slots) for layer in places)
        return KVBuffers(places, self._scaling[layers], keys, keys)

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
