"""Run every kernel for a shape of attention in Triton's interpreter, against float64: ``matrix_interpret.py [--dims 64] ...``.

Rows are empty, of one token, of as many as a kernel takes at a time, and of one more. ``--refuse N``: each kernel's first N
tile sizes do not fit, but for the last one, as on a GPU with little shared memory. Prints a line for each result that is off, and a
count; exits with 1 where there was one. ``--quick``: a few shapes, with the tile sizes that are preferred, and where a kernel has others
once more with the smallest.
"""

import argparse
import os
import re
import sys
import time
from collections import Counter
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import quick_interpreter  # noqa: E402
from marked_helpers import written
from smaller_tiles import had_choice, install, pass_over  # noqa: E402, I001: before kernels

install()
import hand_over_checks  # noqa: E402
import lynx_checks  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from backend_steps import on  # noqa: E402
from gluon_emulator import Emulated  # noqa: E402
from hopper_emulator import Emulated as HopperEmulated  # noqa: E402
from matrix_arguments import add_shapes  # noqa: E402
from matrix_launches import LAUNCHES, Shape, shapes  # noqa: E402
from pack_checks import check_case, pool  # noqa: E402
from packed_helpers import KERNEL_KINDS, attention, attention_over, divides, for_heads, packed_pool  # noqa: E402
from prefill_checks import FIRST_HEAD, LAYER, Batch  # noqa: E402
from pointer_checks import pointed  # noqa: E402
from quest_checks import Paged  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from uneven_checks import uneven_copy  # noqa: E402

from sglang_ext.layers.kernels.select_tokens import SelectionContexts, mark_tokens  # noqa: E402
from sglang_ext.layers.kernels.quantized_keys import quantize_keys, QuantizedKeyTensors  # noqa: E402
from sglang_ext.layers.kernels.kv_copies import gather_kept, scatter_cells, write_pointers, page_checksum, gather_rows, scatter_rows  # noqa: E402
from sglang_ext.layers.kernels.packed import packed_decode, integer_prefill  # noqa: E402
from sglang_ext.layers.kernels.packed.prompt_codes import prompt_codes  # noqa: E402
from sglang_ext.layers.kernels.lynx.layout import PageLayout  # noqa: E402
from sglang_ext.layers.kernels.packed.pack_blocks import can_pack  # noqa: E402
from sglang_ext.layers.kernels.per_head_decode import pointer_decode, ragged_decode  # noqa: E402
from sglang_ext.layers.kernels.verify_attention import verify_attention, EXACT, ContextSplits, VerifyTokens, fast_tile  # noqa: E402
from sglang_ext.layers.kernels.key_scores import window_scores  # noqa: E402
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout, RaggedSelection  # noqa: E402
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing  # noqa: E402
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers  # noqa: E402
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers  # noqa: E402
from sglang_ext.mem_cache.host_tier.tier import SUMMED_WORD, PageChecksums
from sglang_ext.mem_cache.host_tier.host_pool import as_words
from sglang_ext.mem_cache.compressed.key_derived_data import compute_extremes
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, KeySpec  # noqa: E402

# Of the largest number: what rounding of inputs and weights may add up to.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Tokens of a row after its copy, around the 32 of a step; 0 beside a copy alone.
TAILS = (1, 32, 33)
# Shapes and kernels of a quick run.
QUICK = (
    (Shape(40, 20, torch.float32), ("window", "uneven", "verify")),
    (Shape(32, 11, torch.bfloat16), ("decode turboquant4", "decode hack2", "pointers", "choice", "choice 4", "pages", "verify exact")),
    (Shape(64, 1, torch.float32), ("pack turboquant2", "copies")),
    (Shape(64, 2, torch.bfloat16), ("prompts hack4", "prompts specialized")),
)


def teach_bfloat16() -> None:
    """Let the interpreter multiply it, in float32, and cast to and from all types: it knows but float32 beside it."""
    builder = interpreter.InterpreterBuilder
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view("float32")
        return interpreter.TensorHandle(data, tl.float32)

    def cast(self, handle, dtype):
        kinds = handle.dtype.scalar, dtype.scalar
        if tl.bfloat16 in kinds and tl.float32 not in kinds and kinds[0] != kinds[1]:
            handle = wide(handle) if kinds[0] == tl.bfloat16 else plain_cast(self, handle, tl.float32)
        return plain_cast(self, handle, dtype)

    builder.create_dot = lambda self, a, b, *more: plain_dot(self, wide(a), wide(b), *more)
    builder.cast_impl = cast


def worst(found, expected) -> float:
    """Of the largest number, how far the results are off; infinite where one is no number."""
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    return float(torch.nan_to_num(error, nan=float("inf")))


def random(shape: Shape, *sizes, seed=0):
    return torch.randn(*sizes, shape.dim, generator=torch.Generator().manual_seed(seed + shape.dim)).to(shape.dtype)


def window(shape: Shape):
    """Scores, also where queries lie beyond the context's end."""
    for tokens, ahead in ((1, 0), (64, 0), (65, 0), (65, 64)):
        keys, queries = random(shape, 70, 1), random(shape, 1, 2, shape.group, seed=1)
        slots, positions = torch.randperm(70)[:tokens], ahead + torch.tensor([max(0, tokens - 2), tokens - 1])
        table = torch.tensor([keys.data_ptr()])
        found = window_scores(queries, table, keys, slots, positions, 0.1)[0, 0]
        logits = torch.einsum("wgd,td->gwt", queries[0].double(), keys[slots, 0].double()) * 0.1
        hidden = torch.arange(tokens) > positions[:, None]
        yield worst(found, logits.masked_fill(hidden, float("-inf")).softmax(-1).mean((0, 1)))


def verify(shape: Shape, exact: bool):
    """Two requests' new tokens over their rows, in a launch."""
    splits = ContextSplits(2, tile=32) if exact else ContextSplits(3)
    for prefixes, counts in (((0, 1), (1, 2)), ((31, 30), (1, 3))):
        keys, values = random(shape, 80, 1), random(shape, 80, 1, seed=1)
        queries = random(shape, sum(counts), shape.group, seed=2)
        table = torch.randperm(80).view(2, 40).int()
        lengths = torch.cat([torch.arange(p + 1, p + c + 1) for p, c in zip(prefixes, counts)])
        most = max(splits.max_splits, int(splits.count_for(lengths).max()))
        splits = ContextSplits(most, splits.tile)
        starts = torch.tensor([0, counts[0], sum(counts)])
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        tokens = VerifyTokens(torch.tensor([1, 0]), torch.tensor(prefixes), starts, counts, ends, splits.count_for(lengths))
        sums = torch.full((len(lengths), shape.group, most), float("nan"))
        blocks = EXACT if exact else fast_tile(max(counts) * shape.group, shape.dim * shape.dtype.itemsize)
        out = torch.full_like(queries, float("nan"))
        room = sums[..., None].repeat(1, 1, 1, shape.dim), sums
        verify_attention(queries, keys, values, out, table, tokens, splits, blocks, room, 0.1)
        for token, length in enumerate(lengths.tolist()):
            seen = table[0 if token >= counts[0] else 1, :length].long()
            k, v = (part[seen].double().transpose(0, 1) for part in (keys, values))
            yield worst(out[token], attention(queries[token][None], k, v, 0.1)[0])


def decode(shape: Shape, name: str, bits: int):
    """Packed blocks with and without tokens after them, tokens alone, and an empty row."""
    if not divides(name, shape.dim):
        return
    pool = packed_pool(name, bits, 2, 33, heads=1, dim=shape.dim, dtype=shape.dtype)
    packed, tokens = pool.packed, pool.keys.shape[1] - 33
    cases = [(packed, 0), *((packed, tail) for tail in TAILS), *((0, tail) for tail in (0, *TAILS))]
    table = torch.zeros(len(cases), len(pool.row), dtype=torch.int32)
    for row, (first, _) in enumerate(cases):
        part = pool.row[packed - first :]
        table[row, : len(part)] = part
    rows, lengths = torch.arange(len(cases)), torch.tensor([first + tail for first, tail in cases])
    queries = random(shape, len(cases), shape.group, seed=3)
    buffers = pool.buffers.keys[0], pool.buffers.values[0]
    slots = torch.tensor([first for first, _ in cases]).int()
    found = packed_decode.packed_decode(pool.packing, queries, *buffers, table, rows, lengths, slots, 0.1, (3, 1))
    for row, (first, tail) in enumerate(cases):
        seen = slice(0 if first else tokens, tokens + tail)
        given = queries[row][None], pool.keys[:, seen], pool.values[:, seen], 0.1
        yield worst(found[row], attention_over(pool.packing, tokens, *given)[0] if first else _attended(queries[row], *given[1:3]))


def _attended(queries, keys, values):
    """float64 [heads, dim]; 0 for nothing to attend to."""
    if keys.shape[1] == 0:
        return torch.zeros(queries.shape, dtype=torch.float64)
    return attention(queries[None], keys, values, 0.1)[0]


def uneven(shape: Shape):
    """Heads that keep nothing, one token, a step, one more, and tails as long."""
    buffers = KVBuffers((0, 1), (0.1, 0.1), *(tuple(random(shape, 200, 2, seed=s + n) for n in range(2)) for s in (0, 5)))
    cells, copied = RaggedHeadLayout.of(buffers, 4), 20
    order = torch.randperm(200)
    context, table = order[:40], torch.zeros(4, 60, dtype=torch.int32)
    table[1] = order[100:160]
    bounds = torch.tensor([0, 0, 1, 33, 80], dtype=torch.int32)
    kept = RaggedSelection(torch.randint(40, (80,)), bounds)
    cells.write(1, kept, context, table[1, :copied].long())
    table[2, :40] = order[160:200]
    rows, lengths = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([copied, copied + 1, copied + 33, 0, 32])
    queries = random(shape, 5, 2 * shape.group, seed=7)
    for layer in range(2):
        found = ragged_decode(cells, layer, queries, table, rows, lengths, 0.1, (3, 1))
        for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist())):
            for head in range(2):
                first, last = bounds[2 * layer + head :][:2].tolist() if row == 1 else (0, 0)
                slots = torch.cat([context[kept.tokens[first:last]], table[row, copied if row == 1 else 0 : length].long()])
                k, v = (kind[layer][slots, head].double()[None] for kind in (buffers.keys, buffers.values))
                mine = slice(head * shape.group, (head + 1) * shape.group)
                yield worst(found[request, mine], _attended(queries[request, mine], k, v))


def pointers(shape: Shape):
    """Heads that keep nothing, one token, a step, one more, and tails as long."""
    buffers = KVBuffers((0,), (0.1,), (random(shape, 200, 2),), (random(shape, 200, 2, seed=5),))
    form, order = Pointers.for_pool(buffers, 1), torch.randperm(200)
    before = [kind[0].clone() for kind in (buffers.keys, buffers.values)]
    for count, tail in ((0, 0), (0, 1), (1, 0), (32, 32), (33, 33)):
        held = order[100 : 100 + form.packed_slots(count)]
        kept = torch.stack([torch.randperm(100)[:count] for _ in range(2)])[None]
        if count:
            form.write(buffers, kept, order[:100], held)
        table = torch.cat([held, order[150 : 150 + tail], held.new_zeros(1)]).int()[None]
        begins = PointerLayout(form, torch.tensor([count], dtype=torch.int32))
        queries, length = random(shape, 1, 2 * shape.group, seed=8), torch.tensor([len(held) + tail])
        found = pointer_decode(begins, queries, buffers.keys[0], buffers.values[0], table, torch.tensor([0]), length, 0.1, (3, 1))
        for head in range(2):
            slots = torch.cat([order[:100][kept[0, head]], order[150 : 150 + tail]])
            mine = slice(head * shape.group, (head + 1) * shape.group)
            yield worst(found[0, mine], _attended(queries[0, mine], *(part[slots, head].double()[None] for part in before)))


def choice(shape: Shape):
    """Positions of two KV heads, each once: by how much a token that is left out scores more than one that is kept, of the largest score."""
    for tokens, count in ((3, 2), (64, 40), (65, 64)):
        keys, queries = random(shape, 70, 2), random(shape, 1, 1, 2 * shape.group, seed=1).float()
        table, numbers = torch.randperm(70)[:tokens].int()[None], torch.tensor([[0, tokens, count, 0]])
        asked, one = SelectionContexts(table, numbers, (tokens,), (1, 1)), slice(0, 1)
        marked = mark_tokens(queries, torch.tensor([keys.data_ptr()]), keys, torch.tensor([0.1]), asked, one, one)
        found = written(marked, count)[0, 0].long()
        yield from _left_out(found, queries.to(shape.dtype).view(2, shape.group, -1), keys[table[0].long()], tokens, count)


def pages(shape: Shape):
    """Bounds of pages, of requests with few and with more than a program multiplies at once; pointers lead to the best of them."""
    there = Paged("cpu", 1, 2, shape.group, shape.dim, shape.dtype, (3, 70), (2, 9))
    there.write_all_extremes()
    yield float(not torch.equal(there.begins.extremes.held[0], compute_extremes(there.there.keys[0], 16)))
    there.begin()
    queries = there.queries(2, 1)
    found = there.choose(0, queries, [4, 5], [view.owned_slots + 1 for view in there.views])
    for request, most in enumerate(there.pages):
        mine = found[request, :, :most]
        yield worst(mine, there.bounds(request, 0, queries[request]).double())
        yield float(not torch.equal(there.led(request, 0), there.expected(request, mine)))


def _left_out(found: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, tokens: int, count: int):
    scores = (torch.einsum("hgd,thd->hgt", queries.double(), keys.double()) * 0.1).softmax(-1).mean(1)
    for kept, score in zip(found, scores):
        assert kept.tolist() == sorted({*kept.tolist()}) and {0, tokens - 1} <= {*kept.tolist()}, (tokens, kept)
        inner = score[kept[1:-1]].min() if count > 2 else score.max()
        yield max(0.0, float((score.index_fill(0, kept, 0.0).max() - inner) / score.max()))


def coded_choice(shape: Shape, bits: int):
    """The same by codes, of what these mean, as the kernel codes keys."""
    for tokens, count in ((3, 2), (64, 40), (65, 64)):
        keys, queries = random(shape, 70, 2), random(shape, 1, 1, 2 * shape.group, seed=1).float()
        held, addresses = QuantizedKeys(KeySpec(1, 2, shape.dim, shape.dtype, bits), 70), torch.tensor([keys.data_ptr()])
        quantize_keys(addresses, keys, torch.arange(70), held.codes, held.words, held.sizes.group)
        table, numbers = torch.randperm(70)[:tokens].int()[None], torch.tensor([[0, tokens, count, 0]])
        asked, one = SelectionContexts(table, numbers, (tokens,), (1, 1)), slice(0, 1)
        coded = QuantizedKeyTensors(held.codes, held.words, held.sizes.group)
        found = written(mark_tokens(queries, addresses, keys, torch.tensor([0.1]), asked, one, one, coded), count)[0, 0].long()
        yield from _left_out(found, queries.view(2, shape.group, -1), held.read(0, table[0].long()), tokens, count)


def copies(shape: Shape):
    """What does not depend on queries, number by number what PyTorch gives: tokens, cells and pointers that are copied; checksums."""
    yield from (float(not same) for same in (*_gathered(shape), *_scattered(shape), *_pointed(shape), *_summed(shape), *_rowed(shape)))


def _gathered(shape: Shape):
    for count in (1, 32, 33):
        keys, values = random(shape, 90, 2), random(shape, 90, 2, seed=1)
        order, kept = torch.randperm(90), torch.stack([torch.randperm(40)[:count] for _ in range(2)])[None]
        expected = [part[order[:40][kept[0]], torch.arange(2)[:, None]] for part in (keys, values)]
        tables = (torch.tensor([part.data_ptr()]) for part in (keys, values))
        gather_kept(*tables, keys, values, kept, order[:40], order[40 : 40 + count])
        found = [part[order[40 : 40 + count]].transpose(0, 1) for part in (keys, values)]
        yield all(map(torch.equal, found, expected))


def _scattered(shape: Shape):
    for copied in (1, 8, 40):
        made = uneven_copy(2, 2, shape.dim, copied, shape.dtype)
        there = on("cpu", made.buffers)
        scatter_cells(there.key_table, there.value_table, there.keys[0], there.values[0], *made.kept, made.sources, made.targets)
        RaggedHeadLayout.of(made.buffers, 2).write(None, made.kept, made.sources, made.targets)
        yield all(map(torch.equal, (*there.keys, *there.values), (*made.buffers.keys, *made.buffers.values)))


def _pointed(shape: Shape):
    for count in (1, 128, 129):
        made = pointed(2, 2, shape.dim, count, shape.dtype)
        there, form = on("cpu", made.buffers), Pointers.for_pool(made.buffers, 1)
        write_pointers(there.key_table, there.keys[0], made.kept, made.context, made.held)
        found = [form.read(keys, made.held, count) for keys in there.keys]
        yield all(torch.equal(part[head], made.led(layer, head)) for layer, part in enumerate(found) for head in range(2))


def _rowed(shape: Shape):
    for count in (1, 32, 33):
        keys, order = random(shape, 80, 2).flatten(1), torch.randperm(80)
        table, out = torch.tensor([keys.data_ptr()]), torch.zeros(1, count, 2 * shape.dim, dtype=shape.dtype)
        gather_rows(table, keys, order[:count], out)
        yield torch.equal(out[0], keys[order[:count]])
        scatter_rows(table, keys, order[40 : 40 + count], out)
        yield torch.equal(out[0], keys[order[40 : 40 + count]])


def _summed(shape: Shape):
    for page_size in (1, 16, 17):
        keys, values = (tuple(random(shape, 60, 2, seed=seed + layer) for layer in range(2)) for seed in (0, 2))
        plain = PageChecksums(KVBuffers((0, 1), (1.0, 1.0), keys, values), page_size)
        slots, tables = torch.randperm(60)[: 3 * page_size], (plain.buffers.key_table, plain.buffers.value_table)
        words = as_words(keys[0], SUMMED_WORD)
        yield torch.equal(page_checksum(*tables, words, slots, plain.token_weights, plain.column_weights), plain.of(slots))


def lynx(shape: Shape):
    """Streams of pages of two KV heads, byte for byte those of PyTorch; assertions of lynx_checks.py."""
    lynx_checks.check_page("cpu", PageLayout(37, 2 * shape.dim, shape.dtype, sinks=4), torch.Generator().manual_seed(4))
    yield 0.0


def handed_over(shape: Shape):
    """Keys, queries and choices on their way between two GPUs; assertions of hand_over_checks.py."""
    hand_over_checks.without_assembly()
    hand_over_checks.keys_and_questions("cpu", shape.dtype, 2, shape.dim, shape.group)
    hand_over_checks.answers("cpu", 37, shape.dtype, shape.dim)
    hand_over_checks.rows("cpu", 5, shape.dtype, shape.dim)
    yield 0.0


def prompts(shape: Shape, bits: int, kernel: integer_prefill.Kernel | None = "tiles"):
    """Prompts that attend to their codes, of which one's beginning was computed before; weights between two codes may get either."""
    if shape.dim not in integer_prefill.DIMS:
        return
    batch = Batch(bits, 64, shape.dim, 1, shape.group, 1, shape.dtype, ((0, 70), (66, 133)), "cpu")
    given = batch.queries, batch.keys, batch.values
    codes = prompt_codes(batch.prompts, *given[1:], LAYER, FIRST_HEAD)
    found = integer_prefill.attend(batch.prompts, codes, *given, 0.1, kernel=kernel)
    expected = batch.expected()
    worst = float((found.float() - expected).abs().max() / expected.abs().max())
    # As products of 8 bits may be off.
    yield worst * TOLERANCES[shape.dtype] / max(1e-2, TOLERANCES[shape.dtype])


def specialized_prompts(shape: Shape):
    """The same by the kernel with specialized warps, emulated, where it takes them."""
    with mock.patch.object(integer_prefill, "prefill_codes", HopperEmulated("prefill_codes")):
        with mock.patch.object(packed_decode, "capability", lambda keys: (9, 0)):
            yield from prompts(shape, 4, None)


def packing(shape: Shape, name: str, bits: int):
    """What the kernel packs, where it takes such heads, is what PyTorch packs; assertions of pack_checks.py."""
    if not divides(name, shape.dim):
        return
    noise, blocks = torch.Generator().manual_seed(bits), 9
    buffers = pool(1, 1, shape.dim, shape.dtype, 128 * blocks + 20, noise)
    packs = Packing.for_pool(for_heads(name, bits, shape.dim), buffers, 1)
    if can_pack(packs, buffers):
        check_case("cpu", packs, buffers, blocks, noise)
        yield 0.0


ONCE = {
    "copies": copies,
    "lynx": lynx,
    "hand over": handed_over,
    **{f"pack {n}{b}": lambda s, n=n, b=b: packing(s, n, b) for n, b in KERNEL_KINDS},
}
RUNS = {
    "window": window,
    "verify": lambda shape: verify(shape, exact=False),
    "verify exact": lambda shape: verify(shape, exact=True),
    **{f"decode {n}{b}": lambda s, n=n, b=b: decode(s, n, b) for n, b in KERNEL_KINDS},
    "prompts specialized": specialized_prompts,
    "uneven": uneven,
    "pointers": pointers,
    "choice": choice,
    "pages": pages,
    **{f"choice {bits}": lambda s, b=bits: coded_choice(s, b) for bits in (8, 4)},
    **{f"prompts hack{bits}": lambda s, b=bits: prompts(s, b) for bits in (4, 2)},
    **ONCE,
}
assert RUNS.keys() >= {name for name in LAUNCHES if not re.fullmatch(r"verify \d+", name)}, "what is compiled runs here, too"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shapes(parser, tuple(RUNS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--refuse", type=int, default=0)
    parser.add_argument("--tensor-cores", action="store_true", help="the Gluon kernels for the blocks that they take, emulated")
    asked, counts, started = parser.parse_args(), Counter(), time.monotonic()
    quick_interpreter.leave_out()
    teach_bfloat16()
    lynx_checks.teach_bfloat16()
    if asked.tensor_cores:
        packed_decode.packed_splits_gluon = Emulated("packed_splits_gluon")
        packed_decode.integer_splits_gluon = Emulated("integer_splits_gluon")
        packed_decode.has_tensor_cores = lambda keys: True
    jobs = [
        (shape, [name for name in asked.launches if name not in ONCE or shape.group == asked.groups[0]])
        for shape in shapes(asked.dims, asked.groups, asked.dtypes)
    ][asked.part[0] :: asked.part[1]]
    pass_over(asked.refuse)
    for shape, names in QUICK if asked.quick else jobs:
        for name in names:
            counts += check(shape, name)
            if asked.quick and had_choice():
                # So many are more than any kernel has.
                pass_over(99)
                counts += check(shape, name)
                pass_over(asked.refuse)
    print(f"{dict(counts)} in {time.monotonic() - started:.0f} s")
    return int(counts["off"] > 0)


def check(shape: Shape, name: str) -> Counter:
    """Run the kernels of ``name``; answers that they ran, and whether they were off."""
    torch.manual_seed(0)
    try:
        off = max(RUNS[name](shape), default=0.0)
    except AssertionError as error:
        off = float("inf")
        print(str(error)[:300])
    if off <= TOLERANCES[shape.dtype]:
        return Counter(run=1)
    print(f"off: {name}, {shape}: {off:.2g}", flush=True)
    return Counter(run=1, off=1)


if __name__ == "__main__":
    sys.exit(main())
