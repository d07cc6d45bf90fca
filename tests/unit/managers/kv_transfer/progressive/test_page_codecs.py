"""Pages arrive as they were, at other slots and at those alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_helpers import KEY_DIM, LAYERS, SLOTS, make_pool, rows

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.lynx.codec import encode_page
from sglang_ext.layers.kernels.lynx.layout import PageLayout
from sglang_ext.managers.kv_transfer.progressive.compatibility import bench_codec, compile_kernels, make_codec
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import ALIGNED, pack_streams, unpack_streams
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, PlacedPage, page_tokens
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import HostBlocks
from sglang_ext.managers.kv_transfer.wire import LinkError, Stream

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def slots(tokens, seed):
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:tokens]


def move(reference, dtype, tokens, start=0, seed=0, change=lambda pool: None, **kind):
    """The pools of both sides after a page went from one to the other, its slots there, and its streams."""
    source, target = (make_pool(dtype, seed=each, **kind) for each in (seed, seed + 1))
    change(source)
    sender, receiver = make_codec(reference, source), make_codec(reference, target)
    encoded = sender.encode(PlacedPage(start, slots(tokens, seed)))
    assert bytes(encoded.anchor) == bytes(sender.start(PlacedPage(start, slots(tokens, seed)), residual=False)().anchor)
    assert len(encoded.anchor) <= sender.most_bytes(Stream.ANCHOR)
    there = PlacedPage(start, slots(tokens, seed + 5))
    receiver.write_anchor(there, encoded.anchor)
    if encoded.residual is not None:
        assert len(encoded.residual) <= sender.most_bytes(Stream.RESIDUAL)
        receiver.write_residual(there, encoded.anchor, encoded.residual)
    return source, target, encoded


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["raw", "exact"]), st.sampled_from(DTYPES), st.integers(1, 64), st.integers(0, 80), st.integers(0, 9))
def test_exact_and_raw_restore_the_pools_bits_and_touch_no_other_slot(reference, dtype, tokens, start, seed):
    source, target, _ = move(reference, dtype, tokens, start, seed)
    there = slots(tokens, seed + 5)
    assert torch.equal(rows(target, there), rows(source, slots(tokens, seed)))
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[there] = False
    assert torch.equal(rows(target, others), rows(make_pool(dtype, seed=seed + 1), others))


class Watched:
    """A codec, and the names of the methods with which it wrote."""

    def __init__(self, codec):
        self.codec, self.written = codec, []

    def __getattr__(self, name):
        if name.startswith("write_"):
            self.written.append(name)
        return getattr(self.codec, name)


@pytest.mark.parametrize("reference", ["raw", "int8", "exact"])
def test_kernels_are_compiled_with_slot_0_alone(reference):
    pool = make_pool(torch.bfloat16)
    for tensor in pool.tensors:
        tensor[0] = float("nan")
    codec = Watched(make_codec(reference, pool))
    before = rows(pool, torch.arange(1, SLOTS))
    compile_kernels(codec, False)
    assert not codec.written
    compile_kernels(codec, True)
    assert codec.written.count("write_anchor") == 2 and codec.written.count("write_residual") == 2 * codec.has_residual
    assert torch.equal(rows(pool, torch.arange(1, SLOTS)), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_and_extremes_arrive_bit_for_bit(dtype):
    def change(pool):
        least = torch.finfo(dtype)
        for tensor in pool.tensors:
            tensor[::3, 0], tensor[1::3, 1], tensor[:, 2] = float("nan"), float("-inf"), -0.0
            tensor[:, 3], tensor[:, 4] = least.max, least.tiny / 4

    source, target, _ = move("exact", dtype, 64, change=change)
    assert torch.equal(rows(target, slots(64, 5)), rows(source, slots(64, 0)))


def test_the_8_bit_reference_is_closer_than_the_anchor_alone():
    source, target, encoded = move("int8", torch.float32, 64)
    there, page = slots(64, 5), source.keys[0][slots(64, 0)]
    close = (target.keys[0][there] - page).abs().max()
    make_codec("int8", target).write_anchor(PlacedPage(0, there), encoded.anchor)
    coarse = (target.keys[0][there] - page).abs().max()
    assert 0 < close < coarse / 4 and torch.equal(target.keys[0][there][:4], page[:4])  # the sinks


def streams_apart(pool, page, reference):
    """Both streams of a page, put together tensor by tensor."""
    found, sinks = [], min(len(page.slots), max(0, 4 - page.start))
    for tensor in pool.tensors:
        layout = PageLayout(len(page.slots), tensor.shape[1], pool.dtype, sinks=sinks, reference=reference)
        found += encode_page([tensor], layout, page.slots)
    return [bytes(pack_streams(streams, pool.blocks)) for streams in zip(*found, strict=True)]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["int8", "exact"]), st.sampled_from(DTYPES), st.integers(1, 70), st.integers(0, 6), st.booleans(), st.booleans())
def test_streams_are_those_of_each_tensor_raw_or_not(reference, dtype, tokens, start, wide, raw):
    """One that is raw has another size, and so have the streams of its page: at the other end, too."""
    pool, target = (make_pool(dtype, seed=seed, **({"value_dim": KEY_DIM} if wide else {})) for seed in (2, 3))
    codec, page = make_codec(reference, pool), PlacedPage(start, slots(tokens, 1))
    if raw:
        pool.values[1][page.slots[-1], 2] = float("inf")
    anchor, residual = streams_apart(pool, page, reference)
    encoded = codec.encode(page)
    assert (bytes(encoded.anchor), bytes(encoded.residual)) == (anchor, residual)
    assert bytes(codec.start(page, residual=False)().anchor) == anchor
    assert bytes(codec.start(page, anchor=False)().residual) == residual
    receiver = make_codec(reference, target)
    receiver.write_residual(page, encoded.anchor, encoded.residual)
    if raw or reference == "exact":
        mine, theirs = (each.values[1][page.slots].view(torch.uint8) for each in (pool, target))
        assert torch.equal(mine, theirs)


def test_streams_whose_sizes_say_something_else_are_refused():
    pool = make_pool()
    codec, page = make_codec("int8", pool), PlacedPage(0, slots(64, 0))
    encoded = codec.encode(page)
    changed = bytearray(encoded.anchor)
    # Two streams exchange 16 bytes: all together they are as long as before.
    sizes = np.frombuffer(changed, "<u4", 2 * LAYERS)
    sizes[0] += 16
    sizes[1] -= 16
    with pytest.raises(LinkError, match="no streams of a page of 64 tokens"):
        codec.write_anchor(page, memoryview(changed))
    with pytest.raises(LinkError, match="no streams of a page of 64 tokens"):
        codec.write_residual(page, memoryview(changed), encoded.residual)


@pytest.mark.parametrize("reference", ["raw", "int8", "exact"])
@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data[:3], lambda data: data + bytes(16)], ids=["less", "short", "more"])
def test_streams_of_another_size_are_refused(reference, cut):
    pool = make_pool()
    codec, page = make_codec(reference, pool), PlacedPage(0, slots(64, 0))
    encoded = codec.encode(page)
    with pytest.raises(LinkError):
        codec.write_anchor(page, memoryview(cut(bytes(encoded.anchor))))
    with pytest.raises(LinkError):
        codec.write_residual(page, encoded.anchor, memoryview(cut(bytes(encoded.residual or b"12"))))


def test_a_pool_that_the_codec_does_not_take_is_refused_with_a_remedy():
    with pytest.raises(LinkError, match="float8.*--kv-reference raw"):
        make_codec("exact", make_pool(torch.float8_e4m3fn))
    assert make_codec("raw", make_pool(torch.float8_e4m3fn)).encode(PlacedPage(0, slots(4, 0))).residual is None


CODEC_FILE = """
from dataclasses import dataclass

from sglang_ext.managers.kv_transfer.progressive.page_codec import BenchCodec


@dataclass
class Own(BenchCodec):
    pool: object

    @classmethod
    def for_pool(cls, pool):
        return cls(pool)

    def most_bytes(self, stream):
        return 0

    def encode_anchor(self, page):
        return memoryview(b"")

    def write_anchor(self, page, anchor):
        pass


class Unfinished(BenchCodec):
    pass
"""


@pytest.fixture
def own_codecs(tmp_path, monkeypatch):
    """An installed package with a codec of a benchmark's own."""
    (tmp_path / "own_codecs").mkdir()
    (tmp_path / "own_codecs/__init__.py").touch()
    (tmp_path / "own_codecs/pages.py").write_text(CODEC_FILE)
    (tmp_path / "own_codecs/broken.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_benchmarks_codec_is_loaded_by_its_module_and_class(own_codecs):
    codec = make_codec("exact", pool := make_pool(), "own_codecs.pages:Own")
    assert type(codec).__name__ == "Own" and codec.pool is pool


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("zip", "names the class of a codec for comparison: pass MODULE:CLASS, .* values of --kv-reference: exact, int8, raw"),
        ("exact", "pass MODULE:CLASS, .* values of --kv-reference: exact, int8, raw"),
        ("no_such_package.pages:Own", "there is no module no_such_package: install its package where the server runs, or add .* PYTHONPATH"),
        ("own_codecs.missing:Own", "there is no module own_codecs.missing: install"),
        ("own_codecs.broken:Own", "module own_codecs.broken raised ModuleNotFoundError: No module named 'no_such_package': correct the module"),
        ("own_codecs.pages:Other", "own_codecs.pages has no subclass of BenchCodec called Other: name one that it has: Own"),
        ("own_codecs.pages:Unfinished", "has no subclass of BenchCodec called Unfinished: name one that it has: Own"),
        ("json.decoder:JSONDecoder", "has no subclass of BenchCodec called JSONDecoder: name a module that has a subclass of BenchCodec"),
    ],
)
def test_other_names_of_codecs_are_refused_with_the_remedy(own_codecs, value, message):
    with pytest.raises(OptionError, match=message) as raised:
        bench_codec(value)
    assert f"--kv-bench-codec is {value!r}" in str(raised.value)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 3))
def test_streams_are_packed_alike_wherever_they_lie(sizes, before):
    begins = [ALIGNED * (before + sum(-(-size // ALIGNED) for size in sizes[:place])) for place in range(len(sizes))]
    memory = torch.zeros(begins[-1] + -(-sizes[-1] // ALIGNED) * ALIGNED, dtype=torch.uint8)
    streams = [memory[begin : begin + size] for begin, size in zip(begins, sizes)]
    for place, stream in enumerate(streams):
        stream += place + 1
    blocks = HostBlocks(torch.device("cpu"))
    there = pack_streams(streams, blocks)
    assert bytes(there) == bytes(pack_streams([stream.clone() for stream in streams], blocks))
    assert bytes(pack_streams(streams[::-1], blocks)) == bytes(pack_streams([stream.clone() for stream in streams[::-1]], blocks))
    assert all(torch.equal(a, b) for a, b in zip(unpack_streams(there, len(sizes), blocks), streams, strict=True))


def test_pages_of_a_pool_are_whole_units_of_some_megabytes():
    """Both ends know them from the pool alone; a model of long tokens has the shortest."""
    assert [page_tokens(size) for size in (1 << 10, 147456, 300000, 1 << 19, 1 << 22)] == [256, 192, 64, 64, 64]
    assert all(page_tokens(size) % UNIT == 0 for size in range(1 << 10, 1 << 20, 777))
    assert make_codec("exact", make_pool()).page_size == make_codec("raw", make_pool()).page_size == 256


def test_keys_and_values_of_one_dim_arrive_too():
    source, target, _ = move("exact", torch.float32, 64, value_dim=KEY_DIM)
    assert torch.equal(rows(target, slots(64, 5)), rows(source, slots(64, 0)))
