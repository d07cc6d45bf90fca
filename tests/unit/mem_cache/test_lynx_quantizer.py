"""Lynx's anchor as a copy's codes: those of the paper's formula, chunks' extremes kept, numbers near what they were."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import meant, packed_pool

from sglang_ext.mem_cache.compressors.catalogue import QUANTIZERS, quantizer
from sglang_ext.mem_cache.compressors.quantizer import stored_above
from sglang_ext.mem_cache.compressors.level_quantizers import Lynx

A = 2.0


def anchor(y, bits):
    """Algorithm 1 with I up to F, the residual dropped: of y in [-1, 1] sign and V, the number that they mean, and I unrounded; float64."""
    step = 2 ** (8 - bits)
    top = step * (2 ** (bits - 1) - 1)
    companded = top * torch.log1p(A * y.abs()) / math.log1p(A)
    v = (companded.round() + step / 2 - 1).div(step, rounding_mode="floor")
    size = torch.expm1(torch.where(v == 0, step / 4, v * step) / top * math.log1p(A)) / A
    return torch.where(y < 0, -1.0, 1.0) * v, torch.where(y < 0, -size, size), companded


def chunks(spread=1.0, bits=4):
    """Random blocks, what they are packed to, and both as [chunks, 32]: numbers, mu, sigma and meanings in float64."""
    noise = torch.Generator().manual_seed(bits)
    numbers = torch.randn(2, 3, 64, 64, generator=noise) * spread + torch.randn(64, generator=noise) * spread
    packs = Lynx(bits)
    found = packs.quantize(numbers, packs.key_grid(64))
    apart = [part.reshape(2, 3, 2, -1, 64).transpose(3, 4).reshape(-1, part.shape[2] // 2).double() for part in (found.scale, found.zero)]
    back = meant(found, packs.levels(64), None).view(2, 3, 64, 64)
    rows = [part.double().view(2, 3, 2, 32, 64).transpose(3, 4).reshape(-1, 32) for part in (numbers, back)]
    return rows[0], *apart, rows[1]


def test_four_bits_and_two_of_chunks_of_a_channel():
    assert QUANTIZERS["lynx"].bits == (4, 2)
    packs = quantizer("lynx", 4)
    assert packs.key_grid(64) == packs.value_grid(64) == (32, 1) and (packs.sinks, packs.recent) == (4, 0)


@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("bits", [4, 2])
def test_numbers_mean_what_the_papers_formula_says(bits, spread):
    numbers, sigma, mu, back = chunks(spread, bits)
    _, size, place = anchor((numbers - mu) / sigma, bits)
    # Levels and bounds have 13 bits: next to a bound of I either side may be meant.
    clear = ((place - place.floor() - 0.5).abs() > 0.02) & ((numbers - mu).abs() > 1e-6 * sigma)
    assert clear.double().mean() > 0.95
    torch.testing.assert_close(back[clear], (size * sigma + mu)[clear], rtol=2**-12, atol=2**-12 * spread)


@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_mu_is_the_mean_and_sigma_the_greatest_distance_from_it_rounded_up(spread):
    numbers, sigma, mu, back = chunks(spread)
    assert torch.equal(mu, mu.half().double()) and torch.equal(sigma, sigma.half().double())
    torch.testing.assert_close(mu, numbers.mean(-1, keepdim=True), rtol=1e-3, atol=1e-3 * spread)
    far = (numbers - mu).abs().amax(-1, keepdim=True)
    assert (sigma >= far * (1 - 1e-7)).all() and (sigma <= far * (1 + 2**-10) + 2**-24).all()


def test_a_chunks_extreme_is_kept():
    numbers, sigma, mu, back = chunks()
    far = (numbers - mu).abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(1, far), numbers.gather(1, far), rtol=0, atol=float(sigma.max()) * 2**-10)


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_what_is_stored_above_is_the_least_float16_that_is_not_less(sizes):
    sizes = torch.tensor(sizes)
    found, largest = stored_above(sizes), torch.finfo(torch.float16).max
    assert torch.equal(found, found.half().float()) and (found >= sizes.clamp(max=largest)).all()
    below = (found.half().view(torch.int16) - 1).view(torch.float16).float()
    assert ((below < sizes) | (found == 0)).all()


def test_all_of_one_number_come_back_as_it_was():
    numbers = torch.full((1, 1, 64, 64), 0.3)
    packs = Lynx(4)
    found = packs.quantize(numbers, packs.key_grid(64))
    assert (meant(found, packs.levels(64), None) - 0.3).abs().max() < 1e-6


def test_the_anchor_is_nearer_than_integers_of_as_many_bits():
    errors = {}
    for name in ("lynx", "int4"):
        pool = packed_pool(name, 4, 4, 0)
        errors[name] = float((pool.values - pool.originals[1]).norm() / pool.originals[1].norm())
    assert errors["lynx"] < errors["int4"]
