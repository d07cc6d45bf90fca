"""Requests at a cache rank, as the inference rank sees them: lanes and blocks (:class:`KeyLeases`), and open selection requests
(:class:`RankRequest`). The inference rank allocates lanes and blocks, so it knows in advance when the rank is full.

Requests with a common prefix share full blocks of keys. A block's name is a hash of the tokens up to the block's end
(:func:`block_hashes`). Slots would not identify a block, because they change when full KV is freed or moved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.protocol import BLOCK, MAX_BLOCKS_PER_LEASE
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.block_layout import chained

# Returns the name of a full block, by its index in the request; None for a block that is not shared.
Name = Callable[[int], bytes | None]


class MemoryFull(Exception):
    """The rank has no free lane, or no free block, for a request. The text is the reason as metrics name it."""


@dataclass
class KeyLease:
    """Memory of one request at a rank.

    Attributes:
        lane: Lane of the request.
        blocks: Blocks of its tokens, in order.
        held: Tokens whose keys were sent.
        sequence: Sequence of the newest selection request for all layers. A lane's sequence continues across requests, so no reply is
            applied to another request.
    """

    lane: int
    blocks: list[int] = field(default_factory=list)
    held: int = 0
    sequence: int = 0


class KeyLeases:
    """All leases at one process of a rank.

    Attributes:
        link: Connection to the rank.
        epoch: Epoch of the process. In another epoch all leases are void.
        buffers: Layers of SGLang's KV pool.
        sent: Tokens whose keys were sent; those of shared blocks count once.
    """

    def __init__(self, link: RankLink, buffers: KVBuffers):
        attach = link.settings.attach
        self.link = link
        self.epoch = link.epoch
        self.buffers = buffers
        self.sent = 0
        self._lanes = list(reversed(range(attach.shape.lanes)))
        self._free = list(reversed(range(attach.blocks)))
        self._readers = [0] * attach.blocks
        self._sequences = [0] * attach.shape.lanes
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

    def open(self) -> KeyLease:
        """Open a lease for a new request.

        Raises:
            MemoryFull: All lanes are in use.
            RankUnavailable: The rank accepts no messages.
        """
        if not self._lanes:
            raise MemoryFull("no-lane")
        lane = self._lanes.pop()
        lease = KeyLease(lane, sequence=self._sequences[lane])
        self.link.send_message(protocol.Lease(lease.lane, 0, ()))
        return lease

    def close(self, lease: KeyLease) -> None:
        """Close the lease of a request that has ended. Blocks without another reader become free.

        Raises:
            RankUnavailable: The rank accepts no messages.
        """
        self._lanes.append(lease.lane)
        self._sequences[lease.lane] = lease.sequence
        self._release(lease.blocks)
        lease.blocks = []
        self.link.send_message(protocol.Free(lease.lane))

    def _forget_name(self, block: int) -> None:
        self._by_name.pop(self._names.pop(block, b""), None)

    def _release(self, blocks: Sequence[int]) -> None:
        """Remove one reader from each block, and free blocks without readers."""
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._forget_name(block)
                self._free.append(block)

    def extend(self, lease: KeyLease, slots: torch.Tensor, block_name: Name = lambda index: None) -> bool:
        """Send the missing keys of a request, as many as there are free staging slots.

        Another request may have sent blocks with the same keys since. Then this request uses those blocks and releases its own. So
        requests that start with the same prefix at the same time each send a part.

        Args:
            lease: The request's lease.
            slots: int64 [tokens], pool slots from the first token on. Slots of tokens that the rank already has are ignored.
            block_name: Returns the names of full blocks. By default blocks have no names, so that no other request shares them.

        Returns:
            Whether the rank now has all keys.

        Raises:
            MemoryFull: Too few free blocks; nothing was sent.
            RankUnavailable: The rank accepts no messages.
        """
        self._take_blocks(lease, len(slots), block_name)
        pieces, puts = [], []
        while lease.held < len(slots):
            if self._use_shared_blocks(lease, len(slots), block_name):
                continue
            place = self.link.place()
            if place is None:
                break
            (index, offset), first = divmod(lease.held, BLOCK), lease.held
            tokens = min(BLOCK - offset, len(slots) - first)
            pieces.append(protocol.KeyPiece(lease.blocks[index], offset, tokens, place))
            puts.append(protocol.StagedTokens(place, tokens, first))
            lease.held += tokens
        if pieces:
            self.link.send_message(protocol.Append(tuple(pieces), self.link.exchange_buffer.put_keys(puts, self.buffers, slots)))
            self.sent += sum(piece.tokens for piece in pieces)
            for piece, put in zip(pieces, puts):
                if piece.offset + piece.tokens == BLOCK:
                    self._register_name(piece.block, block_name(put.first // BLOCK))
        return lease.held >= len(slots)

    def _find_shared_blocks(self, first: int, tokens: int, block_name: Name) -> list[int]:
        """Return blocks, filled by other requests, that match a request's blocks from ``first`` on. Stops at the first block that does
        not match."""
        found: list[int] = []
        for index in range(first, tokens // BLOCK):
            named = block_name(index)
            block = None if named is None else self._by_name.get(named)
            if block is None:
                break
            found.append(block)
        return found

    def _take_blocks(self, lease: KeyLease, tokens: int, block_name: Name) -> None:
        """Allocate blocks for all tokens of a request, using matching blocks of other requests first."""
        first, needed = len(lease.blocks), -(-tokens // BLOCK)
        taken = self._find_shared_blocks(first, tokens, block_name) if lease.held == first * BLOCK else []
        shared = len(taken)
        missing = needed - first - shared
        if missing > len(self._free):
            raise MemoryFull("memory-full")
        taken += (self._free.pop() for _ in range(missing))
        self._assign(lease, first, taken)
        lease.held += shared * BLOCK

    def _use_shared_blocks(self, lease: KeyLease, tokens: int, block_name: Name) -> bool:
        """Replace the next blocks by matching blocks of other requests. Return whether any matched."""
        first, inside = divmod(lease.held, BLOCK)
        found = [] if inside else self._find_shared_blocks(first, tokens, block_name)
        if not found:
            return False
        before = lease.blocks[first:]
        # The rank gets a lease's blocks from an index on.
        lease.blocks = lease.blocks[:first]
        self._assign(lease, first, found + before[len(found) :])
        self._release(before)
        lease.held += len(found) * BLOCK
        return True

    def _assign(self, lease: KeyLease, first: int, blocks: Sequence[int]) -> None:
        """Assign blocks to a request, from its block ``first`` on."""
        for block in blocks:
            self._readers[block] += 1
        lease.blocks += blocks
        for at in range(0, len(blocks), MAX_BLOCKS_PER_LEASE):
            self.link.send_message(protocol.Lease(lease.lane, first + at, tuple(blocks[at : at + MAX_BLOCKS_PER_LEASE])))

    def _register_name(self, block: int, named: bytes | None) -> None:
        """Register a sent block under its name, unless another block has that name."""
        if named is not None and named not in self._by_name:
            self._by_name[named], self._names[block] = block, named


def block_hashes(namespace: str, tokens: Sequence[int]) -> list[bytes]:
    """Return for each full block of a context a hash of all tokens up to the block's end.

    Args:
        namespace: What else the keys depend on, as in SGLang's prefix tree (``extra_key``: an adapter, a salt).
        tokens: Token ids of the context.
    """
    ids = numpy.asarray(tokens, numpy.int64)
    blocks = (ids[end - BLOCK : end].tobytes() for end in range(BLOCK, len(ids) + 1, BLOCK))
    return [*chained([namespace.encode(), *blocks])][1:]


@dataclass(frozen=True)
class PendingSelection:
    """A selection request whose selection the compressed KV will apply: its sequence, covered tokens, and tokens to keep for each head."""

    sequence: int
    covered: int
    keep: int


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
    """A request at a rank.

    Attributes:
        leases: Leases at the process that has the keys.
        lease: The request's lease.
        names: Names of its prompt's blocks, which requests with the same prefix share.
        pending: The newest selection request of each pack, by the pack's first layer, until its selection is applied or dropped.
        unanswered: Sequence of the selection request of each pack whose reply has not arrived, by the pack's first layer. Unused where the
            device waits for replies.
        is_remote_only: The request's full KV is remote-only.
    """

    leases: KeyLeases
    lease: KeyLease
    names: Sequence[bytes] = ()
    pending: dict[int, PendingSelection] = field(default_factory=dict)
    unanswered: dict[int, int] = field(default_factory=dict)
    is_remote_only: bool = False

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys has ended."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch

    def extend(self, slots: torch.Tensor) -> bool:
        """See :meth:`KeyLeases.extend`. Blocks are named by hashes of tokens."""
        return self.leases.extend(self.lease, slots, lambda index: self.names[index] if index < len(self.names) else None)
