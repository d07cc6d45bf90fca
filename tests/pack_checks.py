"""A check of the kernel that packs blocks, against what PyTorch writes."""

from dataclasses import replace

import torch

from sglang_ext.layers.kernels.pack_blocks import pack_blocks, takes
from sglang_ext.mem_cache.compressors import quantizer
from sglang_ext.mem_cache.compressors.quantizer import grouped, meant
from sglang_ext.mem_cache.kv_buffers import KVBuffers
from sglang_ext.mem_cache.packing import Packing

# Method, bits, channels of a head, KV heads, dtype, blocks.
CASES = (
    ("kivi", 4, 128, 2, torch.bfloat16, 3), ("kivi", 2, 64, 1, torch.float16, 9), ("kivi", 2, 128, 1, torch.float32, 1),
    ("int8", 8, 128, 1, torch.bfloat16, 2), ("int4", 4, 64, 3, torch.float32, 1), ("rotatekv", 2, 64, 2, torch.bfloat16, 9),
    ("rotatekv", 4, 128, 1, torch.float16, 1), ("turboquant", 4, 128, 2, torch.bfloat16, 2),
    ("turboquant", 2, 64, 1, torch.float32, 10),
)  # fmt: skip


def pool(layers, heads, dim, dtype, tokens, noise):
    """Buffers with channels and tokens of different sizes, the last channel alike in all tokens, and the first token zero."""
    spread = 1 + 3 * torch.rand(dim, generator=noise)
    kinds = [[torch.randn(2 * tokens + 9, heads, dim, generator=noise) * spread for _ in range(layers)] for _ in "kv"]
    for buffer in (*kinds[0], *kinds[1]):
        buffer[..., -1], buffer[0] = 0.25, 0
    keys, values = (tuple(buffer.to(dtype) for buffer in kind) for kind in kinds)
    return KVBuffers((0,) * layers, (1.0,) * layers, keys, values)


def check_block(packing, layout, numbers, kernel, plain):
    """Scales are alike, and each number has the code whose meaning is nearest to it."""
    rotation, levels = (of(numbers.device)[0] for of in (packing.rotations, packing.levels))
    if rotation is not None:
        numbers = numbers @ rotation.double()
    for found, expected in ((kernel.scale, plain.scale), (kernel.zero, plain.zero)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-6)
    scale, zero = (part.double()[:, :, :, None, :, None] for part in (kernel.scale, kernel.zero))
    wanted = grouped(numbers.view(kernel.codes.shape), layout.grid)
    distance = [(grouped(meant(b.codes, levels).double(), layout.grid) * scale + zero - wanted).abs() for b in (kernel, plain)]
    assert torch.all(distance[0] <= distance[1] * (1 + 1e-3) + 2e-5 * (scale + zero.abs()))
    assert (kernel.codes != plain.codes).double().mean() < 1e-3


def check_pack_blocks(device):
    """All methods, bits and sizes of heads; kept tokens differ by head; nothing else changes, in slots that lie anywhere."""
    for number, (name, bits, dim, heads, dtype, blocks) in enumerate(CASES):
        if device == "cpu" and dtype == torch.bfloat16 and quantizer(name, bits).rotation(dim) is not None:
            # The interpreter has no products of bfloat16.
            dtype = torch.float16
        noise, layers, tokens = torch.Generator().manual_seed(number), 2, 64 * blocks
        buffers = pool(layers, heads, dim, dtype, tokens + 20, noise)
        there = replace(buffers, **{kind: tuple(b.to(device, copy=True) for b in getattr(buffers, kind)) for kind in ("keys", "values")})
        packing = Packing.of(quantizer(name, bits), buffers, 1)
        order = 1 + torch.randperm(len(buffers.keys[0]) - 1, generator=noise)
        sources = torch.cat([order.new_zeros(1), order[: tokens + 19]])
        targets = order[tokens + 19 :][: packing.held_slots(tokens)]
        kept = torch.stack([torch.randperm(tokens + 20, generator=noise)[:tokens].sort().values for _ in range(layers * heads)])
        kept = kept.view(layers, heads, tokens)
        kept[..., 0] = 0
        assert takes(packing, buffers)
        originals = [buffer.clone() for buffer in (*buffers.keys, *buffers.values)]
        packing.write(buffers, kept, sources, targets)
        pack_blocks(packing, there, *(part.to(device) for part in (kept, sources, targets)))
        pairs = zip((*there.keys, *there.values), (*buffers.keys, *buffers.values), originals, strict=True)
        for index, (found, expected, original) in enumerate(pairs):
            layout = packing.keys if index < layers else packing.values
            read = original[sources[kept[index % layers]], torch.arange(heads)[:, None]].double()
            kernel, plain = (packing.read(buffer.cpu(), layout, targets) for buffer in (found, expected))
            check_block(packing, layout, read, kernel, plain)
            changed = (found.cpu().view(torch.uint8) != original.view(torch.uint8)).flatten(1).any(1).nonzero().flatten()
            assert set(changed.tolist()) <= set(targets.tolist())
