"""Checks of what an inference rank and a cache rank write to an arena and read there by kernels, against PyTorch; on a GPU or through
Triton's interpreter, where plain loads and stores are in the place of assembly."""

import os
import time

import torch
import triton.language as tl
from backend_steps import on

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.on_gpu import mapped_arena
from sglang_ext.managers.cache_rank.on_gpu.arena import Arena, Asked, Copy
from sglang_ext.managers.cache_rank.on_gpu.device_rank import DeviceRank
from sglang_ext.managers.cache_rank.on_gpu.mapped_arena import MappedArena
from sglang_ext.managers.cache_rank.protocol import BLOCK, Attach, Shape, Turning
from sglang_ext.mem_cache.compressed.formats.slot_pointers import Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Slots of a pool, of contexts and of pointers after them.
SLOTS, CONTEXT = 300, 200


def _load(pointer):
    return tl.load(pointer)


def _store(pointer, word):
    tl.store(pointer, word)


def _clock():
    return tl.full((), time.monotonic_ns(), tl.int64)


def without_assembly():
    """Let the interpreter run the kernels."""
    from sglang_ext.layers.kernels import hand_over

    hand_over.load_acquire, hand_over.store_release, hand_over.nanoseconds = _load, _store, _clock


class Pair:
    """An arena of which kernels are asked, and one of which PyTorch is, with pools alike; the first as the cache rank sees it, too."""

    def __init__(self, device, dtype, layers=3, heads=2, group=3, dim=24, window=2, most=40):
        self.shape = Shape(layers, heads * group, heads, dim, str(dtype).removeprefix("torch."), window, 3, most, 2)
        there = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.device, self.arena, self.plain = there, Arena(self.shape, there, str(there)), Arena(self.shape, torch.device("cpu"), "cpu")
        self.arena._by_kernels = True
        for each in (self.arena, self.plain):
            if (descriptor := each.begin(3)) is not None:
                os.close(descriptor)
        # A process does not map what is its own.
        before, mapped_arena.opened = mapped_arena.opened, lambda handle, device: self.arena._held.memory.data_ptr()
        self.rank = MappedArena(self.shape, there, b"", None)
        mapped_arena.opened = before
        self.plain_rank = MappedArena(self.shape, torch.device("cpu"), b"", self.plain._held.descriptor)
        noise = torch.Generator().manual_seed(dim)
        keys, values = (tuple(torch.randn(SLOTS, heads, dim, generator=noise).to(dtype) for _ in range(layers)) for _ in "kv")
        self.buffers = KVBuffers(tuple(range(layers)), (0.1,) * layers, keys, values)
        self.there = on(there, self.buffers)
        self.queries = torch.randn(layers, 9, heads * group, dim, generator=noise).to(dtype)
        self.table = torch.stack([torch.randperm(CONTEXT, generator=noise) for _ in range(3)]).int()

    def alike(self, what):
        """Both arenas hold the same."""
        for one, other in zip(self.arena._layout.views(self.arena._held.memory), self.plain._layout.views(self.plain._held.memory)):
            assert torch.equal(one.cpu(), other), what

    def publish(self, *questions):
        """The same questions of both: places, lane, number."""
        asked = [Asked(places, lane, self.arena.word(number)) for places, lane, number in questions]
        for arena, queries in ((self.arena, self.queries.to(self.device)), (self.plain, self.queries)):
            for _ in asked:
                arena.next_number()
            arena.publish(queries, asked)

    def answer(self, lane, number, keep, seed, chosen=True, word=None):
        """The same answer in both; positions of tokens."""
        word = word or self.arena.word(number)
        noise = torch.rand(self.shape.layers, self.shape.kv_heads, 100, generator=torch.Generator().manual_seed(seed))
        kept = noise.topk(keep, dim=-1).indices.sort(dim=-1).values.int()
        for rank, given in ((self.rank, kept.to(self.device)), (self.plain_rank, kept)):
            rank.push_chosen(lane, word, given)
            rank.answer([(lane, word, chosen)])
        return kept

    def take(self, *copies, seconds=0.0):
        """Copies of lane, number, row and tokens kept, with slots of their own; answers where both then lead."""
        pointers, first, mine = Pointers.of(self.buffers, 1), CONTEXT, []
        for lane, number, row, keep in copies:
            slots = torch.arange(first, first + pointers.packed_slots(keep))
            mine.append((Copy(lane, self.arena.word(number), row, 100, keep, slots)))
            first += len(slots)
        self.plain.take(mine, self.table, self.buffers, seconds)
        there = [copy._replace(slots=copy.slots.to(self.device)) for copy in mine]
        self.arena.take(there, self.table.to(self.device), self.there, seconds)
        for one, other in zip(self.there.keys, self.buffers.keys):
            assert torch.equal(one.cpu(), other)
        assert torch.equal(self.arena.counters[:3].cpu(), self.plain.counters[:3])
        return [pointers.read(self.buffers.keys[0], copy.slots, copy.keep) for copy in mine]


def check_keys_and_questions(device):
    """Of several shapes."""
    for dtype, heads, dim in ((torch.float32, 2, 24), (torch.bfloat16, 1, 64), (torch.float16, 3, 40)):
        keys_and_questions(device, dtype, heads, dim)


def keys_and_questions(device, dtype, heads, dim, group=3):
    """Keys of part of a block and of all of it; queries of one token and of two; what has no place is not put, nor said to be there."""
    pair = Pair(device, dtype, heads=heads, group=group, dim=dim)
    for place, tokens in ((0, 5), (1, BLOCK)):
        slots = torch.randperm(CONTEXT)[:tokens]
        assert pair.arena.put_keys(place, pair.there, slots.to(pair.device)) == pair.plain.put_keys(place, pair.buffers, slots)
        into = [torch.zeros(3, 2 * BLOCK, heads, dim, dtype=dtype, device=where) for where in (pair.device, "cpu")]
        for rank, target in zip((pair.rank, pair.plain_rank), into):
            rank.pull_keys(place, tokens, target[:, 3 : 3 + tokens])
        assert torch.equal(into[0].cpu(), into[1]), (dtype, place)
    pair.publish(([4], 0, 1), ([7, 2], 2, 1))
    pair.alike("questions")
    pair.publish(([3], 0, 2), ([1], 2, 3))
    pair.alike("no place")
    assert pair.rank.read_words() == pair.plain_rank.read_words()
    assert pair.rank.read_words()[1][2][1] == pair.arena.word(1) and pair.rank.read_words()[0] == pair.arena.word(6)
    for lane, number, count in ((0, 1, 1), (2, 1, 2), (0, 2, 1)):
        one, other = (rank.pull_queries(lane, pair.arena.word(number), count) for rank in (pair.rank, pair.plain_rank))
        assert torch.equal(one.cpu(), other), (dtype, lane)
    pair.publish()
    pair.alike("nothing")


def check_answers(device):
    """Of several shapes, of many pointers and of few."""
    for keep, dtype, dim in ((40, torch.float32, 16), (37, torch.bfloat16, 64), (1, torch.float32, 24)):
        answers(device, keep, dtype, dim)


def answers(device, keep, dtype, dim):
    """A copy leads to what was chosen for it; where nothing was, or it was passed over, it stays."""
    pair = Pair(device, dtype, dim=dim, most=max(40, keep))
    pair.publish(([4], 0, 1), ([7], 1, 1), ([2], 2, 1))
    kept, passed = pair.answer(0, 1, keep, seed=1), pair.answer(1, 1, keep, seed=2, chosen=False)
    first, second, third = pair.take((0, 1, 2, keep), (1, 1, 0, keep), (2, 1, 1, keep))
    assert torch.equal(first, pair.table[2].long()[kept[0].long()])
    assert not torch.equal(second, pair.table[0].long()[passed[0].long()]), "it was passed over"
    assert pair.plain.counters[:3].tolist() == [1, 2, 0]
    pair.alike("answers")
    # Nothing was asked by that number; an older process answers.
    pair.answer(2, 1, keep, seed=3, word=pair.arena.word(1) - (1 << 32))
    pair.take((0, 2, 2, keep), (2, 1, 1, keep))
    assert pair.plain.counters[:3].tolist() == [1, 3, 1]


def check_waiting(device):
    """What comes late is not waited for longer than told, and what found no place not at all."""
    pair = Pair(device, torch.float32)
    pair.publish(([4], 0, 1))
    begun = time.monotonic()
    pair.take((0, 1, 1, 5), (1, 1, 1, 5), seconds=0.2)
    if device == "cuda":
        torch.cuda.synchronize()
    assert 0.4 <= time.monotonic() - begun < 5 and pair.plain.counters[:3].tolist() == [0, 1, 1]
    waited = int(pair.arena.counters[3])
    assert 0.2e9 <= waited < 2e9


class Told:
    """In the place of a socket: keeps what a rank says."""

    def __init__(self):
        self.messages = []

    def send(self, frame, flags=0):
        """Keep it."""
        self.messages.append(protocol.decode_from_rank(frame))


def rank_of(pair, plain, predictor, bits):
    """A cache rank in this process, of one arena or the other, that was told what it serves; and its socket."""
    told, socket = attach(pair.shape, predictor, bits), Told()
    descriptor = os.dup(pair.plain._held.descriptor) if plain else None
    rank = DeviceRank(socket, descriptor, 3, torch.device("cpu") if plain else pair.device)
    before, mapped_arena.opened = mapped_arena.opened, lambda handle, device: pair.arena._held.memory.data_ptr()
    rank._take(told)
    mapped_arena.opened = before
    return rank, socket


def attach(shape, predictor, bits):
    """What ranks of this shape are told."""
    turning = Turning(tuple((1 / 10 ** torch.arange(shape.dim // 2)).tolist()), False)
    return Attach(protocol.VERSION, 3, shape, 8, (0.1,) * shape.layers, predictor, 4, 8, turning, bits)


def check_rank(device):
    """A rank that is asked by kernels chooses what one chooses that PyTorch asks: several requests at once, the newest of each alone, with
    windows of one and of two, and more than a block of keys, as they are and in few bits."""
    for predictor, dim, bits in (("current", 24, 16), ("regressed", 16, 16), ("current", 64, 8), ("current", 24, 4)):
        pair = Pair(device, torch.float32, dim=dim)
        ranks = [rank_of(pair, plain, predictor, bits) for plain in (False, True)]
        lengths, keeps = {0: 100, 1: 40}, {0: 30, 1: 20}
        for lane, length in lengths.items():
            for first in range(0, length, BLOCK):
                tokens, place = min(BLOCK, length - first), first // BLOCK
                slots = pair.table[lane, first : first + tokens].long()
                number = pair.arena.put_keys(place, pair.there, slots.to(pair.device))
                pair.plain.put_keys(place, pair.buffers, slots)
                for rank, _ in ranks:
                    rank._take(protocol.Lease(lane, place, (2 * lane + place,)))
                    rank._take(protocol.Append(2 * lane + place, 0, tokens, place, number))
            pair.publish()
            for rank, socket in ranks:
                rank._answer_next()
                assert isinstance(socket.messages[-1], protocol.Taken), socket.messages
        for number in (1, 2):
            pair.publish(([3 + number], 0, number), ([5, 1 + number], 1, number))
            for rank, socket in ranks:
                for lane, positions in ((0, (99,)), (1, (38, 39))):
                    ask = (lane, 0, 3, number, lengths[lane], keeps[lane], positions)
                    rank._take(protocol.Ask(*ask, ahead=2, number=pair.arena.number))
        for rank, socket in ranks:
            rank._answer_next()
            answers = [(each.lane, each.sequence, each.chosen) for each in socket.messages if isinstance(each, protocol.Answer)]
            assert sorted(answers) == [(0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True)], answers
        found, wanted = pair.arena.chosen.cpu(), pair.plain.chosen
        assert torch.equal(pair.arena.heads.cpu(), pair.plain.heads)
        for lane, keep in keeps.items():
            one, other = (part[lane, 0, : 6 * keep].view(6, keep) for part in (found, wanted))
            shared = (one[:, :, None] == other[:, None, :]).any(-1).float().mean()
            # Queries are rounded where integers are multiplied.
            assert shared == 1 if device == "cpu" and bits == 16 else shared > 0.97, (predictor, bits, lane, shared)


def check_hand_over(device):
    """All of them."""
    if device == "cpu":
        without_assembly()
    for check in (check_keys_and_questions, check_answers, check_waiting, check_rank):
        check(device)
