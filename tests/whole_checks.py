"""A check of the kernel that reads blocks with outliers, and keys from before rotary embedding, against what they mean."""

import torch

from packed_helpers import attention, meant
from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.layers.kernels.packed_decode import packed_decode
from sglang_ext.mem_cache.compressors import quantizer
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.formats.packing import Packing, as_bytes
from sglang_ext.mem_cache.compressed.rotary import Rotary

# Bits, channels of a head, KV heads, queries of each, blocks, splits, pairs that turn, whether these are neighbours, dtype.
CASES = (
    (4, 128, 2, 4, 3, (2, 1), 64, False, torch.float32), (2, 64, 1, 1, 2, (3, 2), 32, True, torch.float16),
    (4, 64, 2, 1, 1, (2, 1), 8, True, torch.float32), (2, 128, 1, 4, 2, (1, 1), 64, False, torch.float16),
    (4, 80, 1, 3, 2, (2, 1), 40, False, torch.float32),
)  # fmt: skip
CONTEXT, TAIL = 100_000, 20


def turned(vectors, positions, frequencies, interleaved):
    """Rotary embedding in complex float64: ``vectors`` [heads, tokens, dim] at ``positions`` [heads, tokens]."""
    pairs = len(frequencies)
    where = torch.arange(2 * pairs).view(pairs, 2) if interleaved else torch.arange(2 * pairs).view(2, pairs).t()
    angles = positions.double()[..., None] * frequencies.double()
    units = torch.polar(torch.ones_like(angles), angles) * torch.complex(vectors[..., where[:, 0]], vectors[..., where[:, 1]])
    found = vectors.clone()
    found[..., where[:, 0]], found[..., where[:, 1]] = units.real, units.imag
    return found


def check_packed_whole(device):
    """Tokens are kept at positions of each head's own, far apart; some rows hold no blocks, and some parts of rows are empty."""
    for number, (bits, dim, heads, group, blocks, splits, pairs, interleaved, dtype) in enumerate(CASES):
        noise, tokens = torch.Generator().manual_seed(number), 64 * blocks
        rotary = Rotary(1e4 ** -torch.linspace(0, 1, pairs), interleaved)
        keys, values = (torch.randn(2 * tokens + TAIL + 80, heads, dim, generator=noise).to(dtype) for _ in "kv")
        packing = Packing.of(quantizer("kvquant", bits), KVBuffers((0,), (0.1,), (keys,), (values,)), 1, rotary)
        order, packed = torch.randperm(len(keys), generator=noise), packing.packed_slots(tokens)
        row = order[: packed + TAIL]
        positions = torch.randint(CONTEXT, (heads, tokens), generator=noise).sort().values
        for buffer, layout in ((keys, packing.keys), (values, packing.values)):
            block = packing.quantized(buffer[order[-tokens:]].transpose(0, 1).float(), positions, layout, None)
            as_bytes(buffer)[row[:packed]] = layout.pack(block, packing.block_slots).flatten(1, 2).transpose(0, 1)
        far = [
            meant(packing.read(buffer, layout, row[:packed]), packing.levels(row.device)[0], None)
            for buffer, layout in ((keys, packing.keys), (values, packing.values))
        ]
        far[0] = turned(far[0], positions, rotary.frequencies, interleaved)
        near = [buffer[row[packed:]].transpose(0, 1).double() for buffer in (keys, values)]
        both = [torch.cat(parts, 1) for parts in zip(far, near)]
        table = torch.zeros(4, len(row), dtype=torch.int32)
        table[3], table[1, :TAIL] = row, row[packed:]
        rows, lengths = torch.tensor([3, 1, 3]), torch.tensor([len(row), TAIL - 3, packed + 1])
        slots = torch.tensor([0, 0, 0, packed], dtype=torch.int32)
        queries = torch.randn(3, heads * group, dim, generator=noise).to(dtype)
        given = (queries, keys, values, table, rows, lengths, slots)
        found = packed_decode(packing, *(part.to(device) for part in given), 0.1, splits).cpu()
        like_cpu = packed_attention(packing, queries[:1], keys, values, row, packed, 0.1)[0]
        tolerance = 1e-5 if device == "cpu" and dtype == torch.float32 else 5e-3
        for request, read in enumerate((slice(None), slice(tokens, tokens + TAIL - 3), slice(0, tokens + 1))):
            expected = attention(queries[request][None], both[0][:, read], both[1][:, read], 0.1)[0]
            worst = float((found[request].double() - expected).abs().max() / expected.abs().max())
            # So far from the beginning frequencies are told apart by steps of a turn.
            assert worst < max(tolerance, 1e-4), (bits, dim, request, worst)
        torch.testing.assert_close(found[0].float(), like_cpu, rtol=0, atol=tolerance * float(like_cpu.abs().max()))
