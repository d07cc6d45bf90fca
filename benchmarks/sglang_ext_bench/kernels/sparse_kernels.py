"""Time attention through pointers and Quest's page selection of one layer on a GPU.

    sglang-ext-bench sparse-kernels --batch 8 16 --tokens 32768 --keep 2048 --after 36

8 KV heads of 128 channels with 4 query heads each, bfloat16, scattered slots and pages. The kernels of several layers run in a CUDA
graph, so that no layer finds its data in the GPU's cache. All times are those of one layer. The command prints, per batch:

    parts               attention through pointers, by splits of the pointers and of the tokens after them
    Quest, alone        the selection of pages, by division of the work into programs
    Quest, adds         time that the selection adds to the attention, which starts while the last heads select
    of its bytes        time over the time in which the GPU reads the bytes

Servers use the lines that end with "as in servers".
"""

import argparse
from functools import partial

import torch

from sglang_ext.layers.attention.per_head import pointer_split_counts
from sglang_ext.layers.kernels.per_head_decode import pointer_decode
from sglang_ext.layers.kernels.quest_pages import QUEST_GRIDS, QuestGrid, point_at_best_pages
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.options import add_list, add_sizes, check_sizes, require_gpu
from sglang_ext_bench.kernels.timing import graph_seconds
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.speed.decode_limit import measure_bandwidth

HEADS, GROUP, DIM, PAGE = 8, 4, 128, Quest.page
SCALING = DIM**-0.5
# Layers of the graph, and how many times the graph runs them.
LAYERS, CALLS = 6, 5
SPLITS = ((4, 4), (7, 1), (12, 4), (15, 1), (28, 4))
# Tokens of a row beyond the context, as rows of servers have them.
SPARE_TOKENS = 8192
SIZES = {
    "tokens": (32768, f"tokens of a context, a multiple of {PAGE}"), "keep": (2048, "tokens that a KV head selects"),
    "after": (36, "exact tokens after the selected ones"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_list(parser, "--batch", (8, 16), "requests", type=int)
    add_sizes(parser, SIZES)


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure each batch.

    Raises:
        CommandError: An option is out of range, or there is no GPU.
    """
    check_counts({"--batch": min(args.batch)})
    check_sizes(args, SIZES)
    if args.tokens % PAGE or args.tokens < args.keep + args.after:
        raise CommandError(f"--tokens {args.tokens}: pass a multiple of {PAGE}, at least --keep {args.keep} and --after {args.after} together")
    require_gpu()
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    for batch in args.batch:
        time_pointers(args, batch, bandwidth)
        time_quest(args, batch, bandwidth)
    return 0


def time_pointers(args: argparse.Namespace, batch: int, bandwidth: float) -> None:
    """Print the time of attention through pointers, for each number of splits. ``bandwidth`` is in bytes per second."""
    num_held = Pointers.for_pool(random_buffers(1, 1), 1).packed_slots(args.keep)
    buffers = random_buffers(batch * (args.tokens + num_held + args.after) + 1, LAYERS)
    pointers = Pointers.for_pool(buffers, 1)
    order = 1 + torch.randperm(len(buffers.keys[0]) - 1, device="cuda")
    contexts, held, after = order.split([batch * args.tokens, batch * num_held, batch * args.after])
    table = torch.zeros(batch, args.tokens, dtype=torch.int32, device="cuda")
    table[:, :num_held], table[:, num_held : num_held + args.after] = held.view(batch, -1), after.view(batch, -1)
    layout = PointerLayout.for_table(pointers, table)
    layout.counts[:] = args.keep
    for context, slots in zip(contexts.view(batch, -1), held.view(batch, -1)):
        kept = torch.rand(LAYERS, HEADS, args.tokens, device="cuda").topk(args.keep).indices
        pointers.write(buffers, kept, context, slots)
    queries = torch.randn(batch, HEADS * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, device="cuda")
    lengths = torch.full_like(rows, num_held + args.after)
    limit = batch * HEADS * (args.keep + args.after) * 2 * DIM * 2 / bandwidth
    for splits in SPLITS:

        def attend(splits: tuple[int, int] = splits) -> None:
            for keys, values in zip(buffers.keys, buffers.values):
                pointer_decode(layout, queries, keys, values, table, rows, lengths, SCALING, splits)

        took = graph_seconds(attend, CALLS) / LAYERS
        in_servers = ", as in servers" if splits == pointer_split_counts(batch * HEADS) else ""
        print(f"batch {batch}, parts {splits}: {took * 1e6:.1f} us, {took / limit:.2f} of its bytes{in_servers}", flush=True)


def time_quest(args: argparse.Namespace, batch: int, bandwidth: float) -> None:
    """Print the time of Quest's selection, for each division into programs: alone, and added to the attention that follows it.

    ``bandwidth`` is in bytes per second.
    """
    num_held = Pointers.for_pool(random_buffers(1, 1), PAGE).packed_slots(args.keep)
    buffers = random_buffers(batch * (args.tokens + num_held), LAYERS)
    extremes = PageExtremes(buffers.keys, buffers.layer_ids, PAGE)
    extremes.write(torch.arange(0, batch * args.tokens, PAGE, device="cuda"))
    table = torch.zeros(2 * batch, args.tokens + SPARE_TOKENS, dtype=torch.int32, device="cuda")
    pages = torch.randperm(batch * args.tokens // PAGE, device="cuda").view(batch, -1, 1)
    table[:batch, : args.tokens] = (pages * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)
    table[batch:, :num_held] = (batch * args.tokens + torch.randperm(batch * num_held, device="cuda")).view(batch, -1)
    layout = PagePointerLayout.of_pool(Pointers.for_pool(buffers, PAGE), table, extremes, Quest(in_attention=True))
    layout.counts[batch:], layout.pages[batch:] = args.keep, args.tokens // PAGE
    queries = torch.randn(batch, HEADS * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, 2 * batch, device="cuda")
    lengths = torch.full_like(rows, num_held + args.after)
    limit = batch * args.tokens // PAGE * HEADS * 2 * DIM * 2 / bandwidth
    splits = pointer_split_counts(batch * HEADS)

    def run_layers(grid: QuestGrid | None, attends: bool) -> None:
        for layer, (keys, values) in enumerate(zip(buffers.keys, buffers.values)):
            bounds = grid and point_at_best_pages(layout, layer, queries, as_pointers(keys), table, rows, lengths, grid)
            if attends:
                arrived = None if bounds is None else layout.finished_parts
                pointer_decode(layout, queries, keys, values, table, rows, lengths, SCALING, splits, arrived)
            # The selection uses this memory while the attention starts.
            del bounds

    # Write pointers, which attention without a selection reads.
    run_layers(QUEST_GRIDS[0], False)
    torch.cuda.synchronize()
    attention = graph_seconds(partial(run_layers, None, True), CALLS) / LAYERS
    print(f"batch {batch}, attention through Quest's selection: {attention * 1e6:.1f} us", flush=True)
    for grid in QUEST_GRIDS:
        alone, both = (graph_seconds(partial(run_layers, grid, attends), CALLS) / LAYERS for attends in (False, True))
        times = {"alone": alone, "adds": both - attention}
        parts = "; ".join(f"{name} {took * 1e6:.1f} us, {took / limit:.2f} of its bytes" for name, took in times.items())
        in_servers = ", as in servers" if grid == QUEST_GRIDS[0] else ""
        print(f"batch {batch}, Quest, {grid}: {parts}{in_servers}", flush=True)


def random_buffers(slots: int, layers: int) -> KVBuffers:
    """Create random keys and values, [slots, HEADS, DIM] in each layer."""
    keys, values = (
        tuple(torch.randn(slots, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(layers)) for _ in "kv"
    )
    return KVBuffers(tuple(range(layers)), (SCALING,) * layers, keys, values)
