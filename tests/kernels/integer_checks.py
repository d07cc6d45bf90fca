"""Checks of decode attention by products of integers, with the parts that a benchmark can switch off."""

import torch
from packed_helpers import attention, eight_bits, pool_by

from sglang_ext.layers.kernels.packed.packed_decode import launch_integers, PackedAttentionCall
from sglang_ext.mem_cache.compressors.catalogue import quantizer


def decoded(pool, queries, device, splits, **switches):
    """One request's attention over its whole row, float64 [heads, dim]."""
    keys, values = (part[0].to(device) for part in (pool.buffers.keys, pool.buffers.values))
    table = torch.zeros(2, len(pool.row), dtype=torch.int32)
    table[1], lengths = pool.row, torch.tensor([len(pool.row)])
    rows = [part.to(device) for part in (torch.tensor([1]), lengths, torch.tensor([0, pool.packed], dtype=torch.int32))]
    queries = queries.to(device)[None]
    table = table.to(device), len(pool.row), *rows
    call = PackedAttentionCall(queries, keys, values, splits, pool.packing, queries, table, 0.1)
    launch_integers(call, **switches)
    return call.merged_output()[0].cpu().double()


def requantized(pool, queries, exact):
    """The same in float64, where the ``exact`` newest tokens' values are quantized in partitions as the blocks' are."""
    packing, partition = pool.packing, pool.packing.values.grid.tokens
    tail, far = pool.values[:, -exact:], pool.keys.shape[1] - exact
    blocks = []
    for part in tail.float().split(partition, 1):
        block = packing.quantizer.quantize(part[:, None], packing.values.grid._replace(tokens=part.shape[1]))
        blocks.append(block.codes[:, 0].double() * block.scale[:, 0].double() + block.zero[:, 0].double())
    values = torch.cat([pool.values[:, :far], *blocks], 1)
    keys, group = pool.keys, len(queries) // len(pool.keys)
    logits = [
        torch.cat([eight_bits(query.double() * 0.1, packing.keys.grid.channels) @ key[:far].T, query.double() * 0.1 @ key[far:].T])
        for query, key in zip(queries, keys.repeat_interleave(group, 0))
    ]
    weights = torch.stack(logits).softmax(-1)
    weights = torch.cat([eight_bits(weights[:, :far], partition), eight_bits(weights[:, far:], partition)], -1)
    return torch.einsum("ht,htd->hd", weights, values.repeat_interleave(group, 0))


def check_integer_switches(device):
    """Sums that are computed are those that are stored; values that are quantized at each step are no more than that."""
    for bits, partition, dim, exact in ((4, 64, 64, 75), (2, 32, 128, 20), (4, 128, 128, 128), (2, 32, 96, 33)):
        pool = pool_by(quantizer("hack", bits, partition), 1, exact, heads=1, dim=dim)
        queries = torch.randn(6, dim, generator=torch.Generator().manual_seed(dim))
        plain = decoded(pool, queries, device, (3, 1))
        # Of the same integers; a GPU's compiler may contract other operations.
        summed, last_bits = decoded(pool, queries, device, (3, 1), stored_sums=False), 1e-6 if device == "cpu" else 1e-5
        assert (summed - plain).abs().max() < last_bits * max(1.0, plain.abs().max())
        tokens = pool.keys.shape[1] - exact
        expected = attention(queries[None], pool.keys, pool.values, 0.1, (pool.packing.keys.grid.channels, partition, tokens))[0]
        near = 1e-5 if device == "cpu" else 5e-3
        assert (plain - expected).abs().max() < near * expected.abs().max()
        expected, found = requantized(pool, queries, exact), decoded(pool, queries, device, (3, 1), exact_tail=False)
        # Weights' codes, too, change with keys' products, which are of TensorFloat-32 on a GPU.
        assert (found - expected).abs().max() < 2 * near * expected.abs().max(), (bits, partition, (found - expected).abs().max())
        assert (found - plain).abs().max() > 1e-4, "it is no exact tail"
