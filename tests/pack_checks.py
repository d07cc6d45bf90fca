"""A check of the kernel that packs blocks, against what PyTorch writes."""

from dataclasses import replace
from functools import partial

import torch

from packed_helpers import frequencies, turned
from sglang_ext.layers.kernels.pack_blocks import pack_blocks, takes
from sglang_ext.mem_cache.compressors import quantizer
from sglang_ext.mem_cache.compressors.quantizer import grouped, meant
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.formats.packing import Packing
from sglang_ext.mem_cache.compressed.rotary import Rotary

# Method, bits, channels of a head, KV heads, dtype, blocks.
CASES = (
    ("kivi", 4, 128, 2, torch.bfloat16, 3), ("kivi", 2, 64, 1, torch.float16, 9), ("kivi", 2, 128, 1, torch.float32, 1),
    ("int8", 8, 128, 1, torch.bfloat16, 2), ("int4", 4, 64, 3, torch.float32, 1), ("rotatekv", 2, 64, 2, torch.bfloat16, 9),
    ("rotatekv", 4, 128, 1, torch.float16, 1), ("turboquant", 4, 128, 2, torch.bfloat16, 2),
    ("turboquant", 2, 64, 1, torch.float32, 10), ("kvquant", 4, 128, 2, torch.bfloat16, 2),
    ("kvquant", 2, 64, 1, torch.float32, 3),
)  # fmt: skip


def pool(layers, heads, dim, dtype, slots, noise):
    """Buffers with channels of different sizes, the last one alike in all tokens; of slot 0 all numbers are 0, of slot 1 huge."""
    spread = 1 + 3 * torch.rand(dim, generator=noise)
    kinds = [[torch.randn(slots, heads, dim, generator=noise) * spread for _ in range(layers)] for _ in "kv"]
    for buffer in (*kinds[0], *kinds[1]):
        # The nearest float16 is greater, so that zero points of one channel are, too, and scales negative.
        buffer[..., -1], buffer[0] = 0.20015, 0
        # Scales and zero points end where float16 does.
        buffer[1] *= 1 if dtype == torch.float16 else 1e5
    return KVBuffers((0,) * layers, (1.0,) * layers, *(tuple(buffer.to(dtype) for buffer in kind) for kind in kinds))


def check_outliers(kernel, plain):
    """The same places, in the same order, and what is left over there; positions."""
    assert torch.equal(kernel.outliers.places, plain.outliers.places)
    torch.testing.assert_close(kernel.outliers.excess, plain.outliers.excess, rtol=2e-3, atol=1e-3)
    assert kernel.positions is None or torch.equal(kernel.positions, plain.positions)


def check_block(packing, layout, numbers, kernel, plain):
    """Scales are alike, and each number has the code whose meaning is nearest to it."""
    if kernel.positions is not None:
        numbers = turned(numbers, -kernel.positions.flatten(1), frequencies(layout.dim))
    if kernel.outliers is not None:
        check_outliers(kernel, plain)
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


def check_equals(device):
    """Of numbers that are as far from the mean, kernel and PyTorch keep the first apart."""
    token = torch.zeros(64)
    token[3:11], token[40:48] = torch.tensor([1.0, -1.0]).repeat(4), torch.tensor([-1.0, 1.0]).repeat(4)
    buffers = [torch.zeros(150, 1, 64), token.expand(150, 1, 64).contiguous()]
    expected = (64 * torch.arange(4)[:, None] + torch.cat([torch.arange(3, 11), torch.arange(40, 48)])).flatten()
    packing = Packing.of(quantizer("kvquant", 4), KVBuffers((0,), (1.0,), *((b,) for b in buffers)), 1, Rotary(torch.ones(8)))
    kept, sources, targets = torch.arange(64)[None, None], torch.arange(64), 64 + torch.arange(packing.held_slots(64))
    for pack, where in ((packing.write, "cpu"), (partial(pack_blocks, packing), device)):
        keys, values = (buffer.to(where, copy=True) for buffer in buffers)
        pack(KVBuffers((0,), (1.0,), (keys,), (values,)), *(part.to(where) for part in (kept, sources, targets)))
        found = packing.read(values.cpu(), packing.values, targets)
        assert found.outliers.places.flatten().tolist() == expected.tolist()
        # Those kept apart leave 0 alone to their groups; the others have a range.
        assert found.scale.flatten().tolist() == [0.0] * 8 + [2.0] * 120


def check_case(device, packing, buffers, blocks, noise):
    """Kept tokens differ by head, and slots lie anywhere; nothing but the targets changes."""
    layers, (slots, heads, _), tokens = len(buffers.keys), buffers.keys[0].shape, 64 * blocks
    order = torch.cat([torch.arange(2), 2 + torch.randperm(slots - 2, generator=noise)])
    sources, targets = order[: tokens + 20], order[tokens + 20 :][: packing.held_slots(tokens)]
    kept = torch.stack([torch.randperm(tokens + 20, generator=noise)[:tokens].sort().values for _ in range(layers * heads)])
    kept = kept.view(layers, heads, tokens)
    kept[..., :2] = torch.arange(2)
    originals = [buffer.clone() for buffer in (*buffers.keys, *buffers.values)]
    keys, values = (tuple(b.to(device, copy=True) for b in kind) for kind in (buffers.keys, buffers.values))
    packing.write(buffers, kept, sources, targets)
    pack_blocks(packing, replace(buffers, keys=keys, values=values), *(part.to(device) for part in (kept, sources, targets)))
    pairs = zip((*keys, *values), (*buffers.keys, *buffers.values), originals, strict=True)
    for index, (found, expected, original) in enumerate(pairs):
        layout, found = packing.keys if index < layers else packing.values, found.cpu()
        read = original[sources[kept[index % layers]], torch.arange(heads)[:, None]].double()
        check_block(packing, layout, read, *(packing.read(buffer, layout, targets) for buffer in (found, expected)))
        found[targets] = original[targets]
        assert torch.equal(found, original)


def check_pack_blocks(device):
    """All methods, bits, dtypes and sizes of heads."""
    for number, (name, bits, dim, heads, dtype, blocks) in enumerate(CASES):
        packs, noise = quantizer(name, bits), torch.Generator().manual_seed(number)
        if device == "cpu" and dtype == torch.bfloat16 and packs.rotation(dim) is not None:
            # The interpreter has no products of bfloat16.
            dtype = torch.float16
        buffers = pool(2, heads, dim, dtype, 128 * blocks + 20, noise)
        packing = Packing.of(packs, buffers, 1, Rotary(frequencies(dim)))
        assert takes(packing, buffers)
        check_case(device, packing, buffers, blocks, noise)
    check_equals(device)
