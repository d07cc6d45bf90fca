"""Storage of a cache rank: blocks of keys and values that requests share, and the blocks of each request. The inference rank assigns the
blocks."""

import torch

from sglang_ext.managers.cache_rank.protocol import BLOCK, Lease, KeyPiece, ProtocolError, BufferShape
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, ExactKVRows, KeySpec, scoring_keys


class KeyStore:
    """Blocks of keys, exact or quantized, and with :attr:`BufferShape.rows` exact keys and values. Host memory is used as blocks are
    written.

    The inference rank tracks which blocks are in use, so it knows before it sends whether the store is full.

    Attributes:
        held: Keys that are scored; the tokens of a block are contiguous.
        rows: K and V that are sent back; None if only positions are sent.
        blocks: Number of blocks.
    """

    def __init__(
        self, shape: BufferShape, blocks: int, scaling: tuple[float, ...], bits: int = EXACT, device: torch.device = torch.device("cpu")
    ):
        if len(scaling) != shape.layers:
            raise ProtocolError(f"{len(scaling)} scaling factors for {shape.layers} layers: both sides must be of one version")
        sizes = KeySpec(shape.layers, shape.kv_heads, shape.dim, getattr(torch, shape.dtype), bits)
        self.held = scoring_keys(sizes, blocks * BLOCK, device)
        self.rows = ExactKVRows(sizes, blocks * BLOCK, self.held, device) if shape.rows else None
        self.blocks = blocks
        self._scaling = scaling
        self._leased: dict[int, list[int]] = {}

    def lease(self, told: Lease) -> None:
        """Set the blocks of a lane's request from index ``told.first`` on.

        Raises:
            ProtocolError: A block does not exist, or an earlier block of the request is missing.
        """
        if told.blocks and max(told.blocks) >= self.blocks:
            raise ProtocolError(f"the lease names block {max(told.blocks)}, but there are {self.blocks} blocks")
        held = self._leased.setdefault(told.lane, [])
        if told.first > len(held):
            raise ProtocolError(f"blocks from {told.first} on were leased to lane {told.lane}, which has {len(held)} blocks")
        held[told.first :] = told.blocks

    def free(self, lane: int) -> None:
        """Remove the blocks of a lane's request."""
        self._leased.pop(lane, None)

    def append(self, told: KeyPiece, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Copy keys, and values, into a block.

        Args:
            told: The target tokens.
            keys: [layers, block, kv_heads, dim]; the first ``told.tokens`` tokens are valid.
            values: Like ``keys``.

        Raises:
            ProtocolError: The tokens do not fit into the block.
        """
        first_slot = self.first_slot(told)
        self.held.write(first_slot, keys[:, : told.tokens])
        if self.rows is not None:
            self.rows.write(first_slot, keys[:, : told.tokens], values[:, : told.tokens])

    def first_slot(self, told: KeyPiece) -> int:
        """Return the slot of the first token.

        Raises:
            ProtocolError: The tokens do not fit into the block.
        """
        if told.block >= self.blocks or told.offset + told.tokens > BLOCK:
            place = f"block {told.block} (of {self.blocks} blocks of {BLOCK} tokens)"
            raise ProtocolError(f"{told.tokens} tokens at offset {told.offset} do not fit into {place}")
        return told.block * BLOCK + told.offset

    def gather_keys(self, layers: slice, slots: torch.Tensor) -> KVBuffers:
        """Gather keys of some layers at ``slots``, int64 [tokens], into contiguous buffers like those of SGLang's pool, without values."""
        places = tuple(range(len(self._scaling)))[layers]
        keys = tuple(self.held.read(layer, slots) for layer in places)
        return KVBuffers(places, self._scaling[layers], keys, keys)

    def slots(self, lane: int, tokens: int) -> torch.Tensor:
        """Return the slots of the first ``tokens`` tokens of a lane's request: int64 [tokens].

        Raises:
            ProtocolError: The request has fewer tokens.
        """
        held = self._leased.get(lane, [])
        if tokens > len(held) * BLOCK:
            raise ProtocolError(f"{tokens} tokens were requested of lane {lane}, whose {len(held)} blocks hold {len(held) * BLOCK}")
        first = torch.tensor(held[: -(-tokens // BLOCK)])[:, None] * BLOCK
        return (first + torch.arange(BLOCK)).flatten()[:tokens]
