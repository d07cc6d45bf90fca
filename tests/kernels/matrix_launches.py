"""Launches of every kernel for a shape of attention, on small tensors: for kernel_matrix.py, which compiles what they launch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from marked_helpers import written
from packed_helpers import KERNEL_KINDS, divides, packed_pool

from sglang_ext.layers.kernels import exchange_kernels, row_exchange
from sglang_ext.layers.kernels.select_tokens import SelectionContexts, mark_tokens
from sglang_ext.layers.kernels.quest_pages import point_at_best_pages
from sglang_ext.layers.kernels.key_scores import rotate_queries, window_scores
from sglang_ext.layers.kernels.quantized_keys import quantize_keys, QuantizedKeyTensors
from sglang_ext.layers.kernels.kv_copies import bound_pages, gather_kept, scatter_cells, write_pointers, page_checksum, gather_rows, scatter_rows
from sglang_ext.layers.kernels.packed import integer_prefill, pack_blocks, packed_decode
from sglang_ext.layers.kernels.packed.prompt_codes import PromptBatch, prompt_codes
from sglang_ext.layers.kernels.lynx import triton_codec
from sglang_ext.layers.kernels.lynx.residual_pages import read_pages, write_pages
from sglang_ext.layers.kernels.lynx.layout import PageLayout, PageTensors
from sglang_ext.layers.kernels.per_head_decode import pointer_decode, ragged_decode
from sglang_ext.layers.kernels.verify_attention import verify_attention, EXACT, ContextSplits, VerifyTokens, fast_tile
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.host_tier.tier import SUMMED_WORD
from sglang_ext.mem_cache.host_tier.host_pool import as_words
from sglang_ext.mem_cache.host_tier.page_copies import ResidualPages
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, KeySpec

DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48, 71)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# New tokens of a request: a decode's, and what drafts of 4, 16 and 64 tokens are verified with.
WIDTHS = (1, 5, 17, 65)


@dataclass(frozen=True)
class Shape:
    """Of attention: channels of a head, query heads that share a KV head, and the dtype of the KV pool."""

    dim: int
    group: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dim} channels, {self.group} query heads a KV head, {str(self.dtype).removeprefix('torch.')}"


def shapes(dims=DIMS, groups=GROUPS, dtypes=DTYPES) -> Iterator[Shape]:
    """All combinations."""
    return (Shape(dim, group, dtype) for dim in dims for group in groups for dtype in dtypes)


@lru_cache(maxsize=64)
def pool_of(name: str, bits: int, dim: int, dtype: torch.dtype):
    """A pool with a packed block, and 3 exact tokens."""
    return packed_pool(name, bits, 1, 3, heads=1, dim=dim, dtype=dtype)


def _one_request(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(1, shape.group, shape.dim, dtype=shape.dtype), torch.zeros(2, 8, dtype=torch.int32), torch.tensor([1])


def _window(shape: Shape) -> None:
    pool = pool_of("int8", 8, shape.dim, shape.dtype)
    queries = torch.zeros(1, 32, shape.group, shape.dim, dtype=shape.dtype)
    window_scores(queries, pool.buffers.key_table, pool.buffers.keys[0], torch.zeros(9).long(), torch.arange(32), 0.1)


def _verify(blocks: Callable[[int, int], object], shape: Shape, width: int) -> None:
    keys = torch.zeros(80, 1, shape.dim, dtype=shape.dtype)
    queries, one = torch.zeros(width, shape.group, shape.dim, dtype=shape.dtype), torch.zeros(1, dtype=torch.int64)
    ends = torch.arange(width + 1)
    exact = blocks is None
    splits = ContextSplits(1, tile=256) if exact else ContextSplits(4)
    tokens = VerifyTokens(one, one, torch.tensor([0, width]), [width], ends, torch.ones(width, dtype=torch.int32))
    sizes = EXACT if exact else blocks(width * shape.group, shape.dim * shape.dtype.itemsize)
    partial = torch.zeros(width, shape.group, splits.max_splits, shape.dim)
    table = torch.zeros(2, 80, dtype=torch.int32)
    verify_attention(
        queries, keys, keys, torch.zeros_like(queries), table, tokens, splits, sizes, (partial, partial[..., 0].contiguous()), 0.1
    )


def _packed(name: str, bits: int, shape: Shape) -> None:
    if not divides(name, shape.dim):
        return
    pool = pool_of(name, bits, shape.dim, shape.dtype)
    queries, table, rows = _one_request(shape)
    buffers, slots = (pool.buffers.keys[0], pool.buffers.values[0]), torch.zeros(2, dtype=torch.int32)
    packed_decode.packed_decode(pool.packing, queries, *buffers, table, rows, rows, slots, 0.1)


def _packing(name: str, bits: int, shape: Shape) -> None:
    if not divides(name, shape.dim):
        return
    pool = pool_of(name, bits, shape.dim, shape.dtype)
    kept, slots = torch.zeros(1, 1, 64, dtype=torch.int64), torch.zeros(128, dtype=torch.int64)
    if pack_blocks.can_pack(pool.packing, pool.buffers):
        seeds = slots.int() if pool.packing.stochastic else None
        pack_blocks.pack_blocks(pool.packing, pool.buffers, kept, slots, slots, seeds)


def _prompts(bits: int, shape: Shape, kernel: integer_prefill.Kernel | None = "tiles") -> None:
    """A prompt of sinks, a block and a token after it, which attends to its codes."""
    if shape.dim not in integer_prefill.DIMS:
        return
    pool = pool_of("hack", bits, shape.dim, shape.dtype)
    keys, values, tokens = pool.buffers.keys[0], pool.buffers.values[0], pool.packing.sinks + pool.packing.block_tokens + 1
    integer_prefill.check_prefill(pool.packing, keys, values)
    queries, table = torch.zeros(tokens, shape.group, shape.dim, dtype=shape.dtype), torch.zeros(2, 80, dtype=torch.int32)
    prompts = PromptBatch(pool.packing, table, [0], [0], [tokens], {0: torch.zeros(tokens, dtype=torch.int32)})
    integer_prefill.attend(prompts, prompt_codes(prompts, keys, values, 0, 0), queries, keys, values, 0.1, kernel=kernel)


def _uneven(shape: Shape) -> None:
    pool, (queries, table, rows) = pool_of("int8", 8, shape.dim, shape.dtype), _one_request(shape)
    ragged_decode(RaggedHeadLayout.of(pool.buffers, 2), 0, queries, table, rows, rows, 0.1)


def _pointers(shape: Shape) -> None:
    pool, (queries, table, rows) = pool_of("int8", 8, shape.dim, shape.dtype), _one_request(shape)
    begins = PointerLayout.for_table(Pointers.for_pool(pool.buffers, 1), table)
    pointer_decode(begins, queries, pool.buffers.keys[0], pool.buffers.values[0], table, rows, rows, 0.1)


def _choice(shape: Shape) -> None:
    """Of some tokens, as pointers and as positions."""
    keys = torch.zeros(80, 1, shape.dim, dtype=shape.dtype)
    table, numbers = torch.zeros(2, 80, dtype=torch.int32), torch.tensor([[1, 70, 40, 0]])
    for targets in (torch.zeros(40, dtype=torch.int64), None):
        asked, one = SelectionContexts(table, numbers, (70,), (4, 32), targets), slice(0, 1)
        given, turn = torch.zeros(1, 1, shape.group, shape.dim, dtype=shape.dtype), (torch.zeros(shape.dim),) * 2
        queries, address = rotate_queries(given, (*turn, torch.arange(shape.dim))), torch.tensor([keys.data_ptr()])
        marked = mark_tokens(queries, address, keys, torch.ones(1), asked, one, one)
        written(marked, 40)
    comes = row_exchange.exchange(marked, torch.zeros(1, 40, dtype=torch.int32), 40, 9)
    words, there = torch.zeros(1, exchange_kernels.QUESTION_NUMBERS, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    row_exchange.push_rows((address, address), keys, comes, words, there, (1 << 33,) * 4)


def _pages(shape: Shape) -> None:
    """Of a step, in each step and in every other one, by bounds in registers and in memory; and what bounds pages."""
    keys, numbers, table = torch.zeros(80, 1, shape.dim, dtype=shape.dtype), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 80000, dtype=torch.int32)
    extremes = PageExtremes((keys,), (0,), 16)
    bound_pages(numbers, keys, numbers, extremes.held, 16)
    for every, width in ((1, 40), (1, 80000), (2, 80000)):
        begins = PagePointerLayout.of_pool(Pointers(as_pointers(keys).shape[-1], 16), table, extremes, Quest(every=every, in_attention=True))
        queries = torch.zeros(4, shape.group, shape.dim, dtype=shape.dtype)
        point_at_best_pages(begins, 0, queries, as_pointers(keys), table[:, :width], numbers, numbers)


def _coded_choice(bits: int, shape: Shape) -> None:
    """Of keys that are coded first."""
    keys, one, table = torch.zeros(80, 1, shape.dim, dtype=shape.dtype), slice(0, 1), torch.zeros(2, 80, dtype=torch.int32)
    held, addresses = QuantizedKeys(KeySpec(1, 1, shape.dim, shape.dtype, bits), 80), torch.tensor([keys.data_ptr()])
    quantize_keys(addresses, keys, torch.arange(70), held.codes, held.words, held.sizes.group)
    asked, coded = SelectionContexts(table, torch.tensor([[1, 70, 40, 0]]), (70,), (4, 32)), QuantizedKeyTensors(held.codes, held.words, held.sizes.group)
    written(mark_tokens(torch.zeros(1, 1, shape.group, shape.dim), addresses, keys, torch.ones(1), asked, one, one, coded), 40)


def _copies(shape: Shape) -> None:
    """What does not depend on the queries."""
    buffers = pool_of("int8", 8, shape.dim, shape.dtype).buffers
    kept, slots = torch.zeros(1, 1, 40, dtype=torch.int64), torch.arange(40)
    keys, values = buffers.keys[0], buffers.values[0]
    gather_kept(buffers.key_table, buffers.value_table, keys, values, kept, slots, slots)
    write_pointers(buffers.key_table, keys, kept, slots, slots)
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    scatter_cells(buffers.key_table, buffers.value_table, keys, values, kept.flatten(), bounds, slots, slots)
    words = as_words(keys, SUMMED_WORD)
    weights = torch.ones(1, 2, 16, dtype=torch.int64), torch.ones(words.shape[1], dtype=torch.int64)
    page_checksum(buffers.key_table, buffers.value_table, words, torch.arange(32), *weights)
    flat, out = keys.flatten(1), torch.empty(1, 40, shape.dim, dtype=shape.dtype)
    gather_rows(buffers.key_table, flat, slots, out)
    scatter_rows(buffers.key_table, flat, slots, out)


def _lynx(shape: Shape) -> None:
    """Streams of a page of two KV heads, of both references, and what is read from them."""
    parts, slots = PageTensors.from_tensors([torch.zeros(80, 2 * shape.dim, dtype=shape.dtype)]), torch.arange(70)
    for reference in ("int8", "exact"):
        layout = PageLayout(len(slots), 2 * shape.dim, shape.dtype, sinks=4, reference=reference)
        anchors, residuals = triton_codec.anchors(parts, layout, slots)
        if reference == "exact":
            residuals = triton_codec.exact_residuals(parts, list(anchors), layout, slots)
        for streams in (None, list(residuals)):
            triton_codec.decode(list(anchors), streams, layout, parts, slots)
    if shape.dim in pack_blocks.DIMS:
        for bits in (4, 2):
            _anchored(shape, bits)


def _anchored(shape: Shape, bits: int) -> None:
    """A page as the residual of packed blocks."""
    pool = packed_pool("lynx", bits, 2, 0, heads=2, dim=shape.dim, dtype=shape.dtype)
    pages, slots = ResidualPages(pool.buffers, pool.packing, 64), torch.zeros(64, dtype=torch.int64)
    of_room = torch.zeros(1, pages.page_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    blocks, shared = slots[None, : pages.page_slots].contiguous(), (pool.buffers, pages.layout, pool.packing)
    write_pages(*shared, slots, blocks, *of_room)
    read_pages(*shared, *of_room, slots, blocks)


def _hand_over(shape: Shape) -> None:
    """Both ways through an arena, of one layer, request and head."""
    heads, one = torch.zeros(1, exchange_kernels.LANE_WORDS, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    queries, keys = torch.zeros(1, 4, 1, shape.dim, dtype=shape.dtype), torch.zeros(80, 1, shape.dim, dtype=shape.dtype)
    table, slots, word = torch.tensor([keys.data_ptr()]), torch.arange(40), 1 << 33
    opened = exchange_kernels.put_queries(heads, torch.zeros(1, 2, 1, 1, 1, shape.dim, dtype=shape.dtype), queries, one[:, :1], one)
    exchange_kernels.put_keys(torch.zeros(2, 1, 64, 1, shape.dim, dtype=shape.dtype), torch.zeros(2, 3, dtype=torch.int64), table, keys, slots)
    exchange_kernels.signal_written(heads, torch.zeros(1, dtype=torch.int64), one, opened, word)
    hits = exchange_kernels.wait_for_selections(heads, one, torch.zeros(4, dtype=torch.int64), 0.02)
    commits, tokens = torch.zeros(1, exchange_kernels.COMMIT_NUMBERS, dtype=torch.int64), torch.zeros(1, 80, dtype=torch.int32)
    exchange_kernels.write_selected_pointers(torch.zeros(1, 2, 40, dtype=torch.int32), hits, commits, 40, table, keys, tokens, slots)
    exchange_kernels.pull_blocks(word, word, torch.zeros(2, 3, dtype=torch.int64), 3, 500, 32000, 90000)
    asked, there = torch.zeros(1, exchange_kernels.QUESTION_NUMBERS, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    exchange_kernels.gather_rows(word, asked, torch.zeros(1, 3, 500, dtype=torch.int32), 500, 1000, (9000, 4000))
    exchange_kernels.push_chosen(torch.zeros(1, 1, 1, 40, dtype=torch.int32), asked, there, word, 40)
    exchange_kernels.read_words(word, word, torch.zeros(33, dtype=torch.int64), asked, there)
    exchange_kernels.answer(word, asked, there)
    tables, rows = (table, table), torch.zeros(1, 1, 9, shape.dim, dtype=shape.dtype)
    arrived = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, 9, 2, dtype=torch.int32), rows, rows
    row_exchange.commit_rows(arrived, hits, commits, one[0], torch.zeros(5, dtype=torch.int64), tables, keys, slots)
    row_exchange.move_newest(tables, keys, keys, torch.zeros(1, 1, 20, dtype=torch.int64), slots, slots)


# What does not depend on the query heads is launched for one of them.
ONCE = {
    "copies": _copies,
    "lynx": _lynx,
    "hand over": _hand_over,
    **{f"pack {name}{bits}": lambda s, n=name, b=bits: _packing(n, b, s) for name, bits in KERNEL_KINDS},
}
LAUNCHES: dict[str, Callable[[Shape], None]] = {
    "window": _window,
    **{f"verify {width}": lambda s, w=width: _verify(fast_tile, s, w) for width in WIDTHS},
    "verify exact": lambda s: _verify(None, s, WIDTHS[2]),
    **{f"decode {name}{bits}": lambda s, n=name, b=bits: _packed(n, b, s) for name, bits in KERNEL_KINDS},
    **{f"prompts hack{bits}": lambda s, b=bits: _prompts(b, s) for bits in (4, 2)},
    "prompts specialized": lambda s: _prompts(4, s, None),
    "uneven": _uneven,
    "pointers": _pointers,
    "choice": _choice,
    "pages": _pages,
    **{f"choice {bits}": lambda s, b=bits: _coded_choice(b, s) for bits in (8, 4)},
    **ONCE,
}
