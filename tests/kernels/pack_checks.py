"""A check of the kernel that packs blocks, against what PyTorch writes."""

import torch
from packed_helpers import Gridded

from sglang_ext.layers.kernels.packed.pack_blocks import pack_blocks, can_pack
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.compressors.quantizer import code_values, grouped

# Method, bits, channels of a head, KV heads, dtype, blocks.
CASES = (
    ("kivi", 4, 128, 2, torch.bfloat16, 3), ("kivi", 2, 64, 1, torch.float16, 2), ("kivi", 2, 128, 1, torch.float32, 1),
    ("int8", 8, 128, 1, torch.bfloat16, 2), ("int4", 4, 64, 3, torch.float32, 1), ("rotatekv", 2, 64, 2, torch.bfloat16, 9),
    ("rotatekv", 4, 128, 1, torch.float16, 1), ("turboquant", 4, 128, 2, torch.bfloat16, 2),
    ("turboquant", 2, 64, 1, torch.float32, 9), ("lynx", 4, 128, 2, torch.bfloat16, 2), ("lynx", 2, 64, 1, torch.float32, 2),
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
    return KVBuffers(tuple(range(3, 3 + layers)), (1.0,) * layers, *(tuple(buffer.to(dtype) for buffer in kind) for kind in kinds), 5)


def check_block(packing, layout, numbers, kernel, plain):
    """Scales are alike, and each number has the code whose meaning is nearest to it."""
    rotation, levels = (of(numbers.device)[0] for of in (packing.rotations, packing.levels))
    if rotation is not None:
        numbers = numbers @ rotation.double()
    for found, expected in ((kernel.scale, plain.scale), (kernel.zero, plain.zero)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-6)
    scale, zero = (part.double()[:, :, :, None, :, None] for part in (kernel.scale, kernel.zero))
    wanted = grouped(numbers.view(kernel.codes.shape), layout.grid)
    distance = [(grouped(code_values(b.codes, levels).double(), layout.grid) * scale + zero - wanted).abs() for b in (kernel, plain)]
    assert torch.all(distance[0] <= distance[1] * (1 + 1e-3) + 2e-5 * (scale + zero.abs()))
    assert (kernel.codes != plain.codes).double().mean() < 1e-3


def check_drawn(kernel, plain):
    """What is drawn is the same."""
    for part in ("codes", "scale", "zero", "sums"):
        assert torch.equal(getattr(kernel, part), getattr(plain, part)), part


def check_case(device, packing, buffers, blocks, noise):
    """Kept tokens differ by head, and slots lie anywhere; nothing but the targets changes."""
    layers, (slots, heads, _), tokens = len(buffers.keys), buffers.keys[0].shape, packing.block_tokens * blocks
    order = torch.cat([torch.arange(2), 2 + torch.randperm(slots - 2, generator=noise)])
    sources, targets = order[: tokens + 20], order[tokens + 20 :][: packing.held_slots(tokens)]
    kept = torch.stack([torch.randperm(tokens + 20, generator=noise)[:tokens].sort().values for _ in range(layers * heads)])
    kept = kept.view(layers, heads, tokens)
    kept[..., :2] = torch.arange(2)
    originals = [buffer.clone() for buffer in (*buffers.keys, *buffers.values)]
    keys, values = (tuple(b.to(device, copy=True) for b in kind) for kind in (buffers.keys, buffers.values))
    seeds = torch.randint(-(1 << 31), 1 << 31, sources.shape, generator=noise, dtype=torch.int32)
    given = kept, sources, targets, *((seeds,) if packing.stochastic else ())
    packing.write(buffers, *given)
    there = KVBuffers(buffers.layer_ids, buffers.scaling, keys, values, buffers.first_head)
    pack_blocks(packing, there, *(part.to(device) for part in given))
    pairs = zip((*keys, *values), (*buffers.keys, *buffers.values), originals, strict=True)
    for index, (found, expected, original) in enumerate(pairs):
        layout, found = packing.keys if index < layers else packing.values, found.cpu()
        read = original[sources[kept[index % layers]], torch.arange(heads)[:, None]].double()
        blocks_of = [packing.read(buffer, layout, targets[: packing.packed_slots(tokens)]) for buffer in (found, expected)]
        if packing.stochastic:
            check_drawn(*blocks_of)
        else:
            check_block(packing, layout, read, *blocks_of)
        found[targets] = original[targets]
        assert torch.equal(found, original)


# Grids of keys and of values, of heads of 64 channels: blocks of whole tokens, of parts of them, of tokens and channels.
GRIDS = ((Grid(1, 32), Grid(64, 1)), (Grid(16, 4), Grid(32, 1)))


# Bits, partition, channels of a head and dtype of blocks that are drawn.
DRAWN = (
    (4, 64, 128, torch.bfloat16), (2, 64, 64, torch.float32), (4, 32, 64, torch.float16), (2, 128, 128, torch.bfloat16),
)  # fmt: skip


def check_pack_blocks(device):
    """All methods, bits, dtypes and sizes of heads; and other grids than the methods have."""
    for number, (keys, values) in enumerate(GRIDS):
        noise = torch.Generator().manual_seed(number)
        buffers = pool(1, 1, 64, torch.float32, 200, noise)
        check_case(device, Packing.for_pool(Gridded(4, keys=keys, values=values), buffers, 1), buffers, 1, noise)
    for number, (bits, partition, dim, dtype) in enumerate(DRAWN):
        noise = torch.Generator().manual_seed(number)
        packs, buffers = quantizer("hack", bits, partition), pool(2, 2, dim, dtype, 600, noise)
        packing = Packing.for_pool(packs, buffers, 1)
        assert can_pack(packing, buffers)
        check_case(device, packing, buffers, 2, noise)
    for number, (name, bits, dim, heads, dtype, blocks) in enumerate(CASES):
        packs, noise = quantizer(name, bits), torch.Generator().manual_seed(number)
        if device == "cpu" and dtype == torch.bfloat16 and packs.rotation(dim) is not None:
            # The interpreter has no products of bfloat16.
            dtype = torch.float16
        buffers = pool(2, heads, dim, dtype, 128 * blocks + 20, noise)
        packing = Packing.for_pool(packs, buffers, 1)
        assert can_pack(packing, buffers)
        check_case(device, packing, buffers, blocks, noise)
