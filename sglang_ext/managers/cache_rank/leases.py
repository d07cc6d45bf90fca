"""Whose keys a cache rank holds: lanes and blocks are given out here, on the inference rank, so that what is full is known ahead.

Requests whose rows begin with the same slots of SGLang's pool, as those do that share a prefix in the tree, share the blocks that are full
of their keys: while one of them has a lease, its full KV is locked, and so is what those slots hold. Where full KV is given back, or moves,
slots tell no block from others any more (:meth:`KeyLeases.leave_slots`).
"""

from dataclasses import dataclass, field

import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.link import RankLink
from sglang_ext.managers.cache_rank.protocol import BLOCK, MOST_NAMED
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


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
        self._by_slots: dict[bytes, int] = {}
        self._slots_of: dict[int, bytes] = {}

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
            RankDown: the rank takes no messages.
        """
        if not self._lanes:
            raise MemoryFull("no-lane")
        lane = self._lanes.pop()
        lease = KeyLease(lane, sequence=self._sequences[lane])
        self.link.say(protocol.Lease(lease.lane, 0, ()))
        return lease

    def close(self, lease: KeyLease) -> None:
        """Its request is gone; what nobody else reads is free.

        Raises:
            RankDown: the rank takes no messages.
        """
        self._lanes.append(lease.lane)
        self._sequences[lease.lane] = lease.sequence
        for block in lease.blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._leave_slots(block)
                self._free.append(block)
        lease.blocks = []
        self.link.say(protocol.Free(lease.lane))

    def leave_slots(self, lease: KeyLease) -> None:
        """The slots from which a lease's blocks came may get other tokens: nobody finds the blocks by them any more."""
        for block in lease.blocks:
            self._leave_slots(block)

    def _leave_slots(self, block: int) -> None:
        self._by_slots.pop(self._slots_of.pop(block, b""), None)

    def extend(self, lease: KeyLease, slots: torch.Tensor) -> bool:
        """Send what the rank lacks of the keys in ``slots``, int64 [tokens], a request's from the first on; as much as has places.

        Of tokens that the rank has, the slots of a lease that is ``alone`` are not looked at.

        Returns:
            Whether it has all of them now.

        Raises:
            MemoryFull: there are too few blocks; nothing was sent.
            RankDown: the rank takes no messages.
        """
        self._take_blocks(lease, slots)
        while lease.held < len(slots):
            place = self.link.place()
            if place is None:
                return False
            self._send(lease, slots, place)
        return True

    def _take_blocks(self, lease: KeyLease, slots: torch.Tensor) -> None:
        """Give a request the blocks for all its tokens: first those that others have filled with the same keys."""
        first, needed = len(lease.blocks), -(-len(slots) // BLOCK)
        taken: list[int] = []
        if lease.held == first * BLOCK and not lease.alone:
            for index in range(first, len(slots) // BLOCK):
                block = self._by_slots.get(_key(slots, index))
                if block is None:
                    break
                taken.append(block)
        shared = len(taken)
        missing = needed - first - shared
        if missing > len(self._free):
            raise MemoryFull("memory-full")
        taken += (self._free.pop() for _ in range(missing))
        for block in taken:
            self._readers[block] += 1
        lease.blocks += taken
        lease.held += shared * BLOCK
        for at in range(0, len(taken), MOST_NAMED):
            self.link.say(protocol.Lease(lease.lane, first + at, tuple(taken[at : at + MOST_NAMED])))

    def _send(self, lease: KeyLease, slots: torch.Tensor, place: int) -> None:
        """Send what is missing of the first block that is not whole."""
        index, offset = divmod(lease.held, BLOCK)
        tokens = min(BLOCK - offset, len(slots) - lease.held)
        these = slots[lease.held : lease.held + tokens]
        number = self.link.memory.put_keys(place, self.buffers, these)
        block = lease.blocks[index]
        self.link.say(protocol.Append(block, offset, tokens, place, number))
        lease.held += tokens
        self.sent += tokens
        if offset + tokens < BLOCK or lease.alone:
            return
        key = _key(slots, index)
        if key not in self._by_slots:
            self._by_slots[key], self._slots_of[block] = block, key


def _key(slots: torch.Tensor, index: int) -> bytes:
    """What tells a full block from others: where the keys of its tokens lie in the pool, and at which positions."""
    return index.to_bytes(4, "little") + slots[index * BLOCK : (index + 1) * BLOCK].numpy().tobytes()
