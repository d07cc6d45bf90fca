"""Seeds and noise of stochastic rounding: the same wherever a prompt is packed.

A number between two codes is rounded up with a probability equal to its distance from the lower code. Sums of many numbers are therefore
unbiased (HACK, arXiv 2502.03589, stochastic rounding).

The noise comes from a hash, not from a random generator. Its inputs are the prompt before the token's page, the token's index, its layer,
KV head and channel, and the kind (key or value). Ranks with different heads, and servers that pack the same prefix, therefore compute the
same codes. Later tokens are no input: prompts that share a block share its codes, whatever follows. A kernel computes the same as
:func:`noise` (layers/kernels/packed/pack_blocks.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy
import torch

from sglang_ext.device import to_device

# Tokens of a page. A page's noise depends on one hash of the prompt.
PAGE = 64
# Factors of the lane and channel numbers in the hash: odd, near 2 ** 32 over the golden ratio, and another odd number.
LANE_STEP, CHANNEL_STEP = 0x9E3779B9, 0x85EBCA6B
# Shifts and factors, alternating, of a 32-bit hash that spreads each bit over all others.
SHIFTS, FACTORS = (16, 15, 15), (0x21F0AAAD, 0x735A2D97)
# Bits of noise that float32 holds exactly.
NOISE_BITS = 24
MASK = 0xFFFFFFFF


def chained(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield for each part a hash of it and of all parts before it, 16 bytes."""
    digest = b""
    for part in parts:
        digest = blake2b(digest + part, digest_size=16).digest()
        yield digest


def token_seeds(prompt: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Seeds of a context's tokens, before layer, head and channel are added: int32 [tokens].

    If the prompt fills all pages before a page, the page's seed is a hash of them. The seed of a later page is a hash of the prompt's
    whole pages and the page's number.

    Args:
        prompt: Token ids.
        tokens: Tokens of the context, which may be longer or shorter than the prompt.
        device: Device of the result. The host does not wait for it.
    """
    ids = numpy.asarray(prompt, numpy.int64)
    before = (ids[max(0, end - PAGE) : end] if end <= len(ids) else ids[:0] for end in range(0, tokens, PAGE))
    pages = [int.from_bytes(digest[:4], "little", signed=True) for digest in chained(page.tobytes() for page in before)]
    of_pages = to_device(pages, device, torch.int32)
    # int32 wraps around, as the kernels' integers do.
    return (of_pages[:, None] + torch.arange(PAGE, dtype=torch.int32, device=device)).flatten()[:tokens]


def lane(layer: int, head: int, is_value: bool) -> int:
    """Number of one KV head's keys or values in one layer, unique in the model."""
    return (layer << 12 | head) << 1 | is_value


def noise(seeds: torch.Tensor, lanes: torch.Tensor, dim: int) -> torch.Tensor:
    """Rounding noise, added to steps before truncation: float32 [heads, tokens, dim], uniform over [0, 1).

    Args:
        seeds: int32 [heads, tokens], of the tokens that each head keeps (:func:`token_seeds`).
        lanes: int64 [heads], numbers of :func:`lane`.
        dim: Channels of a head.
    """
    of_tokens = _spread(seeds.long() + (lanes[:, None] + 1) * LANE_STEP)
    channels = torch.arange(dim, device=seeds.device) * CHANNEL_STEP
    return (_spread(of_tokens[..., None] + channels) >> (32 - NOISE_BITS)).float() * 2.0**-NOISE_BITS


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """Hash of the lowest 32 bits: int64, at least 0."""
    numbers = numbers & MASK
    for shift, factor in zip(SHIFTS, FACTORS):
        numbers = (numbers ^ numbers >> shift) * factor & MASK
    return numbers ^ numbers >> SHIFTS[-1]
