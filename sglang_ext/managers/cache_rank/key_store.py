"""Storage of a cache rank: blocks of keys and values that requests share, and the blocks of each request. The inference rank assigns the
blocks."""

from collections.abc import Iterator, Sequence

import torch

from sglang_ext.device import sent
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import BLOCK, Attach, KeyPiece, Lease, StagedTokens
from sglang_ext.managers.kv_transfer.wire import WireError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeyQuantizer, KeySpec, QuantizedKeys


class KeyStore:
    """Blocks of keys, exact or quantized, and with :attr:`BufferShape.rows` exact keys and values. Host memory is used as blocks are
    written.

    Attributes:
        blocks: Number of blocks.
        buffers: Buffers that the selection reads, like those of a KV pool; the tokens of a block are contiguous. For quantized keys: the
            source block and the codes.
        sent: Exact keys and values of all blocks; None if only positions are sent.
    """

    def __init__(self, attach: Attach, device: torch.device):
        shape, scaling, self.blocks = attach.shape, attach.scaling, attach.blocks
        if len(scaling) != shape.layers:
            raise WireError(f"{len(scaling)} scaling factors for {shape.layers} layers: both sides must be of one version")
        sizes, tokens = KeySpec(shape.layers, shape.kv_heads, shape.dim, getattr(torch, shape.dtype), attach.bits), self.blocks * BLOCK
        codes = None if sizes.bits == EXACT else QuantizedKeys(sizes, tokens, device)
        # None if only codes are stored: keys are then quantized from one block.
        self._exact = sizes.empty(tokens, device) if codes is None or shape.rows else None
        self._values = sizes.empty(tokens, device) if shape.rows else None
        if self._exact is None:
            self._block = sizes.empty(BLOCK, device)
        keys, layers = (self._block if self._exact is None else self._exact).unbind(), tuple(range(len(scaling)))
        self._coder = None if codes is None else KeyQuantizer(keys, codes)
        self._device, self._first = device, torch.arange(BLOCK, device=device)
        self._leased: dict[int, list[int]] = {}
        self.buffers = KVBuffers(layers, scaling, keys, keys, codes=codes)
        self.sent = None if self._values is None else KVBuffers(layers, scaling, keys, self._values.unbind())

    def lease(self, told: Lease) -> None:
        """Set the blocks of a lane's request. If a block does not exist, or an earlier one is missing, raise :class:`WireError`."""
        if told.blocks and max(told.blocks) >= self.blocks:
            raise WireError(f"the lease names block {max(told.blocks)}, but there are {self.blocks} blocks")
        held = self._leased.setdefault(told.lane, [])
        if told.first > len(held):
            raise WireError(f"blocks from {told.first} on were leased to lane {told.lane}, which has {len(held)} blocks")
        held[told.first :] = told.blocks

    def free(self, lane: int) -> None:
        """Remove the blocks of a lane's request."""
        self._leased.pop(lane, None)

    def first_slot(self, told: KeyPiece) -> int:
        """Return the slot of the first token. If the tokens do not fit into the block, raise :class:`WireError`."""
        if told.block >= self.blocks or told.offset + told.tokens > BLOCK:
            place = f"block {told.block} (of {self.blocks} blocks of {BLOCK} tokens)"
            raise WireError(f"{told.tokens} tokens at offset {told.offset} do not fit into {place}")
        return told.block * BLOCK + told.offset

    def slots(self, lane: int, tokens: int) -> torch.Tensor:
        """Return the slots of the first tokens of a lane's request: int64 [tokens]. If it has fewer, raise :class:`WireError`."""
        held = self._leased.get(lane, [])
        if tokens > len(held) * BLOCK:
            raise WireError(f"{tokens} tokens were requested of lane {lane}, whose {len(held)} blocks hold {len(held) * BLOCK}")
        first = torch.tensor(held[: -(-tokens // BLOCK)])[:, None] * BLOCK
        return (first + torch.arange(BLOCK)).flatten()[:tokens]

    def pull(self, memory: MappedExchangeBuffer, pulls: Sequence[StagedTokens]) -> None:
        """Copy tokens from staging slots into the store, each of ``pulls`` from its first slot here on."""
        if self._exact is None:
            for place, tokens, first in pulls:
                memory.pull([StagedTokens(place, tokens, 0)], self._block)
                self._coder.quantize(self._first[:tokens], first)
            return
        for some in split_by_block(pulls):
            memory.pull(some, self._exact)
            if self._coder is not None:
                _, tokens, first = torch.tensor(some).unbind(1)
                inside = torch.arange(BLOCK)
                self._coder.quantize(sent((first[:, None] + inside)[inside < tokens[:, None]], self._device))
            if self._values is not None:
                memory.pull(some, self._values, values=True)

    def clear(self, tokens: int) -> None:
        """Set the first ``tokens`` slots to zero."""
        if self.buffers.codes is not None:
            self.buffers.codes.clear(tokens)
        else:
            self._exact[:, :tokens].zero_()


def split_by_block(pulls: Sequence[StagedTokens]) -> Iterator[list[StagedTokens]]:
    """Split ``pulls`` into groups without a common target block. A block that is reused by another request is thus written in the order
    of sending."""
    some: dict[int, StagedTokens] = {}
    for each in pulls:
        if each.first // BLOCK in some:
            yield [*some.values()]
            some = {}
        some[each.first // BLOCK] = each
    if some:
        yield [*some.values()]
