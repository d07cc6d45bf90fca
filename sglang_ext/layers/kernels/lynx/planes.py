"""Packs codes of 2 to 6 bits into planes of 4, 2 and 1 bits (layout.py), in PyTorch."""

import torch

from sglang_ext.layers.kernels.lynx.layout import PLANES


def pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 [tokens, channels] codes into planes, uint8 [tokens * channels * bits / 8]."""
    tokens, left, planes = len(codes), bits, []
    for width in PLANES[bits]:
        left -= width
        each = codes >> left & (1 << width) - 1
        while width < 8:
            pairs = each.view(tokens, -1, 2)
            each = pairs[..., 0] | pairs[..., 1] << width
            width *= 2
        planes.append(each.flatten())
    return torch.cat(planes)


def unpack_planes(planes: torch.Tensor, bits: int, tokens: int) -> torch.Tensor:
    """Unpack the codes, uint8 [tokens, channels], from planes of :func:`pack_planes`."""
    channels = len(planes) * 8 // (bits * tokens)
    codes = torch.zeros(tokens, channels, dtype=torch.uint8, device=planes.device)
    left, begin = bits, 0
    for width in PLANES[bits]:
        left -= width
        size = tokens * channels * width // 8
        each = planes[begin : begin + size].view(tokens, -1)
        begin, share = begin + size, 8
        while share > width:
            share //= 2
            each = torch.stack([each & (1 << share) - 1, each >> share], -1).flatten(1)
        codes |= each << left
    return codes
