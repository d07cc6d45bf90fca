"""How long work on a GPU takes without its launches: the scripts that time kernels share this."""

import argparse
from collections.abc import Callable
from statistics import median

import torch

REPEATS = 7


def needs_gpu(parser: argparse.ArgumentParser) -> None:
    """End a script of kernels where there is no GPU to time them on."""
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here, and kernels are timed on one: run it on a machine with an NVIDIA GPU")


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Median time of a call, of replays of a CUDA graph of so many."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / calls)
    return median(times)
