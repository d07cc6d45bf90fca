"""How fast full KV goes to host memory as residuals of packed blocks, and comes back, on a GPU: ``residual_rate.py [--layers N]``.

Shapes of Qwen3-8B by default. All bits are compared. GB/s are of full KV: of the kernels alone, and of whole loads, beside those of a
tier that holds pages whole.
"""

import argparse

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.residuals import PageBlocks, ResidualPages
from sglang_ext.mem_cache.host_tier.tier import HostTier

PAGE, REPEATS = 64, 5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def seconds(work):
    """Of the quickest of some calls, after one more."""
    times = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return min(times[1:])


def check(buffers, sources, targets):
    """Tokens in ``targets`` have all bits of those in ``sources``; ``targets`` are emptied."""
    for buffer in (*buffers.keys, *buffers.values):
        assert torch.equal(buffer[sources].view(torch.uint8), buffer[targets].view(torch.uint8))
        buffer[targets] = 0


def transfers(tier, buffers, sources, targets, blocks, name):
    """Store, and load several times."""
    pages = tier.pool.pages.allocate(len(sources) // PAGE)
    tier.store(sources, pages, blocks).synchronize()
    outcomes = []
    for _ in range(REPEATS):
        load = tier.load(pages, targets, blocks)
        load.synchronize()
        outcomes.append(load.outcome)
        assert not outcomes[-1].failed
        check(buffers, sources, targets)
    best, full = min(outcomes, key=lambda each: each.seconds), len(sources) * buffers.bytes_per_slot
    print(f"{name}: {full / best.seconds / 1e9:.1f} GB/s of full KV, {best.size / best.seconds / 1e9:.1f} GB/s over the link")
    tier.pool.pages.free(pages)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 36), ("heads", 8), ("dim", 128), ("pages", 128), ("bits", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    args = parser.parse_args()
    tokens, dtype = args.pages * PAGE, DTYPES[args.dtype]
    noise = torch.Generator("cuda").manual_seed(0)
    shape = 3 * tokens, args.heads, args.dim

    def buffer():
        spread = torch.rand(shape[1:], generator=noise, device="cuda") * 4
        return (torch.randn(shape, generator=noise, device="cuda") * spread + spread.sin()).to(dtype)

    kinds = (tuple(buffer() for _ in range(args.layers)) for _ in "kv")
    buffers = KVBuffers(tuple(range(args.layers)), (1.0,) * args.layers, *kinds)
    packing = Packing.for_pool(quantizer("lynx", args.bits), buffers, PAGE)
    order = (torch.randperm(3 * tokens // PAGE)[:, None] * PAGE + torch.arange(PAGE)).flatten().cuda()
    sources, targets, slots = order[:tokens], order[tokens : 2 * tokens], order[2 * tokens :][: packing.packed_slots(tokens)]
    kept = torch.arange(tokens, device="cuda").expand(args.layers, args.heads, tokens)
    packing.write(buffers, kept, sources, slots)
    packed = seconds(lambda: packing.write(buffers, kept, sources, slots))
    slots, pages = slots.view(args.pages, -1), ResidualPages(buffers, packing, PAGE)
    frames = torch.zeros(args.pages, pages.page_bytes, dtype=torch.uint8, device="cuda")
    sizes = torch.zeros(args.pages, dtype=torch.int64, device="cuda")
    full = tokens * buffers.bytes_per_slot
    written = seconds(lambda: pages.write(sources, slots, frames, sizes))
    bits = float(sizes.float().mean()) * 8 / pages.page_bytes * dtype.itemsize
    print(f"bits of a number: {bits:.2f}, whole pages: {int((sizes == 0).sum())}")
    for blocks, name in ((slots, "blocks on the device"), (None, "anchors in rooms")):
        read = seconds(lambda: pages.read(frames, sizes, targets, blocks))
        check(buffers, sources, targets)
        print(f"read, {name}: {full / read / 1e9:.0f} GB/s")
    print(f"pack: {full / packed / 1e9:.0f} GB/s; write: {full / written / 1e9:.0f} GB/s")
    del frames
    there = PageBlocks(slots, torch.ones(args.pages, dtype=torch.bool))
    for residuals, name in ((pages, "residuals"), (None, "whole")):
        pool = HostPool.create(buffers, PAGE, full, frames=residuals is not None)
        tier = HostTier(buffers, pool, residuals=residuals)
        transfers(tier, buffers, sources, targets, None if residuals is None else there, name)
        if residuals is not None:
            transfers(tier, buffers, sources, targets, there, "residuals again")
        tier.close()


if __name__ == "__main__":
    main()
