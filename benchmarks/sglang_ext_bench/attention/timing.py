"""Times device code without the launches of kernels and with an empty GPU cache, and measures the bandwidth of the device."""

import time
from collections.abc import Callable
from statistics import median

import torch

REPEATS, CPU_REPEATS = 9, 3
FLUSH_BYTES = 256 << 20
"""Bytes that are written to empty the GPU's cache. No GPU has a larger cache."""
COPY_BYTES, CPU_COPY_BYTES = 1 << 30, 64 << 20
"""Bytes that are copied to measure the bandwidth."""


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of a call in seconds. On a GPU it is the time of CUDA graph replays, each after the cache is emptied."""
    run()
    if device.type == "cpu":
        return median(_on_cpu(run) for _ in range(CPU_REPEATS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return median(_on_gpu(graph, flush) for _ in range(REPEATS))


def _on_cpu(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _on_gpu(graph: torch.cuda.CUDAGraph, flush: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes. On a GPU a kernel copies, because a graph runs plain copies on slower engines."""
    source = torch.ones((CPU_COPY_BYTES if device.type == "cpu" else COPY_BYTES) // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    if device.type == "cpu":
        return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds(lambda: torch.bitwise_not(source, out=target), device)
