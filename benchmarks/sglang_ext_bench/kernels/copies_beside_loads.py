"""What small copies to the device wait for beside loads of full KV from the host: docs/benchmarks.md.

    sglang-ext-bench copies-beside-loads      # on a GPU

Steps read 14 GB of weights in a CUDA graph, as a draft of an 8B model does. Before each, 32 KiB go to the device: from pinned memory,
from memory that is not pinned, or not at all; beside it a load runs, or none.
"""

from collections.abc import Callable

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import Transfer

LAYERS, HEADS, DIM, TOKENS, STEPS, BATCH = 36, 8, 128, 16384, 80, 24
AHEAD = 3


def tier_with_pages() -> tuple[HostTier, torch.Tensor]:
    """A host tier of Qwen3-8B's KV, and pages of it that were stored."""
    keys, values = (tuple(torch.zeros(2 * TOKENS, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)) for _ in "kv")
    buffers = KVBuffers(tuple(range(LAYERS)), (1.0,) * LAYERS, keys, values)
    tier = HostTier(buffers, HostPool.create(buffers, 1, TOKENS * buffers.bytes_per_slot))
    pages = tier.pool.pages.allocate(TOKENS)
    tier.store(torch.arange(TOKENS, device="cuda"), pages).synchronize()
    return tier, pages


def step_graph() -> torch.cuda.CUDAGraph:
    """Products with the weights of 36 layers."""
    shapes = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
    weights = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 64 for shape in shapes] for _ in range(LAYERS)]
    inputs = torch.randn(BATCH, 4096, device="cuda", dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        found = inputs
        for qkv, out, up, down in weights:
            found = (found @ qkv)[:, :4096] @ out
            found = (found @ up)[:, :12288] @ down
        return found

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    # The graph reads them for as long as it lives.
    graph.weights = weights, inputs
    return graph


def run(graph: torch.cuda.CUDAGraph, small: torch.Tensor | None, load: Callable[[], Transfer] | None) -> str:
    """Milliseconds of steps, with a load under way all the time where one is asked for."""
    target = torch.zeros(8192, dtype=torch.int32, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    loading, count = load and load(), 0
    marks[0].record()
    for i in range(STEPS):
        if small is not None:
            target.copy_(small, non_blocking=True)
        graph.replay()
        marks[i + 1].record()
        if i >= AHEAD:
            marks[i + 1 - AHEAD].synchronize()
        if load and loading.done:
            loading, count = load(), count + 1
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return f"mean {sum(times) / STEPS:6.2f} median {times[STEPS // 2]:5.2f} longest {times[-1]:6.2f} ms, {count} loads"


def main() -> None:
    """Measure all cases."""
    tier, pages = tier_with_pages()
    slots = torch.randperm(TOKENS, device="cuda") + TOKENS
    graph, size = step_graph(), tier.pool.page_bytes * TOKENS

    def load() -> Transfer:
        return tier.load(pages, slots)

    (alone := load()).synchronize()
    print(f"a load of {size / 1e9:.2f} GB alone takes {1000 * alone.outcome.seconds:.1f} ms")
    numbers = torch.zeros(8192, dtype=torch.int32)
    for name, small in (("nothing sent", None), ("pinned", numbers.pin_memory()), ("not pinned", numbers)):
        for beside in (None, load):
            print(f"{name:12} {'beside loads' if beside else 'alone':12} {run(graph, small, beside)}", flush=True)


if __name__ == "__main__":
    main()
