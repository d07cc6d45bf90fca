"""Leases of blocks at a rank, by a model of it: requests come, share, grow, move, give full KV back and go at random."""

import random
from types import SimpleNamespace

import torch
from held_entries import held_entries

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import KeyLeases, MemoryFull, block_hashes
from sglang_ext.managers.cache_rank.protocol import BLOCK

LANES, SLOTS = 5, 4000


class ModelRank:
    """A link to a rank, and what that holds: it hears of leases at once, and takes keys later."""

    epoch = 1

    def __init__(self, blocks, places):
        self.attach = SimpleNamespace(blocks=blocks, shape=SimpleNamespace(lanes=LANES, packs=1))
        self.exchange_buffer, self._number = self, 0
        self._free, self._put, self._coming = list(range(places)), {}, []
        self.held, self.leased = {}, {}

    def place(self):
        return self._free.pop() if self._free else None

    def put_keys(self, puts, pool, slots):
        for place, tokens, first in puts:
            self._put[place] = [pool[slot] for slot in slots[first : first + tokens].tolist()]
        self._number += 1
        return self._number

    def send_message(self, message):
        if isinstance(message, protocol.Append):
            assert message.number == self._number
            self._coming += message.pieces
        elif isinstance(message, protocol.Lease):
            known = self.leased.setdefault(message.lane, [])
            assert message.first <= len(known)
            known[message.first :] = message.blocks
        else:
            del self.leased[message.lane]

    def take(self, most):
        """Take up to so many of the keys that have come."""
        for told in self._coming[:most]:
            self.held.update({(told.block, told.offset + i): token for i, token in enumerate(self._put[told.place])})
            self._free.append(told.place)
        del self._coming[:most]


class Requests:
    """Those of an inference rank: of each its lease, tokens, which are alike where all before them are, and their slots.

    Args:
        seed: of what happens.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.rank, self.pool, self.readers = ModelRank(self.chance.randrange(8, 40), self.chance.randrange(1, 6)), {}, {}
        self.leases, self.running, self.begun = KeyLeases(self.rank, self.pool), [], 0
        self.free, self.full, self.shared = list(range(SLOTS)), 0, 0
        self.empty = self.entries

    @property
    def entries(self):
        """Entries that the leases hold, without those of the pool."""
        return held_entries(self.leases) - len(self.pool)

    def written(self, tokens):
        """Slots to which keys of tokens were written: those that were left last, in their order."""
        slots = [self.free.pop() for _ in tokens]
        self.pool.update(zip(slots, tokens))
        self.readers.update(dict.fromkeys(slots, 1))
        return slots

    def left(self, slots):
        """A request reads these no more; of nobody's others' keys are written there."""
        for slot in reversed(slots):
            self.readers[slot] -= 1
            if not self.readers[slot]:
                self.free.append(slot)
                self.pool[slot] = None

    def begin(self):
        like, count = self.chance.choice([None, *self.running]), self.chance.randrange(1, 500)
        first = 0 if like is None or like.is_alone else self.chance.randrange(min(count, len(like.tokens)) + 1)
        tokens = [*like.tokens[:first]] if first else []
        if self.chance.random() < 0.5:
            slots = like.slots[:first] if first else []
            for slot in slots:
                self.readers[slot] += 1
        else:
            slots = self.written(tokens)
        self.begun += 1
        new = [1000 * self.begun + each for each in range(count - first)]
        tokens, slots = tokens + new, slots + self.written(new)
        lease, covered = self.leases.open(), self.chance.randrange(1, count + 1)
        lease.names = block_hashes("", tokens[: self.chance.choice((count, count // 2))])
        self.running.append(SimpleNamespace(lease=lease, tokens=tokens, slots=slots, covered=covered, is_alone=False))

    def end(self, request):
        self.running.remove(request)
        self.leases.close(request.lease)
        self.left(request.slots)

    def give_back(self, request):
        if request.lease.held == len(request.tokens) and not request.is_alone:
            request.is_alone = True
            self.left(request.slots)
            request.slots = []

    def move(self, request):
        if not request.is_alone:
            before, request.slots = request.slots, self.written(request.tokens)
            self.left(before)

    def grow(self, request):
        if request.is_alone:
            return
        request.covered = min(len(request.tokens), request.covered + self.chance.choice((0, 0, 10, 100, 1000)))
        try:
            self.leases.extend(request.lease, torch.tensor(request.slots[: request.covered]))
        except MemoryFull:
            self.full += 1

    def check(self):
        self.rank.take(1 << 10)
        readers = [0] * self.rank.attach.blocks
        for request in self.running:
            blocks = request.lease.blocks
            assert self.rank.leased[request.lease.lane] == blocks
            held = [self.rank.held[blocks[at // BLOCK], at % BLOCK] for at in range(request.lease.held)]
            assert held == request.tokens[: request.lease.held]
            for block in blocks:
                readers[block] += 1
        assert self.leases.free_blocks == readers.count(0)
        self.shared += sum(each > 1 for each in readers)

    def step(self):
        if len(self.running) < LANES and self.chance.random() < 0.3:
            self.begin()
        elif self.running:
            kinds = (self.grow, self.end, self.give_back, self.move), (10, 2, 2, 1)
            self.chance.choices(*kinds)[0](self.chance.choice(self.running))
        self.rank.take(self.chance.randrange(3))
        if self.chance.random() < 0.2:
            self.check()


def test_a_rank_holds_of_each_request_its_own_tokens_whatever_blocks_it_shares():
    full = shared = 0
    for seed in range(12):
        requests = Requests(seed)
        for _ in range(300):
            requests.step()
        for request in list(requests.running):
            requests.end(request)
        requests.check()
        assert requests.entries == requests.empty and requests.leases.free_lanes == LANES
        full, shared = full + requests.full, shared + requests.shared
    assert full > 20 and shared > 100
