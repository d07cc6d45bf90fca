"""Decode attention over packed blocks on a GPU: error, time, and bytes over bandwidth: docs/benchmarks.md.

    sglang-ext-bench packed-kernel [--methods kivi:4 int4:4] [--kernels gluon triton] [--parts 16,2 28,4]

One layer; slots are scattered one by one. The error is the first request's, over the largest number of its outputs in float64.
Times are those of a CUDA graph of ten calls, the kernel that joins parts included; what does not compile or run is said.
"""

import argparse
from dataclasses import dataclass

import torch
from sglang_ext_bench.kernels.graph_time import seconds
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from sglang_ext.layers.kernels.packed import packed_decode as kernels
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext_bench.speed.decode_limit import measure_bandwidth

SCALING, CALLS = 128**-0.5, 10


@dataclass(frozen=True)
class Setting:
    """Packed copies of a batch, of one layer.

    Attributes:
        keys, values: the pool, [slots, kv_heads, dim].
        table: int32 [batch + 1, slots of a request].
        packed: slots of each request that hold blocks.
        queries: [batch, heads, dim].
        rows, lengths, packed_slots: of the requests, as packed_decode takes them.
    """

    packing: Packing
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    packed: int
    queries: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    packed_slots: torch.Tensor

    @classmethod
    def of(cls, method: str, bits: int, options: argparse.Namespace) -> "Setting":
        """Random keys and values; all requests have the same blocks, each in slots of its own."""
        torch.manual_seed(0)
        batch, tokens, tail = options.batch, options.tokens, options.tail
        shape, like = (options.kv_heads, options.dim), {"dtype": torch.bfloat16, "device": "cuda"}
        probe = KVBuffers((0,), (SCALING,), (torch.zeros(1, *shape, **like),), (torch.zeros(1, *shape, **like),))
        packing = Packing.for_pool(quantizer(method, bits), probe, 1)
        packed = packing.packed_slots(tokens)
        slots = torch.randperm(batch * (packed + tail), device="cuda").int().view(batch, -1)
        room = max(slots.numel(), tokens + packed)
        pool = [torch.randn(room, *shape, **like) for _ in "kv"]
        buffers = KVBuffers((0,), (SCALING,), (pool[0],), (pool[1],))
        written = torch.arange(tokens, tokens + packed, device="cuda")
        kept = torch.arange(tokens, device="cuda").expand(1, options.kv_heads, -1)
        packing.write(buffers, kept, torch.arange(tokens, device="cuda"), written)
        for part in pool:
            blocks = part[written].clone()
            part[:] = torch.randn(room, *shape, **like)
            for request in slots:
                part[request[:packed].long()] = blocks
        table = torch.zeros(batch + 1, packed + tail, dtype=torch.int32, device="cuda")
        table[1:] = slots
        queries = torch.randn(batch, options.kv_heads * options.group, options.dim, **like)
        rows = torch.arange(1, batch + 1, device="cuda")
        packed_slots = torch.full((batch + 1,), packed, dtype=torch.int32, device="cuda")
        return cls(packing, *pool, table, packed, queries, rows, torch.full_like(rows, packed + tail), packed_slots)

    def attend(self, parts: tuple[int, int]) -> torch.Tensor:
        """The call that is measured: [batch, heads, dim]."""
        given = self.queries, self.keys, self.values, self.table, self.rows, self.lengths, self.packed_slots
        return kernels.packed_decode(self.packing, *given, SCALING, parts)

    def expected(self) -> torch.Tensor:
        """The first request's outputs in float64."""
        row, means = self.table[1].long(), []
        layouts, rotations = (self.packing.keys, self.packing.values), self.packing.rotations(self.keys.device)
        levels = self.packing.levels(self.keys.device)
        for buffer, layout, level, rotation in zip((self.keys, self.values), layouts, levels, rotations):
            block = self.packing.read(buffer, layout, row[: self.packed])
            far = self.packing.dequantize(block, layout, level).double()
            far = far if rotation is None else far @ rotation.double().t()
            means.append(torch.cat([far, buffer[row[self.packed :]].transpose(0, 1).double()], 1))
        queries = self.queries[0].double().view(len(means[0]), -1, self.keys.shape[2])
        weights = (torch.einsum("hgd,htd->hgt", queries, means[0]) * SCALING).softmax(-1)
        return torch.einsum("hgt,htd->hgd", weights, means[1]).flatten(0, 1)

    def bytes(self) -> int:
        """Read by a call: codes and what follows them in blocks, exact tokens."""
        layouts, (batch, width) = (self.packing.keys, self.packing.values), (len(self.queries), self.table.shape[1])
        block = sum(layout.tokens * layout.token_bytes + layout.parameter_bytes for layout in layouts)
        exact = (width - self.packed) * self.keys.shape[2] * 4
        return batch * self.keys.shape[1] * (self.packed // self.packing.block_slots * block + exact)


def measure(setting: Setting, name: str, expected: torch.Tensor, bandwidth: float, options: argparse.Namespace) -> None:
    """Print a line for each kernel and number of parts."""
    group, choices = options.group, (kernels.fragments, kernels.integer_fragments)
    limit = setting.bytes() / bandwidth * 1e6
    for kernel in options.kernels:
        if kernel == "gluon" and not any(choose(setting.packing, setting.keys, setting.values, group) for choose in choices):
            print(f"{name} {kernel}: not for these blocks", flush=True)
            continue
        kernels.fragments, kernels.integer_fragments = choices if kernel == "gluon" else (lambda *_: None,) * 2
        for parts in options.parts:
            label = f"{name} {kernel} parts {parts[0]}+{parts[1]}"
            try:
                error = float((setting.attend(parts)[0].double() - expected).abs().max() / expected.abs().max())
                print(f"{label}: error {error:.1e}", end="", flush=True)
                time = 1e6 * seconds(lambda: setting.attend(parts), CALLS)
                print(f", {time:.0f} us, limit {limit:.0f}, {time / limit:.2f} of it", flush=True)
            except (CompilationError, OutOfResources, PTXASError, RuntimeError) as failure:
                print(f"{label}: failed: {str(failure)[-400:]}", flush=True)
    kernels.fragments, kernels.integer_fragments = choices


def main() -> None:
    """Every method, kernel and number of parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["kivi:4", "int4:4", "kivi:2", "int8:8", "rotatekv:4"])
    parser.add_argument("--kernels", nargs="+", default=["gluon"], choices=("gluon", "triton"))
    parser.add_argument("--parts", nargs="+", default=["16,2", "20,4", "28,4", "60,4"], help="of blocks, and of exact tokens")
    for option, default in (("batch", 8), ("tokens", 32768), ("tail", 192), ("kv-heads", 8), ("group", 4), ("dim", 128)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    options.parts = [tuple(map(int, parts.split(","))) for parts in options.parts]
    bandwidth = measure_bandwidth()
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in options.methods:
        method, bits = name.split(":")
        setting = Setting.of(method, int(bits), options)
        measure(setting, name, setting.expected(), bandwidth, options)


if __name__ == "__main__":
    main()
