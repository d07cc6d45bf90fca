"""Pages that lie on the host as residuals of packed blocks come back to the bit; what cannot be one lies there whole."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import PageBlocks, ResidualPages, unsupported_reason
from sglang_ext.mem_cache.host_tier.tier import HostTier

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("normal", "zeros", "signed zeros", "subnormal", "outliers", "far", "constant")
PAGES = 4


def numbers(kind, shape, dtype, noise):
    x = torch.randn(shape, generator=noise)
    if kind == "zeros":
        x = torch.zeros(shape)
    elif kind == "signed zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "subnormal":
        x = x * (1e-7 if dtype == torch.float16 else 1e-39)
    elif kind == "outliers":
        x = torch.where(x > 2.5, x * 1000, x)
    elif kind == "far":
        x = x / 50 + 1000
    elif kind == "constant":
        x = torch.full(shape, 1.7)
    return x.to(dtype)


def made(dtype, bits=4, heads=1, dim=64, page=64, kinds=("normal",) * 2, seed=0, staging=None):
    """A tier with a pool of one layer, slots of pages with these kinds of keys and of values, and of their blocks."""
    noise, tokens = torch.Generator().manual_seed(seed), PAGES * page
    slots = 4 * tokens
    keys, values = (numbers(kind, (slots, heads, dim), dtype, noise) for kind in kinds)
    buffers = KVBuffers((0,), (1.0,), (keys,), (values,))
    packing = lynx(buffers, page, bits)
    order = torch.randperm(slots, generator=noise)
    sources, targets, blocks = order[:tokens], order[tokens : 2 * tokens], order[2 * tokens :][: packing.packed_slots(tokens)]
    packing.write(buffers, torch.arange(tokens).expand(1, heads, tokens), sources, blocks)
    pool = HostPool.create(buffers, page, (PAGES + 2) * page * buffers.bytes_per_slot, frames=True)
    tier = HostTier(buffers, pool, staging, ResidualPages(buffers, packing, page))
    return tier, buffers, sources, targets, page_blocks(blocks.view(PAGES, -1))


def lynx(buffers, page, bits=4):
    return Packing.for_pool(quantizer("lynx", bits), buffers, page)


def page_blocks(slots, gone=()):
    """Blocks of pages, without those of some."""
    slots, there = slots.clone(), torch.ones(len(slots), dtype=torch.bool)
    slots[list(gone)], there[list(gone)] = -1, False
    return PageBlocks(slots, there)


def words(buffers, slots):
    return torch.stack([b[slots].flatten().view(torch.uint8) for b in (*buffers.keys, *buffers.values)])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_what_was_stored_comes_back_to_the_bit(data):
    dtype, bits = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([4, 2]))
    heads, dim = data.draw(st.sampled_from([(1, 64), (2, 64), (1, 128), (2, 96), (3, 32)]))
    kinds = [data.draw(st.sampled_from(KINDS)) for _ in "kv"]
    tier, buffers, sources, targets, blocks = made(
        dtype, bits, heads, dim, data.draw(st.sampled_from([64, 128])), kinds, data.draw(st.integers(0, 1 << 30)),
        data.draw(st.sampled_from([None, 0])),
    )  # fmt: skip
    before = words(buffers, sources)
    some = st.sets(st.integers(0, PAGES - 1))
    whole, gone = data.draw(some, label="whole"), data.draw(some, label="blocks gone")
    pages = torch.tensor(data.draw(st.permutations(tier.pool.pages.allocate(PAGES + 2).tolist()))[:PAGES])
    store = tier.store(sources, pages, page_blocks(blocks.slots, whole))
    store.synchronize()
    for page in gone:
        for buffer in (*buffers.keys, *buffers.values):
            buffer[blocks.slots[page]] = 3
    load = tier.load(pages, targets, page_blocks(blocks.slots, whole | gone) if len(whole | gone) < PAGES else None)
    load.synchronize()
    assert load.outcome.failed == [] and torch.equal(words(buffers, targets), before)
    sizes, anchor, most = tier.pool.sizes[pages].tolist(), len(blocks.slots[0]) * buffers.bytes_per_slot, tier.pool.page_bytes
    assert all(sizes[page] == 0 for page in whole) and max(sizes) + anchor < most
    if set(kinds) == {"normal"}:
        assert all(size > 0 or page in whole for page, size in enumerate(sizes))
    expected = [size + anchor * (page in gone) if size else most for page, size in enumerate(sizes)]
    assert load.outcome.size == sum(expected) <= store.outcome.size == load.size == PAGES * most
    tier.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e5])
def test_a_page_with_numbers_that_no_bin_holds_lies_there_whole(value):
    tier, buffers, sources, targets, blocks = made(torch.bfloat16)
    buffers.values[0][sources[70], 0, 3] = value
    lynx(buffers, tier.pool.page_size).write(buffers, torch.arange(len(sources))[None, None], sources, blocks.slots.flatten())
    pages, before = tier.pool.pages.allocate(PAGES), words(buffers, sources)
    tier.store(sources, pages, blocks)
    load = tier.load(pages, targets, blocks)
    load.synchronize()
    assert (tier.pool.sizes[pages] == 0).tolist() == [False, True, False, False]
    assert load.outcome.failed == [] and torch.equal(words(buffers, targets), before)


def test_so_does_one_that_changed_since_it_was_packed():
    tier, buffers, sources, targets, blocks = made(torch.float32)
    buffers.keys[0][sources[:64]] += 1
    pages, before = tier.pool.pages.allocate(PAGES), words(buffers, sources)
    tier.store(sources, pages, blocks).wait()
    tier.load(pages, targets, blocks).synchronize()
    assert (tier.pool.sizes[pages] == 0).tolist() == [True, False, False, False]
    assert torch.equal(words(buffers, targets), before)


@pytest.mark.parametrize("damage", ["bits", "size", "pages", "blocks"])
def test_a_page_that_came_back_changed_is_named(damage):
    tier, buffers, sources, targets, blocks = made(torch.float32)
    pages = tier.pool.pages.allocate(PAGES)
    tier.store(sources, pages, blocks).wait()
    if damage == "bits":
        tier.pool.flip(2)
    elif damage == "size":
        with torch.inference_mode():
            tier.pool.sizes[2] -= 8
    elif damage == "pages":
        with torch.inference_mode():
            for part in (tier.pool.frames, tier.pool.sizes):
                part[[2, 1]] = part[[1, 2]]
    else:
        buffers.keys[0][blocks.slots[2, 0]] = 0
    others = torch.ones(len(buffers.keys[0]), dtype=torch.bool)
    others[targets] = False
    rest = words(buffers, others.nonzero().flatten())
    load = tier.load(pages, targets, blocks)
    load.synchronize()
    assert sorted(load.outcome.failed) == ([1, 2] if damage == "pages" else [2])
    assert torch.equal(words(buffers, others.nonzero().flatten()), rest)


def test_what_no_residual_can_be_made_of_is_told():
    buffers = made(torch.float32)[1]
    packing = Packing.for_pool(quantizer("lynx", 4), buffers, 16)
    assert unsupported_reason(packing, buffers, 128) == ""
    assert unsupported_reason(packing, buffers, 16) == "pages are 16 tokens, blocks 64: pass --page-size 64"
    coarse = KVBuffers((0,), (1.0,), *((buffer.to(torch.float8_e5m2),) for buffer in (buffers.keys[0], buffers.values[0])))
    assert "pass --kv-cache-dtype auto" in unsupported_reason(packing, coarse, 64)
