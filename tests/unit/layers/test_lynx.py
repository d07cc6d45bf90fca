"""Streams of pages: what an anchor is off by, and what residuals restore; lynx_checks.py compares kernels with this."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import (
    ANCHORS,
    bounds,
    fine_bounds,
    fine_levels,
    level_step,
    levels,
    max_level,
    CHUNK,
    DTYPES,
    HEADER,
    PageLayout,
)
from sglang_ext.layers.kernels.lynx.codec import decode_page, encode_page
from sglang_ext.layers.kernels.lynx.encode_tiles import CELLS, REACH, cells
from sglang_ext.layers.kernels.lynx.pytorch_codec import CLEAR, as_bytes

PATTERNS = {2: torch.int16, 4: torch.int32}
KINDS = ("normal", "constant", "zeros", "signed zeros", "subnormal", "outlier", "far", "tiny", "greatest", "any")


def encode(x, layout):
    """Streams of one tensor's page."""
    return encode_page([x], layout)[0]


def decode(anchor, residual, layout):
    """One tensor's page."""
    out = torch.empty(layout.tokens, layout.channels, dtype=layout.dtype)
    decode_page([anchor], None if residual is None else [residual], layout, [out])
    return out


def numbers(kind, tokens, dtype, noise):
    """Of a channel, of the dtype; finite."""
    x = torch.randn(tokens, generator=noise, dtype=torch.float64)
    one, info = torch.randn((), generator=noise, dtype=torch.float64), torch.finfo(dtype)
    if kind == "outlier":
        x[torch.randint(tokens, (1,), generator=noise)] *= 1000
    made = {
        "normal": x, "outlier": x, "constant": one.expand(tokens), "zeros": 0 * x, "signed zeros": torch.where(x > 0, 0.0, -0.0),
        "subnormal": x * float(info.smallest_normal) / 4, "far": 3000 + x / 300, "tiny": x * 1e-7, "greatest": x.sign() * 32000,
    }  # fmt: skip
    if kind == "any":
        bits = torch.randint(-(2**15), 2**15, (tokens,), generator=noise).to(torch.int16)
        found = bits.view(dtype) if dtype.itemsize == 2 else (bits.int() << 16 | bits.int() & 0xFFFF).view(dtype)
        return torch.where(found.isfinite() & (found.abs() <= 32752), found, 1.0).to(dtype)
    return made[kind].to(dtype)


@st.composite
def pages(draw, reference="int8"):
    """A layout and [tokens, channels] that a float16 reaches."""
    layout = PageLayout(
        draw(st.integers(1, 100)), draw(st.sampled_from((8, 16, 72))), draw(st.sampled_from(DTYPES)), reference=reference
    )
    layout = replace(layout, sinks=draw(st.integers(0, min(layout.tokens, 40))))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=8, max_size=8))
    return layout, torch.stack([numbers(kinds[c % 8], layout.tokens, layout.dtype, noise) for c in range(layout.channels)], 1)


def same(a, b):
    """Bit for bit."""
    return torch.equal(as_bytes(a), as_bytes(b))


def bounds_of(x, layout):
    """Twice what one number may be off: of the scales that cover each chunk, float64 [tokens, channels]."""
    wide = torch.empty(x.shape, dtype=torch.float64)
    for row in range(layout.rows):
        begin, end = max(row * CHUNK, layout.sinks), min((row + 1) * CHUNK, layout.tokens)
        if end > begin:
            some = x[begin:end].double()
            reach = some.amax(0) - some.amin(0)
            wide[begin:end] = reach * (1 + 2**-9) + some.abs().amax(0) * 2**-10 + 2**-23
    return wide


@settings(max_examples=60, deadline=None)
@given(pages())
def test_numbers_are_off_by_half_a_step_at_most(page):
    layout, x = page
    streams = encode(x, layout)
    if len(streams.anchor) == layout.raw_bytes:
        assert layout.always_raw
        assert same(decode(*streams, layout), x)
        return
    rounding = x.double().abs() * torch.finfo(layout.dtype).eps + torch.finfo(layout.dtype).tiny
    fine, anchors = fine_levels(layout.bits), levels(layout.bits)
    coarse = bounds(layout.bits)
    widest = max(max(b - c, c - a) for a, c, b in zip(coarse[:-1], anchors, coarse[1:], strict=True))
    for residual, off in ((None, widest), (streams.residual, 0.51 * max(b - a for a, b in zip(fine, fine[1:])))):
        found = decode(streams.anchor, residual, layout)
        assert same(found[: layout.sinks], x[: layout.sinks])
        error = (found.double() - x.double()).abs()[layout.sinks :]
        assert torch.all(error <= (off * bounds_of(x, layout) + rounding + 2**-24)[layout.sinks :])


@settings(max_examples=80, deadline=None)
@given(pages("exact") | pages("compact"))
def test_an_exact_residual_restores_the_pools_bits(page):
    layout, x = page
    streams = encode(x, layout)
    assert same(decode(*streams, layout), x)
    if layout.reference == "compact" and streams.anchor[0]:
        assert len(streams.anchor) == layout.raw_bytes
        return
    assert len(streams.anchor) + len(streams.residual) <= layout.raw_bytes or layout.reference == "exact"
    # Codes of sinks have no meaning, and differ.
    if layout.reference == "exact" or not layout.sinks:
        assert torch.equal(streams.anchor, encode(x, replace(layout, reference="int8")).anchor)
    assert torch.equal(decode(streams.anchor, None, layout), decode(streams.anchor, None, replace(layout, reference="int8")))


@settings(max_examples=40, deadline=None)
@given(pages("compact"), st.sampled_from((float("nan"), float("inf"), -float("inf"), 65535.0, -7e37)), st.randoms())
def test_what_a_float16_does_not_reach_is_stored_as_it_is(page, value, random):
    layout, x = page
    if layout.dtype == torch.float16 and math.isfinite(value):
        value = -value * math.inf
    token, channel = random.randrange(layout.tokens), random.randrange(layout.channels)
    x[token, channel] = value
    for reference in ("int8", "exact", "compact"):
        asked = replace(layout, reference=reference)
        streams = encode(x, asked)
        assert token < layout.sinks or len(streams.anchor) == layout.raw_bytes and len(streams.residual) == 0
        assert streams.anchor[0] == (len(streams.anchor) == layout.raw_bytes)
        found = decode(*streams, asked)
        if reference != "int8" or streams.anchor[0]:
            assert same(found, x)
        else:
            assert same(found[: layout.sinks], x[: layout.sinks]) and found[layout.sinks :].isfinite().all()


def test_scales_that_overflow_are_stored_as_they_are():
    x = torch.zeros(64, 8, dtype=torch.bfloat16)
    x[:, 3] = torch.where(torch.arange(64) % 32 > 0, 60000.0, -65280.0)
    layout = PageLayout(64, 8, torch.bfloat16)
    assert len(encode(x, layout).anchor) == layout.raw_bytes
    x[:, 3] /= 4
    assert len(encode(x, layout).anchor) == layout.coded_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_have_the_layouts_sizes_and_extremes_are_exact_in_the_anchor(dtype):
    x = (torch.arange(128) % 2 * 6 - 3).to(dtype)[:, None].repeat(1, 16)
    layout = PageLayout(128, 16, dtype)
    anchor, residual = encode(x, layout)
    assert len(anchor) * 8 == 8 * HEADER + x.numel() * 5 and len(residual) * 8 == x.numel() * 4
    assert torch.equal(decode(anchor, None, layout), x)


def test_algorithm_1s_split():
    assert max_level(4) == 112 and max_level(3) == 96 and max_level(2) == 64
    for bits in ANCHORS:
        rest = 8 - bits
        i = torch.arange(max_level(bits) + 1)
        v = i + 2 ** (rest - 1) - 1 >> rest
        edges = torch.tensor(fine_bounds(bits), dtype=torch.float64)
        below = torch.tensor(bounds(bits), dtype=torch.float64)
        # The anchor's bounds are among those of I, where V changes.
        assert edges[1:][v[1:] != v[:-1]].tolist() == below[2 ** (bits - 1) + 1 : -1].tolist()
        assert below.tolist() == sorted(below.tolist()) and torch.equal(below, -below.flip(0))
        # 13 bits and a float16's 11 fit float32: the product is exact.
        halves = torch.rand(1000, generator=torch.Generator().manual_seed(2)).half()
        for table in (fine_bounds(bits), fine_levels(bits), levels(bits)):
            exact = halves.double()[:, None] * torch.tensor(table, dtype=torch.float64)
            assert torch.equal(exact.float().double(), exact)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**20))
def test_bytes_hold_codes(tokens, words, seed):
    codes = torch.randint(16, (tokens, 8 * words), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pytorch_codec.pack_codes(codes)
    assert len(packed) == tokens * words * 4
    assert torch.equal(pytorch_codec.unpack_codes(packed, tokens), codes)


@pytest.mark.parametrize("reference", ["exact", "compact"])
def test_a_page_goes_from_slots_to_slots_and_touches_no_others(reference):
    noise = torch.Generator().manual_seed(4)
    pools = [torch.randn(200, 2, 8, generator=noise).bfloat16() for _ in range(3)]
    pools[1][7, 1, 1] = math.nan
    layout = PageLayout(40, 16, torch.bfloat16, sinks=4, reference=reference)
    slots, targets = (torch.randperm(200, generator=noise)[:40] for _ in range(2))
    slots[9] = 7
    streams = encode_page(pools, layout, slots)
    assert [int(each.anchor[0]) for each in streams] == [0, 1, 0]
    outs = [torch.full_like(pool, 5) for pool in pools]
    decode_page([each.anchor for each in streams], [each.residual for each in streams], layout, outs, targets)
    for pool, out in zip(pools, outs, strict=True):
        assert same(out[targets], pool[slots])
        out[targets] = 5
        assert torch.all(out == 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0: must be at least 1"),
        ({"channels": 12}, "channels=12: must be a multiple of 8; pad"),
        ({"dtype": torch.float64}, "dtype=torch.float64: must be one of"),
        ({"bits": 3}, "bits=3: must be one of"),
        ({"sinks": 41}, "sinks=41: must be from 0 to the page's 40 tokens"),
        ({"reference": "fp8"}, "reference='fp8': must be one of"),
        ({"reference": "compact", "bits": 2}, "bits=2: compact residuals need anchors of 4 bits"),
    ],
)
def test_a_layout_refuses_what_it_is_not(options, message):
    with pytest.raises(ValueError, match=message):
        PageLayout(**{"tokens": 40, "channels": 16, "dtype": torch.bfloat16} | options)


def test_streams_and_tensors_that_do_not_fit_are_refused():
    layout = PageLayout(40, 16, torch.bfloat16)
    x = torch.randn(40, 16).bfloat16()
    anchor, residual = encode(x, layout)
    for wrong, message in ((x.float(), "contiguous channels"), (x[:, :8], "contiguous channels"), (x[:39], "has 40 tokens")):
        with pytest.raises(ValueError, match=message):
            encode(wrong, layout)
    with pytest.raises(ValueError, match="codes of streams have 4 bits"):
        encode(x, replace(layout, bits=2))
    with pytest.raises(ValueError, match="an anchor stream of 7 bytes"):
        decode(anchor[:7], None, layout)
    with pytest.raises(ValueError, match="a residual of 319 bytes"):
        decode(anchor, residual[:-1], layout)
    exact = replace(layout, reference="exact")
    with pytest.raises(ValueError, match="an exact residual of .* bytes does not fit its anchor"):
        decode(anchor, encode(x, exact).residual[:-8], exact)
    compact = replace(layout, reference="compact")
    for size in (0, 3, 4, len(encode(x, compact).residual) - 4):
        with pytest.raises(ValueError, match=f"a compact residual of {size} bytes"):
            decode(anchor, encode(x, compact).residual[:size], compact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_compact_residual_restores_every_number_of_16_bits(dtype):
    # A chunk has adjacent numbers. Pages of the numbers that are much smaller than those of float16 are raw.
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    reached = patterns[(patterns.float().abs() <= 32752)]
    reached = reached[torch.argsort(reached.float(), stable=True)]
    layout = PageLayout(CHUNK, len(reached) // CHUNK // 8 * 8, dtype, reference="compact")
    x = reached[: CHUNK * layout.channels].view(layout.channels, CHUNK).T.contiguous()
    layout, coded = replace(layout, channels=8), 0
    for page in x.split(8, 1):
        anchor, residual = encode(page.contiguous(), layout)
        coded += not anchor[0]
        assert same(decode(anchor, residual, layout), page)
    assert coded > x.shape[1] // 8 // 5


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**20), st.integers(0, 80), st.sampled_from((0, 1, 2**31, 2**32 - 1)) | st.integers(0, 100))
def test_compact_streams_of_any_bytes_are_decoded_or_refused(dtype, seed, words, first):
    layout = PageLayout(33, 8, dtype, reference="compact")
    noise = torch.Generator().manual_seed(seed)
    anchor, residual = (torch.randint(256, (size,), generator=noise, dtype=torch.uint8) for size in (layout.coded_bytes, 4 + 4 * words))
    residual[:4] = as_bytes(torch.tensor([first]).to(torch.uint32))
    try:
        decode(anchor, residual, layout)
    except ValueError as error:
        assert "compact residual" in str(error)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ANCHORS), st.floats(-60000, 60000, width=32), st.floats(0, 14), st.sampled_from((-2, 0, 2)))
def test_the_bound_of_a_cell_decides_what_lies_in_it(bits, mean, wider, ulps):
    """As kernels find a bin, where sigma is least and wherever a number is a bound, or the next to it; the quotient may be off."""
    mu, one = torch.tensor(mean), torch.tensor(min(max(abs(mean) * CLEAR, 2.0**-24) * 2**wider, 65000.0)).half().float()
    sigma = one if one > mu.abs() * CLEAR else one.half().view(torch.int16).add(1).view(torch.float16).float()
    of, table, half = torch.tensor(fine_bounds(bits))[1:], torch.tensor(cells(bits)), level_step(bits) // 2
    x = torch.cat([mu + sigma * of, mu - sigma * of, mu[None], mu + sigma * (torch.arange(-255, 256) / 255)])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    x = torch.cat([x, x.nextafter(up), x.nextafter(down), torch.tensor([0.0, -0.0])])
    x = x[(x <= mu + sigma) & (x >= mu - sigma)]
    above = x >= mu
    i = torch.where(above, (x[:, None] >= mu + of * sigma).sum(1), (x[:, None] < mu - of * sigma).sum(1))
    grow = REACH.value / sigma * (1 + ulps * 2.0**-24)
    found = table[((x - mu).double() * grow.double()).floor().long() + CELLS.value // 2].view(torch.int32)
    off = x + (-mu - (found & -256).view(torch.float32) * sigma)
    byte = found - (off.view(torch.int32) >> 31) & 255
    assert torch.equal(255 - byte, torch.where(above, 127 + half + i, 128 - half - i))
