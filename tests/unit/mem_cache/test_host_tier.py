"""KV goes to host memory and comes back as it was, or the pages that changed are named."""

import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import pieces
from sglang_ext.mem_cache.host_tier.tier import HostLinkBandwidth, HostTier, staging_bytes
from sglang_ext.mem_cache.host_tier.transfers import TransferError, TransferTracker

LAYERS, SLOTS, HEADS, DIM = 3, 64, 2, 8


def kv_buffers(dtype=torch.bfloat16, seed=0):
    noise = torch.Generator().manual_seed(seed)
    shape = SLOTS, HEADS, DIM * dtype.itemsize
    keys, values = (
        tuple(torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8).view(dtype) for _ in range(LAYERS)) for _ in "kv"
    )
    return KVBuffers(tuple(range(LAYERS)), (1.0,) * LAYERS, keys, values)


def host_tier(buffers, page_size=4, pages=12, **kwargs):
    pool = HostPool.create(buffers, page_size, pages * page_size * buffers.bytes_per_slot)
    assert pool.pages.count == pages
    return HostTier(buffers, pool, **kwargs)


def contents(buffers, slots):
    """Bytes of slots in all layers, since floats of random bits may be no numbers."""
    return torch.stack([b.flatten(1).view(torch.uint8)[slots] for b in (*buffers.keys, *buffers.values)])


def slots_of(pages, page_size):
    """Slots of device pages."""
    return (torch.tensor(list(pages), dtype=torch.int64)[:, None] * page_size + torch.arange(page_size)).flatten()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_what_was_stored_comes_back_wherever_it_goes(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]))
    page_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    buffers = kv_buffers(dtype)
    page_bytes = page_size * HEADS * DIM * dtype.itemsize
    room = data.draw(st.integers(0, 7), label="pages in half the staging")
    tier = host_tier(buffers, page_size, 12, staging=2 * room * page_bytes)
    assert tier.workspace_bytes == 2 * 2 * max(1, room) * page_bytes
    count = data.draw(st.integers(1, min(12, SLOTS // page_size // 2)), label="pages")
    order = data.draw(st.permutations(range(SLOTS // page_size)))
    sources, targets = (slots_of(part, page_size) for part in (order[:count], order[count : 2 * count]))
    pages = torch.tensor(data.draw(st.permutations(tier.pool.pages.allocate(12).tolist()))[:count])
    before, rest = contents(buffers, sources), slots_of(order[2 * count :], page_size)
    untouched = contents(buffers, rest)
    stored = tier.store(sources, pages)
    loaded = tier.load(pages, targets)
    loaded.wait()
    assert stored.done and loaded.done and loaded.outcome.failed == []
    assert stored.size == loaded.size == count * page_size * buffers.bytes_per_slot
    assert stored.outcome.seconds > 0 and loaded.outcome.seconds > 0
    assert torch.equal(contents(buffers, targets), before) and torch.equal(contents(buffers, sources), before)
    assert torch.equal(contents(buffers, rest), untouched)
    tier.close()


def test_the_host_holds_layer_after_layer():
    buffers = kv_buffers()
    tier = host_tier(buffers)
    pages, slots = tier.pool.pages.allocate(2), slots_of([5, 3], 4)
    tier.store(slots, pages).wait()
    assert tier.pool.kv.shape == (2, LAYERS, 12, 4, HEADS, DIM) and tier.pool.kv.is_contiguous()
    for of_host, of_device in zip(tier.pool.kv, (buffers.keys, buffers.values)):
        for layer in range(LAYERS):
            landed = of_host[layer, pages].view(8, HEADS, DIM).view(torch.uint8)
            assert torch.equal(landed, of_device[layer][slots].view(torch.uint8))


@pytest.mark.parametrize("damage", ["bit", "tokens", "layers", "kv", "pages"])
def test_a_page_that_changed_on_the_host_is_named(damage):
    buffers = kv_buffers()
    tier = host_tier(buffers)
    pages = tier.pool.pages.allocate(6).flip(0)
    tier.store(slots_of(range(6), 4), pages).wait()
    kv = tier.pool.kv.view(torch.int16)
    if damage == "bit":
        kv[1, 2, 3, 1, 0, 7] ^= 64
    elif damage == "tokens":
        kv[:, :, 3, [0, 1]] = kv[:, :, 3, [1, 0]]
    elif damage == "layers":
        kv[:, [0, 1], 3] = kv[:, [1, 0], 3]
    elif damage == "kv":
        kv[[0, 1], :, 3] = kv[[1, 0], :, 3]
    else:
        kv[:, :, [3, 1]] = kv[:, :, [1, 3]]
    loaded = tier.load(pages, slots_of(range(6, 12), 4))
    loaded.synchronize()
    assert sorted(loaded.outcome.failed) == ([1, 3] if damage == "pages" else [3])
    assert tier.load(pages[:2], slots_of([0, 1], 4)).size, "the others are served on"


def test_slots_that_the_load_did_not_write_are_noticed():
    buffers = kv_buffers()
    tier = host_tier(buffers)
    pages, slots = tier.pool.pages.allocate(2), slots_of([0, 1], 4)
    tier.store(slots, pages).wait()
    # Two tokens of a page share a slot: only one of them can be there.
    loaded = tier.load(pages, torch.tensor([20, 21, 22, 23, 30, 31, 32, 32]))
    loaded.wait()
    assert loaded.outcome.failed == [1]


def test_transfers_of_the_same_pages_follow_one_another():
    buffers = kv_buffers()
    tier = host_tier(buffers)
    pages = tier.pool.pages.allocate(2)
    first, second = contents(buffers, slots_of([0, 1], 4)), contents(buffers, slots_of([2, 3], 4))
    tier.store(slots_of([0, 1], 4), pages)
    one = tier.load(pages, slots_of([4, 5], 4))
    tier.store(slots_of([2, 3], 4), pages)
    other = tier.load(pages, slots_of([6, 7], 4))
    other.wait()
    assert one.outcome.failed == other.outcome.failed == []
    assert torch.equal(contents(buffers, slots_of([4, 5], 4)), first)
    assert torch.equal(contents(buffers, slots_of([6, 7], 4)), second)


class Gate:
    """Blocks of pages whose slots are known once the event is set: a transfer with them waits, and all after it."""

    def __init__(self):
        self.event = threading.Event()

    @property
    def slots(self):
        self.event.wait()
        return torch.zeros(0, dtype=torch.int64)


def test_calls_return_at_once_and_forwards_go_on():
    buffers = kv_buffers()
    tier = host_tier(buffers)
    gate = Gate()
    pages, slots = tier.pool.pages.allocate(2), slots_of([0, 1], 4)
    before = contents(buffers, slots)
    stored, loaded = tier.store(slots, pages, gate), tier.load(pages, slots_of([2, 3], 4))
    slots.zero_()
    pages.zero_()
    assert not stored.done and not loaded.done
    with pytest.raises(TransferError, match="still in progress"):
        loaded.outcome.failed
    for buffer in (*buffers.keys, *buffers.values):
        buffer[32:] = 1
    gate.event.set()
    loaded.wait()
    assert stored.done and torch.equal(contents(buffers, slots_of([2, 3], 4)), before)
    assert stored.outcome.failed == [], "a store compares no checksums"


def test_it_works_beside_other_threads_writing_other_slots():
    buffers = kv_buffers()
    tier = host_tier(buffers)
    pages, slots, others = tier.pool.pages.allocate(4), slots_of(range(4), 4), torch.arange(32, 64)
    before = contents(buffers, slots)
    for value in range(20):
        tier.store(slots, pages)
        loaded = tier.load(pages, slots)
        while True:
            for buffer in (*buffers.keys, *buffers.values):
                buffer[others] = value
            if loaded.done:
                break
        assert loaded.outcome.failed == []
        assert torch.equal(contents(buffers, slots), before)
        assert all(bool((b[others] == value).all()) for b in (*buffers.keys, *buffers.values))


def test_buffers_made_in_inference_mode_are_served():
    with torch.inference_mode():
        buffers = kv_buffers()
        tier = host_tier(buffers)
    pages = tier.pool.pages.allocate(1)
    tier.store(torch.arange(4), pages)
    loaded = tier.load(pages, torch.arange(4, 8))
    loaded.wait()
    assert loaded.outcome.failed == []


def test_transfers_that_make_no_sense_are_refused():
    buffers = kv_buffers()
    tier = host_tier(buffers)
    pages = tier.pool.pages.allocate(2)
    for slots, of_host, message in (
        (torch.arange(7), pages, "7 slots for 2 pages of 4 tokens"),
        (torch.arange(0), pages[:0], "0 slots for 0 pages"),
        (torch.arange(8).int(), pages, "slots are torch.int32"),
        (torch.arange(8), pages.int(), "pages are torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            tier.store(slots, of_host)
    with pytest.raises(ValueError, match=r"\[7\] are free"):
        tier.store(torch.arange(4), torch.tensor([7]))
    with pytest.raises(ValueError, match=r"\[12\] do not exist"):
        tier.load(torch.tensor([12]), torch.arange(4))
    with pytest.raises(ValueError, match=r"\[0, 1\] were not stored"):
        tier.load(pages, torch.arange(8))


def test_an_error_on_the_way_reaches_who_waits():
    tier = host_tier(kv_buffers())
    stored = tier.store(torch.arange(SLOTS, SLOTS + 4), tier.pool.pages.allocate(1))
    with pytest.raises((IndexError, RuntimeError)):
        stored.wait()


def test_buffers_that_the_kernels_cannot_take_are_refused():
    buffers = kv_buffers()
    other = KVBuffers(buffers.layer_ids, buffers.scaling, buffers.keys, tuple(v.float() for v in buffers.values))
    pool = HostPool.create(buffers, 4, 1 << 20)
    for wrong in (other, KVBuffers((0,), (1.0,), (buffers.keys[0].mT,), (buffers.values[0].mT,))):
        with pytest.raises(ValueError, match="needs contiguous buffers of one shape and dtype"):
            HostTier(wrong, pool)
        with pytest.raises(ValueError, match="needs contiguous buffers of one shape and dtype"):
            HostPool.create(wrong, 4, 1 << 20)


def test_too_little_host_memory_names_the_flag(monkeypatch):
    buffers = kv_buffers()
    with pytest.raises(OptionError, match="--kv-host-gb gives 0.000 GB .* one page of 4 tokens"):
        HostPool.create(buffers, 4, 100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(OptionError, match="--kv-host-gb asks for .* 0.0 GB are available"):
        HostPool.create(buffers, 4, 8 << 20)


def test_the_rate_follows_what_was_measured_last():
    rate = HostLinkBandwidth(decay=0.5)
    assert rate.bandwidth is None
    rate.add(100, 1.0)
    assert rate.bandwidth == 100
    rate.add(1000, 1.0)
    assert rate.bandwidth == pytest.approx((50 + 1000) / 1.5)
    for _ in range(50):
        rate.add(10, 1.0)
    assert rate.bandwidth == pytest.approx(10)


def test_a_rate_is_measured_before_anything_is_served():
    buffers = kv_buffers()
    tier, rate = host_tier(buffers), HostLinkBandwidth()
    before = contents(buffers, torch.arange(SLOTS))
    assert rate.measure(tier, torch.arange(4).repeat(6), TransferTracker()) == rate.bandwidth > 0
    assert tier.pool.pages.free_pages == 12
    assert torch.equal(contents(buffers, torch.arange(SLOTS)), before)
    with pytest.raises(TransferError, match="12 free pages of host memory"):
        rate.measure(tier, torch.arange(4).repeat(13), TransferTracker())


def launches(tokens, pool, bytes_per_buffer=2048, buffers=72):
    """Of a load of so many tokens into a pool: copies, and with each piece two waits of a lane at most, and a mark."""
    staging = staging_bytes(pool * buffers * bytes_per_buffer)
    found = list(pieces(buffers, torch.arange(tokens), 1, staging // 2 // bytes_per_buffer))
    return sum(len(piece.buffers) * len(piece.runs) + 3 for piece in found)


def test_loads_are_fewer_launches_than_a_stream_takes():
    # Qwen3-8B in bfloat16: keys or values of a layer and token are 2 KB. Three loads of a long context, and one that fills its pool.
    assert 3 * launches(30720, 262144) < 1000
    assert launches(32768, 32768) < 1000
    assert staging_bytes(100_000) == 16 << 20
