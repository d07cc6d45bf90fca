"""What numbers are rounded by where codes are drawn: the same wherever a prompt is packed.

A number between two codes gets the upper one as often as it lies above the lower one, so that a sum of many is right (HACK, arXiv
2502.03589, stochastic rounding). What decides is no generator's state, but a hash of the prompt before the token's page, the token's
place, its layer, KV head and channel, and whether it is a key's: ranks that hold different heads, and servers that pack the same
prefix, draw the same codes. Nothing after a token is in it, so that prompts which share a block share its codes, however they go on. A
kernel draws as :func:`noise` does (layers/kernels/packed/pack_blocks.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy
import torch

from sglang_ext.device import to_device

# Tokens whose noise a hash of the prompt decides together.
PAGE = 64
# What steps from lane to lane and from channel to channel are multiplied with: odd, near 2 ** 32 over the golden ratio, and another.
LANE_STEP, CHANNEL_STEP = 0x9E3779B9, 0x85EBCA6B
# Of a hash of 32 bits that spreads each bit over all others: shifts and factors alternate.
SHIFTS, FACTORS = (16, 15, 15), (0x21F0AAAD, 0x735A2D97)
# Bits of noise that float32 holds exactly.
NOISE_BITS = 24
MASK = 0xFFFFFFFF


def chained(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Of each part a hash of it and of all before it, 16 bytes."""
    digest = b""
    for part in parts:
        digest = blake2b(digest + part, digest_size=16).digest()
        yield digest


def token_seeds(prompt: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """What the noise of a context's tokens depends on, but for layer, head and channel: int32 [tokens].

    Of a page before which the prompt fills all others it is a hash of those; of the pages after it, of the prompt's whole pages and
    the page's number.

    Args:
        prompt: token ids.
        tokens: of the context, which may be longer or shorter.
        device: where the seeds lie; nothing waits for it.
    """
    ids = numpy.asarray(prompt, numpy.int64)
    before = (ids[max(0, end - PAGE) : end] if end <= len(ids) else ids[:0] for end in range(0, tokens, PAGE))
    pages = [int.from_bytes(digest[:4], "little", signed=True) for digest in chained(page.tobytes() for page in before)]
    of_pages = to_device(pages, device, torch.int32)
    # Int32 wraps around, as kernels' numbers do.
    return (of_pages[:, None] + torch.arange(PAGE, dtype=torch.int32, device=device)).flatten()[:tokens]


def lane(layer: int, head: int, is_value: bool) -> int:
    """The number of a layer's keys or values of one KV head, of all layers and heads of the model."""
    return (layer << 12 | head) << 1 | is_value


def noise(seeds: torch.Tensor, lanes: torch.Tensor, dim: int) -> torch.Tensor:
    """What is added to steps before they are cut off: float32 [heads, tokens, dim], even over [0, 1).

    Args:
        seeds: int32 [heads, tokens], of the tokens that each head keeps (:func:`token_seeds`).
        lanes: int64 [heads], as :func:`lane` counts.
        dim: channels of a head.
    """
    of_tokens = _spread(seeds.long() + (lanes[:, None] + 1) * LANE_STEP)
    channels = torch.arange(dim, device=seeds.device) * CHANNEL_STEP
    return (_spread(of_tokens[..., None] + channels) >> (32 - NOISE_BITS)).float() * 2.0**-NOISE_BITS


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of the lowest 32 bits: int64, at least 0."""
    numbers = numbers & MASK
    for shift, factor in zip(SHIFTS, FACTORS):
        numbers = (numbers ^ numbers >> shift) * factor & MASK
    return numbers ^ numbers >> SHIFTS[-1]
