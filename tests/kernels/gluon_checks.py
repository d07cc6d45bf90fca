"""Checks of the Gluon kernels for packed blocks, on a GPU, or in PyTorch with Triton's interpreter for the rest."""

import torch
from gluon_emulator import Emulated
from packed_helpers import attention, attention_over, packed_pool, pool_by

from sglang_ext.layers.kernels.packed import packed_decode
from sglang_ext.mem_cache.compressors.catalogue import quantizer

# Method, bits, channels of a head, queries that share a KV head, dtype, parts of blocks and of exact tokens.
CASES = (
    ("kivi", 4, 128, 4, torch.bfloat16, (2, 1)), ("kivi", 2, 128, 1, torch.float16, (3, 1)),
    ("int4", 4, 128, 5, torch.float16, (1, 2)), ("int8", 8, 128, 8, torch.bfloat16, (2, 1)),
    ("rotatekv", 4, 64, 3, torch.bfloat16, (2, 1)), ("rotatekv", 2, 128, 11, torch.float16, (3, 1)),
    ("kivi", 4, 64, 16, torch.float16, (5, 1)), ("int8", 8, 64, 2, torch.float16, (1, 1)),
)  # fmt: skip

# Of products of integers: bits, channels of a head, partition, queries that share a KV head, blocks, dtype of the pool, parts of blocks and
# of exact tokens. Where two blocks are a step, parts have one step and a half, or a half.
INTEGERS = (
    (4, 128, 64, 4, 3, torch.float16, (1, 1)), (2, 128, 64, 3, 3, torch.bfloat16, (2, 1)), (4, 64, 64, 1, 5, torch.float16, (2, 1)),
    (4, 128, 64, 8, 2, torch.bfloat16, (1, 2)), (2, 128, 64, 5, 1, torch.float16, (3, 1)), (4, 64, 64, 8, 2, torch.bfloat16, (1, 1)),
    (4, 128, 128, 4, 3, torch.float16, (2, 1)), (2, 128, 128, 3, 2, torch.bfloat16, (1, 1)), (4, 128, 128, 1, 1, torch.bfloat16, (3, 1)),
)  # fmt: skip


def check_packed_gluon(device):
    """Attention over what packed and exact tokens mean, where the Gluon kernel takes the blocks; rows without blocks, too."""
    if device == "cpu":
        packed_decode.packed_splits_gluon = Emulated("packed_splits_gluon")
        packed_decode.has_tensor_cores = lambda keys: True
    for number, (name, bits, dim, group, dtype, splits) in enumerate(CASES):
        heads, exact = 2 if number == 0 else 1, 37
        pool = packed_pool(name, bits, 3, exact, heads=heads, dim=dim, dtype=dtype, seed=number)
        keys, values = (part[0].to(device) for part in (pool.buffers.keys, pool.buffers.values))
        assert packed_decode.fragments(pool.packing, keys, group)
        tokens = pool.keys.shape[1]
        table = torch.zeros(3, len(pool.row), dtype=torch.int32)
        table[2], table[1, :exact] = pool.row, pool.row[pool.packed :]
        rows, lengths, slots = torch.tensor([2, 1]), torch.tensor([len(pool.row), 5]), torch.tensor([0, 0, pool.packed])
        queries = torch.randn(2, heads * group, dim, generator=torch.Generator().manual_seed(number)).to(dtype)
        found = packed_decode.packed_decode(
            pool.packing, queries.to(device), keys, values, *(part.to(device) for part in (table, rows, lengths, slots.int())),
            0.1, splits,
        ).cpu()  # fmt: skip
        for request, seen in enumerate((slice(0, tokens), slice(tokens - exact, tokens - exact + 5))):
            expected = attention(queries[request][None], pool.keys[:, seen], pool.values[:, seen], 0.1)[0]
            worst = float((found[request].double() - expected).abs().max() / expected.abs().max())
            assert worst < (4e-3 if dtype == torch.float16 else 2e-2), (name, bits, dim, request, worst)


def check_integer_gluon(device):
    """Products of integers by the Gluon kernel: those of the Triton kernel, as of the same codes, and attention over what all means."""
    plain = packed_decode.has_tensor_cores
    if device == "cpu":
        packed_decode.integer_splits_gluon, plain = Emulated("integer_splits_gluon"), lambda keys: True
    for number, (bits, dim, partition, group, blocks, dtype, splits) in enumerate(INTEGERS):
        heads, exact = 2 if number < 2 else 1, 37
        pool = pool_by(quantizer("hack", bits, partition), blocks, exact, heads=heads, dim=dim, dtype=dtype, seed=number)
        keys, values = (part[0].to(device) for part in (pool.buffers.keys, pool.buffers.values))
        table = torch.zeros(3, len(pool.row), dtype=torch.int32)
        table[1], table[2], table[0, :exact] = pool.row, pool.row, pool.row[pool.packed :]
        # The first request ends with its blocks, the last one has none.
        rows, slots = torch.tensor([2, 1, 0]), torch.tensor([0, pool.packed, pool.packed], dtype=torch.int32)
        lengths, found = torch.tensor([pool.packed, len(pool.row), 5]), []
        queries = torch.randn(3, heads * group, dim, generator=torch.Generator().manual_seed(number))
        # The interpreter has no products of bfloat16: the Triton kernel reads no exact tokens.
        for cores, count in ((plain, 3), (lambda keys: False, 1)):
            packed_decode.has_tensor_cores = cores
            assert (packed_decode.integer_fragments(pool.packing, keys, group) is None) == (count == 1)
            given = (part.to(device) for part in (table, rows[:count], lengths[:count], slots))
            found.append(packed_decode.packed_decode(pool.packing, queries[:count].to(device), keys, values, *given, 0.1, splits).cpu())
        packed_decode.has_tensor_cores = plain
        # A weight between two codes may get either where a compiler contracts other operations. Of larger partitions more is rounded.
        apart = float((found[0][:1] - found[1]).abs().max() / found[1].abs().max())
        assert apart < (1e-5 * partition / 64 if device == "cpu" else 2e-3), (bits, dim, partition, group, apart)
        tokens = pool.keys.shape[1] - exact
        for request, (first, last) in enumerate(((0, tokens), (0, tokens + exact), (tokens, tokens + 5))):
            far = 0 if first else tokens
            seen = pool.keys[:, first:last], pool.values[:, first:last]
            expected = attention_over(pool.packing, far, queries[request][None], *seen, 0.1)[0]
            worst = float((found[0][request].double() - expected).abs().max() / expected.abs().max())
            assert worst < (4e-3 if dtype == torch.float16 else 2e-2), (bits, dim, partition, group, request, worst)
