"""Requests at a cache rank, as the inference rank sees them: lanes and blocks (:class:`KeyLeases`), and open selection requests
(:class:`RankRequest`). The inference rank allocates lanes and blocks, so it knows in advance when the rank is full.

Requests with a common prefix share full blocks of keys. A block's name is a hash of the tokens up to the block's end
(:func:`block_hashes`). Slots would not identify a block, because they change when full KV is freed or moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy
import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.protocol import BLOCK, MAX_BLOCKS_PER_LEASE
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.block_layout import prefix_hashes


class MemoryFull(Exception):
    """The rank has no free lane, or no free block, for a request. The text is the reason as metrics name it."""


@dataclass(frozen=True)
class RowRecord:
    """Tokens whose rows a compressed KV holds.

    Attributes:
        positions: int32 [layers, kv_heads, keep], position of each row; kernels update it.
        covered: Tokens that the compressed KV covers.
    """

    positions: torch.Tensor
    covered: int


@dataclass
class RankRequest:
    """A request at a rank: its memory there, and its open selection requests.

    Attributes:
        leases: Leases at the process that has the keys.
        lane: Lane of the request.
        sequences: Sequence of the newest selection request of each pack, by the pack's first layer. Those of a lane continue across requests,
            so no reply is applied to another request.
        blocks: Blocks of its tokens, in order.
        names: Names of the first blocks, in order. Other requests share named blocks.
        held: Tokens whose keys were sent.
        pending: The newest selection request of each pack, by the pack's first layer, until its selection is applied or dropped.
        unanswered: Sequence of the selection request of each pack whose reply has not arrived, by the pack's first layer. Unused where the
            device waits for replies.
        is_remote_only: The request's full KV is remote-only.
    """

    leases: "KeyLeases"
    lane: int
    sequences: list[int]
    blocks: list[int] = field(default_factory=list)
    names: Sequence[bytes] = ()
    held: int = 0
    pending: dict[int, protocol.SelectionRequest] = field(default_factory=dict)
    unanswered: dict[int, int] = field(default_factory=dict)
    is_remote_only: bool = False

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys has ended."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch


class KeyLeases:
    """All leases at one process of a rank.

    Attributes:
        link: Connection to the rank.
        epoch: Epoch of the process. In another epoch all leases are void.
        buffers: SGLang's KV pool.
    """

    def __init__(self, link: RankLink, buffers: KVBuffers):
        attach = link.attach
        self.link = link
        self.epoch = link.epoch
        self.buffers = buffers
        self._lanes = list(reversed(range(attach.shape.lanes)))
        self._free = list(reversed(range(attach.blocks)))
        self._readers = [0] * attach.blocks
        self._sequences = [[0] * attach.shape.packs for _ in range(attach.shape.lanes)]
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def free_lanes(self) -> int:
        """Number of free lanes, that is, of requests that can be added."""
        return len(self._lanes)

    def open(self) -> RankRequest:
        """Open a lease for a new request. Raise :class:`MemoryFull` if all lanes are in use, and :class:`RankUnavailable` as for messages."""
        if not self._lanes:
            raise MemoryFull("no-lane")
        lane = self._lanes.pop()
        self.link.send_message(protocol.Lease(lane, 0, ()))
        return RankRequest(self, lane, self._sequences[lane])

    def close(self, request: RankRequest) -> None:
        """Close the lease of a request that has ended. Blocks without another reader become free. Raise :class:`RankUnavailable` as for messages."""
        self._lanes.append(request.lane)
        self._release(request.blocks)
        request.blocks = []
        self.link.send_message(protocol.Free(request.lane))

    def _release(self, blocks: Sequence[int]) -> None:
        """Remove one reader from each block, and free blocks without readers."""
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._by_name.pop(self._names.pop(block, b""), None)
                self._free.append(block)

    def extend(self, request: RankRequest, slots: torch.Tensor) -> bool:
        """Send the missing keys of a request, as many as there are free staging slots.

        Another request may have sent blocks with the same keys since. Then this request uses those blocks and releases its own. So
        requests that start with the same prefix at the same time each send a part.

        ``slots``: int64 [tokens], pool slots from the first token on. Slots of tokens that the rank already has are ignored. Returns whether the
        rank now has all keys.

        Raises:
            MemoryFull: Too few free blocks; nothing was sent.
            RankUnavailable: The rank accepts no messages.
        """
        self._take_blocks(request, len(slots))
        pieces, puts = [], []
        while request.held < len(slots):
            if self._use_shared_blocks(request, len(slots)):
                continue
            place = self.link.place()
            if place is None:
                break
            (index, offset), first = divmod(request.held, BLOCK), request.held
            tokens = min(BLOCK - offset, len(slots) - first)
            pieces.append(protocol.KeyPiece(request.blocks[index], offset, tokens, place))
            puts.append(protocol.StagedTokens(place, tokens, first))
            request.held += tokens
        if pieces:
            self.link.send_message(protocol.Append(tuple(pieces), self.link.exchange_buffer.put_keys(puts, self.buffers, slots)))
            for piece, put in zip(pieces, puts):
                index = put.first // BLOCK
                is_named = piece.offset + piece.tokens == BLOCK and index < len(request.names)
                # Another block may have the name.
                if is_named and request.names[index] not in self._by_name:
                    self._by_name[request.names[index]], self._names[piece.block] = piece.block, request.names[index]
        return request.held >= len(slots)

    def _find_shared_blocks(self, request: RankRequest, first: int, tokens: int) -> list[int]:
        """Return blocks of other requests that match a request's full blocks from ``first`` on, up to the first that does not match."""
        names = request.names[first : tokens // BLOCK]
        return [self._by_name[name] for name in takewhile(self._by_name.__contains__, names)]

    def _take_blocks(self, request: RankRequest, tokens: int) -> None:
        """Allocate blocks for all tokens of a request, using matching blocks of other requests first."""
        first = len(request.blocks)
        taken = self._find_shared_blocks(request, first, tokens) if request.held == first * BLOCK else []
        shared = len(taken)
        missing = -(-tokens // BLOCK) - first - shared
        if missing > len(self._free):
            raise MemoryFull("memory-full")
        taken += (self._free.pop() for _ in range(missing))
        self._assign(request, first, taken)
        request.held += shared * BLOCK

    def _use_shared_blocks(self, request: RankRequest, tokens: int) -> bool:
        """Replace the next blocks by matching blocks of other requests. Return whether any matched."""
        first, inside = divmod(request.held, BLOCK)
        found = [] if inside else self._find_shared_blocks(request, first, tokens)
        if not found:
            return False
        before = request.blocks[first:]
        # The rank gets a lease's blocks from an index on.
        request.blocks = request.blocks[:first]
        self._assign(request, first, found + before[len(found) :])
        self._release(before)
        request.held += len(found) * BLOCK
        return True

    def _assign(self, request: RankRequest, first: int, blocks: Sequence[int]) -> None:
        """Assign blocks to a request, from its block ``first`` on."""
        for block in blocks:
            self._readers[block] += 1
        request.blocks += blocks
        for at in range(0, len(blocks), MAX_BLOCKS_PER_LEASE):
            self.link.send_message(protocol.Lease(request.lane, first + at, tuple(blocks[at : at + MAX_BLOCKS_PER_LEASE])))


def block_hashes(namespace: str, tokens: Sequence[int]) -> list[bytes]:
    """Return for each full block of a context a hash of the ``namespace`` and of all tokens up to the block's end. The namespace is what else
    the keys depend on, as in SGLang's prefix tree (``extra_key``: an adapter, a salt)."""
    ids = numpy.asarray(tokens, numpy.int64)
    blocks = (ids[end - BLOCK : end].tobytes() for end in range(BLOCK, len(ids) + 1, BLOCK))
    return [*prefix_hashes([namespace.encode(), *blocks])][1:]
