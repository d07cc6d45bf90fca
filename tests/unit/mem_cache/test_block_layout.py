"""Codes and their parameters lie in cells as the layout says, and come back as they were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, BlockLayout, Quantized, pack_codes

GRIDS = {"channel": lambda dim: Grid(32, 1), "token": lambda dim: Grid(1, dim), "groups": lambda dim: Grid(1, dim // 2), "both": lambda dim: Grid(16, 2)}


@given(
    bits=st.sampled_from([2, 4, 8]),
    dim=st.sampled_from([16, 64, 80, 128]),
    itemsize=st.sampled_from([2, 4]),
    grid=st.sampled_from(sorted(GRIDS)),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 3),
    spare=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_blocks_come_back_as_they_were_packed(bits, dim, itemsize, grid, heads, blocks, spare):
    layout = BlockLayout(bits, 64, dim, dim * itemsize, GRIDS[grid](dim))
    noise = torch.Generator().manual_seed(dim + bits)
    codes = torch.randint(0, 1 << bits, (heads, blocks, 64, dim), generator=noise, dtype=torch.uint8)
    scale, zero = (torch.randn(heads, blocks, *layout.groups, generator=noise).half().float() for _ in "sz")
    cells = layout.pack(Quantized(codes, scale, zero), layout.cells + spare)
    assert cells.shape == (heads, blocks, layout.cells + spare, layout.cell_bytes) and cells.dtype == torch.uint8
    found = layout.unpack(cells)
    assert torch.equal(found.codes, codes) and torch.equal(found.scale, scale) and torch.equal(found.zero, zero)
    assert layout.code_cells == 64 * bits // (8 * itemsize), "nothing but the codes' own bytes"
    assert (layout.cells - layout.code_cells - 1) * layout.cell_bytes < layout.parameter_bytes


def test_a_bytes_codes_are_channels_far_apart():
    codes = torch.arange(8, dtype=torch.uint8)
    assert pack_codes(codes, 4).tolist() == [0 | 4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4]
    assert pack_codes(codes % 4, 2).tolist() == [0 | 2 << 2 | 0 << 4 | 2 << 6, 1 | 3 << 2 | 1 << 4 | 3 << 6]
    assert pack_codes(codes, 8).tolist() == list(range(8))


def test_bf16_heads_of_128_take_four_bits_and_their_parameters():
    layout = BlockLayout(4, 64, 128, 256, Grid(64, 1))
    assert (layout.code_cells, layout.cells) == (16, 18)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((3, 64, 64, 256, Grid(1, 64)), "codes of 3 bits .* use 2, 4 or 8 bits"),
        ((2, 8, 64, 256, Grid(1, 64)), "of 8 tokens .* multiple of 64"),
        ((4, 64, 64, 256, Grid(1, 48)), "1 tokens and 48 channels do not divide .* use divisors"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(layout, words):
    with pytest.raises(ValueError, match=words):
        BlockLayout(*layout)
