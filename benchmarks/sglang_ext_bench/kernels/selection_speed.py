"""Time the selection of the tokens that decode steps read, on a GPU: alone, and concurrently with steps.

    sglang-ext-bench selection-speed --scratch-mb 64 256 1024 --every 1 2 4 --select-by current regressed --priority 0 -1

The shapes are those of Qwen3-8B, with scattered slots. If the GPU cannot hold all layers, the command uses as many as fit and prints
their number. It prints:

1. Selections alone, by keys of 16, 8 and 4 bits, query predictor and scratch memory. "of the limit" is the time over the time in which
   the GPU reads the scored keys. "host" is the launch time. For quantized keys, the time to quantize the keys of a step and of a prompt.
2. A step without a selection. It multiplies by matrices of the model's shapes and attends through pointers. For comparison, a step on
   the full KV, with FlashInfer.
3. Steps with selections on a second stream, as --kv-compressor spade runs them. --every 2 selects for half of the requests in each step.
4. Quest, which selects pages of 16 tokens in each layer of each step (--kv-compressor quest). The limit counts the extremes of its pages.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from sglang_ext.device import SideStream
from sglang_ext.layers.attention.per_head import pointer_split_counts
from sglang_ext.layers.kernels.per_head_decode import pointer_decode
from sglang_ext.layers.kernels.select_tokens import SelectionContexts
from sglang_ext.layers.kernels.quest_pages import QUEST_GRIDS, QuestGrid, point_at_best_pages
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressed.key_derived_data import SlotCodes
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector
from sglang_ext.mem_cache.selection.predictors import query_predictor
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, SCORE_BITS, KeySpec
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.flashinfer_decode import plan_decode
from sglang_ext_bench.kernels.options import add_list, add_sizes, check_sizes, require_gpu
from sglang_ext_bench.kernels.timing import graph_seconds
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.speed.decode_limit import measure_bandwidth

OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}
# Weights of a layer of Qwen3-8B: QKV projection, output projection, gate and up projection, down projection.
MATRICES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
WEIGHT_BYTES = 2 * sum(rows * columns for rows, columns in MATRICES)
# Tokens of a prompt chunk, and stored queries of a request.
CHUNK, WINDOW = 8192, 17
# First and newest tokens that are always selected.
ALWAYS = (4, 32)
# Tokens of a page of Quest; spare tokens of its rows.
PAGE, SPARE_TOKENS = Quest.page, 8192
# Steps of a measurement with concurrent selections; launches of a measurement of selections alone.
STEPS, LAUNCHES = 32, 7
# Free bytes beside KV, weights and scratch.
SPARE_BYTES = 3 << 30
SIZES = {
    "batch": (16, "requests"), "tokens": (32768, "tokens of a context, a multiple of a page"), "keep": (2048, "tokens that a KV head selects"),
    "layers": (36, "layers"), "kv-heads": (8, "KV heads"), "group": (4, "query heads of a KV head"), "dim": (128, "channels of a head"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_list(parser, "--scratch-mb", (64, 256, 1024), "scratch memory of a selection, MiB", type=int)
    add_list(parser, "--every", (1, 2, 4), "steps between two selections of a request", type=int)
    add_list(parser, "--priority", (0,), "priority of the steps' kernels: 0 equal to selections, -1 before them", type=int, choices=(0, -1))
    predictors = ("current", "regressed")
    add_list(parser, "--select-by", predictors, "query predictors", choices=predictors)
    add_sizes(parser, SIZES)


def run(args: argparse.Namespace) -> int:
    """Measure selections alone, then concurrently with steps, then Quest.

    Raises:
        CommandError: An option is out of range, there is no GPU, or it is too small for a layer.
    """
    check_sizes(args, SIZES)
    check_counts({"--scratch-mb": min(args.scratch_mb), "--every": min(args.every)})
    if args.tokens % PAGE or args.keep > args.tokens:
        raise CommandError(f"--tokens {args.tokens}: pass a multiple of {PAGE}, at least --keep {args.keep}")
    if max(args.every) > args.batch:
        raise CommandError(f"--every {max(args.every)}: pass at most --batch {args.batch}")
    require_gpu()
    fitting = fitting_layers(args, torch.cuda.mem_get_info()[0])
    if not fitting:
        raise CommandError(f"{torch.cuda.get_device_name()} has too little free memory for a layer: pass a smaller --batch or --tokens")
    if fitting < args.layers:
        print(f"{fitting} of {args.layers} layers, which fit this GPU; all times are for these", flush=True)
    args.layers = fitting
    bandwidth = measure_bandwidth()
    key_seconds = args.layers * args.batch * args.tokens * args.kv_heads * args.dim * 2 / bandwidth
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s; keys {1e3 * key_seconds:.2f} ms, Quest's {2e3 * key_seconds / PAGE:.2f} ms", flush=True)
    batch = SparseBatch(args)
    for bits in SCORE_BITS:
        for line in selections_alone(batch, bandwidth, bits):
            print(line, flush=True)
    weights = graph_seconds(batch.multiply_all)
    print(f"weights: {1e3 * weights:.2f} ms, {weights * bandwidth / (args.layers * WEIGHT_BYTES):.2f} of their bytes' limit", flush=True)
    full, sparse = graph_seconds(batch.full_step()), graph_seconds(batch.sparse_step)
    print(f"a step: full KV {1e3 * full:.2f} ms, through pointers {1e3 * sparse:.2f} ms, {sparse / full:.2f} of it", flush=True)
    for select_by in args.select_by:
        for every in args.every:
            for priority in args.priority:
                took = concurrent_step(batch, select_by, args.scratch_mb[-1] << 20, every, priority)
                share = f"{1e3 * took:.2f} ms a step, {took / full:.2f} of full KV's"
                print(f"{select_by}, every {every}, steps of priority {priority}: {share}", flush=True)
    measure_quest(batch, 2 * key_seconds / PAGE, full)
    return 0


def measure_quest(batch: "SparseBatch", limit: float, full: float) -> None:
    """Print times of Quest's extremes, its selection by division into programs, and a step with the fastest one.

    Args:
        batch: The requests. Their compressed KV holds Quest's pointers afterwards.
        limit: Seconds in which the GPU reads the extremes.
        full: Seconds of a step on the full KV.
    """
    extremes = PageExtremes(batch.buffers.keys, batch.buffers.layer_ids, PAGE)
    slots = torch.randperm(len(batch.buffers.keys[0]) // PAGE * PAGE, device="cuda")[: batch.args.batch]
    step, chunk = (1e3 * graph_seconds(lambda: extremes.write(some)) for some in (slots, torch.arange(CHUNK, device="cuda")))
    print(f"extremes of pages: {step:.3f} ms a step, {chunk:.2f} ms for {CHUNK} tokens of prompts", flush=True)
    (select, arrived), times = batch.quest(extremes), {}
    for grid in QUEST_GRIDS:
        times[grid] = took = graph_seconds(lambda: [select(layer, grid) for layer in range(batch.args.layers)])
        print(f"Quest's selection, {grid}: {1e3 * took:.2f} ms, {took / limit:.2f} of its bytes' limit", flush=True)
    best = min(times, key=times.get)
    took = graph_seconds(lambda: batch.sparse_step(lambda layer: select(layer, best), arrived))
    print(f"Quest, {best}: {1e3 * took:.2f} ms a step, {took / full:.2f} of full KV's", flush=True)


def num_slots(args: argparse.Namespace) -> int:
    """Slots of the pool: contexts, and two sets of pointers for each request."""
    return args.batch * (args.tokens + 2 * args.keep) + 1


def fitting_layers(args: argparse.Namespace, free: int) -> int:
    """Return how many layers fit into ``free`` bytes with their KV, quantized keys and weights, at most ``--layers``."""
    most_bits = max(bits for bits in SCORE_BITS if bits != EXACT)
    kv, codes = (KeySpec(1, args.kv_heads, args.dim, torch.bfloat16, *more).token_bytes for more in ((EXACT, True), (most_bits,)))
    layer_bytes = num_slots(args) * (kv + codes) + WEIGHT_BYTES
    return min(args.layers, max(0, free - (max(args.scratch_mb) << 20) - SPARE_BYTES) // layer_bytes)


class SparseBatch:
    """Requests whose compressed KV consists of pointers, and the weights of a model.

    Args:
        args: Options of the command.

    Attributes:
        args: Options of the command.
        buffers: Keys and values of each layer.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        slots, batch = num_slots(args), args.batch
        keys, values = (tuple(torch.randn(slots, args.kv_heads, args.dim, **OPTIONS) for _ in range(args.layers)) for _ in "kv")
        self.buffers = KVBuffers(tuple(range(args.layers)), (args.dim**-0.5,) * args.layers, keys, values)
        self._pointers = Pointers.for_pool(self.buffers, 1)
        self._num_held = self._pointers.packed_slots(args.keep)
        order = 1 + torch.randperm(slots - 1, device="cuda")
        contexts, rest = order[: batch * args.tokens].view(batch, -1), order[batch * args.tokens :]
        held, self._spare = rest[: 2 * batch * self._num_held].view(2, batch, -1)
        # The first half has the contexts, the second half the slots with pointers.
        self._table = torch.zeros(2 * batch, args.tokens, dtype=torch.int32, device="cuda")
        self._table[:batch], self._table[batch:, : self._num_held] = contexts, held
        self._draft_rows = torch.arange(batch, 2 * batch, device="cuda")
        self._lengths = torch.full_like(self._draft_rows, self._num_held + 1)
        self._layout = PointerLayout.for_table(self._pointers, self._table)
        self._layout.counts[batch:] = args.keep
        kept = torch.rand(args.layers, args.kv_heads, args.tokens, device="cuda").topk(args.keep).indices
        for context, slots_of_request in zip(contexts, held):
            self._pointers.write(self.buffers, kept, context, slots_of_request)
        self._query_heads = args.kv_heads * args.group
        self._queries = torch.randn(batch, args.layers, self._query_heads, WINDOW, args.dim, **OPTIONS)
        self._positions = (args.tokens - WINDOW + torch.arange(WINDOW, device="cuda")).expand(batch, -1)
        self._step_queries = self._queries[:, 0, :, 0].contiguous()
        self._weights = [[torch.randn(shape, **OPTIONS) for shape in MATRICES] for _ in range(args.layers)]
        self._inputs = {width: torch.randn(batch, width, **OPTIONS) for width, _ in MATRICES}

    def multiply(self, layer: int) -> None:
        """Multiply by the weights of a layer."""
        for matrix in self._weights[layer]:
            _ = self._inputs[len(matrix)] @ matrix

    def multiply_all(self) -> None:
        """Multiply by the weights of all layers."""
        for layer in range(self.args.layers):
            self.multiply(layer)

    def selection(
        self, select_by: str, scratch: int, requests: slice = slice(None), buffers: KVBuffers | None = None
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Return a selection in all layers, and the tensors that only the selection reads.

        Args:
            select_by: Name of the query predictor.
            scratch: Bytes of scratch memory.
            requests: Requests to select for. Their pointers are written to spare slots.
            buffers: Keys to score; None for the exact keys.
        """
        predictor, args = query_predictor(select_by), self.args
        rotary = Rotary(1e6 ** -(torch.arange(args.dim // 2, device="cuda") / (args.dim // 2)))
        selector = GpuSelector(predictor, buffers or self.buffers, self._query_heads, rotary, scratch)
        rows = range(args.batch)[requests]
        numbers = torch.tensor([[row, args.tokens, args.keep, i * self._num_held] for i, row in enumerate(rows)], device="cuda")
        contexts = SelectionContexts(self._table, numbers, (args.tokens,) * len(rows), ALWAYS, self._spare[requests].flatten())
        window = slice(WINDOW - predictor.window, WINDOW)
        positions, queries = self._positions[requests, window], self._queries[requests]
        own = contexts.numbers, contexts.targets, rotary.frequencies
        return lambda: selector.choose(contexts, lambda some, layers: queries[some, layers, :, window], positions), own

    def sparse_step(self, select: Callable[[int], object] | None = None, arrived: torch.Tensor | None = None) -> None:
        """Run a step: weights, and attention through pointers.

        Args:
            select: Selects tokens in a layer, before its attention.
            arrived: Heads whose selection is complete, as in :meth:`quest`.
        """
        splits = pointer_split_counts(self.args.batch * self.args.kv_heads)
        for layer, (keys, values) in enumerate(zip(self.buffers.keys, self.buffers.values)):
            self.multiply(layer)
            bounds = select and select(layer)
            rows = self._table, self._draft_rows, self._lengths
            pointer_decode(self._layout, self._step_queries, keys, values, *rows, self.buffers.scaling[layer], splits, arrived)
            # The selection uses this memory while the attention starts.
            del bounds

    def full_step(self) -> Callable[[], None]:
        """Return a step on the full KV: weights, and FlashInfer's attention to all tokens."""
        attend = plan_decode(self.buffers, self._table[: self.args.batch], self._query_heads)

        def step() -> None:
            for layer in range(self.args.layers):
                self.multiply(layer)
                attend(layer, self._step_queries)

        return step

    def quest(self, extremes: PageExtremes) -> tuple[Callable[[int, QuestGrid], object], torch.Tensor]:
        """Return Quest's selection in a layer for all requests, and a tensor that marks the heads that have selected.

        Contexts are random whole pages of the pool, except pages with pointers.

        Args:
            extremes: Extremes of the pool's pages. They are written.
        """
        args, batch, keys = self.args, self.args.batch, self.buffers.keys
        held = self._table[batch:, : self._num_held]
        unused = torch.ones(len(keys[0]) // PAGE, dtype=torch.bool, device="cuda")
        unused[torch.cat([held.flatten().long(), self._spare.flatten()]).clamp(max=len(unused) * PAGE - 1) // PAGE] = False
        pages = unused.nonzero().flatten().int()
        pages = pages[torch.randperm(len(pages), device="cuda")[: batch * args.tokens // PAGE]].view(batch, -1)
        table = torch.zeros(2 * batch, args.tokens + SPARE_TOKENS, dtype=torch.int32, device="cuda")
        table[:batch, : args.tokens] = (pages[..., None] * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)
        table[batch:, : self._num_held] = held
        layout = PagePointerLayout.of_pool(self._pointers, table, extremes, Quest(in_attention=True))
        layout.counts[batch:], layout.pages[batch:] = args.keep, args.tokens // PAGE
        extremes.write(torch.arange(0, len(unused) * PAGE, PAGE, device="cuda"))

        def select(layer: int, grid: QuestGrid) -> object:
            cells, rows = as_pointers(keys[layer]), (table, self._draft_rows, self._lengths)
            return point_at_best_pages(layout, layer, self._step_queries, cells, *rows, grid)

        return select, layout.finished_parts


def selections_alone(batch: SparseBatch, bandwidth: float, bits: int) -> Iterator[str]:
    """Yield a line per query predictor and scratch size, for keys of ``bits`` bits; ``bandwidth`` is in bytes per second."""
    args, buffers = batch.args, batch.buffers
    spec = KeySpec(args.layers, args.kv_heads, args.dim, torch.bfloat16, bits)
    limit = spec.token_bytes * args.batch * args.tokens / bandwidth
    if bits != EXACT:
        codes = SlotCodes(buffers.keys, buffers.layer_ids, bits)
        codes.write(torch.arange(len(buffers.keys[0]), device="cuda"))
        slots = torch.randperm(len(buffers.keys[0]), device="cuda")
        step, chunk = (1e3 * graph_seconds(lambda: codes.write(some)) for some in (slots[: args.batch], slots[:CHUNK]))
        yield f"coding in {bits} bits: {step:.3f} ms a step, {chunk:.2f} ms for {CHUNK} tokens of prompts"
        buffers = replace(buffers, codes=codes.held)
    for select_by in args.select_by:
        for scratch in args.scratch_mb:
            took, on_host = launch_seconds(batch.selection(select_by, scratch << 20, buffers=buffers)[0])
            times = f"{1e3 * took:.2f} ms, {took / limit:.2f} of the limit, {1e3 * limit:.2f} ms; host {1e3 * on_host:.2f} ms"
            yield f"{bits} bits, {select_by}, scratch {scratch} MB: {times}"


def launch_seconds(run: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of a call that launches kernel by kernel: on the device, and of the launches on the host."""
    run()
    on_device, on_host = [], []
    for _ in range(LAUNCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = perf_counter()
        begin.record()
        run()
        end.record()
        on_host.append(perf_counter() - started)
        end.synchronize()
        on_device.append(begin.elapsed_time(end) / 1000)
    return median(on_device), median(on_host)


def concurrent_step(batch: SparseBatch, select_by: str, scratch: int, every: int, priority: int) -> float:
    """Return the seconds of a step while selections run on a second stream.

    Args:
        batch: The requests.
        select_by: Name of the query predictor.
        scratch: Bytes of scratch memory.
        every: Steps between two selections of a request.
        priority: Priority of the steps' stream; kernels of a stream below 0 run before those of selections.
    """
    graph, side = torch.cuda.CUDAGraph(), SideStream(torch.device("cuda"))
    batch.sparse_step()
    torch.cuda.synchronize()
    # Kernels of a graph have the priority of the stream that captures it.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=priority)):
        batch.sparse_step()
    shares = [batch.selection(select_by, scratch, slice(part, None, every)) for part in range(every)]

    def steps() -> None:
        running: list[torch.cuda.Event | None] = [None] * every
        for step in range(STEPS):
            graph.replay()
            # Wait for the previous selection of the same requests.
            side.wait(running[step % every])
            running[step % every] = side.launch(*shares[step % every])
        # The next measurement writes what these selections read.
        for event in running:
            side.wait(event)

    return launch_seconds(steps)[0] / STEPS
