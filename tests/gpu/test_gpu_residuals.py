"""Full KV goes to host memory as residuals of packed blocks, and comes back to the bit, beside what other streams do."""

import pytest
import torch
from anchored_checks import moved, packed, words

from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import PageBlocks
from sglang_ext.mem_cache.host_tier.tier import HostTier

@pytest.mark.parametrize("staging", [None, 0], ids=["one piece", "page by page"])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 4), (torch.float32, 2), (torch.float16, 4)])
def test_pages_come_back_to_the_bit_with_and_without_their_blocks(dtype, bits, staging):
    count = 9
    plain, slots, blocks = packed(dtype, bits, 2, 64, 64, torch.Generator().manual_seed(1), count)
    there = moved(plain, "cuda")
    pool = HostPool.create(there.buffers, 64, count * there.page_bytes, frames=True)
    tier = HostTier(there.buffers, pool, staging, there)
    slots, blocks = slots.cuda(), blocks.cuda()
    known = PageBlocks(blocks, torch.ones(count, dtype=torch.bool))
    before, pages = words(there.buffers, slots), pool.pages.allocate(count).flip(0)
    sizes = []
    # The first load comes before the store has ended.
    store = tier.store(slots, pages, known)
    for given in (known, known, None):
        for buffer in (*there.buffers.keys, *there.buffers.values):
            store.wait()
            buffer[slots] = 0
        load = tier.load(pages, slots, given)
        load.synchronize()
        assert not load.outcome.failed and torch.equal(words(there.buffers, slots), before)
        sizes.append(load.outcome.size)
    assert sizes[1] < sizes[2] < count * there.page_bytes
    assert sizes[1] == int(torch.where(pool.sizes > 0, pool.sizes, there.page_bytes).sum())
    tier.close()
