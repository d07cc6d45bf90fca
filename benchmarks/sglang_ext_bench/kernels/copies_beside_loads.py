"""Time small copies to the GPU while full KV is loaded from host memory.

    sglang-ext-bench copies-beside-loads

Each step replays a CUDA graph that reads 14 GB of weights, as a draft step of an 8B model does. Before the step, 32 KiB are copied to the
GPU: from pinned memory, from unpinned memory, or not at all. The command prints milliseconds of a step, with and without concurrent
loads of 2.4 GB from the host. It prints the mean, median and maximum of 80 steps, and the number of loads.
"""

import argparse
from collections.abc import Callable

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import Transfer
from sglang_ext_bench.kernels.options import require_gpu

LAYERS, HEADS, DIM, TOKENS, STEPS, BATCH = 36, 8, 128, 16384, 80, 24
MATRICES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
SMALL_COPY = 8192
# Steps that the host launches ahead of the GPU.
AHEAD = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Measure each kind of copy, with and without loads.

    Raises:
        CommandError: There is no GPU.
    """
    require_gpu()
    tier, pages = tier_with_pages()
    slots = torch.randperm(TOKENS, device="cuda") + TOKENS
    step, size = WeightStep(), tier.pool.page_bytes * TOKENS

    def load() -> Transfer:
        return tier.load(pages, slots)

    (alone := load()).synchronize()
    print(f"a load of {size / 1e9:.2f} GB alone takes {1000 * alone.outcome.seconds:.1f} ms")
    numbers = torch.zeros(SMALL_COPY, dtype=torch.int32)
    for name, source in (("no copy", None), ("pinned", numbers.pin_memory()), ("not pinned", numbers)):
        for concurrent_load in (None, load):
            times = step_times(step, source, concurrent_load)
            print(f"{name:12} {'beside loads' if concurrent_load else 'alone':12} {times}", flush=True)
    return 0


def tier_with_pages() -> tuple[HostTier, torch.Tensor]:
    """Return a host tier with the KV shapes of Qwen3-8B, and pages that are stored in it."""
    keys, values = (tuple(torch.zeros(2 * TOKENS, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)) for _ in "kv")
    buffers = KVBuffers(tuple(range(LAYERS)), (1.0,) * LAYERS, keys, values)
    tier = HostTier(buffers, HostPool.create(buffers, 1, TOKENS * buffers.bytes_per_slot))
    pages = tier.pool.pages.allocate(TOKENS)
    tier.store(torch.arange(TOKENS, device="cuda"), pages).synchronize()
    return tier, pages


class WeightStep:
    """A CUDA graph of products with the weights of all layers."""

    def __init__(self) -> None:
        weights = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 64 for shape in MATRICES] for _ in range(LAYERS)]
        inputs = torch.randn(BATCH, 4096, device="cuda", dtype=torch.bfloat16)
        # The graph reads them as long as it exists.
        self._weights, self._inputs = weights, inputs
        stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._forward()
        stream.synchronize()
        with torch.cuda.graph(self._graph, stream=stream):
            self._forward()

    def _forward(self) -> None:
        hidden = self._inputs
        for qkv, out, up, down in self._weights:
            hidden = (hidden @ qkv)[:, :4096] @ out
            hidden = (hidden @ up)[:, :12288] @ down

    def replay(self) -> None:
        """Run the graph."""
        self._graph.replay()


def step_times(step: WeightStep, source: torch.Tensor | None, load: Callable[[], Transfer] | None) -> str:
    """Return the milliseconds of steps as text.

    Args:
        step: The step.
        source: Host tensor that is copied before each step; None for no copy.
        load: Starts a load. The next one starts when it is complete. None for no loads.
    """
    target = torch.zeros(SMALL_COPY, dtype=torch.int32, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    loading, num_loads = load and load(), 0
    marks[0].record()
    for i in range(STEPS):
        if source is not None:
            target.copy_(source, non_blocking=True)
        step.replay()
        marks[i + 1].record()
        if i >= AHEAD:
            marks[i + 1 - AHEAD].synchronize()
        if load and loading.done:
            loading, num_loads = load(), num_loads + 1
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in zip(marks, marks[1:]))
    return f"mean {sum(times) / STEPS:6.2f} median {times[STEPS // 2]:5.2f} longest {times[-1]:6.2f} ms, {num_loads} loads"
