"""Full KV in pinned host memory: copies beside the forward pass, and as fast as the link."""

import time
from dataclasses import dataclass

import pytest
import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.tier import HostLinkBandwidth, HostTier
from sglang_ext.mem_cache.host_tier.transfers import TransferTracker

PAGE = 16


@dataclass
class Setup:
    buffers: KVBuffers
    tier: HostTier
    slots: int

    def contents(self, slots):
        """Bytes of slots in all layers."""
        return torch.stack([b.flatten(1).view(torch.uint8)[slots] for b in (*self.buffers.keys, *self.buffers.values)])

    def write(self, slots):
        """New random bits in slots, by the current stream."""
        for buffer in (*self.buffers.keys, *self.buffers.values):
            rows = buffer.flatten(1).view(torch.uint8)
            rows[slots] = torch.randint(0, 256, (len(slots), rows.shape[1]), device=rows.device, dtype=torch.uint8)


def setup(layers=6, slots=4096, pages=192, heads=8, dim=128, dtype=torch.bfloat16, **kwargs):
    """A device pool of random bits and its tier."""
    keys, values = (tuple(torch.zeros(slots, heads, dim, device="cuda").to(dtype) for _ in range(layers)) for _ in "kv")
    buffers = KVBuffers(tuple(range(layers)), (1.0,) * layers, keys, values)
    pool = HostPool.create(buffers, PAGE, pages * PAGE * buffers.bytes_per_slot)
    made = Setup(buffers, HostTier(buffers, pool, **kwargs), slots)
    made.write(torch.arange(slots, device="cuda"))
    return made


def slots_of(pages):
    """Slots of device pages, on the device."""
    return (pages.cuda()[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()


def sleep(seconds):
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("staging", [0, 1 << 20, 64 << 20])
def test_what_was_stored_comes_back(dtype, staging):
    made = setup(dtype=dtype, staging=staging)
    assert made.tier.pool.kv.is_pinned() and made.tier.pool.checksums.is_pinned()
    order = torch.randperm(made.slots // PAGE)
    sources, targets, rest = (slots_of(part) for part in order.split([100, 100, len(order) - 200]))
    before, untouched = made.contents(sources), made.contents(rest)
    pages = made.tier.pool.pages.allocate(192)[torch.randperm(192)[:100]]
    stored = made.tier.store(sources, pages)
    loaded = made.tier.load(pages, targets)
    loaded.wait()
    assert torch.equal(made.contents(targets), before) and torch.equal(made.contents(rest), untouched)
    loaded.synchronize()
    assert stored.done and loaded.done and loaded.outcome.failed == []
    assert 0 < stored.outcome.seconds < 1 and 0 < loaded.outcome.seconds < 1


def test_forwards_go_on_and_order_is_kept_without_the_host_waiting():
    made = setup()
    pages, sources, targets = made.tier.pool.pages.allocate(64), slots_of(torch.arange(64)), slots_of(torch.arange(64, 128))
    others = slots_of(torch.arange(128, 256))
    # The first time, kernels are loaded and memory is allocated, for which the device is waited.
    for seconds in (0, 0.5):
        torch.cuda.synchronize()
        sleep(seconds)
        made.write(sources)
        before = made.contents(sources)
        stored = made.tier.store(sources, pages)
        loaded = made.tier.load(pages, targets)
        # Temporary tensors of the current stream must not take the memory of what the transfers still use.
        for _ in range(20):
            made.write(others)
        stored.wait()
        made.write(sources)
        loaded.wait()
        landed = made.contents(targets)
        under_way = not stored.done and not loaded.done
        loaded.synchronize()
        assert loaded.outcome.failed == [] and torch.equal(landed, before)
    assert under_way, "launching does not wait for the device"


def test_a_load_waits_for_the_readers_of_its_slots():
    made = setup()
    pages, sources, targets = made.tier.pool.pages.allocate(64), slots_of(torch.arange(64)), slots_of(torch.arange(64, 128))
    made.tier.store(sources, pages).synchronize()
    for seconds in (0, 0.3):
        made.write(targets)
        before = made.contents(targets)
        torch.cuda.synchronize()
        sleep(seconds)
        read = made.contents(targets)
        loaded = made.tier.load(pages, targets)
        loaded.synchronize()
        assert torch.equal(read, before) and torch.equal(made.contents(targets), made.contents(sources))
    assert loaded.outcome.seconds < 0.1, "what it waited for does not count"


def test_a_load_waits_for_a_forward_on_another_stream_that_writes_its_slots():
    forward = torch.cuda.Stream()
    made = setup(forward_stream=forward)
    pages, sources, targets = made.tier.pool.pages.allocate(64), slots_of(torch.arange(64)), slots_of(torch.arange(64, 128))
    made.tier.store(sources, pages).synchronize()
    for seconds in (0, 0.3):
        torch.cuda.synchronize()
        with torch.cuda.stream(forward):
            sleep(seconds)
            made.write(targets)
        made.tier.load(pages, targets).synchronize()
        assert torch.equal(made.contents(targets), made.contents(sources))


def test_what_is_deferred_does_not_wait_for_what_the_stream_is_given_meanwhile():
    made = setup()
    pages, sources, targets = made.tier.pool.pages.allocate(64), slots_of(torch.arange(64)), slots_of(torch.arange(64, 128))
    made.tier.store(sources, pages).synchronize()
    for seconds in (0, 0.5):
        torch.cuda.synchronize()
        with made.tier.defer_transfers():
            loaded = made.tier.load(pages, targets)
            assert not loaded.done
            sleep(seconds)
        began = time.perf_counter()
        loaded.synchronize()
        took = time.perf_counter() - began
        assert torch.equal(made.contents(targets), made.contents(sources))
    assert took < 0.3


def test_who_waits_for_what_is_deferred_gets_it():
    made = setup()
    pages, sources, targets = made.tier.pool.pages.allocate(64), slots_of(torch.arange(64)), slots_of(torch.arange(64, 128))
    with made.tier.defer_transfers():
        made.tier.store(sources, pages)
        made.tier.load(pages, targets).wait()
        assert torch.equal(made.contents(targets), made.contents(sources))


def test_many_transfers_beside_each_other_arrive():
    made = setup(staging=1 << 20)
    noise = torch.Generator().manual_seed(0)
    kept, landed = [], []
    for step in range(60):
        count = int(torch.randint(1, 30, (1,), generator=noise))
        if step % 3 == 2 and kept:
            pages, before = kept.pop(0)
            targets = slots_of(torch.randperm(128)[: len(pages)] + 128)
            loaded = made.tier.load(pages, targets)
            loaded.wait()
            landed.append((loaded, made.contents(targets), before))
            made.tier.pool.pages.free(pages)
        elif (pages := made.tier.pool.pages.allocate(count)) is not None:
            sources = slots_of(torch.randperm(128)[:count])
            kept.append((pages, made.contents(sources)))
            made.tier.store(sources, pages).wait()
            made.write(sources)
    torch.cuda.synchronize()
    assert len(landed) > 10
    for loaded, found, before in landed:
        assert loaded.outcome.failed == [] and torch.equal(found, before)


def test_pages_that_changed_on_the_host_are_named():
    made = setup()
    pages, slots = made.tier.pool.pages.allocate(64), slots_of(torch.arange(64))
    made.tier.store(slots, pages).synchronize()
    kv = made.tier.pool.kv.view(torch.int16)
    kv[1, 3, 17, 5, 2, 100] ^= 1
    kv[:, :, 40, [2, 3]] = kv[:, :, 40, [3, 2]]
    loaded = made.tier.load(pages, slots_of(torch.arange(64, 128)))
    loaded.synchronize()
    assert loaded.outcome.failed == [17, 40]


def test_pinned_memory_can_be_made_again():
    for _ in range(3):
        made = setup()
        made.tier.store(slots_of(torch.arange(4)), made.tier.pool.pages.allocate(4))
        del made
    torch.cuda.synchronize()


def timed(copy):
    """Seconds of a copy on the current stream, the best of three."""
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return best


def test_a_load_is_nearly_as_fast_as_one_plain_copy():
    pages = 2048
    made = setup(layers=32, slots=pages * PAGE, pages=pages)
    size = made.tier.pool.kv.numel() * made.tier.pool.kv.element_size()
    assert size == 1 << 32
    of_device = torch.empty(size // 8, dtype=torch.int64, device="cuda")
    of_host = made.tier.pool.words.view(-1)
    plain = size / timed(lambda: of_device.copy_(of_host, non_blocking=True))
    del of_device
    held, slots = made.tier.pool.pages.allocate(pages), slots_of(torch.randperm(pages))
    rate = HostLinkBandwidth()
    made.tier.store(slots, held).synchronize()
    best, launched = 0.0, float("inf")
    for _ in range(3):
        began = time.perf_counter()
        loaded = made.tier.load(held, slots)
        launched = min(launched, time.perf_counter() - began)
        loaded.synchronize()
        assert loaded.outcome.failed == []
        best = max(best, loaded.size / loaded.outcome.seconds)
        rate.add(loaded.size, loaded.outcome.seconds)
    print(f"plain {plain / 1e9:.1f} GB/s, load {best / 1e9:.1f} GB/s, launched in {launched * 1e3:.1f} ms")
    assert best >= 0.8 * plain
    assert launched < 0.5 * loaded.outcome.seconds
    assert rate.bandwidth == pytest.approx(best, rel=0.3)
    made.tier.pool.pages.free(held)
    assert HostLinkBandwidth().measure(made.tier, slots[: 512 * PAGE], TransferTracker()) > 0.5 * plain


def test_what_a_forward_sends_to_the_device_does_not_wait_for_a_load():
    made = setup(layers=32, slots=65536, pages=2048)
    pages = made.tier.pool.pages.allocate(2048)
    made.tier.store(slots_of(torch.arange(2048)), pages).synchronize()
    for _ in range(2):
        load = made.tier.load(pages, slots_of(torch.arange(2048, 4096)))
        began = time.perf_counter()
        for values in ([1, 2, 3], list(range(8192))):
            assert to_device(values, "cuda").tolist() == values
        waited, load_runs = time.perf_counter() - began, not load.done
        load.synchronize()
    assert load_runs and waited < load.outcome.seconds / 4
