"""Exact residuals in PyTorch: a number's index in the bin of its code, which restores the pool's bits from an anchor.

The bin of a code contains the numbers of the pool's dtype from one bound to the next, in the order of floats, with -0 just below 0. The
rank in this order is called the ordinal: the bit pattern as an integer, with the order of negative patterns reversed. The encoder and
the decoder both compute a bin's first and last number from code and scales. An index has as many bits as the last index of its bin.
"""

import torch

from sglang_ext.layers.kernels.lynx.layout import BLOCK, CHUNK, UNIT, PageLayout
from sglang_ext.layers.kernels.lynx.levels import bounds
from sglang_ext.layers.kernels.lynx.scales import ChunkScales, as_bytes

# Integer types of the same size, and the masks that reverse the order of negative patterns.
PATTERNS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}


def ordinals(numbers: torch.Tensor) -> torch.Tensor:
    """Ordinals of floats, int64."""
    kind, turn = PATTERNS[numbers.itemsize]
    patterns = numbers.view(kind).long()
    return torch.where(patterns < 0, patterns ^ turn, patterns)


def from_ordinals(ranks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats of ordinals."""
    kind, turn = PATTERNS[dtype.itemsize]
    return torch.where(ranks < 0, ranks ^ turn, ranks).to(kind).view(dtype)


def first_reaching(bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The ordinal of the smallest number of ``dtype`` that is not less than a float32, int64. For 0, the ordinal of -0."""
    nearest = bound.to(dtype)
    ranks = torch.where(nearest == 0, 0, ordinals(nearest))
    less = nearest.float() < bound
    return torch.where(less, ranks + 1, torch.where(nearest == 0, -1, ranks))


def bins(codes: torch.Tensor, scales: ChunkScales, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """First ordinal and last index of each code's bin, int64 [rows, 32, channels].

    Args:
        codes: int64 [rows, 32, channels].
    """
    # Computed per chunk, because a chunk has fewer bounds than numbers.
    ends = scales.mu[:, None] + scales.sigma[:, None] * torch.tensor(bounds(bits), device=codes.device)[:, None]
    reached = first_reaching(ends, dtype)
    last = reached[:, 1:] - 1
    # The last bin includes its end, because the end is a number of the chunk. 0 counts twice, as -0 and 0.
    last[:, -1] += torch.where(ends[:, -1] == 0, 2, 1)
    first = reached.gather(1, codes)
    return first, last.gather(1, codes) - first


def widths(last: torch.Tensor) -> torch.Tensor:
    """Bits of an index, int64, if the last index of its bin is ``last``, from 0 to 2 ** 32 - 1."""
    # Clearing the second highest bit keeps rounding from reaching the next power.
    power = (last & ~(last >> 1)).float().view(torch.int32) >> 23
    return (power.long() - 126).clamp(min=0)


def positions(width: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """First bits of the indices, int64 [rows, 32, channels], and starts of the blocks, int64 [rows * blocks + 1], in units."""
    rows, blocks, channels = layout.rows, layout.blocks, layout.channels
    filled = torch.nn.functional.pad(width, (0, blocks * BLOCK - channels))
    inside = filled.view(rows, CHUNK, blocks, BLOCK).transpose(1, 2).reshape(rows * blocks, CHUNK * BLOCK)
    ends = inside.cumsum(1)
    units = (ends[:, -1] + 8 * UNIT - 1) // (8 * UNIT)
    starts = torch.nn.functional.pad(units.cumsum(0), (1, 0))
    found = starts[:-1, None] * 8 * UNIT + ends - inside
    return found.view(rows, blocks, CHUNK, BLOCK).transpose(1, 2).reshape(rows, CHUNK, -1)[..., :channels], starts


def encode_indices(index: torch.Tensor, last: torch.Tensor, coded: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The exact residual stream, uint8 [bytes].

    Args:
        index: int64 [rows, 32, channels], indices in bins.
        last: int64 [rows, 32, channels], last indices of the bins.
        coded: bool [rows, 32, 1], tokens of the page that are not sinks.
    """
    width = widths(last) * coded
    place, starts = positions(width, layout)
    held, place = (index * (width > 0)).flatten(), place.flatten()
    moved = held << (place & 31)
    # One extra word absorbs additions of 0 after the last word.
    words = torch.zeros(2 * int(starts[-1]) + 1, dtype=torch.int64, device=index.device)
    words.index_add_(0, place >> 5, moved & 0xFFFFFFFF).index_add_(0, ((place >> 5) + 1).clamp(max=len(words) - 1), moved >> 32)
    heads = torch.zeros(layout.index_bytes // 4, dtype=torch.int64, device=index.device)
    heads[: len(starts) - 1] = starts[:-1]
    return as_bytes(torch.cat([heads, words[:-1]]).to(torch.int32))


def decode_indices(residual: torch.Tensor, last: torch.Tensor, coded: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Decode the indices, int64 [rows, 32, channels], from a stream of :func:`encode_indices`.

    Raises:
        ValueError: The stream's size is not the one that codes and scales imply.
    """
    width = widths(last) * coded
    place, starts = positions(width, layout)
    expected = layout.index_bytes + UNIT * int(starts[-1])
    if len(residual) != expected:
        raise ValueError(
            f"an exact residual of {len(residual)} bytes does not fit its anchor, which needs {expected}: pass the anchor's own residual"
        )
    words = residual[layout.index_bytes :].clone().view(torch.int32).long() & 0xFFFFFFFF
    words = torch.nn.functional.pad(words, (0, 2))
    low, high = words[place >> 5], words[(place >> 5) + 1]
    shift = place & 31
    # The highest of the 64 bits may act as a sign bit. It is shifted out or masked.
    return (high << 32 | low) >> shift & (1 << width) - 1
