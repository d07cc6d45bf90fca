"""Whose keys a cache rank holds: lanes and blocks are given out here, on the inference rank, so that what is full is known ahead.

Requests with one beginning share the blocks that are full of its keys, by names of blocks. Where the host knows them these are the slots
of SGLang's pool, which rows have in common that share a prefix in the tree: while one of them has a lease, its full KV is locked, and so is
what those slots hold. Where full KV is given back, or moves, slots tell no block from others any more (:meth:`KeyLeases.leave_slots`).
Beside a GPU they are the tokens up to a block's end (:func:`block_hashes`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.managers.cache_rank.protocol import BLOCK, MAX_BLOCKS_PER_LEASE
from sglang_ext.mem_cache.compressed.layouts.rounding import chained
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# What tells a whole block from others, by its place in a request; None for one that is nobody else's.
Name = Callable[[int], bytes | None]


class MemoryFull(Exception):
    """The rank has no lane, or no block, for a request; says which, as metrics name it."""


@dataclass
class KeyLease:
    """What a rank holds of one request.

    Attributes:
        lane: of the request.
        blocks: of its tokens, in order.
        held: tokens whose keys were sent.
        sequence: of the newest question; a lane's go on from request to request, so that no answer is taken for another's.
        alone: whether its request's full KV was given back: of its first tokens it has no slots.
    """

    lane: int
    blocks: list[int] = field(default_factory=list)
    held: int = 0
    sequence: int = 0
    alone: bool = False


class KeyLeases:
    """All leases at one process of a rank.

    Attributes:
        link: to the rank.
        epoch: of the process; with another all leases are void.
        buffers: the layers of SGLang's pool.
        sent: tokens whose keys were sent, those of shared blocks once.
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
        """Blocks that nobody has."""
        return len(self._free)

    @property
    def free_lanes(self) -> int:
        """Requests that it takes yet."""
        return len(self._lanes)

    def open(self) -> KeyLease:
        """For a request that has none.

        Raises:
            MemoryFull: all lanes are taken.
            RankUnavailable: the rank takes no messages.
        """
        if not self._lanes:
            raise MemoryFull("no-lane")
        lane = self._lanes.pop()
        lease = KeyLease(lane, sequence=self._sequences[lane])
        self.link.send_message(protocol.Lease(lease.lane, 0, ()))
        return lease

    def close(self, lease: KeyLease) -> None:
        """Its request is gone; what nobody else reads is free.

        Raises:
            RankUnavailable: the rank takes no messages.
        """
        self._lanes.append(lease.lane)
        self._sequences[lease.lane] = lease.sequence
        self._release(lease.blocks)
        lease.blocks = []
        self.link.send_message(protocol.Free(lease.lane))

    def leave_slots(self, lease: KeyLease) -> None:
        """The slots from which a lease's blocks came may get other tokens: nobody finds the blocks by them any more."""
        for block in lease.blocks:
            self._forget_name(block)

    def _forget_name(self, block: int) -> None:
        self._by_name.pop(self._names.pop(block, b""), None)

    def _release(self, blocks: Sequence[int]) -> None:
        """A request reads these no more."""
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._forget_name(block)
                self._free.append(block)

    def extend(self, lease: KeyLease, slots: torch.Tensor, name: Name | None = None) -> bool:
        """Send what the rank lacks of the keys in ``slots``, a request's from the first on; as much as has places.

        Of blocks that come meanwhile with the same keys it takes another request's, and gives its own back: requests that begin alike at
        the same time each send a part.

        Args:
            lease: the request's.
            slots: int64 [tokens]; on a CPU, where nothing else is said, they name blocks. Of tokens that the rank has, those of a lease that
                is ``alone`` are not looked at.
            name: of whole blocks.

        Returns:
            Whether it has all of them now.

        Raises:
            MemoryFull: there are too few blocks; nothing was sent.
            RankUnavailable: the rank takes no messages.
        """
        name = name or (lambda index: None if lease.alone else _key(slots, index))
        self._take_blocks(lease, len(slots), name)
        pieces, puts = [], []
        while lease.held < len(slots):
            if self._share(lease, len(slots), name):
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
            self.link.send_message(protocol.Append(tuple(pieces), self.link.memory.put_keys(puts, self.buffers, slots)))
            self.sent += sum(piece.tokens for piece in pieces)
            for piece, put in zip(pieces, puts):
                if piece.offset + piece.tokens == BLOCK:
                    self._name(piece.block, name(put.first // BLOCK))
        return lease.held >= len(slots)

    def _filled(self, first: int, tokens: int, name: Name) -> list[int]:
        """The blocks that others have filled with what a request has from its ``first`` block on, of so many tokens."""
        found: list[int] = []
        for index in range(first, tokens // BLOCK):
            named = name(index)
            block = None if named is None else self._by_name.get(named)
            if block is None:
                break
            found.append(block)
        return found

    def _take_blocks(self, lease: KeyLease, tokens: int, name: Name) -> None:
        """Give a request the blocks for all its tokens: first those that others have filled with the same keys."""
        first, needed = len(lease.blocks), -(-tokens // BLOCK)
        taken = self._filled(first, tokens, name) if lease.held == first * BLOCK else []
        shared = len(taken)
        missing = needed - first - shared
        if missing > len(self._free):
            raise MemoryFull("memory-full")
        taken += (self._free.pop() for _ in range(missing))
        self._give(lease, first, taken)
        lease.held += shared * BLOCK

    def _share(self, lease: KeyLease, tokens: int, name: Name) -> bool:
        """Take others' blocks in the place of those that come next; whether there were some."""
        first, inside = divmod(lease.held, BLOCK)
        found = [] if inside else self._filled(first, tokens, name)
        if not found:
            return False
        before = lease.blocks[first:]
        # The rank hears of a lease's blocks from one on.
        lease.blocks = lease.blocks[:first]
        self._give(lease, first, found + before[len(found) :])
        self._release(before)
        lease.held += len(found) * BLOCK
        return True

    def _give(self, lease: KeyLease, first: int, blocks: Sequence[int]) -> None:
        """Let a request read blocks, from its ``first`` one on."""
        for block in blocks:
            self._readers[block] += 1
        lease.blocks += blocks
        for at in range(0, len(blocks), MAX_BLOCKS_PER_LEASE):
            self.link.send_message(protocol.Lease(lease.lane, first + at, tuple(blocks[at : at + MAX_BLOCKS_PER_LEASE])))

    def _name(self, block: int, named: bytes | None) -> None:
        """Let others find a block whose keys were sent, where nobody finds another by its name."""
        if named is not None and named not in self._by_name:
            self._by_name[named], self._names[block] = block, named


def _key(slots: torch.Tensor, index: int) -> bytes:
    """What tells a full block from others: where the keys of its tokens lie in the pool, and at which positions."""
    return index.to_bytes(4, "little") + slots[index * BLOCK : (index + 1) * BLOCK].numpy().tobytes()


def block_hashes(namespace: str, tokens: Sequence[int]) -> list[bytes]:
    """Of the whole blocks of a context, each a hash of all tokens up to its end.

    Args:
        namespace: what else its keys depend on, as SGLang's prefix tree has it (``extra_key``: an adapter, a salt).
        tokens: of it.
    """
    ids = numpy.asarray(tokens, numpy.int64)
    blocks = (ids[end - BLOCK : end].tobytes() for end in range(BLOCK, len(ids) + 1, BLOCK))
    return [*chained([namespace.encode(), *blocks])][1:]
