"""Measure how fast full KV is stored in host memory as residuals of quantized pages, and loaded again, on a GPU.

    sglang-ext-bench residual-rate --dtype bfloat16

The default shapes are those of Qwen3-8B. The command compares all bits that it loads. It prints:

    read, write, pack      GB/s of full KV in kernels alone: restoring pages, writing residuals, quantizing
    residuals, whole       GB/s of full KV of loads from a host tier, and GB/s over the link, for residuals and for exact pages
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import PageBlocks, ResidualPages
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.options import add_sizes, check_sizes, require_gpu
from sglang_ext_bench.kernels.timing import event_seconds

METHOD, PAGE, REPEATS = "lynx", 64, 5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = {
    "layers": (36, "layers"), "heads": (8, "KV heads"), "dim": (128, "channels of a head"), "pages": (128, f"pages of {PAGE} tokens"),
    "bits": (4, "bits of a number in the anchor"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_sizes(parser, SIZES)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the pool (default: %(default)s)")


@dataclass(frozen=True)
class Pool:
    """A pool of random KV, and its slots in three parts.

    Attributes:
        buffers: Keys and values of each layer.
        sources: Slots of the tokens, int64 [tokens].
        targets: Slots that loads write, int64 [tokens].
        spare: Slots for quantized blocks, int64 [tokens].
    """

    buffers: KVBuffers
    sources: torch.Tensor
    targets: torch.Tensor
    spare: torch.Tensor

    @classmethod
    def random(cls, args: argparse.Namespace) -> "Pool":
        """Create a pool whose channels have different means and spreads. Pages are in random order."""
        tokens, noise = args.pages * PAGE, torch.Generator("cuda").manual_seed(0)
        shape = 3 * tokens, args.heads, args.dim

        def buffer() -> torch.Tensor:
            spread = torch.rand(shape[1:], generator=noise, device="cuda") * 4
            return (torch.randn(shape, generator=noise, device="cuda") * spread + spread.sin()).to(DTYPES[args.dtype])

        keys, values = (tuple(buffer() for _ in range(args.layers)) for _ in "kv")
        order = (torch.randperm(3 * args.pages)[:, None] * PAGE + torch.arange(PAGE)).flatten().cuda()
        return cls(KVBuffers(tuple(range(args.layers)), (1.0,) * args.layers, keys, values), *order.split(tokens))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens' full KV."""
        return len(self.sources) * self.buffers.bytes_per_slot

    def check_targets(self) -> None:
        """Check that the targets have all bits of the sources, and clear the targets."""
        for buffer in (*self.buffers.keys, *self.buffers.values):
            assert torch.equal(buffer[self.sources].view(torch.uint8), buffer[self.targets].view(torch.uint8)), "loads restore all bits"
            buffer[self.targets] = 0


def run(args: argparse.Namespace) -> int:
    """Measure the kernels alone, then loads from a host tier.

    Raises:
        CommandError: An option is out of range, or there is no GPU.
    """
    check_sizes(args, SIZES)
    if args.bits not in (allowed := catalogue.QUANTIZERS[METHOD].bits):
        raise CommandError(f"--bits {args.bits}: pass one of {allowed}")
    require_gpu()
    pool = Pool.random(args)
    packing = Packing.for_pool(catalogue.quantizer(METHOD, args.bits), pool.buffers, PAGE)
    slots, residuals = measure_kernels(pool, packing, args), ResidualPages(pool.buffers, packing, PAGE)
    blocks = PageBlocks(slots, torch.ones(args.pages, dtype=torch.bool))
    for residual_pages, names in ((residuals, ("residuals", "residuals again")), (None, ("whole",))):
        host = HostPool.create(pool.buffers, PAGE, pool.num_bytes, frames=residual_pages is not None)
        tier = HostTier(pool.buffers, host, residuals=residual_pages)
        for name in names:
            measure_loads(tier, pool, None if residual_pages is None else blocks, name)
        tier.close()
    return 0


def measure_kernels(pool: Pool, packing: Packing, args: argparse.Namespace) -> torch.Tensor:
    """Print the rates of the kernels and the bits per number. Returns the slots of each page's blocks, int64 [pages, slots of a page].

    Args:
        pool: The KV.
        packing: Layout of the blocks.
        args: Options of the command.
    """
    tokens = len(pool.sources)
    slots = pool.spare[: packing.packed_slots(tokens)]
    kept = torch.arange(tokens, device="cuda").expand(args.layers, args.heads, tokens)
    packing.write(pool.buffers, kept, pool.sources, slots)
    packed = best_seconds(lambda: packing.write(pool.buffers, kept, pool.sources, slots))
    slots, pages = slots.view(args.pages, -1), ResidualPages(pool.buffers, packing, PAGE)
    frames = torch.zeros(args.pages, pages.page_bytes, dtype=torch.uint8, device="cuda")
    sizes = torch.zeros(args.pages, dtype=torch.int64, device="cuda")
    written = best_seconds(lambda: pages.write(pool.sources, slots, frames, sizes))
    bits = float(sizes.float().mean()) * 8 / pages.page_bytes * DTYPES[args.dtype].itemsize
    print(f"bits of a number: {bits:.2f}, whole pages: {int((sizes == 0).sum())}")
    for blocks, name in ((slots, "blocks on the device"), (None, "anchors in frames")):
        read = best_seconds(lambda: pages.read(frames, sizes, pool.targets, blocks))
        pool.check_targets()
        print(f"read, {name}: {pool.num_bytes / read / 1e9:.0f} GB/s")
    print(f"pack: {pool.num_bytes / packed / 1e9:.0f} GB/s; write: {pool.num_bytes / written / 1e9:.0f} GB/s")
    return slots


def measure_loads(tier: HostTier, pool: Pool, blocks: PageBlocks | None, name: str) -> None:
    """Store the tokens once, load them several times, and print the best rate.

    Args:
        tier: The host tier.
        pool: The KV.
        blocks: Quantized blocks of the pages on the device; None if the tier stores exact pages.
        name: Name of the line.
    """
    pages = tier.pool.pages.allocate(len(pool.sources) // PAGE)
    tier.store(pool.sources, pages, blocks).synchronize()
    outcomes = []
    for _ in range(REPEATS):
        load = tier.load(pages, pool.targets, blocks)
        load.synchronize()
        outcomes.append(load.outcome)
        assert not load.outcome.failed, "no page of a load fails its checksum"
        pool.check_targets()
    best = min(outcomes, key=lambda outcome: outcome.seconds)
    print(f"{name}: {pool.num_bytes / best.seconds / 1e9:.1f} GB/s of full KV, {best.size / best.seconds / 1e9:.1f} GB/s over the link")
    tier.pool.pages.free(pages)


def best_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, after a warm-up call."""
    return min(event_seconds(work, REPEATS + 1)[1:])
