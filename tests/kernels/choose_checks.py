"""Checks of which tokens a kernel chooses for queries, on a GPU or through Triton's interpreter."""

import weakref
from contextlib import contextmanager
from unittest.mock import patch

import torch
from backend_steps import on
from marked_helpers import written

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import Pointers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery
from sglang_ext.mem_cache.selection.scoring import group_attention, mark_always

# Slots of a pool, of which the last are nobody's.
SLOTS = 1400
# Tokens that are chosen at once, where checks replace the kernels' own number.
FEW_AT_ONCE = 128


class Asked:
    """Requests in a pool with random KV, whose contexts are of different lengths, each with what it is to choose; on the host."""

    def __init__(self, layers, heads, group, dim, dtype, lengths, counts, always, seed=0):
        noise = torch.Generator().manual_seed(seed + dim)
        keys, values = (tuple(torch.randn(SLOTS, heads, dim, generator=noise).to(dtype) for _ in range(layers)) for _ in "kv")
        self.buffers = KVBuffers(tuple(range(layers)), tuple(0.1 + 0.05 * layer for layer in range(layers)), keys, values)
        self.lengths, self.counts, self.always = lengths, counts, always
        self.pointers = Pointers.for_pool(self.buffers, 1)
        self.held = [self.pointers.packed_slots(count) for count in counts]
        self.table = torch.zeros(len(lengths) + 2, max(lengths) + 3, dtype=torch.int32)
        self.rows = 1 + torch.randperm(len(lengths), generator=noise)
        for row, length in zip(self.rows.tolist(), lengths):
            self.table[row, :length] = torch.randperm(SLOTS - sum(self.held), generator=noise)[:length]
        self.targets = torch.arange(SLOTS - sum(self.held), SLOTS)
        self.queries = torch.randn(len(lengths), layers, heads * group, dim, generator=noise)
        firsts = torch.tensor([0, *self.held]).cumsum(0)[:-1]
        self.numbers = torch.stack([self.rows, torch.tensor(lengths), torch.tensor(counts), firsts], dim=1)

    def contexts(self, device, pointing):
        """As the kernel takes them."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts

        there = (part.to(device) for part in (self.table, self.numbers))
        return SelectionContexts(*there, tuple(self.lengths), self.always, self.targets.to(device) if pointing else None)

    def scores(self, request, layer):
        """Of each KV head: float32 [kv_heads, tokens]."""
        row, length = int(self.rows[request]), self.lengths[request]
        keys = self.buffers.keys[layer][self.table[row, :length].long()].transpose(0, 1)[None, None]
        # As the kernel multiplies them.
        queries = self.queries[request, layer].to(keys.dtype).float()
        found = group_attention(queries[None, None], keys, self.buffers.scaling[layer])
        return mark_always(found, *self.always)[0, 0]


def check_chosen(kept, scores, count, tolerance, about):
    """Positions of a KV head are ascending, each once, and no other's score is higher, but for rounding."""
    assert torch.equal(kept, kept.unique()) and len(kept) == count, about
    best = scores.topk(count).indices.sort().values
    if tolerance == 0:
        assert torch.equal(kept, best), about
        return
    left = scores.index_fill(0, kept, -1.0)
    assert bool(left.max() <= scores[kept].min() * (1 + tolerance)), about
    assert len(set(kept.tolist()) & set(best.tolist())) >= 0.95 * count, about


def check_choose_tokens(device):
    """What PyTorch chooses, over lengths around the kernel's chunks and blocks, shares of layers and of requests, as positions and as
    pointers; nothing else of the pool changes."""
    from sglang_ext.layers.kernels import select_tokens
    from sglang_ext.layers.kernels.select_tokens import mark_tokens

    half = torch.float16 if device == "cpu" else torch.bfloat16
    shapes = (
        (1, 2, 1, 80, half, (300,), (70,), (4, 32), (slice(0, 1), slice(0, 1))),
        (3, 1, 4, 24, torch.float32, (65, 1, 1025), (40, 1, 300), (0, 0), (slice(1, 3), slice(1, 3))),
        (1, 1, 20, 16, torch.float32, (129, 90), (100, 30), (2, 20), (slice(0, 1), slice(0, 2))),
        (2, 2, 3, 64, torch.float32, (1100, 63, 64), (133, 45, 64), (4, 32), (slice(0, 2), slice(0, 3))),
    )
    # The interpreter is slow: a few tokens at once it chooses for the first two shapes.
    quick = device == "cpu" and select_tokens.AT_ONCE == FEW_AT_ONCE
    for layers, heads, group, dim, dtype, lengths, counts, always, part in shapes[:2] if quick else shapes:
        asked = Asked(layers, heads, group, dim, dtype, lengths, counts, always)
        there, tolerance = on(device, asked.buffers), 0 if device == "cpu" and dtype == torch.float32 else 2e-2
        meant = asked.queries[part[1], part[0]].to(device)
        most = max(counts)
        shared = meant, there.key_table, there.keys[0], there.scaling_table
        found = written(mark_tokens(*shared, asked.contexts(device, False), *part), most).cpu()
        assert written(mark_tokens(*shared, asked.contexts(device, True), *part)) is None
        pointed = torch.tensor_split(asked.targets, torch.tensor(asked.held).cumsum(0)[:-1])
        for layer in range(layers)[part[0]]:
            for request in range(len(lengths))[part[1]]:
                count, scores = counts[request], asked.scores(request, layer)
                where = layer - part[0].start, request - part[1].start, slice(None), slice(count)
                kept = found[where].long()
                for head in range(heads):
                    check_chosen(kept[head], scores[head], count, tolerance, (dim, layer, request, head))
                slots = asked.pointers.read(there.keys[layer], pointed[request].to(device), count).cpu()
                assert torch.equal(slots, asked.table[asked.rows[request]].long()[kept]), (dim, layer, request)
        rest = torch.arange(SLOTS - sum(asked.held))
        for one, other in zip((*there.keys, *there.values), (*asked.buffers.keys, *asked.buffers.values)):
            assert torch.equal(one.cpu()[rest], other[rest])


def check_turned(device):
    """Queries are turned on as PyTorch turns them, those of each layer of one piece, whatever lies between requests and layers."""
    from sglang_ext.layers.kernels.key_scores import rotate_queries

    noise = torch.Generator().manual_seed(3)
    shapes = (3, 2, 5, 48, 16, False), (2, 3, 32, 128, 64, True), (1, 1, 1, 16, 8, False)
    for requests, layers, heads, dim, turning, interleaved in shapes:
        window = torch.randn(requests, layers, 2, heads, dim, generator=noise).to(torch.bfloat16)
        rotary = Rotary(torch.rand(turning, generator=noise), interleaved)
        given, turn = window[:, :, 1], tuple(each.to(device) for each in rotary._rotation(7, dim))
        found = rotate_queries(window.to(device)[:, :, 1], turn)
        assert found.transpose(0, 1).is_contiguous()
        assert torch.allclose(found.cpu(), rotary.rotate_ahead(given, 7), rtol=1e-6, atol=1e-6), (dim, interleaved)


def check_ties(device):
    """Of equal scores earlier tokens are chosen, whatever their number; so it is where keys are no numbers."""
    from sglang_ext.layers.kernels.select_tokens import mark_tokens

    early = (*range(32), *range(82, 90))
    for broken, expected in ((0.0, (*range(29), *range(50, 53), *range(82, 90))), (float("nan"), early), (float("inf"), early)):
        asked = Asked(1, 1, 2, 16, torch.float32, (90,), (40,), (4, 8))
        slots = asked.table[asked.rows[0], :90].long()
        asked.buffers.keys[0][slots] = 0.0
        asked.buffers.keys[0][slots[50:53]] = broken or asked.queries[0, 0].sum(0) * 9
        there, everything = on(device, asked.buffers), (slice(0, 1), slice(0, 1))
        given = asked.queries.to(device), there.key_table, there.keys[0], there.scaling_table
        found = written(mark_tokens(*given, asked.contexts(device, False), *everything), 40).flatten().tolist()
        assert found == [*expected], (broken, found)


def check_many_ties(device):
    """So it is where they are many, and on both sides of what is written at once."""
    from sglang_ext.layers.kernels.select_tokens import mark_tokens

    asked = Asked(1, 1, 1, 16, torch.float32, (1300,), (700,), (0, 2))
    slots = asked.table[asked.rows[0], :1300].long()
    # Of the first two halves of 600 tokens the odd ones are alike, and above those that are even; of the rest all are below.
    query = asked.queries[0, 0, 0]
    for begin, end, factor in ((0, 1200, 1.0), (1200, 1300, -1.0)):
        asked.buffers.keys[0][slots[begin:end]] = factor * query
    asked.buffers.keys[0][slots[1:1200:2]] = 1.5 * query
    there, everything = on(device, asked.buffers), (slice(0, 1), slice(0, 1))
    given = asked.queries.to(device), there.key_table, there.keys[0], there.scaling_table
    # 600 odd ones, the newest two, and of the even ones the first 98.
    expected = sorted([*range(1, 1200, 2), *range(0, 196, 2), 1298, 1299])
    found = written(mark_tokens(*given, asked.contexts(device, False), *everything), 700).flatten().tolist()
    assert found == expected, (sorted({*found} - {*expected}), sorted({*expected} - {*found}))


def check_far_ties(device):
    """So it is in contexts of many chunks, with scores in the registers of many threads and in memory: all threads sum chunks alike."""
    from sglang_ext.layers.kernels.select_tokens import SelectionContexts, mark_tokens

    # Sums of threads, where they differ, mostly do in the last bit of one head of a hundred.
    heads, requests = (1, 1) if device == "cpu" else (8, 32)
    for length, count in ((17_500, 8_000), (33_000, 9_000))[: 1 if device == "cpu" else 2]:
        noise = torch.Generator().manual_seed(length)
        keys = torch.randn(64, heads, 16, generator=noise).to(device)
        table = torch.randint(64, (requests, length), generator=noise, dtype=torch.int32)
        numbers = torch.tensor([[row, length, count, 0] for row in range(requests)])
        contexts = SelectionContexts(table.to(device), numbers.to(device), (length,) * requests, (0, 0))
        queries = torch.randn(requests, 1, heads, 16, generator=noise).to(device)
        addresses, scaling = torch.tensor([keys.data_ptr()], device=device), torch.tensor([0.3], device=device)
        marked = mark_tokens(queries, addresses, keys, scaling, contexts, slice(0, 1), slice(0, requests))
        found = written(marked, count)[0].cpu().long()
        for request, row in enumerate(table):
            for head, kept in enumerate(found[request]):
                chosen, parted = torch.zeros(length, dtype=torch.bool).index_fill(0, kept, True), 0
                assert chosen.sum() == count, (length, request, head)
                # Tokens of a slot have the same score.
                for slot in range(64):
                    mine = chosen[row == slot].int()
                    assert (mine.diff() <= 0).all(), (length, request, head, slot)
                    parted += 0 < mine.sum() < len(mine)
                assert parted <= 1, (length, request, head, parted)


@contextmanager
def one_at_once():
    """No part of a choice that is launched one by one holds memory when the next one takes some."""
    from sglang_ext.layers.kernels import select_tokens

    mark, parts = select_tokens.mark_tokens, []

    def marked(*given):
        assert not any(part() for part in parts)
        found = mark(*given)
        parts.append(weakref.ref(found))
        return found

    with patch.object(select_tokens, "mark_tokens", marked):
        yield
    assert parts


def check_predicted(device):
    """What the method chooses in PyTorch, by either predictor, in one launch or in many; of one request as positions, of all as pointers."""
    from sglang_ext.mem_cache.selection.on_gpu import GpuSelector

    # All at once; one by one; queries at once, choices one by one; queries of a layer at once.
    for predictor, scratch in ((CurrentQuery(), 1 << 30), (CurrentQuery(), 1), (CurrentQuery(), 9_000), (RegressedQuery(), 200_000)):
        asked, window = Asked(3, 2, 2, 16, torch.float32, (90, 130), (40, 60), (4, 32)), 5
        there, rotary = on(device, asked.buffers), Rotary((1 / 10 ** torch.arange(8)).to(device))
        queries = torch.randn(2, 3, 4, window, 16, generator=torch.Generator().manual_seed(3)) * 3
        positions = torch.tensor([[1, 2, 3, 5, 6], [200, 201, 202, 203, 204]])
        choice = GpuSelector(predictor, there, 4, rotary, scratch)
        given = (lambda requests, layers: queries.to(device)[requests, layers]), positions.to(device)
        with one_at_once():
            assert choice.choose(asked.contexts(device, True), *given, ahead=3) is None
        found = choice.choose(asked.contexts(device, False), *given, ahead=3, most=60).cpu().long()
        on_host = Rotary(rotary.frequencies.cpu())
        asked.queries = predictor.predict(queries, positions, on_host, ahead=3)
        pointed = torch.tensor_split(asked.targets, [asked.held[0]])
        for layer in range(3):
            for request, count in enumerate(asked.counts):
                kept, scores = found[layer, request, :, :count], asked.scores(request, layer)
                for head in range(2):
                    check_chosen(kept[head], scores[head], count, 0 if device == "cpu" else 2e-2, (predictor.name, layer, request, head))
                slots = asked.pointers.read(there.keys[layer], pointed[request].to(device), count).cpu()
                assert torch.equal(slots, asked.table[asked.rows[request]].long()[kept]), (predictor.name, layer, request)


def check_choosing(device):
    """All of them; then as of contexts that are too long for registers, a few tokens at once."""
    from sglang_ext.layers.kernels import select_tokens

    for check in (check_turned, check_choose_tokens, check_ties, check_many_ties, check_far_ties, check_predicted):
        check(device)
    with patch.multiple(select_tokens, RESIDENT=256, AT_ONCE=FEW_AT_ONCE, WRITTEN=64):
        for check in (check_choose_tokens, check_ties, check_many_ties):
            check(device)
