"""Checks of Quest's extremes and choice of pages, on a GPU or through Triton's interpreter."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton.language as tl
from backend_steps import Layers, on
from packed_backend import batch_of_nobody, captured, layer_of, runner_of
from packed_helpers import attention

from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes, compute_extremes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.queries import record_queries, set_key_write_callback
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.selection.scoring import page_scores

PAGE = 16
# The newest pages first, then the first one.
FIRST, NEWEST = 1, 2


class Paged:
    """Requests in a pool of scattered pages, of which so many are a request's, and so many are chosen; copies in the draft rows."""

    def __init__(self, device, layers, heads, group, dim, dtype, pages, chosen, every=1, seed=0):
        noise = torch.Generator().manual_seed(seed + dim)
        self.pages, self.chosen, self.heads, self.group, self.dim, self.dtype = pages, chosen, heads, group, dim, dtype
        self.device, per_slot = device, dim * dtype.itemsize // 4
        held = [-(-most * PAGE // per_slot) for most in chosen]
        total = sum(pages) + sum(-(-slots // PAGE) for slots in held) + 2
        keys, values = (tuple(torch.randn(total * PAGE + 5, heads, dim, generator=noise).to(dtype) for _ in range(layers)) for _ in "kv")
        self.before = KVBuffers(tuple(range(layers)), (dim**-0.5,) * layers, keys, values)
        self.there = on(device, self.before)
        order = 1 + torch.randperm(total - 1, generator=noise)
        rows = len(pages) + 1
        self.table = torch.zeros(2 * rows, max(*pages, 2) * PAGE + 40, dtype=torch.int32)
        self.views, begin = [], 0
        for row, (most, slots) in enumerate(zip(pages, held), 1):
            mine = order[begin : begin + most]
            self.table[row, : most * PAGE] = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()
            begin += most
            own = (order[begin : begin + -(-slots // PAGE), None] * PAGE + torch.arange(PAGE)).flatten()
            begin += -(-slots // PAGE)
            self.table[row + rows, :slots] = own[:slots]
            self.views.append(SimpleNamespace(covered=most * PAGE, own_tokens=chosen[row - 1] * PAGE, own=own, owned_slots=slots))
        self.rows, self.there_table = rows, self.table.to(device)
        extremes = PageExtremes(self.there.keys, range(layers), PAGE)
        method = Quest(every=every, in_attention=True)
        self.begins = PagePointerLayout.of_pool(Pointers.for_pool(self.there, PAGE), self.there_table, extremes, method)
        # With PyTorch, because the interpreter is slow. check_extremes checks the kernel.
        for there, held in zip(self.there.keys, extremes.held):
            held.copy_(compute_extremes(there, PAGE))

    def write_extremes(self, slots):
        """As forwards that wrote to ``slots``."""
        from sglang_ext.layers.kernels.kv_copies import bound_pages

        extremes = self.begins.extremes
        bound_pages(self.there.key_table, self.there.keys[0], slots.to(self.device), extremes.held, PAGE)

    def write_all_extremes(self):
        """With the kernel, over whatever was there."""
        extremes = self.begins.extremes.held
        extremes.fill_(7)
        self.write_extremes(torch.arange(extremes.shape[1] * PAGE))

    def begin(self):
        """All copies are made."""
        for row, view in enumerate(self.views, 1):
            self.begins.on_filled(row + self.rows, view)

    def choose(self, layer, queries, rows, lengths, cut=None):
        """As a step's attention does; the bounds."""
        from sglang_ext.layers.kernels.quest_pages import QUEST_GRIDS, point_at_best_pages

        given = (torch.tensor(part, device=self.device) for part in (rows, lengths))
        cells = as_pointers(self.there.keys[layer])
        return point_at_best_pages(self.begins, layer, queries.to(self.device), cells, self.there_table, *given, cut or QUEST_GRIDS[0]).cpu()

    def queries(self, requests, seed, scale=1.0):
        """Of a step."""
        noise = torch.Generator().manual_seed(seed)
        return (torch.randn(requests, self.heads * self.group, self.dim, generator=noise) * scale).to(self.dtype)

    def bounds(self, request, layer, queries):
        """As PyTorch's Quest scores whole pages of a request: float32 [kv_heads, pages]."""
        slots = self.table[request + 1, : self.pages[request] * PAGE].long()
        keys = self.before.keys[layer][slots].transpose(0, 1)[None, None]
        return page_scores(queries[None, None].float(), keys, PAGE)[0, 0, :, ::PAGE]

    def expected(self, request, bounds):
        """Slots that each head's pointers lead to, by these bounds: int64 [kv_heads, tokens]."""
        count, found = self.pages[request], bounds.clone()
        found[:, :FIRST] = float("inf")
        # Of so few pages that not all that are always chosen are, the newest come first.
        newest = torch.arange(count - 1, max(-1, count - 1 - NEWEST), -1)
        chosen = []
        for pages in found.sort(dim=-1, descending=True, stable=True).indices.tolist():
            ordered = [*newest.tolist(), *(page for page in pages if page not in newest)]
            chosen.append(sorted(ordered[: self.chosen[request]]))
        firsts = self.table[request + 1, : count * PAGE : PAGE].long()[torch.tensor(chosen)]
        return (firsts[..., None] + torch.arange(PAGE)).flatten(1)

    def led(self, request, layer):
        """Where the pointers lead."""
        view = self.views[request]
        return self.begins.layout.read(self.there.keys[layer].cpu(), view.own, view.own_tokens)


def check_extremes(device):
    """After random writes, of slots that are used again among them, extremes are those of the keys that are in the pages, and of no
    other page: in all layers, over channels that are no power of 2, and slots in any order."""
    for layers, heads, dim, dtype in (
        (2, 2, 64, torch.float32), (3, 1, 24, torch.float16), (1, 8, 128, torch.bfloat16), (2, 5, 80, torch.float32),
    ):  # fmt: skip
        noise = torch.Generator().manual_seed(dim)
        there = Paged(device, layers, heads, 1, dim, dtype, (6, 3), (3, 2))
        extremes, total = there.begins.extremes, len(there.before.keys[0]) // PAGE
        there.write_all_extremes()
        for keys, held in zip(there.there.keys, extremes.held):
            assert torch.equal(held, compute_extremes(keys, PAGE)), dim
        for count in (1, 7, 40):
            before = extremes.held.clone()
            # Of tokens of some requests, next to each other and in an order, of others, and of padding.
            start = int(torch.randint(total * PAGE - 20, (1,), generator=noise))
            some = torch.randint(total * PAGE, (count,), generator=noise)
            slots = torch.cat([torch.arange(start, start + 19), some, torch.zeros(3, dtype=torch.int64), some[:2]])
            for keys in there.there.keys:
                keys[slots.to(device)] = torch.randn(len(slots), heads, dim, generator=noise).to(dtype).to(device) * 3
            there.write_extremes(slots)
            for keys, held, old in zip(there.there.keys, extremes.held, before):
                expected, touched = compute_extremes(keys, PAGE), (slots // PAGE).unique().to(device)
                assert torch.equal(held, expected), (dim, count)
                rest = torch.ones(total, dtype=torch.bool, device=device).index_fill(0, touched, False)
                assert torch.equal(held[rest], old[rest]), (dim, count)


def check_choice(device, cut=None):
    """Batches of several lengths, padded, with rows that read full KV: pointers lead to what PyTorch's Quest chooses, time and again, and
    nothing else changes; in a graph, too."""
    half = torch.float16 if device == "cpu" else torch.bfloat16
    shapes = (
        (1, 1, 4, 80, torch.float32, (70, 3), (7, 1)), (1, 3, 1, 24, torch.float32, (4, 64, 65), (2, 3, 64)),
        (2, 2, 3, 32, half, (37, 5, 130), (9, 5, 40)),
    )  # fmt: skip
    # The interpreter is slow: it runs the largest shape with one cut.
    for layers, heads, group, dim, dtype, pages, chosen in shapes if device == "cuda" or cut is None else shapes[:2]:
        there = Paged(device, layers, heads, group, dim, dtype, pages, chosen)
        requests, rows = len(pages), there.rows
        # A row of full KV, and two that pad.
        batch = [*range(rows + 1, rows + 1 + requests), 1, 0, 0]
        lengths = [view.owned_slots + 3 for view in there.views] + [pages[0] * PAGE, 1, 1]
        before = [keys.clone() for keys in there.there.keys]
        there.choose(0, there.queries(len(batch), 9), batch, lengths)
        assert all(map(torch.equal, before, there.there.keys)), "nobody has a copy yet"
        there.begin()
        # The interpreter is slow: there the smallest of these pools has all scales of queries, the others have the first two.
        for turn, scale in enumerate((1.0, 0.0, 30.0, 1.0)[: 4 if device == "cuda" or layers * heads == 1 else 2]):
            for layer in range(layers):
                queries = there.queries(len(batch), 10 * turn + layer, scale)
                bounds = there.choose(layer, queries, batch, lengths, cut)
                for request in range(requests):
                    found, meant = bounds[request, :, : pages[request]], there.bounds(request, layer, queries[request])
                    torch.testing.assert_close(found, meant, rtol=1e-3, atol=1e-3 * max(scale, 1.0))
                    assert torch.equal(there.led(request, layer), there.expected(request, found)), (dim, turn, layer, request)
                assert not there.begins.finished_parts.any()
        copies = torch.cat([view.own[: view.owned_slots] for view in there.views])
        rest = torch.ones(len(before[0]), dtype=torch.bool).index_fill(0, copies, False)
        for keys, old in zip(there.there.keys, before):
            assert torch.equal(keys.cpu()[rest], old.cpu()[rest])


def check_wrong_numbers(device, cut=None):
    """Bounds that are no numbers, or infinite, end, and lead to pages of the context, each once."""
    for broken in (float("nan"), float("inf"), float("-inf")):
        there = Paged(device, 1, 1, 2, 16, torch.float32, (50,), (12,))
        there.begin()
        page = there.table[1, 10 * PAGE] // PAGE
        there.begins.extremes.held[0, page] = broken
        if broken == float("inf"):
            there.begins.extremes.held[0] = broken
        there.choose(0, there.queries(1, 1), [3], [there.views[0].owned_slots + 1], cut)
        found = there.led(0, 0)[0]
        assert len(found.unique()) == 12 * PAGE and set(found.tolist()) <= set(there.table[1, : 50 * PAGE].tolist()), broken


def check_turns(device):
    """With a choice every three steps copies lead elsewhere in the first step after they were made, and in each third one; and the host
    knows in which."""
    there = Paged(device, 2, 2, 2, 16, torch.float32, (20, 30), (6, 7), every=3)
    there.begin()
    changed = [[], []]
    # The second copy is made anew before its fifth step, over the same pages.
    for step in range(8):
        if step == 4:
            there.begins.on_filled(there.rows + 2, there.views[1])
        before = [[there.led(request, layer) for layer in range(2)] for request in range(2)]
        since = step, step if step < 4 else step - 4
        lengths = [view.owned_slots + 5 + more for view, more in zip(there.views, since)]
        for layer in range(2):
            there.choose(layer, there.queries(2, 2 * step + layer), [there.rows + 1, there.rows + 2], lengths)
        told = [there.begins.record_step(there.rows + 1 + request, 5 + more) for request, more in enumerate(since)]
        for request in range(2):
            different = {not torch.equal(there.led(request, layer), before[request][layer]) for layer in range(2)}
            assert different == {told[request]}
            changed[request] += different
    turn, rest = True, False
    assert changed == [[turn, rest, rest, turn, rest, rest, turn, rest], [turn, rest, rest, turn, turn, rest, rest, turn]]


def check_in_graph(device):
    """A captured choice follows what rows begin with, who reads which row, and its pages as they are then."""
    from sglang_ext.layers.kernels.quest_pages import point_at_best_pages

    there = Paged(device, 1, 2, 2, 32, torch.float32, (40, 21), (8, 6))
    rows, lengths = (torch.tensor(part, device=device) for part in ([0, 0, 0], [1, 1, 1]))
    queries, slots = there.queries(3, 1).to(device), torch.zeros(2, dtype=torch.int64, device=device)

    def step():
        from sglang_ext.layers.kernels.kv_copies import bound_pages

        found = point_at_best_pages(there.begins, 0, queries, as_pointers(there.there.keys[0]), there.there_table, rows, lengths)
        bound_pages(there.there.key_table, there.there.keys[0], slots, there.begins.extremes.held, PAGE)
        return found

    run = captured(step, device)
    there.begin()
    rows.copy_(torch.tensor([there.rows + 2, 0, there.rows + 1]))
    lengths.copy_(torch.tensor([there.views[1].owned_slots + 1, 1, there.views[0].owned_slots + 1]))
    for seed in (2, 3):
        queries.copy_(there.queries(3, seed))
        # Of a page of each request one key is another from this step's end on.
        slots.copy_(torch.stack([there.table[request + 1, 4 * PAGE + seed] for request in range(2)]).long())
        bounds = run().cpu()
        for place, request in ((0, 1), (2, 0)):
            found, meant = bounds[place, :, : there.pages[request]], there.bounds(request, 0, queries[place].cpu())
            torch.testing.assert_close(found, meant, rtol=1e-3, atol=1e-3)
            assert torch.equal(there.led(request, 0), there.expected(request, found)), (seed, request)
        for slot in slots.tolist():
            there.before.keys[0][slot] = there.there.keys[0][slot] = 9.0
        run()


def check_pages_backend(device):
    """Each layer of a step attends to the pages that its own query chooses and to the tokens after them, beside a row of full KV; a graph
    of it follows its tables, and leaves extremes of what it wrote when its last layer has attended."""
    from sglang_ext.layers.attention.per_head import PagesDecode

    layers, group, tail = 2, 2, 3
    there = Paged(device, layers, 2, group, 32, torch.float32, (40, 21), (8, 6))
    heads, extremes = there.heads * group, there.begins.extremes
    backend = PagesDecode(runner_of(Layers(there.there), there.there_table, heads), there.begins)
    backend.splits = lambda requests: (2, 1)
    batch = batch_of_nobody(device)
    batch.forward_mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True)
    noise = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(layers, 2, width * 32, generator=noise).to(device) for width in (heads, 2, 2))

    def step():
        def attend(self, *given, **more):
            return self.forward_decode(*given[:5])

        found = []
        for layer in range(layers):
            given = q[layer], k[layer], v[layer], layer_of(layer, heads, 32), batch
            found.append(record_queries(attend, backend, *given))
        return torch.stack(found)

    set_key_write_callback(extremes.on_keys_written)
    try:
        run = captured(step, device)
        there.begin()
        # The second request's copy, and the first's full KV, each with a token in its row's last slot.
        view, row = there.views[1], there.rows + 2
        newest = torch.tensor([there.table[1, 39 * PAGE + 15], there.table[1, 5 * PAGE]]).long()
        there.there_table[row, view.owned_slots : view.owned_slots + tail] = there.table[1, 5 * PAGE - tail + 1 : 5 * PAGE + 1].to(device)
        batch.req_pool_indices.copy_(torch.tensor([1, row]))
        batch.seq_lens.copy_(torch.tensor([40 * PAGE, view.owned_slots + tail]))
        batch.out_cache_loc.copy_(newest)
        after = there.table[1, 5 * PAGE - tail + 1 : 5 * PAGE + 1].long()
        for _ in range(2):
            found = run().view(layers, 2, heads, 32).cpu().double()
            for layer in range(layers):
                for kind, new in ((there.before.keys, k), (there.before.values, v)):
                    kind[layer][newest] = new[layer].view(2, 2, 32).cpu()
                led = there.led(1, layer)
                assert torch.equal(led, there.expected(1, there.bounds(1, layer, q[layer, 1].view(heads, 32).cpu())))
                for head, mine in enumerate(range(0, heads, group)):
                    for request, slots in enumerate((there.table[1, : 40 * PAGE].long(), torch.cat([led[head], after]))):
                        queries = q[layer, request].view(1, heads, 32)[:, mine : mine + group].cpu()
                        seen = (kind[layer][slots, head][None].double() for kind in (there.before.keys, there.before.values))
                        expected = attention(queries, *seen, 0.1)[0]
                        worst = float((found[layer, request, mine : mine + group] - expected).abs().max() / expected.abs().max())
                        assert worst < (5e-3 if device == "cuda" else 1e-5), (layer, head, request, worst)
            for layer in range(layers):
                pages = newest // PAGE
                assert torch.equal(extremes.held[layer].cpu()[pages], compute_extremes(there.before.keys[layer], PAGE)[pages])
            # Of the next step queries and keys are others.
            for part in (q, k, v):
                part.copy_(torch.randn(part.shape, generator=noise))
    finally:
        set_key_write_callback(None)


@contextmanager
def launched_early(device):
    """As on GPUs that launch a kernel while the one before it ends. Through the interpreter, where one is done before the next, each head
    says once that it is not chosen yet; what is yielded counts what was asked and waited for."""
    counts = Counter()
    if device == "cuda":
        yield counts
        return
    from sglang_ext.layers.kernels import per_head_decode, quest_pages

    def left(arrived):
        counts["asked"] += 1
        return tl.load(arrived) + counts["asked"] % 2

    def wait():
        counts["waited"] += 1

    early = {"pdl_options": lambda keys: {"EARLY": True}, "gdc_wait": wait, "gdc_launch_dependents": lambda: None}
    with patch.multiple(per_head_decode, load_acquired_count=left, **early), patch.multiple(quest_pages, **early):
        yield counts


def check_overlapped(device):
    """Attention that begins while the last heads choose gives bit for bit what one gives that waits for all, in steps of a graph whose
    queries change, of requests that choose among few pages and many."""
    with launched_early(device) as counts:
        overlapped_steps(device)
    # Programs of pointers ask twice, those of the last request wait for what comes after them.
    assert device == "cuda" or (counts["asked"] >= 2 * 8 and counts["waited"] > 8), counts


def overlapped_steps(device):
    """As :func:`check_overlapped` has it."""
    from sglang_ext.layers.kernels.per_head_decode import pointer_decode
    from sglang_ext.layers.kernels.quest_pages import point_at_best_pages

    on_gpu = device == "cuda"
    requests, heads, layers, steps = (24, 8, 3, 30) if on_gpu else (2, 2, 2, 2)
    among = [512 if number % 3 else 40 + number for number in range(requests)] if on_gpu else [40, 21]
    there = Paged(device, layers, heads, 2, 64, torch.float32, among, [pages // 4 for pages in among])
    there.begin()
    queries = there.queries(requests, 0).to(device)
    rows = torch.arange(1, 1 + requests, device=device) + there.rows
    lengths = torch.tensor([view.owned_slots for view in there.views], device=device)

    def attend(overlapped):
        found = []
        for layer in range(layers):
            keys, values = there.there.keys[layer], there.there.values[layer]
            given = there.there_table, rows, lengths
            bounds = point_at_best_pages(there.begins, layer, queries, as_pointers(keys), *given)
            waits = there.begins.finished_parts if overlapped else None
            if not overlapped:
                # What was not launched early ends before attention begins, and the choice before that: its pointers are there.
                queries.add_(0)
            found.append(pointer_decode(there.begins, queries, keys, values, *given, 0.1, (3, 2), waits))
            del bounds
        return torch.stack(found)

    runs = [captured(lambda overlapped=overlapped: attend(overlapped), device) for overlapped in (True, False)]
    for seed in range(steps):
        queries.copy_(there.queries(requests, seed))
        found, meant = (run().clone() for run in runs)
        assert torch.equal(found, meant) and not there.begins.finished_parts.any(), seed


def check_quest(device):
    """All of them; then with bounds in memory, more than a program multiplies at once, and pointers in several turns."""
    from sglang_ext.layers.kernels import quest_pages

    for check in (check_extremes, check_choice, check_wrong_numbers, check_turns, check_in_graph, check_pages_backend, check_overlapped):
        check(device)
    with patch.multiple(quest_pages, CHUNK=32, KEPT=4):
        for check in (check_choice, check_wrong_numbers):
            check(device, quest_pages.QuestGrid(1024, 24, 16, None))
