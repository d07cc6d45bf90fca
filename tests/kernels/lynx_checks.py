"""Checks of the kernels that encode and decode pages in two streams: the same bits as PyTorch gives."""

from dataclasses import replace

import torch

from sglang_ext.layers.kernels.lynx import pytorch_codec, triton_codec

from sglang_ext.layers.kernels.lynx.layout import PageLayout, ALIGNMENT, PageTensors, StreamBatch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tokens, channels and sinks of a page: full and cut chunks, blocks of channels cut too, a row of sinks alone. FEW: in the interpreter.
SIZES = ((70, 72, 4), (64, 64, 0), (5, 8, 1), (40, 16, 33), (64, 32, 32))
FEW = ((37, 40, 4), (32, 72, 0), (5, 8, 1), (40, 16, 33), (64, 8, 32))


def teach_bfloat16():
    """Let Triton's interpreter round to it and read its subnormals; it carries into no exponent."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    usual = interpreter._convert_float

    def converted(data, given, wanted, mode):
        if (given, wanted) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (given, wanted) == (tl.float32, tl.bfloat16):
            patterns = data.view(np.uint32)
            return ((patterns + (0x7FFF + (patterns >> 16 & 1))) >> 16).astype(np.uint16)
        return usual(data, given, wanted, mode)

    interpreter._convert_float = converted


def pages(layout, noise, even=False):
    """Two pools of random numbers, with channels that are huge, tiny, alike, nearly alike, zero, and extreme; slots of a page.

    Args:
        even: without such channels, of which no bin is looked up, nor are those beside them.
    """
    pools = []
    for scale in (1.0, 40.0):
        x = scale * torch.randn(layout.tokens + 9, layout.channels, generator=noise)
        x *= 1 + 9 * torch.rand(layout.channels, generator=noise)
        if even:
            x += 100 * scale * torch.randn(layout.channels, generator=noise)
            pools.append(x.to(layout.dtype))
            continue
        x[:4] *= 20
        x[:, 1], x[:, 2], x[:, 3] = 0, 1.7, 1000 + x[:, 3] / 200
        x[:, 4] *= 1e-7 if layout.dtype == torch.float16 else 1e-38
        x[:, 5] = torch.where(x[:, 5] > 0, 0.0, -0.0)
        pools.append(x.clamp(-60000, 60000).to(layout.dtype))
    if not even:
        pools[1][:, 6] = 30000 * pools[1][:, 6].sign()
    return pools, torch.randperm(layout.tokens + 9, generator=noise)[: layout.tokens]


def check_page(device, layout, noise, even=False, where_they_belong=True):
    """Streams of both references, and what is read from them, into slots of pools that stay as they are elsewhere."""
    pools, slots = pages(layout, noise, even)
    there, slots_there = [pool.to(device) for pool in pools], slots.to(device)
    exact = replace(layout, reference="exact")
    parts, parts_there = PageTensors.from_tensors(pools), PageTensors.from_tensors(there)
    anchors, residuals = pytorch_codec.anchors(parts, layout, slots)
    found, rest = triton_codec.anchors(parts_there, layout, slots_there)
    assert torch.equal(found.cpu(), anchors) and torch.equal(rest.cpu(), residuals), layout
    if where_they_belong:
        check_placed(device, layout, parts_there, slots_there, anchors, residuals)
    wide = pytorch_codec.exact_residuals(parts, list(anchors), exact, slots)
    found = triton_codec.exact_residuals(parts_there, list(found), exact, slots_there)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wide, strict=True)), exact
    for read, streams in ((layout, None), (layout, list(residuals)), (exact, wide)):
        expected, outs = ([torch.full_like(pool, 7) for pool in pools] for _ in range(2))
        pytorch_codec.decode(list(anchors), streams, read, PageTensors.from_tensors(expected), slots)
        outs = [out.to(device) for out in outs]
        moved = None if streams is None else [stream.to(device) for stream in streams]
        triton_codec.decode([anchor.to(device) for anchor in anchors], moved, read, PageTensors.from_tensors(outs), slots_there)
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(pytorch_codec.as_bytes(out.cpu()), pytorch_codec.as_bytes(wanted)), (read, streams is None)
    assert all(torch.equal(pytorch_codec.as_bytes(out[slots]), pytorch_codec.as_bytes(pool[slots])) for out, pool in zip(expected, pools, strict=True))


def placed(size, count, first, device):
    """Room for streams, of zeros, that begin some bytes after its own beginning."""
    width = -(-size // ALIGNMENT) * ALIGNMENT
    begins = first + width * torch.arange(count, device=device)
    return StreamBatch(torch.zeros(first + width * count, dtype=torch.uint8, device=device), begins, first, width, size)


def check_placed(device, layout, parts, slots, anchors, residuals):
    """Streams are written where they belong, the same bytes with zeros between them, and read from there."""
    both = [placed(each.shape[1], len(each), 3 * ALIGNMENT, device) for each in (anchors, residuals)]
    alone = placed(anchors.shape[1], len(anchors), 0, device)
    triton_codec.write_streams(parts, layout, slots, *both)
    triton_codec.write_streams(parts, layout, slots, alone, None)
    for place, wanted in zip((*both, alone), (anchors, residuals, anchors), strict=True):
        assert torch.equal(place.rows.cpu(), wanted), layout
        left = place.memory.clone()
        place.rows.zero_()
        assert not place.memory.any(), layout
        place.memory.copy_(left)
    for rest in (None, both[1]):
        outs = [torch.full_like(tensor, 7) for tensor in parts.tensors]
        expected = [out.cpu().clone() for out in outs]
        triton_codec.decode(both[0], rest, layout, PageTensors.from_tensors(outs), slots)
        pytorch_codec.decode(list(anchors), None if rest is None else list(residuals), layout, PageTensors.from_tensors(expected), slots.cpu())
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(pytorch_codec.as_bytes(out.cpu()), pytorch_codec.as_bytes(wanted)), (layout, rest is None)


def check_lynx(device):
    """All dtypes and sizes, each with each on a GPU; and that what a float16 does not reach is found."""
    noise = torch.Generator().manual_seed(3)
    if device == "cpu":
        teach_bfloat16()
    for dtype in DTYPES:
        sizes = FEW if device == "cpu" else SIZES
        # The interpreter is slow. It runs all sizes in one dtype; make matrix runs them all.
        for size in sizes if dtype == DTYPES[0] or device != "cpu" else sizes[:1]:
            # Where streams belong with one size and dtype.
            tokens, channels, sinks = size
            placed = device != "cpu" or size == sizes[0] and dtype == DTYPES[0]
            check_page(device, PageLayout(tokens, channels, dtype, sinks=sinks), noise, False, placed)
        # A chunk with sinks, and one or two that are whole.
        check_page(device, PageLayout(96 if device != "cpu" else 64, 24, dtype, sinks=4), noise, True, device != "cpu")
    for value in (float("nan"), float("inf"), -1e5):
        layout = PageLayout(64, 32, torch.bfloat16, sinks=1)
        pools = [torch.randn(64, 32, generator=noise).bfloat16() for _ in range(3)]
        # Not in the sinks of the first, but of the second.
        pools[0][40, 17] = pools[1][0, 17] = value
        kinds = [part.anchors(PageTensors.from_tensors(those), layout, None)[0][:, 0].tolist() for part, those in (
            (pytorch_codec, pools), (triton_codec, [pool.to(device) for pool in pools]))]  # fmt: skip
        assert kinds == [[1, 0, 0]] * 2, (value, kinds)
