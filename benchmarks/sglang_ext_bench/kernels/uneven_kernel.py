"""Time decode attention over compressed KV whose heads keep different numbers of tokens, on a GPU.

    sglang-ext-bench uneven-kernel --spread 0 0.5 1 1.5 --splits 28,4

The layers of one step run in a CUDA graph, over scattered slots. A head's share of the budget is drawn as e^(spread * normal noise), so
that with spread 0 all heads keep the same number. No head keeps more than all tokens. FlashInfer's decode kernel reads equal heads for
comparison. The command prints one line per spread and number of splits:

    ms              milliseconds of all layers
    of the limit    the same over the time in which the GPU reads all keys and values
"""

import argparse
from collections.abc import Callable

import torch

from sglang_ext.layers.kernels.per_head_decode import ragged_decode
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.flashinfer_decode import plan_decode
from sglang_ext_bench.kernels.options import (
    add_list,
    add_sizes,
    check_sizes,
    parse_group,
    positive_int,
    require_gpu,
)
from sglang_ext_bench.kernels.timing import graph_seconds
from sglang_ext_bench.options import check_budgets
from sglang_ext_bench.speed.decode_limit import measure_bandwidth

SIZES = {
    "batch": (16, "requests"), "tokens": (30720, "tokens of a request"), "tail": (128, "exact tokens after the kept ones"),
    "layers": (36, "layers"), "kv-heads": (8, "KV heads"), "group": (4, "query heads of a KV head"), "dim": (128, "channels of a head"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_list(parser, "--spread", (0.0, 0.5, 1.0, 1.5), "spreads of the shares, from 0", type=float)
    add_list(parser, "--splits", ("16,4",), "splits of the kept tokens and of the tail", metavar="KEPT,TAIL")
    budget = "share of the tokens that heads keep on average (default: %(default)s)"
    parser.add_argument("--budget", type=float, default=0.25, help=budget)
    add_sizes(parser, SIZES)


def run(args: argparse.Namespace) -> int:
    """Measure FlashInfer once, then each spread and number of splits.

    Raises:
        CommandError: An option is out of range, or there is no GPU.
    """
    check_sizes(args, SIZES)
    check_budgets([args.budget])
    if min(args.spread) < 0:
        raise CommandError(f"--spread {min(args.spread):g}: pass numbers from 0")
    splits = [parse_group(text, "--splits", {"kept": positive_int, "tail": positive_int}) for text in args.splits]
    require_gpu()
    kept, batch, heads, dim = int(args.tokens * args.budget), args.batch, args.kv_heads, args.dim
    width, options = kept + args.tail, {"dtype": torch.bfloat16, "device": "cuda"}
    keys, values = (tuple(torch.randn(batch * width, heads, dim, **options) for _ in range(args.layers)) for _ in "kv")
    buffers = KVBuffers(tuple(range(args.layers)), (dim**-0.5,) * args.layers, keys, values)
    table = torch.randperm(batch * width, device="cuda").int().view(batch, width)
    queries = torch.randn(batch, heads * args.group, dim, **options)
    bandwidth = measure_bandwidth()
    limit = args.layers * batch * width * heads * dim * 4 / bandwidth * 1e3
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s, limit {limit:.2f} ms", flush=True)
    attend = plan_decode(buffers, table, queries.shape[1])
    took = 1e3 * graph_seconds(lambda: [attend(layer, queries) for layer in range(args.layers)])
    print(f"FlashInfer, equal heads: {took:.2f} ms, {took / limit:.2f} of the limit", flush=True)
    for spread in args.spread:
        layout = RaggedHeadLayout.of(buffers, batch)
        layout.bounds[:] = head_bounds(args, spread).cuda()
        counts = layout.bounds[0].diff().float()
        layer_counts = counts.view(args.layers, -1).sum(1)
        most, least, layer = counts.max() / kept, counts.min() / kept, layer_counts.max() / layer_counts.mean()
        print(f"spread {spread}: a head keeps {least:.2f} to {most:.1f} of the mean, a layer up to {layer:.1f}")
        for each in splits:
            took = 1e3 * graph_seconds(ragged_step(layout, buffers, table, queries, each))
            print(f"  parts {each[0]},{each[1]}: {took:.2f} ms, {took / limit:.2f} of the limit", flush=True)
    return 0


def head_bounds(args: argparse.Namespace, spread: float) -> torch.Tensor:
    """Return the bounds of the heads' cells in a request, int32 [heads of all layers + 1]."""
    heads, kept = args.layers * args.kv_heads, int(args.tokens * args.budget)
    noise = torch.randn(heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = (spread * noise).exp()
    counts = weights / weights.sum() * heads * kept
    for _ in range(20):
        # Tokens that a head cannot keep go to the other heads.
        counts = counts.clamp(max=args.tokens)
        below = counts < args.tokens
        if below.any():
            counts += below * counts * (heads * kept - counts.sum()) / counts[below].sum()
    bounds = torch.cat([torch.zeros(1), counts.cumsum(0)]).round().int()
    bounds[-1] = heads * kept
    return bounds


def ragged_step(
    layout: RaggedHeadLayout, buffers: KVBuffers, table: torch.Tensor, queries: torch.Tensor, splits: tuple[int, int]
) -> Callable[[], None]:
    """Return a call of the ragged kernel in each layer.

    Args:
        layout: Numbers of tokens that each head keeps.
        buffers: Keys and values of each layer, [slots, kv_heads, dim].
        table: Slots of each request, int32 [batch, slots of a request].
        queries: [batch, heads, dim].
        splits: Splits of the kept tokens and of the tail.
    """
    rows = torch.arange(len(table), device="cuda")
    lengths = torch.full_like(rows, table.shape[1])

    def step() -> None:
        for layer, scaling in enumerate(buffers.scaling):
            ragged_decode(layout, layer, queries, table, rows, lengths, scaling, splits)

    return step
