"""Choosing the tokens of a step on a GPU: time, and bytes of keys over bandwidth; alone, and beside steps: docs/benchmarks.md.

    sglang-ext-bench selection-speed [--scratch-mb 64 256 1024] [--every 1 2 4] [--select-by current regressed] [--priority 0 -1]

Qwen3-8B shapes, slots scattered one by one. An H200 holds all 36 layers, an H100 those of --batch 8; else as many are taken as fit, of
which all times are then, as the first line says. Choices alone are told by keys as they are, and of 8 and 4 bits (--kv-score-bits), each
against its own bytes, with what it takes to code the keys of a step, and of a chunk of a prompt. A step multiplies by matrices of the
model's shapes, whose time is told beside that of their bytes, and attends through pointers; with full KV it attends by FlashInfer's
kernel.
Beside a step, the choice is on a second stream, as --kv-compressor spade makes it: of a share of the requests in each step, so that each
has one every so many. Quest scores pages of 16 tokens, scattered, by the largest and smallest number of each channel, an eighth of the
bytes, as --kv-compressor quest does, with a row of the token table for 8,192 tokens more than are there; in its step each layer chooses
before it attends, as its query has to be there. What brings extremes up to date after a step, and after a chunk of a prompt, is told, too.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from sglang_ext_bench.kernels.graph_time import needs_gpu, seconds

from sglang_ext.device import SideStream
from sglang_ext.layers.attention.compressed.per_head import pointer_split_counts
from sglang_ext.layers.kernels.pointer_decode import pointer_decode
from sglang_ext.layers.kernels.select_tokens import SelectionContexts
from sglang_ext.layers.kernels.selection.quest_pages import (
    QUEST_GRIDS,
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
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressed.slot_codes import SlotCodes
from sglang_ext.mem_cache.compressors.each_step.quest import Quest
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector
from sglang_ext.mem_cache.selection.predictors import query_predictor
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, SCORE_BITS, KeySpec
from sglang_ext_bench.speed.decode_limit import measure_bandwidth

LIKE = {"dtype": torch.bfloat16, "device": "cuda"}
# Of a layer of Qwen3-8B: queries, keys and values; what joins heads; both that widen, and the one that narrows.
MATRICES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
# Tokens of a chunk of a prompt.
PROMPT = 8192
# Tokens of a page of Quest, and for which there is room in a row beside those of its context; steps of a measurement beside choices.
PAGE, ROOM, STEPS = Quest.scoring.page, 8192, 32
# Bytes for what is made by the way, beside what choices work in.
SPARE = 3 << 30


def slots_of(options: argparse.Namespace) -> int:
    """Slots of the pool: so many pointers as are kept have room for each of two copies of a request."""
    return options.batch * (options.tokens + 2 * options.keep) + 1


def fitting_layers(options: argparse.Namespace, free: int) -> int:
    """Layers, at most those asked for, whose keys and values, codes of the former, and weights so many free bytes hold."""
    most = max(bits for bits in SCORE_BITS if bits != EXACT)
    kv, codes = (KeySpec(1, options.kv_heads, options.dim, torch.bfloat16, *more).token_bytes for more in ((EXACT, True), (most,)))
    layer = slots_of(options) * (kv + codes) + 2 * sum(rows * columns for rows, columns in MATRICES)
    return min(options.layers, max(0, free - (max(options.scratch_mb) << 20) - SPARE) // layer)


class World:
    """Contexts in a pool, copies of them that hold pointers, and what stands for a model's weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, dim, batch = options, options.dim, options.batch
        slots = slots_of(options)
        keys, values = (
            tuple(torch.randn(slots, options.kv_heads, dim, **LIKE) for _ in range(options.layers)) for _ in "kv"
        )
        self.buffers = KVBuffers(tuple(range(options.layers)), (dim**-0.5,) * options.layers, keys, values)
        self.form = Pointers.for_pool(self.buffers, 1)
        self.held = self.form.packed_slots(options.keep)
        order = 1 + torch.randperm(slots - 1, device="cuda")
        contexts, rest = order[: batch * options.tokens].view(batch, -1), order[batch * options.tokens :]
        copies = rest[: 2 * batch * self.held].view(2, batch, -1)
        self.table = torch.zeros(2 * batch, options.tokens, dtype=torch.int32, device="cuda")
        self.table[:batch], self.table[batch:, : self.held] = contexts, copies[0]
        self.begins, self.spare = PointerLayout.for_table(self.form, self.table), copies[1]
        self.begins.counts[batch:] = options.keep
        kept = torch.rand(options.layers, options.kv_heads, options.tokens, device="cuda").topk(options.keep).indices
        for context, held in zip(contexts, copies[0]):
            self.form.write(self.buffers, kept, context, held)
        self.queries = torch.randn(batch, options.layers, options.kv_heads * options.group, 17, dim, **LIKE)
        self.positions = (options.tokens - 17 + torch.arange(17, device="cuda")).expand(batch, -1)
        # What a step reads beside KV.
        self.weights = [[torch.randn(shape, **LIKE) for shape in MATRICES] for _ in range(options.layers)]
        self.inputs = {width: torch.randn(batch, width, **LIKE) for width, _ in MATRICES}
        self.attended = self.queries[:, 0, :, 0].contiguous()

    def multiply(self, layer: int) -> None:
        """Read the weights of a layer."""
        for matrix in self.weights[layer]:
            _ = self.inputs[len(matrix)] @ matrix

    def all_weights(self) -> None:
        """Read those of all layers."""
        for layer in range(self.options.layers):
            self.multiply(layer)

    def asked(self, requests: slice) -> SelectionContexts:
        """Some requests, whose pointers go to spare slots."""
        some, options = range(self.options.batch)[requests], self.options
        numbers = torch.tensor([[row, options.tokens, options.keep, i * self.held] for i, row in enumerate(some)], device="cuda")
        return SelectionContexts(self.table, numbers, (options.tokens,) * len(some), (4, 32), self.spare[requests].flatten())

    def codes(self, bits: int) -> SlotCodes:
        """Of all keys, in so many bits."""
        made = SlotCodes(self.buffers.keys, self.buffers.layer_ids, bits)
        made.write(torch.arange(len(self.buffers.keys[0]), device="cuda"))
        return made

    def choosing(
        self, select_by: str, scratch: int, requests: slice = slice(None), buffers: KVBuffers | None = None
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """A choice in all layers, for some requests, by the pool or what lies beside it, and what it reads that is its own."""
        predictor, options = query_predictor(select_by), self.options
        rotary = Rotary(1e6 ** -(torch.arange(options.dim // 2, device="cuda") / (options.dim // 2)))
        choice = GpuSelector(predictor, buffers or self.buffers, options.kv_heads * options.group, rotary, scratch)
        asked, positions, queries = self.asked(requests), self.positions[requests], self.queries[requests]
        # As windows are read: what a predictor does not look at is not touched.
        window = slice(17 - predictor.window, 17)
        own = asked.numbers, asked.targets, rotary.frequencies
        return lambda: choice.choose(asked, lambda some, layers: queries[some, layers, :, window], positions[:, window]), own

    def sparse_step(self, choose: Callable[[int], object] | None = None, arrived: torch.Tensor | None = None) -> None:
        """Weights, and attention through pointers; before that of each layer a choice, ``arrived`` as :meth:`quest` has it."""
        rows = torch.arange(self.options.batch, 2 * self.options.batch, device="cuda")
        lengths, splits = torch.full_like(rows, self.held + 1), pointer_split_counts(self.options.batch * self.options.kv_heads)
        for layer, (keys, values) in enumerate(zip(self.buffers.keys, self.buffers.values)):
            self.multiply(layer)
            bounds = choose and choose(layer)
            pointer_decode(self.begins, self.attended, keys, values, self.table, rows, lengths, self.options.dim**-0.5, splits, arrived)
            # In which the choice works while attention begins.
            del bounds

    def quest(self, extremes: PageExtremes) -> tuple[Callable[[int, tuple[int, int, int | None]], object], torch.Tensor]:
        """Quest's choice in a layer, for all requests, cut as said; from then on copies hold its pointers. And which heads have chosen, for
        attention that is launched while the last ones do.

        Its contexts are whole pages of the pool, any but those with slots of copies.
        """
        options, keys, rows = self.options, self.buffers.keys, torch.arange(self.options.batch, 2 * self.options.batch, device="cuda")
        held = self.table[options.batch :, : self.held]
        unused = torch.ones(len(keys[0]) // PAGE, dtype=torch.bool, device="cuda")
        unused[torch.cat([held.flatten().long(), self.spare.flatten()]).clamp(max=len(unused) * PAGE - 1) // PAGE] = False
        pages = unused.nonzero().flatten().int()
        pages = pages[torch.randperm(len(pages), device="cuda")[: options.batch * options.tokens // PAGE]].view(options.batch, -1)
        table = torch.zeros(2 * options.batch, options.tokens + ROOM, dtype=torch.int32, device="cuda")
        table[: options.batch, : options.tokens] = (pages[..., None] * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)
        table[options.batch :, : self.held] = held
        begins = PagePointerLayout.of_pool(self.form, table, extremes, Quest(in_attention=True))
        begins.counts[options.batch :], begins.pages[options.batch :] = options.keep, options.tokens // PAGE
        extremes.write(torch.arange(0, len(unused) * PAGE, PAGE, device="cuda"))
        lengths = torch.full_like(rows, self.held + 1)

        def choose(layer: int, cut: tuple[int, int, int | None]) -> object:
            return point_at_best_pages(begins, layer, self.attended, as_pointers(keys[layer]), table, rows, lengths, cut)

        return choose, begins.finished_parts

    def full_step(self) -> Callable[[], None]:
        """Weights, and attention to all tokens by FlashInfer."""
        # A package that machines without a GPU lack: they have --help all the same.
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        options, wrapper = self.options, BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
        )  # fmt: skip
        ends = torch.arange(options.batch + 1, dtype=torch.int32, device="cuda") * options.tokens
        shape = options.kv_heads * options.group, options.kv_heads, options.dim, 1
        last = torch.ones(options.batch, dtype=torch.int32, device="cuda")
        wrapper.plan(ends, self.table[: options.batch].flatten(), last, *shape, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        pools = [(keys.unsqueeze(1), values.unsqueeze(1)) for keys, values in zip(self.buffers.keys, self.buffers.values)]

        def step() -> None:
            for layer, pool in enumerate(pools):
                self.multiply(layer)
                wrapper.run(self.attended, pool)

        return step


def launched(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a call that is launched kernel by kernel, on the device, and on the host alone."""
    run()
    on_device, on_host = [], []
    for _ in range(7):
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


def beside(world: World, select_by: str, scratch: int, every: int, priority: int) -> float:
    """Seconds of a step while choices run beside it, of each request every so many steps; ``priority``: of its kernels, below 0 before
    those of choices."""
    graph, side = torch.cuda.CUDAGraph(), SideStream(torch.device("cuda"))
    world.sparse_step()
    torch.cuda.synchronize()
    # Kernels of a graph have the priority of the stream on which it was captured.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=priority)):
        world.sparse_step()
    shares = [world.choosing(select_by, scratch, slice(part, None, every)) for part in range(every)]

    def steps() -> None:
        under_way: list[torch.cuda.Event | None] = [None] * every
        for step in range(STEPS):
            graph.replay()
            # Waits for the choice of as many steps before.
            side.wait(under_way[step % every])
            under_way[step % every] = side.launch(*shares[step % every])
        # All that was launched counts, and none reads what the next measurement writes.
        for done in under_way:
            side.wait(done)

    return launched(steps)[0] / STEPS


def coding(world: World, codes: SlotCodes) -> str:
    """How long keys take that are coded."""
    slots = torch.randperm(len(world.buffers.keys[0]), device="cuda")
    step, prompt = (1e3 * seconds(lambda: codes.write(some)) for some in (slots[: world.options.batch], slots[:PROMPT]))
    return f"coding in {codes.held.sizes.bits} bits: {step:.3f} ms a step, {prompt:.2f} ms for {PROMPT} tokens of prompts"


def bounding(world: World, extremes: PageExtremes) -> str:
    """How long it takes to bring the extremes of pages up to date."""
    slots = torch.randperm(len(world.buffers.keys[0]) // PAGE * PAGE, device="cuda")[: world.options.batch]
    step, prompt = (1e3 * seconds(lambda: extremes.write(some)) for some in (slots, torch.arange(PROMPT, device="cuda")))
    return f"extremes of pages: {step:.3f} ms a step, {prompt:.2f} ms for {PROMPT} tokens of prompts"


def alone(world: World, bandwidth: float, bits: int) -> Iterator[str]:
    """By keys of so many bits, what choices take that nothing runs beside, for each predictor and scratch, and coding."""
    options, buffers = world.options, world.buffers
    sizes = KeySpec(options.layers, options.kv_heads, options.dim, torch.bfloat16, bits)
    limit = sizes.token_bytes * options.batch * options.tokens / bandwidth
    if bits != EXACT:
        codes = world.codes(bits)
        yield coding(world, codes)
        buffers = replace(buffers, codes=codes.held)
    for select_by in options.select_by:
        for scratch in options.scratch_mb:
            took, on_host = launched(world.choosing(select_by, scratch << 20, buffers=buffers)[0])
            told = f"{1e3 * took:.2f} ms, {took / limit:.2f} of the limit, {1e3 * limit:.2f} ms; host {1e3 * on_host:.2f} ms"
            yield f"{bits} bits, {select_by}, scratch {scratch} MB: {told}"


def main() -> None:
    """Choices alone, then beside steps, then Quest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch-mb", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--priority", nargs="+", type=int, default=[0], help="of steps' kernels beside choices: 0 as these, -1 before them")
    parser.add_argument("--select-by", nargs="+", default=["current", "regressed"])
    sizes = {"batch": 16, "tokens": 32768, "keep": 2048, "layers": 36, "kv-heads": 8, "group": 4, "dim": 128}
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    needs_gpu(parser)
    asked, options.layers = options.layers, fitting_layers(options, torch.cuda.mem_get_info()[0])
    if not options.layers:
        parser.error(f"{torch.cuda.get_device_name()} has no room for a layer: pass a smaller --batch or --tokens")
    if options.layers < asked:
        print(f"{options.layers} of {asked} layers, which this GPU has room for; all times are of these", flush=True)
    bandwidth = measure_bandwidth()
    limit = options.layers * options.batch * options.tokens * options.kv_heads * options.dim * 2 / bandwidth
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s; keys {1e3 * limit:.2f} ms, Quest's {1e3 * limit * 2 / PAGE:.2f} ms", flush=True)
    world = World(options)
    for bits in SCORE_BITS:
        for line in alone(world, bandwidth, bits):
            print(line, flush=True)
    took, size = seconds(world.all_weights), options.layers * 2 * sum(rows * columns for rows, columns in MATRICES)
    print(f"weights: {1e3 * took:.2f} ms, {took * bandwidth / size:.2f} of their bytes' limit", flush=True)
    full, sparse = seconds(world.full_step()), seconds(world.sparse_step)
    print(f"a step: full KV {1e3 * full:.2f} ms, through pointers {1e3 * sparse:.2f} ms, {sparse / full:.2f} of it", flush=True)
    for select_by in options.select_by:
        for every in options.every:
            for priority in options.priority:
                took = beside(world, select_by, options.scratch_mb[-1] << 20, every, priority)
                told = f"{1e3 * took:.2f} ms a step, {took / full:.2f} of full KV's"
                print(f"{select_by}, every {every}, steps of priority {priority}: {told}", flush=True)
    extremes = PageExtremes(world.buffers.keys, world.buffers.layer_ids, PAGE)
    print(bounding(world, extremes), flush=True)
    (quest, arrived), times = world.quest(extremes), {}
    for cut in QUEST_GRIDS:
        times[cut] = took = seconds(lambda: [quest(layer, cut) for layer in range(options.layers)])
        print(f"Quest's choice, cut {cut}: {1e3 * took:.2f} ms, {took / (limit * 2 / PAGE):.2f} of its bytes' limit", flush=True)
    best = min(times, key=times.get)
    took = seconds(lambda: world.sparse_step(lambda layer: quest(layer, best), arrived))
    print(f"Quest, cut {best}: {1e3 * took:.2f} ms a step, {took / full:.2f} of full KV's", flush=True)


if __name__ == "__main__":
    main()
