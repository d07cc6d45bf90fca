"""Checks of the kernels that write pages as residuals of packed blocks, and read them: what PyTorch writes, and the pool's bits."""

import torch
from lynx_checks import teach_bfloat16

from sglang_ext.layers.kernels.lynx import residual_pages
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.host_tier.page_copies import ResidualPages

# Dtype, bits, KV heads, channels of a head, tokens of a page.
CASES = (
    (torch.bfloat16, 4, 1, 64, 64), (torch.float16, 2, 2, 64, 64), (torch.float32, 4, 1, 128, 64), (torch.bfloat16, 2, 1, 128, 128),
    (torch.float32, 2, 3, 64, 64),
)  # fmt: skip


def pool(dtype, heads, dim, layers, slots, noise):
    """Buffers with channels that are large, tiny, alike, nearly alike, zero, of signed zeros."""
    kinds = []
    for _ in "kv":
        kind = []
        for _ in range(layers):
            x = torch.randn(slots, heads, dim, generator=noise) * (1 + 9 * torch.rand(dim, generator=noise))
            x[..., 1], x[..., 2], x[..., 3] = 0, 1.7, 1000 + x[..., 3] / 200
            x[..., 4] *= 1e-7 if dtype == torch.float16 else 1e-38
            x[..., 5] = torch.where(x[..., 5] > 0, 0.0, -0.0)
            x[..., 6] = 30000 * x[..., 6].sign()
            kind.append(x.to(dtype))
        kinds.append(tuple(kind))
    return KVBuffers(tuple(range(layers)), (1.0,) * layers, *kinds)


def packed(dtype, bits, heads, dim, page, noise, pages=3):
    """A pool with the blocks of so many pages of tokens: slots of the tokens, and of each page's blocks."""
    tokens = pages * page
    buffers = pool(dtype, heads, dim, 1, 4 * tokens, noise)
    packing = Packing.for_pool(quantizer("lynx", bits), buffers, page)
    order = torch.randperm(4 * tokens, generator=noise)
    slots, blocks = order[:tokens], order[tokens : tokens + packing.packed_slots(tokens)]
    kept = torch.arange(tokens).expand(1, heads, tokens).contiguous()
    packing.write(buffers, kept, slots, blocks)
    return ResidualPages(buffers, packing, page), slots, blocks.view(pages, -1).clone()


def moved(pages, device):
    """The same on a device."""
    kinds = (tuple(b.to(device, copy=True) for b in kind) for kind in (pages.buffers.keys, pages.buffers.values))
    buffers = KVBuffers(pages.buffers.layer_ids, pages.buffers.scaling, *kinds)
    return ResidualPages(buffers, pages.packing, pages.page_size)


def words(buffers, slots):
    return torch.stack([b[slots].flatten().view(torch.uint8) for b in (*buffers.keys, *buffers.values)]).cpu()


def check_case(device, dtype, bits, heads, dim, page, noise):
    plain, slots, blocks = packed(dtype, bits, heads, dim, page, noise)
    # Of the second page no blocks are known; the third has a number that is none.
    blocks[1] = -1
    plain.buffers.values[0][slots[2 * page + 5], 0, 7] = float("nan")
    there = moved(plain, device)
    expected = torch.zeros(3, plain.page_bytes, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    found = tuple(torch.full_like(each, 3, device=device) for each in expected)
    plain.write(slots, blocks, *expected)
    shared = plain.layout, plain.packing
    residual_pages.write_pages(there.buffers, *shared, slots.to(device), blocks.to(device), *found)
    rooms, sizes = (each.cpu() for each in found)
    assert torch.equal(sizes, expected[1]) and sizes[1] == sizes[2] == 0 < sizes[0] < plain.page_bytes, (sizes, expected[1])
    for page_rooms, size in zip(zip(rooms, expected[0]), sizes.tolist()):
        assert torch.equal(*(room[: size + plain.anchor_bytes if size else None] for room in page_rooms)), (dtype, bits)
    before, others = words(plain.buffers, slots), torch.ones(len(plain.buffers.keys[0]), dtype=torch.bool)
    others[slots] = False
    rest = words(there.buffers, others.nonzero().flatten())
    for buffer in (*there.buffers.keys, *there.buffers.values):
        buffer[slots.to(device)] = 0
    residual_pages.read_pages(there.buffers, *shared, *found, slots.to(device), blocks.to(device))
    assert torch.equal(words(there.buffers, slots), before), (dtype, bits)
    assert torch.equal(words(there.buffers, others.nonzero().flatten()), rest)
    # Anchors come with residuals where blocks are gone.
    for gone in (None, blocks.new_full(blocks.shape, -1)):
        for buffer in (*there.buffers.keys, *there.buffers.values):
            buffer[slots.to(device)] = 0
        residual_pages.read_pages(there.buffers, *shared, *found, slots.to(device), None if gone is None else gone.to(device))
        assert torch.equal(words(there.buffers, slots), before), (dtype, bits)
    # Without blocks all is whole; where bits were lost, nothing else is written.
    residual_pages.write_pages(there.buffers, *shared, slots.to(device), None, *found)
    assert not found[1].any()
    residual_pages.read_pages(there.buffers, *shared, *found, slots.to(device), None)
    assert torch.equal(words(there.buffers, slots), before)
    for size in (plain.page_bytes // 2, plain.page_bytes, -8):
        found[0].random_(0, 256), found[1].fill_(size)
        residual_pages.read_pages(there.buffers, *shared, *found, slots.to(device), blocks.to(device))
        assert torch.equal(words(there.buffers, others.nonzero().flatten()), rest)


def check_anchored(device):
    """All dtypes and bits; the interpreter, which is slow, leaves out the last case."""
    noise = torch.Generator().manual_seed(5)
    if device == "cpu":
        teach_bfloat16()
    for case in CASES if device != "cpu" else CASES[:-1]:
        check_case(device, *case, noise)
