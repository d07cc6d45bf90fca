"""Times kernels and calls. The commands that time kernels share it."""

import time
from collections.abc import Callable
from statistics import median

import torch

GRAPH_REPLAYS = 7


def graph_seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of one call on the GPU, without launches: the median of several replays of a CUDA graph.

    Args:
        run: The call. The graph captures it.
        calls: Calls in the graph, one after the other.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    return median(event_seconds(graph.replay, GRAPH_REPLAYS)) / calls


def event_seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds between the start and the end of each of ``repeats`` calls on the GPU, by CUDA events."""
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return found


def wall_seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median seconds of ``repeats`` calls, including their launches, after one warm-up call.

    Args:
        run: The call.
        device: Type of the device, ``cpu`` or ``cuda``. On a GPU, each measurement ends when the GPU is idle.
        repeats: Number of measured calls.
    """
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return median(found[1:])
