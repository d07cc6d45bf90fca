"""Baseline codecs of KV transfer: how far numbers move, how many bits they take, and what is refused."""

import pytest
import torch
from transfer_helpers import LAYERS, SLOTS, make_pool, rows

from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.progressive.compatibility import (
    bench_codec,
    compile_kernels,
    make_codec,
)
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, PlacedPage
from sglang_ext.managers.kv_transfer.wire import LinkError, LinkSettings, Stream
from sglang_ext_bench.baselines import CODECS
from sglang_ext_bench.baselines.quantized_codec import QuantizedCodec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Heads as models have them: 30 layers, 3 heads of 64.
SHAPE = 30, 64, 3, 64
CLASSES = {name: bench_codec(value) for name, value in CODECS.items()}
QUANTIZERS = {name: codec.quantizer for name, codec in CLASSES.items() if issubclass(codec, QuantizedCodec)}


def codec_of(name, pool):
    """The codec that a server makes of the flag's value."""
    return make_codec("exact", pool, CODECS[name])


def slots(tokens, seed):
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:tokens]


def pages(seed=0):
    """Neighbours alike, as tokens are: float32 [layers, tokens, heads, dim]."""
    made = torch.Generator().manual_seed(seed)
    shared, own = torch.randn(30, 1, 3, 64, generator=made), torch.randn(*SHAPE, generator=made)
    return 2 * shared + own


def moved(name, x):
    """What arrives, and bits of a number."""
    quantizer = QUANTIZERS[name]
    stream = quantizer.encode(x, 30)
    assert len(stream) <= quantizer.most_bytes(*x.shape)
    return quantizer.decode(stream, tuple(x.shape), 30), 8 * len(stream) / x.numel()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_sides_have_the_same_numbers_at_the_pages_slots_and_touch_no_other(name, dtype):
    for tokens, start in ((64, 0), (1, 64), (33, 128)):
        source, target, again = make_pool(dtype), make_pool(dtype, seed=1), make_pool(dtype, seed=1)
        codec = codec_of(name, source)
        encoded = codec.encode(PlacedPage(start, slots(tokens, 0)))
        assert encoded.residual is None and not codec.most_bytes(Stream.RESIDUAL)
        assert bytes(encoded.anchor) == bytes(codec.encode_anchor(PlacedPage(start, slots(tokens, 0))))
        assert len(encoded.anchor) <= codec.most_bytes(Stream.ANCHOR)
        there = slots(tokens, 5)
        for pool in (target, again):
            codec_of(name, pool).write_anchor(PlacedPage(start, there), encoded.anchor)
        assert torch.equal(rows(target, there), rows(again, there))
        others = torch.ones(SLOTS, dtype=torch.bool)
        others[there] = False
        assert torch.equal(rows(target, others), rows(make_pool(dtype, seed=1), others))
        # Half a step of the coarsest, of numbers up to 4 or so.
        off = (target.keys[0][there].float() - source.keys[0][slots(tokens, 0)].float()).abs().max()
        assert off < (1.2 if name in ("lynx-int4", "cachegen") else 0.3)


def test_a_number_moves_by_half_a_step_at_most():
    x = pages()
    for name, step in (
        ("bf16", x.abs() / 2**7),
        ("int8", x.abs().amax(3, keepdim=True) / 127),
        ("int8-tensor", x.abs().amax((1, 2, 3), keepdim=True) / 127),
        ("int4", (x.unflatten(3, (2, 32)).amax(4) - x.unflatten(3, (2, 32)).amin(4)).repeat_interleave(32, 3) / 15),
    ):
        found, _ = moved(name, x)
        # Scales are rounded to float16, which moves the ends by 128 half steps of theirs.
        assert ((found - x).abs() <= 0.5 * step + x.abs() / 2**10).all(), name


@pytest.mark.parametrize("name, least, most", [("bf16", 16, 16), ("int8", 8.25, 8.25), ("int8-tensor", 8, 8.01), ("int4", 5, 5), ("cachegen", 2.5, 5)])
def test_bits_of_a_number_with_all_scales(name, least, most):
    assert least <= moved(name, pages())[1] <= most


def test_cachegen_codes_later_layers_coarser_and_in_fewer_bits_what_repeats():
    x = pages()
    found, bits = moved("cachegen", x)
    error = (found - x).square().mean((1, 2, 3))
    assert error[:10].mean() < error[10:20].mean() < error[20:].mean()
    assert moved("cachegen", x[:, :1].expand(-1, 64, -1, -1).contiguous())[1] < bits - 2


def test_extremes_of_a_group_and_groups_of_one_number_arrive():
    for x in (torch.zeros(SHAPE), torch.full(SHAPE, -3.0)):
        for name in QUANTIZERS:
            assert torch.allclose(moved(name, x)[0], x, atol=0.02)
    with pytest.raises(ValueError, match="beyond float16"):
        QUANTIZERS["int8"].encode(torch.full(SHAPE, 1e9), 30)


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_numbers_without_a_code_are_refused_by_name(name):
    pool = make_pool()
    pool.keys[1][slots(8, 0)[3], 2] = float("nan")
    with pytest.raises(LinkError, match=f"not finite: codec {name} .*--kv-reference exact"):
        codec_of(name, pool).encode(PlacedPage(0, slots(8, 0)))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data[:3], lambda data: data + bytes(16)], ids=["less", "short", "more"])
def test_streams_of_another_size_are_refused(name, cut):
    codec, page = codec_of(name, make_pool()), PlacedPage(0, slots(64, 0))
    anchor = codec.encode(page).anchor
    with pytest.raises(LinkError):
        codec.write_anchor(page, memoryview(cut(bytes(anchor))))
    with pytest.raises(LinkError, match="no residuals"):
        codec.write_residual(page, anchor, memoryview(b"12"))


def test_symbols_that_are_no_code_are_refused():
    codec, page = codec_of("cachegen", make_pool()), PlacedPage(0, slots(64, 0))
    data = bytearray(codec.encode(page).anchor)
    data[-48:] = bytes(48)
    with pytest.raises(LinkError, match="symbols"):
        codec.write_anchor(page, memoryview(bytes(data)))


def test_a_peer_with_another_codec_is_refused_by_name():
    def end(name):
        codec = make_codec("exact", make_pool(), CODECS.get(name))
        named = codec.name, codec.version, codec.options, codec.reference
        return LinkSettings("any", "float32", LAYERS, 2, 16, 8, codec.page_size, *named, 0, 1)

    for one, other in (("int8", "int8-tensor"), ("int4", None), ("lynx-int8", "lynx-int4")):
        said = wire.settings_mismatch(end(one), end(other))
        assert f"codec is '{one}' at the receiver and '{other or 'lynx'}'" in said and "--kv-bench-codec" in said
    assert wire.settings_mismatch(end("cachegen"), end("cachegen")) is None


def test_a_pool_of_8_bits_is_refused():
    for name in CODECS:
        with pytest.raises(LinkError, match="float8"):
            codec_of(name, make_pool(torch.float8_e4m3fn))


def test_pages_have_64_tokens_if_scales_span_them():
    assert {name: codec_of(name, make_pool()).page_size for name in CODECS} == dict.fromkeys(CODECS, 256) | {"int8-tensor": UNIT, "cachegen": UNIT}


@pytest.mark.parametrize("name", CODECS)
def test_short_names_are_those_that_both_ends_compare(name):
    assert codec_of(name, make_pool()).name == name


@pytest.mark.parametrize("name", CODECS)
def test_kernels_are_compiled_with_slot_0_alone(name):
    pool = make_pool(torch.bfloat16)
    for tensor in pool.tensors:
        tensor[0] = float("nan")
    before = rows(pool, torch.arange(1, SLOTS))
    compile_kernels(codec_of(name, pool), True)
    assert torch.equal(rows(pool, torch.arange(1, SLOTS)), before)


def test_short_names_are_not_values_of_the_flag():
    with pytest.raises(OptionError, match="--kv-bench-codec is 'int8'; .*pass MODULE:CLASS, for example sglang_ext_bench"):
        bench_codec("int8")
