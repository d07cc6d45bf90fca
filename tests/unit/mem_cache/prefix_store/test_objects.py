"""An object restores exactly the page that it was written from, or is refused."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.lynx.codec import decode_page, encode_page
from sglang_ext.managers.kv_transfer.progressive.page_codec import page_ends, page_hashes
from sglang_ext.mem_cache.prefix_store.backend import ReadRange, StoreError
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.object_header import CHECKSUM_BYTES, FIELDS, ObjectError, check_object
from sglang_ext.mem_cache.prefix_store.objects import (
    ObjectFormat,
    StoredPage,
    encode_object,
    read_page,
)

FORM = ObjectFormat("a model", torch.bfloat16, layers=2, heads=2, head_dim=16, page_size=64)
HASH, OTHER_HASH = bytes(range(32)), bytes(range(1, 33))
BITS_OF = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def like_keys(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Channels with means and scales of their own, which drift along the tokens, and a first token that differs, as keys have."""
    tokens, *rest = shape
    found = 5 * torch.randn(rest) + torch.randn(rest).exp() * torch.randn(shape) + torch.linspace(0, 2, tokens)[:, None, None]
    found[0] *= 20
    return found.to(dtype)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of any bits: NaN with payloads, infinities, numbers below the least normal one."""
    info = torch.iinfo(BITS_OF[dtype])
    return torch.randint(info.min, info.max, shape, dtype=BITS_OF[dtype]).view(dtype)


def rare(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, and a channel with one tiny number."""
    found = torch.zeros(shape, dtype=dtype)
    found[::2] = -found[::2]
    found[3 % len(found), 0, 1] = torch.finfo(dtype).tiny / 2
    return found


def one_infinity(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    found = normal(shape, dtype)
    found[20 % len(found), 1, 3] = float("inf")
    return found


KINDS = [normal, like_keys, any_bits, rare, one_infinity]


def page_of(form: ObjectFormat, *kinds: Callable, seed: int = 0) -> torch.Tensor:
    """KV of a page whose parts are of these kinds, in turn."""
    torch.manual_seed(seed)
    shape = form.page_size, form.heads, form.head_dim
    return torch.stack([kinds[number % len(kinds)](shape, form.dtype) for number in range(form.tensors)])


def empty(form: ObjectFormat) -> torch.Tensor:
    return torch.full((form.tensors, form.page_size, form.heads, form.head_dim), 7.0, dtype=form.dtype)


def equal(some: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.equal(some.view(BITS_OF[some.dtype]), others.view(BITS_OF[others.dtype]))


def encoded(page: StoredPage, kv: torch.Tensor) -> bytes:
    return b"".join(encode_object(page, kv))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FileBackend:
    return FileBackend(tmp_path_factory.mktemp("objects"))


def put(store: FileBackend, page: StoredPage, content: bytes) -> None:
    store.delete([page.name])
    store.put(page.name, [memoryview(content)])


@pytest.mark.parametrize("form", ["anchored", "raw"])
@pytest.mark.parametrize("dtype", list(BITS_OF), ids=str)
@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS], ids=lambda kinds: "+".join(kind.__name__ for kind in kinds))
@pytest.mark.parametrize("start, page_size", [(0, 64), (64, 64), (0, 128), (128, 128), (3, 1)])
def test_a_page_is_restored_to_the_bit(store, form, dtype, kinds, start, page_size):
    kind = replace(FORM, dtype=dtype, form=form, page_size=page_size, layers=3)
    tensors, found = page_of(kind, *kinds), empty(kind)
    put(store, StoredPage(kind, HASH, start), encoded(StoredPage(kind, HASH, start), tensors))
    read_page(store, StoredPage(kind, HASH, start), found)
    assert equal(found, tensors)


def test_pages_of_host_memory_are_written_and_read_in_place(store):
    # [2, layers, pages, page_size, heads, dim], as HostPool has them.
    memory = torch.randn(2, FORM.layers, 5, FORM.page_size, FORM.heads, FORM.head_dim).to(FORM.dtype)
    before, page = memory.clone(), StoredPage(FORM, HASH, 64)
    put(store, page, encoded(page, memory[:, :, 3].flatten(0, 1)))
    read_page(store, StoredPage(FORM, HASH, 64), memory[:, :, 1].flatten(0, 1))
    before[:, :, 1] = before[:, :, 3]
    assert torch.equal(memory, before)


def test_anchors_alone_are_the_codecs_and_need_no_more_bytes(store):
    for start, kinds in ((0, [normal, like_keys]), (64, [one_infinity, normal])):
        page, tensors, found, expected = StoredPage(FORM, HASH, start), page_of(FORM, *kinds), empty(FORM), empty(FORM)
        header, anchors, residuals = encode_object(page, tensors)
        assert len(residuals) > 0
        put(store, page, bytes(header) + bytes(anchors))
        read_page(store, StoredPage(FORM, HASH, start), found, exact=False)
        decode_page([each.anchor for each in encode_page(tensors.unbind(), FORM.layout(start))], None, FORM.layout(start), expected.unbind())
        assert equal(found, expected)
        with pytest.raises(ObjectError, match="missing or shorter"):
            read_page(store, StoredPage(FORM, HASH, start), found)


def test_two_writers_write_the_same_bytes():
    tensors = page_of(FORM, *KINDS)
    assert encoded(StoredPage(FORM, HASH, 0), tensors) == encoded(StoredPage(FORM, HASH, 0), tensors.clone())


@pytest.fixture(scope="module")
def kv(demo_model) -> torch.Tensor:
    """KV of the demo model for some text, float32 [keys and values of layers, tokens, heads, dim]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (Path(__file__).parents[4] / "docs/architecture.md").read_text()
    input_ids = AutoTokenizer.from_pretrained(demo_model)(text, return_tensors="pt").input_ids[:, :256]
    with torch.inference_mode():
        layers = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)(input_ids).past_key_values.layers
    return torch.cat([torch.cat([each.keys for each in layers]), torch.cat([each.values for each in layers])]).transpose(1, 2)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 11.5), (torch.float16, 14.5), (torch.float32, 27.5)], ids=str)
def test_bits_of_a_number_of_the_demo_models_kv(kv, store, dtype, most):
    form = ObjectFormat("demo", dtype, layers=len(kv) // 2, heads=kv.shape[2], head_dim=kv.shape[3], page_size=64)
    anchor_bytes = all_bytes = 0
    for start in range(0, kv.shape[1], form.page_size):
        tensors, found = kv[:, start : start + form.page_size].to(dtype).contiguous(), empty(form)
        header, anchors, residuals = encode_object(StoredPage(form, HASH, start), tensors)
        anchor_bytes += len(header) + len(anchors)
        all_bytes += len(header) + len(anchors) + len(residuals)
        put(store, StoredPage(form, HASH, start), bytes(header) + bytes(anchors) + bytes(residuals))
        read_page(store, StoredPage(form, HASH, start), found)
        assert equal(found, tensors)
    assert 8 * anchor_bytes / kv.numel() < 5.6 and 8 * all_bytes / kv.numel() < most


def test_anchored_objects_are_never_larger_than_raw_ones_by_more_than_padding():
    for kinds in ([any_bits], [rare], [like_keys], KINDS):
        sizes = []
        for name in ("anchored", "raw"):
            form = replace(FORM, form=name, layers=3)
            sizes.append(len(encoded(StoredPage(form, HASH, 64), page_of(form, *kinds))))
        assert sizes[0] <= sizes[1] + 16 * form.tensors


def test_names_are_the_namespace_and_the_hash_of_all_tokens_up_to_the_pages_end():
    tokens = list(range(150))
    hashes = page_hashes(tokens, page_ends(64, 128))
    names = [StoredPage(FORM, each, 64 * number).name for number, each in enumerate(hashes)]
    assert names == [f"{FORM.namespace}/{each.hex()}" for each in hashes] and len(FORM.namespace) == 32
    with pytest.raises(ValueError):
        StoredPage(FORM, b"short", 0)


def test_every_setting_has_a_namespace_of_its_own():
    others = [
        replace(FORM, **{setting: value})
        for setting, value in {
            "model": "another", "dtype": torch.float16, "layers": 1, "heads": 4, "head_dim": 32, "page_size": 32, "rank": 1, "ranks": 2,
            "form": "raw",
        }.items()
    ]  # fmt: skip
    assert len({form.namespace for form in (FORM, *others)}) == 10


@pytest.mark.parametrize(
    "change, named", [({"form": "x"}, "x: pass"), ({"heads": 1, "head_dim": 4}, "channels=4"),
                      ({"dtype": torch.int8}, "int8"), ({"page_size": 1 << 24}, "--page-size")]
)  # fmt: skip
def test_settings_that_are_not_supported_are_refused_by_name(change, named):
    with pytest.raises(OptionError, match=named):
        replace(FORM, **change)


def test_tensors_that_do_not_fit_are_refused():
    for wrong in (page_of(FORM, normal)[1:], page_of(replace(FORM, page_size=32), normal), page_of(replace(FORM, dtype=torch.float16), normal)):
        with pytest.raises(ValueError):
            encode_object(StoredPage(FORM, HASH, 0), wrong)


@pytest.mark.parametrize(
    "other", [StoredPage(FORM, OTHER_HASH, 0), StoredPage(FORM, HASH, 64), StoredPage(replace(FORM, model="another"), HASH, 0),
              StoredPage(replace(FORM, form="raw"), HASH, 0), StoredPage(replace(FORM, rank=1, ranks=2), HASH, 0)]
)  # fmt: skip
def test_an_object_of_another_page_or_other_settings_is_refused(store, other):
    page = StoredPage(FORM, HASH, 0)
    put(store, page, encoded(other, page_of(FORM, normal)))
    with pytest.raises(ObjectError):
        read_page(store, page, empty(FORM))


def test_an_object_of_another_version_is_refused(store):
    page = StoredPage(FORM, HASH, 0)
    content = bytearray(encoded(page, page_of(FORM, normal)))
    content[8] += 1
    put(store, page, forged(content))
    with pytest.raises(ObjectError, match="version 3"):
        read_page(store, page, empty(FORM))


def test_a_store_that_fails_or_lacks_the_object_is_a_miss(store):
    class Failing:
        def read(self, ranges: list[ReadRange], is_use: bool = True) -> list[bool]:
            raise StoreError("no answer in 5 s")

    with pytest.raises(ObjectError, match="no answer"):
        read_page(Failing(), StoredPage(FORM, HASH, 0), empty(FORM))
    with pytest.raises(ObjectError, match="missing"):
        read_page(store, StoredPage(FORM, bytes(32), 0), empty(FORM))


def test_steps_out_of_order_are_refused():
    page = StoredPage(FORM, HASH, 0)
    for step in (page.anchor_ranges, page.residual_ranges, lambda: page.restore(empty(FORM)), lambda: page.decode_anchors(empty(FORM))):
        with pytest.raises(ObjectError, match="not opened"):
            step()


def forged(content: bytearray) -> bytes:
    """An object with a header whose checksum is right."""
    end = FORM.header_bytes - CHECKSUM_BYTES
    content[end : FORM.header_bytes] = xxhash.xxh3_128_digest(bytes(content[:end]))
    return bytes(content)


SMALL = page_of(FORM, normal, one_infinity)
WHOLE = encoded(StoredPage(FORM, HASH, 0), SMALL)


def restores_or_refuses(store: FileBackend, content: bytes) -> bool:
    """Read ``content`` as an object. Returns whether it was restored, which must then be to the right bits."""
    page, found = StoredPage(FORM, HASH, 0), empty(FORM)
    put(store, page, content)
    try:
        read_page(store, page, found)
    except ObjectError:
        return False
    assert equal(found, SMALL)
    return True


@settings(max_examples=150, deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=4, unique_by=lambda each: each[0]))
def test_flipped_bits_are_refused(store, places):
    content = bytearray(WHOLE)
    for place, mask in places:
        content[place] ^= mask
    assert not restores_or_refuses(store, bytes(content))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, len(WHOLE) - 1))
def test_truncated_objects_are_refused(store, size):
    assert not restores_or_refuses(store, WHOLE[:size])


@settings(max_examples=10, deadline=None)
@given(more=st.binary(min_size=1, max_size=100))
def test_a_reader_ignores_bytes_after_an_object_and_a_check_refuses_them(store, more):
    name = StoredPage(FORM, HASH, 0).name
    assert restores_or_refuses(store, WHOLE + more)
    check_object(name, memoryview(WHOLE))
    for other in (WHOLE + more, WHOLE + bytes(len(more)), WHOLE[: -len(more)]):
        with pytest.raises(ObjectError):
            check_object(name, memoryview(other))


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=2 * FORM.header_bytes))
def test_any_bytes_are_refused(store, content):
    assert not restores_or_refuses(store, content.ljust(FORM.most_bytes, b"\x01"))


@settings(max_examples=150, deadline=None)
@given(
    word=st.integers(0, (FORM.header_bytes - CHECKSUM_BYTES) // 4 - 1),
    value=st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1, FORM.layout(0).raw_bytes, FORM.layout(0).coded_bytes]),
)
def test_a_forged_header_is_refused_and_never_makes_a_reader_allocate_more_than_a_page(store, word, value):
    content = bytearray(WHOLE)
    struct.pack_into("<I", content, 4 * word, value)
    page = StoredPage(FORM, HASH, 0)
    put(store, page, forged(content))
    assert store.read([page.first_range()]) == [True]
    try:
        page.open()
    except ObjectError:
        pass
    else:
        asked = sum(each.memory.nbytes for each in page.anchor_ranges() + page.residual_ranges())
        assert asked <= FORM.most_bytes
    in_zeros = 4 * word >= FIELDS.size + 8 * FORM.tensors
    assert restores_or_refuses(store, bytes(content)) == (bytes(content) == WHOLE or in_zeros)


@settings(max_examples=100, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(FORM.header_bytes, len(WHOLE) - 1), st.binary(min_size=1, max_size=64)), min_size=1, max_size=3)
)
def test_forged_streams_with_right_checksums_do_not_restore(store, places):
    content = bytearray(WHOLE)
    for place, written in places:
        end = min(len(content), place + len(written))
        content[place:end] = written[: end - place]
    anchors_end = FORM.header_bytes + struct.unpack_from("<Q", content, 24)[0]
    for place, part in ((104, content[FORM.header_bytes : anchors_end]), (120, content[anchors_end:])):
        content[place : place + CHECKSUM_BYTES] = xxhash.xxh3_128_digest(bytes(part))
    restores_or_refuses(store, forged(content))
