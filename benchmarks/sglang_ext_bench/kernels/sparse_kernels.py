"""A layer's attention through pointers, by parts of a row, and Quest's choice of pages, alone and what it adds to the attention that
follows it, over their bytes: docs/results/longcot.md.

    sglang-ext-bench sparse-kernels [--batch 8 16] [--tokens 32768] [--keep 2048] [--after 36]

8 KV heads of 128 channels, 4 query heads each, bfloat16, slots and pages scattered. In CUDA graphs of several layers, so that no layer
finds in a cache what the one before has read. Bytes are divided by what a sum of 4 GiB reads a second.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from sglang_ext_bench.kernels.graph_time import needs_gpu

from sglang_ext.layers.attention.compressed.per_head import pointer_split_counts
from sglang_ext.layers.kernels.pointer_decode import pointer_decode
from sglang_ext.layers.kernels.selection.quest_pages import (
    QUEST_GRIDS,
    QuestGrid,
    point_at_best_pages,
)
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout
from sglang_ext.mem_cache.compressed.layouts.pointers import (
    PointerLayout,
    Pointers,
    as_pointers,
)
from sglang_ext.mem_cache.compressed.page_extremes import PageExtremes
from sglang_ext.mem_cache.compressors.each_step.quest import Quest

HEADS, GROUP, DIM, PAGE = 8, 4, 128, Quest.scoring.page
LAYERS, REPEATS = 6, 5
PARTS = ((4, 4), (7, 1), (12, 4), (15, 1), (28, 4))


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS / 1e3


def in_graph(run: Callable[[], object]) -> float:
    """Seconds of a replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return timed(graph.replay)


def read_rate() -> float:
    """Bytes a second."""
    numbers = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    return numbers.nbytes / timed(numbers.sum)


def pointers(options: argparse.Namespace, batch: int, rate: float) -> None:
    """Print times of attention through pointers."""
    held = Pointers.for_pool(_buffers(1, 1), 1).packed_slots(options.keep)
    buffers = _buffers(batch * (options.tokens + held + options.after) + 1, LAYERS)
    form = Pointers.for_pool(buffers, 1)
    order = 1 + torch.randperm(len(buffers.keys[0]) - 1, device="cuda")
    contexts, copies, after = order.split([batch * options.tokens, batch * held, batch * options.after])
    table = torch.zeros(batch, options.tokens, dtype=torch.int32, device="cuda")
    table[:, :held], table[:, held : held + options.after] = copies.view(batch, -1), after.view(batch, -1)
    begins = PointerLayout.for_table(form, table)
    begins.counts[:] = options.keep
    for context, copy in zip(contexts.view(batch, -1), copies.view(batch, -1)):
        form.write(buffers, torch.rand(LAYERS, HEADS, options.tokens, device="cuda").topk(options.keep).indices, context, copy)
    queries = torch.randn(batch, HEADS * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, device="cuda")
    lengths = torch.full_like(rows, held + options.after)
    ideal = batch * HEADS * (options.keep + options.after) * 2 * DIM * 2 / rate
    for parts in PARTS:

        def layers(parts: tuple[int, int] = parts) -> None:
            for keys, values in zip(buffers.keys, buffers.values):
                pointer_decode(begins, queries, keys, values, table, rows, lengths, DIM**-0.5, parts)

        took = in_graph(layers) / LAYERS
        chosen = ", as servers cut them" if parts == pointer_split_counts(batch * HEADS) else ""
        print(f"batch {batch}, parts {parts}: {took * 1e6:.1f} us, {took / ideal:.2f} of its bytes{chosen}", flush=True)


def quest(options: argparse.Namespace, batch: int, rate: float) -> None:
    """Print times of Quest's choice: alone, and what it adds to the attention through what it chose, which begins while the last heads
    choose."""
    held = Pointers.for_pool(_buffers(1, 1), PAGE).packed_slots(options.keep)
    buffers = _buffers(batch * (options.tokens + held), LAYERS)
    extremes = PageExtremes(buffers.keys, buffers.layer_ids, PAGE)
    extremes.write(torch.arange(0, batch * options.tokens, PAGE, device="cuda"))
    # Room for longer contexts, as rows of servers have it.
    table = torch.zeros(2 * batch, options.tokens + 8192, dtype=torch.int32, device="cuda")
    pages = torch.randperm(batch * options.tokens // PAGE, device="cuda").view(batch, -1, 1)
    table[:batch, : options.tokens] = (pages * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)
    table[batch:, :held] = (batch * options.tokens + torch.randperm(batch * held, device="cuda")).view(batch, -1)
    begins = PagePointerLayout.of_pool(Pointers.for_pool(buffers, PAGE), table, extremes, Quest(in_attention=True))
    begins.counts[batch:], begins.pages[batch:] = options.keep, options.tokens // PAGE
    queries = torch.randn(batch, HEADS * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, 2 * batch, device="cuda")
    lengths = torch.full_like(rows, held + options.after)

    ideal = batch * options.tokens // PAGE * HEADS * 2 * DIM * 2 / rate
    parts = pointer_split_counts(batch * HEADS)

    def layers(cut: QuestGrid | None, attends: bool) -> None:
        for layer, (keys, values) in enumerate(zip(buffers.keys, buffers.values)):
            bounds = cut and point_at_best_pages(begins, layer, queries, as_pointers(keys), table, rows, lengths, cut)
            if attends:
                arrived = None if bounds is None else begins.finished_parts
                pointer_decode(begins, queries, keys, values, table, rows, lengths, DIM**-0.5, parts, arrived)
            del bounds

    layers(QUEST_GRIDS[0], False)
    # Attention without a choice looks up what this writes before it waits for anything.
    torch.cuda.synchronize()
    attention = in_graph(lambda: layers(None, True)) / LAYERS
    print(f"batch {batch}, attention through what Quest chose: {attention * 1e6:.1f} us", flush=True)
    for cut in QUEST_GRIDS:
        alone, both = (in_graph(partial(layers, cut, attends)) / LAYERS for attends in (False, True))
        found = {"alone": alone, "adds": both - attention}
        told = (f"{name} {took * 1e6:.1f} us, {took / ideal:.2f} of its bytes" for name, took in found.items())
        chosen = ", as servers cut them" if cut == QUEST_GRIDS[0] else ""
        print(f"batch {batch}, Quest, {cut}: {'; '.join(told)}{chosen}", flush=True)


def _buffers(slots: int, layers: int) -> KVBuffers:
    keys, values = (
        tuple(torch.randn(slots, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(layers)) for _ in "kv"
    )
    return KVBuffers(tuple(range(layers)), (DIM**-0.5,) * layers, keys, values)


def main() -> None:
    """Measure by the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 16])
    for name, default in (("tokens", 32768), ("keep", 2048), ("after", 36)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    needs_gpu(parser)
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}: reads {rate / 1e12:.2f} TB/s", flush=True)
    for batch in options.batch:
        pointers(options, batch, rate)
        quest(options, batch, rate)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
