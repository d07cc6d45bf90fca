"""Decode attention over copies of uneven heads, on a GPU: time, and bytes over bandwidth: docs/benchmarks.md.

    sglang-ext-bench uneven-kernel [--spread 0 0.5 1 1.5] [--splits 16,4 32,2]

All layers of one step, in a CUDA graph; slots are scattered one by one. A head's share is e^(spread * normal noise), so that
0 has all heads keep the same; no head keeps more than all tokens. FlashInfer's decode kernel reads copies of equal heads.
"""

import argparse

import torch
from sglang_ext_bench.kernels.graph_time import needs_gpu, seconds

from sglang_ext.layers.kernels.ragged_decode import ragged_decode
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext_bench.speed.decode_limit import measure_bandwidth


def shares(options: argparse.Namespace, spread: float) -> torch.Tensor:
    """Bounds of the heads' cells: int32 [heads of all layers + 1]."""
    heads, kept = options.layers * options.kv_heads, int(options.tokens * options.budget)
    noise = torch.randn(heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = (spread * noise).exp()
    counts = weights / weights.sum() * heads * kept
    for _ in range(20):
        # What is above all tokens goes to the others.
        counts = counts.clamp(max=options.tokens)
        counts += (counts < options.tokens) * counts * (heads * kept - counts.sum()) / counts[counts < options.tokens].sum()
    bounds = torch.cat([torch.zeros(1), counts.cumsum(0)]).round().int()
    bounds[-1] = heads * kept
    return bounds


def main() -> None:
    """FlashInfer once, then every spread and number of parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spread", nargs="+", type=float, default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--splits", nargs="+", default=["16,4"], help="of what a head keeps, and of the tokens after the copy")
    parser.add_argument("--budget", type=float, default=0.25)
    sizes = {"batch": 16, "tokens": 30720, "tail": 128, "layers": 36, "kv-heads": 8, "group": 4, "dim": 128}
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    needs_gpu(parser)
    # A package that machines without a GPU lack: they have --help all the same.
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    kept, batch, heads, dim = int(options.tokens * options.budget), options.batch, options.kv_heads, options.dim
    width, like = kept + options.tail, {"dtype": torch.bfloat16, "device": "cuda"}
    keys, values = (tuple(torch.randn(batch * width, heads, dim, **like) for _ in range(options.layers)) for _ in "kv")
    buffers = KVBuffers(tuple(range(options.layers)), (dim**-0.5,) * options.layers, keys, values)
    table = torch.randperm(batch * width, device="cuda").int().view(batch, width)
    rows, queries = torch.arange(batch, device="cuda"), torch.randn(batch, heads * options.group, dim, **like)
    lengths = torch.full_like(rows, width)
    bandwidth = measure_bandwidth()
    limit = options.layers * batch * width * heads * dim * 4 / bandwidth * 1e3
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s, limit {limit:.2f} ms", flush=True)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * width
    last = torch.ones(batch, dtype=torch.int32, device="cuda")
    shape, dtypes = (heads * options.group, heads, dim, 1), {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(ends, table.flatten(), last, *shape, **dtypes)
    pools = [(key.unsqueeze(1), value.unsqueeze(1)) for key, value in zip(keys, values)]
    took = 1e3 * seconds(lambda: [wrapper.run(queries, pool) for pool in pools])
    print(f"FlashInfer, equal heads: {took:.2f} ms, {took / limit:.2f} of the limit", flush=True)
    for spread in options.spread:
        cells = RaggedHeadLayout.of(buffers, batch)
        cells.bounds[:] = shares(options, spread).cuda()
        counts = cells.bounds[0].diff().float()
        of_layers = counts.view(options.layers, -1).sum(1)
        most, least, layer = counts.max() / kept, counts.min() / kept, of_layers.max() / of_layers.mean()
        print(f"spread {spread}: a head keeps {least:.2f} to {most:.1f} of the mean, a layer up to {layer:.1f}")
        for splits in options.splits:
            parts = tuple(map(int, splits.split(",")))

            def step(parts=parts, cells=cells):
                for layer in range(options.layers):
                    ragged_decode(cells, layer, queries, table, rows, lengths, dim**-0.5, parts)

            took = 1e3 * seconds(step)
            print(f"  parts {splits}: {took:.2f} ms, {took / limit:.2f} of the limit", flush=True)


if __name__ == "__main__":
    main()
