"""Checks of what an inference rank and a cache rank write to an arena and read there by kernels, against PyTorch; on a GPU or through
Triton's interpreter, where plain loads and stores are in the place of assembly."""

import os
import time
from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton.language as tl
from backend_steps import on

from sglang_ext.layers.kernels.select_tokens import SelectionContexts, MarkedTokens
from sglang_ext.layers.kernels.key_scores import logits_dtype
from sglang_ext.layers.kernels import row_exchange
from sglang_ext.layers.kernels.row_exchange import move_newest
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank import mapped_exchange_buffer
from sglang_ext.managers.cache_rank.selection_runner import INLINE
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import BLOCK, StagedTokens, BufferShape
from sglang_ext.mem_cache.compressed.layouts.pointers import Pointers
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows, missing_mask, plan_refresh
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.on_gpu import MarkedPart

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
    from sglang_ext.layers.kernels import exchange_kernels

    exchange_kernels.load_acquire, exchange_kernels.store_release, exchange_kernels.nanoseconds = _load, _store, _clock


class Pair:
    """An arena of which kernels are asked, and one of which PyTorch is, with pools alike; the first as the cache rank sees it, too; with
    ``fresh``, of rows that an answer brings at most, through both rows travel."""

    def __init__(self, device, dtype, layers=2, heads=2, group=3, dim=24, window=2, most=40, fresh=0):
        kind = str(dtype).removeprefix("torch.")
        self.shape = BufferShape(layers, heads * group, heads, dim, kind, window, 3, most, 2, fresh > 0, fresh)
        there = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.device, self.arena, self.plain = there, ExchangeBuffer(self.shape, there, str(there)), ExchangeBuffer(self.shape, torch.device("cpu"), "cpu")
        self.arena._by_kernels = True
        if (descriptor := self.arena.begin(3)) is not None:
            os.close(descriptor)
        # A rank in this process closes its own.
        self.descriptor = self.plain.begin(3)
        with self.mapped_here():
            self.rank = MappedExchangeBuffer(self.shape, there, b"", None)
        self.plain_rank = MappedExchangeBuffer(self.shape, torch.device("cpu"), b"", self.descriptor)
        noise = torch.Generator().manual_seed(dim)
        keys, values = (tuple(torch.randn(SLOTS, heads, dim, generator=noise).to(dtype) for _ in range(layers)) for _ in "kv")
        self.buffers = KVBuffers(tuple(range(layers)), (0.1,) * layers, keys, values)
        self.there = on(there, self.buffers)
        self.queries = torch.randn(layers, 9, heads * group, dim, generator=noise).to(dtype)
        self.table = torch.stack([torch.randperm(CONTEXT, generator=noise) for _ in range(3)]).int()

    @contextmanager
    def mapped_here(self):
        """Ranks map the arena of kernels by its address: a process does not map what is its own."""
        before, mapped_exchange_buffer.open_ipc_handle = mapped_exchange_buffer.open_ipc_handle, lambda handle, device: self.arena.heads.data_ptr()
        try:
            yield
        finally:
            mapped_exchange_buffer.open_ipc_handle = before

    def alike(self, what):
        """Both arenas hold the same."""
        for one, other in zip(self.arena.regions, self.plain.regions):
            assert torch.equal(one.cpu(), other), what

    def publish(self, *questions):
        """The same questions of both: places, lane, number."""
        asked = [QueryUpload(places, lane, self.arena.word(number)) for places, lane, number in questions]
        for arena, queries in ((self.arena, self.queries.to(self.device)), (self.plain, self.queries)):
            for _ in asked:
                arena.reserve_number()
            arena.publish(queries, asked)

    def answer(self, lane, number, keep, seed, chosen=True, word=None):
        """The same answer in both; positions of tokens."""
        word = word or self.arena.word(number)
        noise = torch.rand(self.shape.layers, self.shape.kv_heads, 100, generator=torch.Generator().manual_seed(seed))
        kept = noise.topk(keep, dim=-1).indices.sort(dim=-1).values.int()
        for rank, given in ((self.rank, kept.to(self.device)), (self.plain_rank, kept)):
            asked, there = asked_of(given.device, (lane, word, keep if chosen else 0))
            rank.push_chosen(asked_of(given.device, (lane, word, keep))[0], there, given[:, None].contiguous())
            rank.answer(asked, there)
        return kept

    def take(self, *copies, seconds=0.0):
        """Copies of lane, number, row and tokens kept, with slots of their own; answers where both then lead."""
        pointers, first, mine = Pointers.for_pool(self.buffers, 1), CONTEXT, []
        for lane, number, row, keep in copies:
            slots = torch.arange(first, first + pointers.packed_slots(keep))
            mine.append((SelectionTarget(lane, self.arena.word(number), row, 100, keep, slots)))
            first += len(slots)
        self.plain.apply_selections(mine, self.table, self.buffers, seconds)
        there = [copy._replace(slots=copy.slots.to(self.device)) for copy in mine]
        self.arena.apply_selections(there, self.table.to(self.device), self.there, seconds)
        for one, other in zip(self.there.keys, self.buffers.keys):
            assert torch.equal(one.cpu(), other)
        assert torch.equal(self.arena.counters[:3].cpu(), self.plain.counters[:3])
        return [pointers.read(self.buffers.keys[0], copy.slots, copy.keep) for copy in mine]


def asked_of(device, *numbers, put=None):
    """Numbers of questions, and which of them are there, on a device: all, if nothing else is said."""
    return torch.tensor(numbers, device=device), torch.tensor(put or (1,) * len(numbers), dtype=torch.int32, device=device)


def marked_parts(chosen, logits, keeps, table, buffers, like):
    """What was chosen, int32 [layers, questions, kv_heads, most], as tokens are marked, in parts: the requests of the first layer apart, then
    those of the others; on the device and of the kind of logits that kernels make of keys ``like`` these. ``logits``: float32 [layers,
    questions, kv_heads, 100], of each query head."""
    (layers, count, heads, _), group, device = chosen.shape, 3, like.device
    marks = torch.zeros(*chosen.shape[:3], 128, dtype=torch.bool)
    for i, keep in enumerate(keeps):
        marks[:, i].scatter_(-1, chosen[:, i, :, :keep].long(), True)
    words = (marks.view(*marks.shape[:3], 4, 32).long() << torch.arange(32)).sum(-1).int().to(device)
    rows = torch.nn.functional.pad(logits, (0, 28), value=-9.0).to(logits_dtype(like.dtype))[..., None, :].expand(*marks.shape[:3], group, 128)
    numbers = torch.tensor([[i, 100, keep, 0] for i, keep in enumerate(keeps)], device=device)
    contexts, parts = SelectionContexts(table, numbers, (100,) * count, (4, 0)), []
    for where in (*((slice(0, 1), slice(i, i + 1)) for i in range(count)), (slice(1, layers), slice(0, count))):
        # With one KV head, a reshaped part would be a view whose rows share memory.
        given = rows[where].reshape(-1, 128).contiguous().to(device)
        left = given, torch.zeros(len(given), 1, device=device), torch.ones(len(given), 1, device=device)
        of_part, sizes = words[where].reshape(-1, 4).clone(), (where[0].start, where[1].start, where[1].stop - where[1].start, 1)
        marked = MarkedTokens(contexts, (buffers.key_table, like), sizes, len(of_part) // heads, group, left, of_part)
        parts.append(MarkedPart(*where, marked, None))
    return parts


def some(shapes, device):
    """All ``shapes``, or without a GPU, where kernels are interpreted, the first two."""
    return shapes[:2] if device == "cpu" else shapes


def check_keys_and_questions(device):
    """Of several shapes."""
    shapes = ((torch.float32, 2, 24, 3), (torch.bfloat16, 1, 64, 1), (torch.float16, 3, 40, 3))
    for dtype, heads, dim, group in some(shapes, device):
        keys_and_questions(device, dtype, heads, dim, group)


def keys_and_questions(device, dtype, heads, dim, group=3):
    """Keys of part of a block and of all of it; queries of one token and of two; what has no place is not put, nor said to be there."""
    pair = Pair(device, dtype, heads=heads, group=group, dim=dim)
    for puts, pulls in (((StagedTokens(0, 5, 2),), [(0, 5, 3)]), ((StagedTokens(1, 7, 70), StagedTokens(0, BLOCK, 1)), [(0, BLOCK, 3), (1, 7, 70), (0, 4, 80)])):
        slots = torch.randperm(CONTEXT)[:77]
        assert pair.arena.put_keys(puts, pair.there, slots.to(pair.device)) == pair.plain.put_keys(puts, pair.buffers, slots)
        into = [torch.zeros(pair.shape.layers, 2 * BLOCK, heads, dim, dtype=dtype, device=where) for where in (pair.device, "cpu")]
        for rank, target in zip((pair.rank, pair.plain_rank), into):
            rank.pull([StagedTokens(*each) for each in pulls], target)
        assert torch.equal(into[0].cpu(), into[1]), (dtype, puts)
        # Of place 0, what was put there last.
        put, pulled = puts[-1], pulls[0][2]
        sent = torch.stack([each[slots[put.first : put.first + put.tokens]] for each in pair.buffers.keys])
        assert torch.equal(into[1][:, pulled : pulled + put.tokens], sent)
    pair.publish(([4], 0, 1), ([7, 2], 2, 1))
    pair.alike("questions")
    pair.publish(([3], 0, 2), ([1], 2, 3))
    pair.alike("no place")
    assert pair.rank.read_words() == pair.plain_rank.read_words()
    assert pair.rank.read_words()[1][2][1] == pair.arena.word(1) and pair.rank.read_words()[0] == pair.arena.word(6)
    for asked, count in (([(0, 1)], 1), ([(2, 1)], 2), ([(0, 2), (2, 1)], 1), ([(2, 1), (0, 1), (0, 2)], 1)):
        words = [(lane, pair.arena.word(number), 1) for lane, number in asked]
        one, other = (rank.pull_queries(asked_of(on, *words)[0], count, pair.shape.layers) for rank, on in ((pair.rank, pair.device), (pair.plain_rank, "cpu")))
        assert one.shape == other.shape and torch.equal(one.cpu(), other), (dtype, asked)
    pair.publish()
    pair.alike("nothing")


def check_answers(device):
    """Of several shapes, of many pointers and of few."""
    shapes = ((1, torch.float32, 24), (37, torch.bfloat16, 64), (40, torch.float32, 16))
    for keep, dtype, dim in some(shapes, device):
        answers(device, keep, dtype, dim)
    answers_at_once(device)


def answers_at_once(device):
    """Answers to questions of other lanes, numbers and lengths each, in one launch: each lies in its own place, nothing else changes."""
    pair = Pair(device, torch.float32)
    shape, asked = pair.shape, [(2, pair.arena.word(1), 40), (0, pair.arena.word(2), 7), (1, pair.arena.word(5), 23)]
    sizes = shape.layers, len(asked), shape.kv_heads, shape.most
    chosen = torch.randint(1, 100, sizes, generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    for put in ((0, 0, 0), (1, 1, 1)):
        for rank, given in ((pair.rank, chosen.to(pair.device)), (pair.plain_rank, chosen)):
            rank.push_chosen(*asked_of(given.device, *asked, put=put), given)
            rank.answer(*asked_of(given.device, *asked, put=put))
        pair.alike("answers at once")
        assert any(put) == bool(pair.plain.chosen.any()) == bool((pair.plain.heads[0] == asked[1][1]).any())
    for i, (lane, word, keep) in enumerate(asked):
        place = pair.plain.chosen[lane, word % 2]
        assert torch.equal(place[: 4 * keep].view(2, 2, keep), chosen[:, i, :, :keep]) and not place[4 * keep :].any()
    assert int((pair.plain.chosen != 0).sum()) == 4 * (40 + 7 + 23)


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
    pair.answer(2, 1, keep, seed=3, word=pair.arena.word(1) - (1 << protocol.NUMBER_BITS))
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


def later(put):
    """Let another stream do so after a while; launched before what waits for it, as launches may wait for all that the device does."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        put()


def check_awaited_words(device):
    """Words are read once what is waited for is there, or time is up; also where another stream writes it meanwhile."""
    pair = Pair(device, torch.float32)
    pair.publish(([4], 0, 1))
    before, of = pair.plain_rank.read_words(), ((0, 1), (0, 2), (1, 1))
    for rank in (pair.rank, pair.plain_rank):
        # Of lane 0 one word is there, and another is not; of lane 1 none.
        asked, there = asked_of(pair.device if rank is pair.rank else "cpu", *((lane, pair.arena.word(word), 1) for lane, word in of))
        assert rank.await_words(asked, there, pair.arena.word(1), 60.0)() == before and there.tolist() == [1, 0, 0]
        begun = time.monotonic()
        # Before so much was written as is waited for nothing is there.
        assert rank.await_words(asked, there, pair.arena.word(2), 0.2)() == before and there.tolist() == [0, 0, 0]
        assert 0.2 <= time.monotonic() - begun < 5
    if device == "cuda":
        later(lambda: pair.publish(([5], 1, 1)))
        asked, there = asked_of(pair.device, *((lane, pair.arena.word(word), 1) for lane, word in of))
        words = pair.rank.await_words(asked, there, pair.arena.word(2), 20.0)
        assert words() == pair.plain_rank.read_words() != before and there.tolist() == [1, 0, 1]


class RowPair(Pair):
    """Arenas of a rank with full KV, whose pools hold copies after contexts: of each a record, here and there.

    Args:
        keeps: tokens that the heads of each copy keep.
    """

    def __init__(self, device, dtype, keeps=(40, 21), **given):
        super().__init__(device, dtype, **given)
        self.keeps, self.copies, self.noise = keeps, [], torch.Generator().manual_seed(7)
        first = CONTEXT
        for keep in keeps:
            held = torch.rand(self.shape.layers, self.shape.kv_heads, 100, generator=self.noise).topk(keep).indices.int()
            slots = torch.arange(first, first + keep)
            self.buffers.copy_kept(held.long(), self.table[len(self.copies)].long(), slots)
            self.copies.append((slots, held.clone(), held.to(self.device, copy=True)))
            first += keep
        for there, here in zip((*self.there.keys, *self.there.values), (*self.buffers.keys, *self.buffers.values)):
            there.copy_(here)

    def push(self, seed, equal=False):
        """What a rank might choose for both, of scores that are ``equal`` or not, from its own pool."""
        noise, shape = torch.Generator().manual_seed(seed), (self.shape.layers, len(self.keeps), self.shape.kv_heads)
        chosen, bits = torch.zeros(2, *shape, max(self.keeps), dtype=torch.int32)
        # Numbers of bfloat16's logits, too.
        logits = torch.rand(*shape, 100, generator=noise).log2().half().float()
        for i, keep in enumerate(self.keeps):
            kept = logits[:, i].topk(keep).indices.sort(-1).values
            chosen[:, i, :, :keep] = kept.int()
            scores = torch.ones(kept.shape) if equal else logits[:, i].exp2().gather(-1, kept)
            bits[:, i, :, :keep] = torch.where(kept < 4, torch.inf, scores).view(torch.int32)
        logits *= not equal
        places, lanes = [self.table[i, :100] for i in range(len(self.keeps))], [*range(len(self.keeps))]
        table = torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True)
        asked = [(lane, 0, keep) for lane, keep in zip(lanes, self.keeps)]
        puts = (1,) * len(lanes), (0,) * len(lanes), (0, *(1,) * (len(lanes) - 1))
        for put in (*puts[1:], puts[0]) if seed == 1 else puts[:1]:
            before = [part.clone() for part in self.plain.arrived]
            self.plain_rank.push_rows_on_cpu(*asked_of("cpu", *asked, put=put), chosen, bits, table, self.buffers)
            numbers, there = asked_of(self.device, *asked, put=put)
            parts = marked_parts(chosen, logits, self.keeps, table.to(self.device), self.there, self.there.keys[0])
            records = self.rank.records(numbers, max(self.keeps))
            self.rank.push_rows(numbers, there, parts, records, self.there, (INLINE, INLINE))
            if not any(put):
                # Nothing of questions that are not there.
                for there, here, was in zip(self.arena.arrived, self.plain.arrived, before):
                    assert torch.equal(there.cpu(), here) and torch.equal(here, was)
            else:
                counts = self.arrived(put)
                assert put[0] or torch.equal(counts[0], before[0][0])
        return chosen

    def arrived(self, what):
        """Both arenas hold the same rows, as far as they count."""
        (counts, moves, *rows), there = self.plain.arrived, [part.cpu() for part in self.arena.arrived]
        assert torch.equal(there[0], counts), what
        inside = torch.arange(self.shape.fresh) < counts[..., None]
        for one, other in zip(there[1:], (moves, *rows)):
            assert torch.equal(one[inside], other[inside]), what
        return counts

    def take_rows(self, number, passed=()):
        """Answers to questions of this number of both copies, but for lanes that are ``passed``, are taken here and there."""
        word = self.arena.word(number)
        for rank in (self.rank, self.plain_rank):
            on = self.device if rank is self.rank else "cpu"
            rank.answer(*asked_of(on, *((lane, word, int(lane not in passed)) for lane in range(len(self.keeps)))))
        for arena, buffers, device in ((self.plain, self.buffers, "cpu"), (self.arena, self.there, self.device)):
            mine = []
            for lane, (slots, plain, there) in enumerate(self.copies):
                record = plain if arena is self.plain else there
                mine.append(SelectionTarget(lane, word, lane, 100, self.keeps[lane], slots.to(device), record))
            arena.apply_selections(mine, self.table.to(device), buffers, 0.0)

    def true_records(self):
        """Each slot of a copy holds the row that its record says."""
        for lane, (slots, _, record) in enumerate(self.copies):
            at, head = self.table[lane].long()[record.cpu().long()], torch.arange(self.shape.kv_heads)[:, None]
            for part in (*enumerate(self.there.keys), *enumerate(self.there.values)):
                layer, found = part[0], part[1].cpu()
                assert torch.equal(found[slots].transpose(0, 1), found[at[layer], head]), (lane, layer)

    def same(self):
        """Pools, records and counts are alike."""
        for one, other in zip((*self.there.keys, *self.there.values), (*self.buffers.keys, *self.buffers.values)):
            assert torch.equal(one.cpu(), other)
        assert all(torch.equal(there.cpu(), plain) for _, plain, there in self.copies)
        kinds = [0, 1, 2, 4]
        assert torch.equal(self.arena.counters[kinds].cpu(), self.plain.counters[kinds])


def check_rows(device):
    """Of several shapes; an answer has room for all that comes, for some, and for one row of a head; then programs take turns."""
    # Without a GPU the room for some rows is checked below.
    shapes = ((40, torch.float32, 24, 2), (1, torch.float16, 40, 1), (3, torch.bfloat16, 64, 2))
    for fresh, dtype, dim, heads in some(shapes, device):
        rows(device, fresh, dtype, dim, heads)
    with patch.multiple(row_exchange, COPYING=3, COPIED=4, LOOKED_AT=8, WORDS=2, COUNTED=4):
        for fresh in (3, 40)[: 2 if device == "cuda" else 1]:
            rows(device, fresh, torch.float32, 24)


def rows(device, fresh, dtype, dim, heads=2):
    """What copies lack is sent, and taken where it is answered; values travel as keys do; a copy that is renewed takes in the newest."""
    pair = RowPair(device, dtype, dim=dim, heads=heads, fresh=fresh)
    slots = torch.randperm(CONTEXT)[:BLOCK]
    put = [StagedTokens(1, BLOCK, 0)]
    pair.arena.put_keys(put, pair.there, slots.to(pair.device)), pair.plain.put_keys(put, pair.buffers, slots)
    for values in (False, True):
        into = [torch.zeros(pair.shape.layers, BLOCK, heads, dim, dtype=dtype, device=where) for where in (pair.device, "cpu")]
        for rank, target in zip((pair.rank, pair.plain_rank), into):
            rank.pull(put, target, values)
        part = pair.buffers.values if values else pair.buffers.keys
        assert torch.equal(into[0].cpu(), into[1]) and torch.equal(into[1], torch.stack([each[slots] for each in part]))
    for number, (equal, passed) in enumerate(((False, ()), (False, (1,)), (True, ()), (False, ())), 1):
        asked = [QueryUpload([number], lane, pair.arena.word(number)) for lane in range(2)]
        for arena, queries, kind in ((pair.arena, pair.queries.to(pair.device), 2), (pair.plain, pair.queries, 1)):
            arena.publish(queries, [each._replace(record=pair.copies[each.lane][kind]) for each in asked])
        chosen, before = pair.push(number, equal), [plain.clone() for _, plain, _ in pair.copies]
        counts = pair.arrived((fresh, number))
        pair.take_rows(number, passed)
        pair.same()
        for lane, (slots, held, _) in enumerate(pair.copies):
            keep, wanted = pair.keeps[lane], chosen[:, lane, :, : pair.keeps[lane]]
            coming = missing_mask(wanted.long(), before[lane].long()).sum(-1).clamp(max=fresh)
            assert torch.equal(counts[lane].view(-1, heads).long(), coming)
            if lane in passed:
                assert torch.equal(held, before[lane])
            elif fresh >= keep:
                assert torch.equal(held.sort(-1).values, wanted)
        pair.true_records()
    assert int(pair.plain.counters[4]) > 0
    slots, held, _ = pair.copies[0]
    _, coming = plan_refresh(held, 100, 130, 40, 8)
    there = NewestRows(coming.places.to(pair.device), coming.first)
    pair.buffers.move_newest(coming, pair.table[0].long(), slots)
    if device == "cuda":
        pair.there.move_newest(there, pair.table[0].long().to(device), slots.to(device))
    else:
        tables = pair.there.key_table, pair.there.value_table
        move_newest(tables, pair.there.keys[0], pair.there.values[0], there.places, pair.table[0, 122:130].long(), slots)
    for one, other in zip((*pair.there.keys, *pair.there.values), (*pair.buffers.keys, *pair.buffers.values)):
        assert torch.equal(one.cpu(), other)
