"""Time decode attention over quantized blocks of one layer on a GPU, and check its outputs.

    sglang-ext-bench packed-kernel --methods kivi:4 int4:4 --kernels gluon triton --parts 16,2 28,4

Each request has --tokens tokens in quantized blocks and --tail exact tokens, in scattered slots. The command prints one line per method,
kernel and number of splits:

    error       largest error of the first request's outputs, over the largest output in float64
    us          microseconds of a call in a CUDA graph of ten, including the kernel that merges the splits
    limit       microseconds in which the GPU reads the bytes of the call
    of it       the first over the second

If a kernel does not compile or run, the line has its error message.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from sglang_ext.layers.kernels.packed import packed_decode as kernels
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.options import (
    add_list,
    add_sizes,
    check_sizes,
    parse_group,
    positive_int,
    require_gpu,
)
from sglang_ext_bench.kernels.timing import graph_seconds
from sglang_ext_bench.speed.decode_limit import measure_bandwidth

SCALING, CALLS = 128**-0.5, 10
SIZES = {
    "batch": (8, "requests"), "tokens": (32768, "tokens of a request in blocks"), "tail": (192, "exact tokens of a request"),
    "kv-heads": (8, "KV heads"), "group": (4, "query heads of a KV head"), "dim": (128, "channels of a head"),
}  # fmt: skip


@dataclass(frozen=True)
class PackedBatch:
    """Compressed KV of a batch in one layer: quantized blocks, then exact tokens.

    Attributes:
        packing: Layout of the blocks.
        keys: Pool of keys, [slots, kv_heads, dim].
        values: Pool of values, [slots, kv_heads, dim].
        table: Slots of each request, int32 [batch + 1, slots of a request]. Row 0 is unused.
        num_packed: Slots of a request that hold blocks.
        queries: Queries of the newest tokens, [batch, heads, dim].
        rows: Row of the table of each request, int64 [batch].
        lengths: Slots of each row, int64 [batch].
        packed_slots: Slots with blocks of each row, int32 [batch + 1].
    """

    packing: Packing
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    num_packed: int
    queries: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    packed_slots: torch.Tensor

    @classmethod
    def random(cls, method: str, bits: int, args: argparse.Namespace) -> "PackedBatch":
        """Create random keys and values. All requests have the same blocks, each in its own slots."""
        torch.manual_seed(0)
        batch, tokens, tail = args.batch, args.tokens, args.tail
        shape, options = (args.kv_heads, args.dim), {"dtype": torch.bfloat16, "device": "cuda"}
        probe = KVBuffers((0,), (SCALING,), (torch.zeros(1, *shape, **options),), (torch.zeros(1, *shape, **options),))
        packing = Packing.for_pool(catalogue.quantizer(method, bits), probe, 1)
        packed = packing.packed_slots(tokens)
        slots = torch.randperm(batch * (packed + tail), device="cuda").int().view(batch, -1)
        num_slots = max(slots.numel(), tokens + packed)
        pools = [torch.randn(num_slots, *shape, **options) for _ in "kv"]
        buffers = KVBuffers((0,), (SCALING,), (pools[0],), (pools[1],))
        written = torch.arange(tokens, tokens + packed, device="cuda")
        kept = torch.arange(tokens, device="cuda").expand(1, args.kv_heads, -1)
        packing.write(buffers, kept, torch.arange(tokens, device="cuda"), written)
        for pool in pools:
            blocks = pool[written].clone()
            pool[:] = torch.randn(num_slots, *shape, **options)
            for request in slots:
                pool[request[:packed].long()] = blocks
        table = torch.zeros(batch + 1, packed + tail, dtype=torch.int32, device="cuda")
        table[1:] = slots
        queries = torch.randn(batch, args.kv_heads * args.group, args.dim, **options)
        rows = torch.arange(1, batch + 1, device="cuda")
        packed_slots = torch.full((batch + 1,), packed, dtype=torch.int32, device="cuda")
        return cls(packing, *pools, table, packed, queries, rows, torch.full_like(rows, packed + tail), packed_slots)

    def attend(self, splits: tuple[int, int]) -> torch.Tensor:
        """Run the measured kernel. Returns the outputs, [batch, heads, dim]."""
        inputs = self.queries, self.keys, self.values, self.table, self.rows, self.lengths, self.packed_slots
        return kernels.packed_decode(self.packing, *inputs, SCALING, splits)

    def exact_outputs(self) -> torch.Tensor:
        """Return the outputs of the first request over the same blocks, computed in float64, [heads, dim]."""
        row, numbers = self.table[1].long(), []
        layouts, rotations = (self.packing.keys, self.packing.values), self.packing.rotations(self.keys.device)
        levels = self.packing.levels(self.keys.device)
        for buffer, layout, level, rotation in zip((self.keys, self.values), layouts, levels, rotations):
            block = self.packing.read(buffer, layout, row[: self.num_packed])
            dequantized = self.packing.dequantize(block, layout, level).double()
            dequantized = dequantized if rotation is None else dequantized @ rotation.double().t()
            numbers.append(torch.cat([dequantized, buffer[row[self.num_packed :]].transpose(0, 1).double()], 1))
        keys, values = numbers
        queries = self.queries[0].double().view(len(keys), -1, self.keys.shape[2])
        weights = (torch.einsum("hgd,htd->hgt", queries, keys) * SCALING).softmax(-1)
        return torch.einsum("hgt,htd->hgd", weights, values).flatten(0, 1)

    @property
    def read_bytes(self) -> int:
        """Bytes that a call reads: blocks with their parameters, and exact tokens."""
        layouts, (batch, width) = (self.packing.keys, self.packing.values), (len(self.queries), self.table.shape[1])
        block = sum(layout.tokens * layout.token_bytes + layout.parameter_bytes for layout in layouts)
        exact = (width - self.num_packed) * self.keys.shape[2] * 4
        return batch * self.keys.shape[1] * (self.num_packed // self.packing.block_slots * block + exact)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    methods = ("kivi:4", "int4:4", "kivi:2", "int8:8", "rotatekv:4")
    add_list(parser, "--methods", methods, "quantizers and bits of their codes", metavar="METHOD:BITS")
    add_list(parser, "--kernels", ("gluon",), "kernels to time", choices=("gluon", "triton"))
    splits = ("16,2", "20,4", "28,4", "60,4")
    add_list(parser, "--parts", splits, "splits of the blocks and of the exact tokens", metavar="BLOCKS,EXACT")
    add_sizes(parser, SIZES)


def run(args: argparse.Namespace) -> int:
    """Measure each method, kernel and number of splits.

    Raises:
        CommandError: An option is out of range, or there is no GPU.
    """
    check_sizes(args, SIZES)
    methods = [parse_group(text, "--methods", {"method": str, "bits": positive_int}, ":") for text in args.methods]
    for method, bits in methods:
        if method not in catalogue.packing():
            raise CommandError(f"--methods {method}: pass quantizers, from {', '.join(catalogue.packing())}")
        if bits not in (allowed := catalogue.QUANTIZERS[method].bits):
            raise CommandError(f"--methods {method}:{bits}: pass bits from {allowed}")
    splits = [parse_group(text, "--parts", {"blocks": positive_int, "exact": positive_int}) for text in args.parts]
    require_gpu()
    bandwidth = measure_bandwidth()
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for method, bits in methods:
        measure(PackedBatch.random(method, bits, args), f"{method}:{bits}", bandwidth, args.kernels, splits)
    return 0


def measure(batch: PackedBatch, name: str, bandwidth: float, kernel_names: list[str], splits: list[tuple[int, int]]) -> None:
    """Print one line per kernel and number of splits.

    Args:
        batch: What the kernels read.
        name: Name of the method.
        bandwidth: Read bandwidth of the GPU, bytes per second.
        kernel_names: ``gluon`` or ``triton``.
        splits: Splits of the blocks and of the exact tokens.
    """
    expected, limit = batch.exact_outputs(), batch.read_bytes / bandwidth * 1e6
    group = batch.queries.shape[1] // batch.keys.shape[1]
    for kernel in kernel_names:
        if kernel == "gluon" and kernels.max_resident_programs(batch.packing, batch.keys, group) is None:
            print(f"{name} {kernel}: does not support these blocks", flush=True)
            continue
        for each in splits:
            label = f"{name} {kernel} parts {each[0]}+{each[1]}"
            try:
                with triton_only() if kernel == "triton" else nullcontext():
                    error = float((batch.attend(each)[0].double() - expected).abs().max() / expected.abs().max())
                    print(f"{label}: error {error:.1e}", end="", flush=True)
                    microseconds = 1e6 * graph_seconds(lambda: batch.attend(each), CALLS)
                print(f", {microseconds:.0f} us, limit {limit:.0f}, {microseconds / limit:.2f} of it", flush=True)
            except (CompilationError, OutOfResources, PTXASError, RuntimeError) as failure:
                print(f"{label}: failed: {str(failure)[-400:]}", flush=True)


@contextmanager
def triton_only() -> Iterator[None]:
    """Make ``packed_decode`` launch its Triton kernels: inside this context, the Gluon kernels accept no blocks."""
    before = kernels.fragments, kernels.integer_fragments
    kernels.fragments = kernels.integer_fragments = lambda *_: None
    try:
        yield
    finally:
        kernels.fragments, kernels.integer_fragments = before
