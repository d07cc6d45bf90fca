"""Checks of kernels against plain PyTorch: ``kernel_checks.py NAME...`` prints those that hold; interpreted where there is no GPU."""

import os
import sys
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.leave_out()

from anchored_checks import check_anchored  # noqa: E402
from check_names import CHECK_NAMES  # noqa: E402
from choose_checks import check_choosing  # noqa: E402
from coded_checks import check_coded_keys  # noqa: E402
from gluon_checks import check_integer_gluon, check_packed_gluon  # noqa: E402
from lynx_checks import check_lynx  # noqa: E402
from pack_checks import check_pack_blocks  # noqa: E402
from packed_backend import Pool, check_packed_backend  # noqa: E402
from packed_helpers import KERNEL_KINDS, Gridded, attention, attention_over, divides, packed_pool, pool_by  # noqa: E402
from pointer_checks import check_pointers  # noqa: E402
from prefill_checks import check_prefill, check_specialized_prefill, check_whole_blocks  # noqa: E402
from quest_checks import check_quest  # noqa: E402
from rank_checks import check_hand_over  # noqa: E402
from uneven_checks import check_scatter_cells, check_uneven_backend  # noqa: E402

from sglang_ext.layers.kernels.kv_copies import gather_kept, page_checksum, gather_rows, has_whole_words, scatter_rows  # noqa: E402
from sglang_ext.layers.kernels.packed.packed_decode import packed_decode  # noqa: E402
from sglang_ext.layers.kernels.per_head_decode import ragged_decode  # noqa: E402
from sglang_ext.layers.kernels.verify_attention import (  # noqa: E402
    verify_attention,
    EXACT,
    ContextSplits,
    VerifyTokens,
    fast_tile,
    partial_buffers,
    partial_numbers,
)
from sglang_ext.layers.kernels.key_scores import window_scores  # noqa: E402
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout, RaggedSelection  # noqa: E402
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid  # noqa: E402
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers  # noqa: E402
from sglang_ext.mem_cache.compressors.catalogue import quantizer  # noqa: E402
from sglang_ext.mem_cache.host_tier.tier import SUMMED_WORD, PageChecksums
from sglang_ext.mem_cache.host_tier.host_pool import as_words


def pools(layers, slots, heads, dim, seed):
    """Key and value buffers of each layer, and their addresses."""
    noise = torch.Generator().manual_seed(seed)
    buffers = [[torch.randn(slots, heads, dim, generator=noise).to(DEVICE) for _ in range(layers)] for _ in "kv"]
    return [(b, torch.tensor([x.data_ptr() for x in b], device=DEVICE)) for b in buffers]


def check_window_scores():
    """Means of softmax attention, over window sizes, groups and lengths around the kernel's blocks; positions have gaps.

    Some queries lie beyond the context's end, as those do of a packed copy that leaves the newest tokens exact.
    """
    for window, heads, group, dim, tokens, ahead in (
        (32, 2, 3, 64, 1100, 0), (5, 1, 4, 24, 63, 0), (40, 2, 8, 16, 65, 0), (1, 3, 1, 128, 1, 0), (32, 2, 4, 64, 70, 128),
        (4, 1, 2, 16, 1, 200), (5, 1, 48, 16, 1030, 64), (9, 1, 71, 16, 80, 0),
    ):  # fmt: skip
        (keys, table), _ = pools(2, tokens + 30, heads, dim, window)
        noise = torch.Generator().manual_seed(1)
        slots = torch.randperm(tokens + 30, generator=noise)[:tokens].to(DEVICE)
        window = min(window, tokens)
        queries = torch.randn(2, window, heads * group, dim, generator=noise).to(DEVICE)
        positions = (ahead + torch.randperm(tokens, generator=noise)[:window]).sort().values.to(DEVICE)
        found = window_scores(queries, table, keys[0], slots, positions, 0.3)
        for layer in range(2):
            k = keys[layer][slots].double()
            q = queries[layer].double().view(window, heads, group, dim)
            logits = torch.einsum("whgd,thd->hgwt", q, k) * 0.3
            hidden = torch.arange(tokens, device=DEVICE)[None] > positions[:, None]
            expected = logits.masked_fill(hidden, float("-inf")).softmax(-1).mean((1, 2))
            torch.testing.assert_close(found[layer].double(), expected, rtol=1e-4, atol=1e-7)


def check_gather_kept():
    """Copies land in the right layer, head and slot, and nothing else changes; also where values are narrower than keys."""
    for layers, heads, dim, value_dim, count in ((2, 3, 64, 64, 40), (3, 1, 24, 24, 33), (1, 2, 128, 128, 1), (2, 2, 96, 64, 33)):
        (keys, key_table), _ = pools(layers, 200, heads, dim, count)
        (values, value_table), _ = pools(layers, 200, heads, value_dim, count + 1)
        noise = torch.Generator().manual_seed(2)
        order = torch.randperm(200, generator=noise).to(DEVICE)
        sources, targets = order[:100], order[100 : 100 + count]
        kept = torch.stack([torch.randperm(100, generator=noise)[:count] for _ in range(layers * heads)])
        kept = kept.view(layers, heads, count).to(DEVICE)
        expected = [[b.clone() for b in buffers] for buffers in (keys, values)]
        for kind, buffers in zip(expected, (keys, values)):
            for layer in range(layers):
                for head in range(heads):
                    kind[layer][targets, head] = buffers[layer][sources[kept[layer, head]], head]
        gather_kept(key_table, value_table, keys[0], values[0], kept, sources, targets)
        for kind, buffers in zip(expected, (keys, values)):
            for layer in range(layers):
                assert torch.equal(kind[layer], buffers[layer])


def check_page_checksum():
    """The sums that PyTorch gives, over word sizes, and rows and pages around the kernel's blocks."""
    cases = (
        (torch.bfloat16, 2, 8, 128, 16, 3),
        (torch.float32, 1, 3, 200, 5, 2),
        (torch.float16, 3, 1, 3, 40, 1),
        (torch.uint8, 2, 1, 7, 1, 9),
        (torch.float8_e4m3fn, 1, 1, 64, 64, 2),
    )
    for dtype, layers, heads, dim, page_size, pages in cases:
        noise = torch.Generator().manual_seed(dim)
        room, shape = pages * page_size, (pages * page_size + 9, heads, dim * dtype.itemsize)
        bits = [torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8).view(dtype) for _ in range(2 * layers)]
        slots = torch.randperm(room + 9, generator=noise)[:room]
        keys, values = tuple(bits[:layers]), tuple(bits[layers:])
        plain = PageChecksums(KVBuffers((0,) * layers, (1.0,) * layers, keys, values), page_size)
        keys, values = (tuple(buffer.to(DEVICE) for buffer in buffers) for buffers in (keys, values))
        found = page_checksum(
            *(torch.tensor([x.data_ptr() for x in buffers], device=DEVICE) for buffers in (keys, values)),
            as_words(keys[0], SUMMED_WORD), slots.to(DEVICE), plain.token_weights.to(DEVICE), plain.column_weights.to(DEVICE),
        )  # fmt: skip
        assert torch.equal(found.cpu(), plain.of(slots)), (dtype, page_size)


def check_page_rows():
    """Tokens of all buffers, copied into one and from it into other slots, over widths around the kernel's blocks; tokens apart."""
    for dtype, parts, width, tokens in ((torch.bfloat16, 3, 1024, 192), (torch.float32, 2, 20, 5), (torch.uint8, 1, 8, 1), (torch.float16, 4, 4100, 3)):
        noise = torch.Generator().manual_seed(width)
        wide = torch.randint(0, 256, (parts, tokens + 9, (width + 8) * dtype.itemsize), generator=noise, dtype=torch.uint8).to(DEVICE)
        buffers = wide.view(dtype)[:, :, :width]
        one, table = buffers[0], torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)
        order, out = torch.randperm(tokens + 9, generator=noise).to(DEVICE), torch.zeros(parts, tokens, width, dtype=dtype, device=DEVICE)
        bits, before = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize], wide.clone().view(dtype)
        gather_rows(table, one, order[:tokens], out)
        assert torch.equal(out.view(bits), buffers[:, order[:tokens]].view(bits)), (dtype, width)
        target = order.flip(0)[:tokens]
        scatter_rows(table, one, target, out)
        before[:, target, :width] = out
        assert torch.equal(wide.view(bits), before.view(bits)), (dtype, width)
    assert not has_whole_words(torch.zeros(4, 3, dtype=torch.bfloat16))


def new_tokens(prefixes, counts, rows, splits):
    """What a verification tells the kernel."""
    lengths = torch.cat([torch.arange(p + 1, p + c + 1) for p, c in zip(prefixes, counts)]).to(DEVICE)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], device=DEVICE)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return VerifyTokens(
        rows.to(DEVICE), torch.tensor(prefixes, device=DEVICE), starts, counts, ends, splits.count_for(lengths)
    ), lengths


def workspace(tokens, heads, dim, splits):
    """Room for so many tokens' partial results."""
    numbers = torch.full((tokens * partial_numbers(heads, dim, splits),), float("nan"), device=DEVICE)
    return partial_buffers(numbers, heads, dim, splits)


def verification(prefixes, counts, heads, group, dim, splits, blocks, dtype, cap=0.0, room=None, value_dim=None):
    """The kernel's output, and what it was given."""
    noise = torch.Generator().manual_seed(sum(prefixes) + dim)
    width = max(p + c for p, c in zip(prefixes, counts))
    slots = len(counts) * width + 7
    value_dim = value_dim or dim
    keys, values = (torch.randn(slots, heads, size, generator=noise).to(DEVICE, dtype) for size in (dim, value_dim))
    queries = torch.randn(sum(counts), heads * group, dim, generator=noise).to(DEVICE, dtype)
    table = torch.randperm(slots, generator=noise)[: len(counts) * width].view(len(counts), width).int().to(DEVICE)
    rows = torch.randperm(len(counts), generator=noise)
    tokens, lengths = new_tokens(prefixes, counts, rows, splits)
    out = torch.full((*queries.shape[:2], value_dim), float("nan"), dtype=dtype, device=DEVICE)
    buffers = workspace(room or sum(counts), heads * group, value_dim, splits)
    verify_attention(queries, keys, values, out, table, tokens, splits, blocks, buffers, 0.3, cap)
    return out, queries, keys, values, table[tokens.rows], lengths, tokens


def check_verify_attention():
    """Causal attention over paged KV, over lengths around parts and blocks, even and ragged, in one launch and more."""
    cases = (
        ((70, 5), (3, 3), 2, 4, 16, ContextSplits(4), fast_tile(12, 256), 0.0, None),
        ((33, 0, 70), (17, 1, 5), 1, 3, 24, ContextSplits(3), fast_tile(51, 1024), 0.0, None),
        ((80, 65), (17, 17), 1, 4, 16, ContextSplits(2, tile=64), EXACT, 0.0, 17),
        ((40,), (9,), 2, 9, 32, ContextSplits(8), fast_tile(81, 128), 5.0, None),
        # Two products a program: the newest tokens are in the second alone.
        ((16, 5), (17, 17), 2, 4, (16, 24), ContextSplits(4), fast_tile(68, 64), 0.0, 17),
    )
    for prefixes, counts, heads, group, dims, splits, blocks, cap, room in cases:
        dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
        out, queries, keys, values, table, lengths, _ = verification(
            prefixes, counts, heads, group, dim, splits, blocks, torch.float32, cap, room, value_dim
        )
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        for token, owner in enumerate(owners):
            slots = table[owner, : lengths[token]].long()
            k, v = keys[slots].double(), values[slots].double()
            q = queries[token].double().view(heads, group, dim)
            logits = torch.einsum("hgd,thd->hgt", q, k) * 0.3
            logits = cap * torch.tanh(logits / cap) if cap else logits
            expected = torch.einsum("hgt,thd->hgd", logits.softmax(-1), v).reshape(heads * group, value_dim)
            tolerance = 2e-3 if DEVICE == "cuda" else 1e-5
            torch.testing.assert_close(out[token].double(), expected, rtol=tolerance, atol=tolerance)


def check_verify_attention_is_decode():
    """With a decode's blocks and splits, each token gets bit for bit what SGLang's decode kernel gives it."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    kinds = (torch.float32,) if DEVICE == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    lengths_of, tile = (((90, 60), (5, 7)), 64) if DEVICE == "cpu" else (((300, 505, 7000, 31), (17, 17, 17, 17)), 256)
    for dtype in kinds:
        for heads, group, dim in ((1, 4, 16), (2, 3, 64), (1, 5, 128))[: 1 if DEVICE == "cpu" else 3]:
            prefixes, counts = lengths_of
            splits = ContextSplits(max_splits=-(-(max(prefixes) + 17) // tile), tile=tile)
            out, queries, keys, values, table, lengths, tokens = verification(
                prefixes, counts, heads, group, dim, splits, EXACT, dtype
            )
            owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            indices = torch.cat([table[owner, :length] for owner, length in zip(owners, lengths)]).long()
            expected = torch.empty_like(out)
            partial, lse = workspace(len(lengths), heads * group, dim, splits)
            decode_attention_fwd(
                queries, keys, values, expected, tokens.ends, indices, partial, lse, tokens.parts, splits.max_splits, 0.3, 1.0, 1.0
            )
            # The interpreter's matrix products round by a row's place.
            tolerance = 1e-6 if DEVICE == "cpu" else 0.0
            torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


def check_verify_backend():
    """The backend writes KV and attends, for even verifications and for ragged steps over rows shorter than their positions."""
    from sglang_ext.layers.attention.verify_attention import VerifyAttention
    from sglang_ext.layers.forward import EvenVerifyInput, RaggedVerifyInput

    heads, group, dim, width = 2, 3, 16, 700
    for exact, (before, counts) in ((False, ((40, 300), (5, 5))), (True, ((300, 7), (5, 5))), (True, ((290, 64, 9), (4, 1, 3)))):
        noise = torch.Generator().manual_seed(len(counts))
        pool = Pool(*(torch.randn(4 * width, heads, dim, generator=noise).to(DEVICE) for _ in "kv"))
        table = torch.randperm(4 * width, generator=noise).view(4, width).int().to(DEVICE)
        runner = SimpleNamespace(
            model_config=SimpleNamespace(num_attention_heads=heads * group), device=DEVICE, token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table), attn_backend=SimpleNamespace(split_tile_size=256),
            server_args=SimpleNamespace(tp_size=1, enable_deterministic_inference=exact, speculative_num_draft_tokens=5),
        )  # fmt: skip
        rows = torch.randperm(4, generator=noise)[: len(counts)].to(DEVICE)
        prefixes, news = (torch.tensor(x, device=DEVICE) for x in (before, counts))
        even = len(set(counts)) == 1
        batch = SimpleNamespace(
            batch_size=len(counts), req_pool_indices=rows, seq_lens=prefixes if even else prefixes + news,
            spec_info=EvenVerifyInput(counts[0]) if even else RaggedVerifyInput(prefixes + news, news, list(counts)),
            positions=torch.zeros(sum(counts), device=DEVICE),
            out_cache_loc=torch.cat([table[r, b : b + c] for r, b, c in zip(rows, before, counts)]).long(),
        )  # fmt: skip
        layer = SimpleNamespace(
            layer_id=0, tp_q_head_num=heads * group, qk_head_dim=dim, v_head_dim=dim, scaling=0.3, logit_cap=0.0,
            xai_temperature_len=-1, k_scale=None, v_scale=None,
        )  # fmt: skip
        q = torch.randn(sum(counts), heads * group * dim, generator=noise).to(DEVICE)
        k, v = (torch.randn(sum(counts), heads, dim, generator=noise).to(DEVICE) for _ in "kv")
        backend = VerifyAttention(runner)
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q, k, v, layer, batch).view(sum(counts), heads, group, dim)
        token = 0
        for row, first, count in zip(rows, before, counts):
            for offset in range(count):
                slots = table[row, : first + offset + 1].long()
                keys, values = pool.keys[slots].double(), pool.values[slots].double()
                logits = torch.einsum("hgd,thd->hgt", q[token].double().view(heads, group, dim), keys) * 0.3
                expected = torch.einsum("hgt,thd->hgd", logits.softmax(-1), values)
                torch.testing.assert_close(out[token].double(), expected, rtol=2e-3, atol=2e-3)
                token += 1
        assert torch.equal(pool.keys[batch.out_cache_loc], k)


# Bits, grids of keys and of values, and tokens of a block, of heads of 64 channels: groups of fewer and of more tokens than a step's.
GRIDS = (
    (4, Grid(16, 1), Grid(64, 1), 64), (8, Grid(64, 1), Grid(16, 1), 64), (2, Grid(1, 64), Grid(32, 1), 64),
    (4, Grid(128, 1), Grid(128, 1), 128), (4, Grid(32, 1), Grid(1, 16), 64),
)  # fmt: skip


def check_packed_decode():
    """Attention over what packed and exact tokens mean: all quantizers it reads, groups, sizes and lengths, and other grids."""
    # The interpreter has no products of bfloat16.
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    # More parts than blocks, too; few: in the interpreter each program takes as long as its products.
    shapes = ((3, 64, 2, 3, (2, 1), torch.float32), (1, 32, 1, 2, (3, 2), torch.float32), (8, 80, 1, 1, (1, 1), half))
    for number, (name, bits) in enumerate(KERNEL_KINDS):
        group, dim, heads, blocks, splits, dtype = shapes[number % len(shapes)]
        if divides(name, dim):
            check_packed_pool(packed_pool(name, bits, blocks, 75, heads=heads, dim=dim, dtype=dtype), group, splits)
    for number, (bits, keys, values, block) in enumerate(GRIDS):
        packs = Gridded(bits, block, keys=keys, values=values)
        check_packed_pool(pool_by(packs, 2, 75, heads=1, dtype=(torch.float32, half)[number % 2]), 3, (1, 1))


def check_integer_decode():
    """Attention by products of integers: all bits, partitions, groups, dtypes, and heads of which a part of bytes cuts a partition."""
    # The interpreter has no products of bfloat16.
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    for bits, partition, dim, group, heads, blocks, splits, dtype in (
        (4, 64, 128, 4, 2, 3, (2, 1), torch.float32), (2, 64, 64, 1, 1, 2, (3, 2), half), (4, 32, 96, 3, 1, 1, (1, 1), half),
        (2, 32, 96, 8, 2, 1, (1, 1), torch.float32), (4, 128, 128, 16, 1, 1, (1, 1), half),
        (2, 128, 128, 1, 1, 2, (1, 1), torch.float32), (4, 64, 192, 5, 1, 1, (1, 1), half), (2, 32, 256, 32, 1, 1, (1, 1), torch.float32),
    ):  # fmt: skip
        packs = quantizer("hack", bits, partition)
        check_packed_pool(pool_by(packs, blocks, 75, heads=heads, dim=dim, dtype=dtype), group, splits)


def check_packed_pool(pool, group, splits):
    """Rows with blocks and all, few, or one exact token of 75 after them; rows without any."""
    (_, heads, dim), dtype = pool.buffers.keys[0].shape, pool.buffers.keys[0].dtype
    keys, values = (part[0].to(DEVICE) for part in (pool.buffers.keys, pool.buffers.values))
    packed, width = pool.packed, len(pool.row)
    table = torch.zeros(6, width, dtype=torch.int32)
    table[4], table[1], table[2, :75], table[5] = pool.row, pool.row, pool.row[packed:], pool.row
    rows, lengths = torch.tensor([4, 2, 5, 1]), torch.tensor([width, 40, packed + 1, packed + 33])
    slots = torch.tensor([0, packed, 0, 0, packed, packed], dtype=torch.int32)
    queries = torch.randn(4, heads * group, dim, generator=torch.Generator().manual_seed(dim + group)).to(dtype)
    found = packed_decode(
        pool.packing, queries.to(DEVICE), keys, values, *(t.to(DEVICE) for t in (table, rows, lengths, slots)), 0.1, splits
    ).cpu()
    tokens = pool.keys.shape[1] - 75
    for request, (row, length) in enumerate(zip([4, 2, 5, 1], lengths.tolist())):
        first = 0 if slots[row] else tokens
        last = tokens + length - int(slots[row])
        far = tokens if slots[row] else 0
        expected = attention_over(pool.packing, far, queries[request][None], pool.keys[:, first:last], pool.values[:, first:last], 0.1)[0]
        tolerance = 1e-5 if DEVICE == "cpu" and dtype == torch.float32 else 5e-3 if dtype != torch.bfloat16 else 3e-2
        worst = float((found[request].double() - expected).abs().max() / expected.abs().max())
        assert worst < tolerance, (pool.packing.quantizer, request, worst)


def check_uneven_decode():
    """Attention over what each head keeps and the tokens after it; some heads keep nothing, some nearly all.

    Parts of one step, and of more than there are cells in a layer; values as wide as keys, and not.
    """
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    for layers, heads, group, dim, splits, dtype, value_dim in (
        (3, 2, 3, 64, (3, 1), torch.float32, 64), (2, 1, 5, 24, (5, 2), torch.float32, 24), (2, 3, 1, 80, (2, 1), half, 80),
        (2, 2, 71, 16, (1, 1), torch.float32, 24), (6, 1, 2, 32, (1, 1), torch.float32, 16),
    ):  # fmt: skip
        # The last: a step lies in five layers.
        copied, width, noise = 21 if layers < 6 else 7, 60, torch.Generator().manual_seed(dim)
        buffers = [
            [torch.randn(400, heads, size, generator=noise).to(DEVICE, dtype) for _ in range(layers)] for size in (dim, value_dim)
        ]
        cells = RaggedHeadLayout.of(KVBuffers(tuple(range(layers)), (0.1,) * layers, *map(tuple, buffers)), 6)
        slots = torch.randperm(400, generator=noise).to(DEVICE)
        table = torch.zeros(6, width, dtype=torch.int32, device=DEVICE)
        context, table[1], table[4] = slots[:50], slots[100 : 100 + width], slots[200 : 200 + width]
        # Some heads end where they begin; the rows are those of two copies and of a request without one.
        kept = {}
        for row in (1, 4):
            ends = torch.randint(copied * layers * heads + 1, (layers * heads - 1,), generator=noise).sort().values
            ends[: layers * heads // 3] = 1
            tokens = torch.randint(50, (copied * layers * heads,), generator=noise).to(DEVICE)
            bounds = torch.nn.functional.pad(ends.int(), (1, 0)).tolist() + [len(tokens)]
            kept[row] = RaggedSelection(tokens, torch.tensor(bounds, dtype=torch.int32, device=DEVICE))
            cells.write(row, kept[row], context, table[row, :copied].long())
        table[2, :40] = slots[300:340]
        rows, lengths = [4, 2, 1], [copied + 1, 40, width]
        queries = torch.randn(3, heads * group, dim, generator=noise).to(DEVICE, dtype)
        tolerance = 1e-5 if DEVICE == "cpu" and dtype == torch.float32 else 5e-3 if dtype != torch.bfloat16 else 3e-2
        for layer in (0, layers - 1):
            found = ragged_decode(
                cells, layer, queries, table, *(torch.tensor(part, device=DEVICE) for part in (rows, lengths)), 0.1, splits
            )
            for request, (row, length) in enumerate(zip(rows, lengths)):
                for head in range(heads):
                    tail, seen = table[row, copied if row in kept else 0 : length].long(), context[:0]
                    if row in kept:
                        first, last = kept[row].bounds[layer * heads + head :][:2].tolist()
                        seen = context[kept[row].tokens[first:last]]
                    k, v = (kind[layer][torch.cat([seen, tail]), head].double()[None].cpu() for kind in buffers)
                    mine = slice(head * group, (head + 1) * group)
                    expected = attention(queries[request, mine][None].cpu(), k, v, 0.1)[0]
                    worst = float((found[request, mine].cpu().double() - expected).abs().max() / expected.abs().max())
                    assert worst < tolerance, (dim, layer, row, head, worst)


CHECKS = {
    "lynx": lambda: check_lynx(DEVICE),
    "anchored": lambda: check_anchored(DEVICE),
    "pointers": lambda: check_pointers(DEVICE),
    "choosing": lambda: check_choosing(DEVICE),
    "quest": lambda: check_quest(DEVICE),
    "coded_keys": lambda: check_coded_keys(DEVICE),
    "hand_over": lambda: check_hand_over(DEVICE),
    "scatter_cells": lambda: check_scatter_cells(DEVICE),
    "uneven_backend": lambda: check_uneven_backend(DEVICE),
    "ragged_decode": check_uneven_decode,
    "packed_decode": check_packed_decode,
    "integer_decode": check_integer_decode,
    "prefill": lambda: check_prefill(DEVICE),
    "specialized_prefill": lambda: check_specialized_prefill(DEVICE),
    "whole_blocks": lambda: check_whole_blocks(DEVICE),
    "packed_gluon": lambda: check_packed_gluon(DEVICE),
    "integer_gluon": lambda: check_integer_gluon(DEVICE),
    "pack_blocks": lambda: check_pack_blocks(DEVICE),
    "packed_backend": lambda: check_packed_backend(DEVICE),
    "verify_backend": check_verify_backend,
    "window_scores": check_window_scores,
    "gather_kept": check_gather_kept,
    "page_checksum": check_page_checksum,
    "page_rows": check_page_rows,
    "verify_attention": check_verify_attention,
    "verify_attention_is_decode": check_verify_attention_is_decode,
}
assert CHECKS.keys() == {*CHECK_NAMES}, "check_names.py names each check"

if __name__ == "__main__":
    for check in sys.argv[1:]:
        CHECKS[check]()
        print(check)
