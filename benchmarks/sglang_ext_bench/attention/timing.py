"""How long attention takes without its launches, and with nothing of its KV in the GPU's cache; and the bandwidth of the device."""

import time
from collections.abc import Callable
from statistics import median

import torch

REPEATS, CPU_REPEATS = 9, 3
# More than any GPU's cache; and what is copied to measure the bandwidth.
FLUSHED, COPIED, CPU_COPIED = 256 << 20, 1 << 30, 64 << 20


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of a call; on a GPU of replays of a CUDA graph, after what empties the cache."""
    run()
    if device.type == "cpu":
        return median(_on_cpu(run) for _ in range(CPU_REPEATS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    return median(_on_gpu(graph, flush) for _ in range(REPEATS))


def _on_cpu(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _on_gpu(graph: torch.cuda.CUDAGraph, flush: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes; on a GPU by a kernel, as a graph leaves plain copies to slower engines."""
    source = torch.ones((CPU_COPIED if device.type == "cpu" else COPIED) // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    if device.type == "cpu":
        return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds(lambda: torch.bitwise_not(source, out=target), device)
