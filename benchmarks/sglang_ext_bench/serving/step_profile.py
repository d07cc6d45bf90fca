"""Where decode steps of a server spend their time: kernels, what the device waits for, and what the host launches (docs/benchmarks.md).

    sglang-ext-bench step-profile --model MODEL [--batch 16] [--tokens 32768] [--settle 3] [--seconds 0.3] --server-arg=FLAGS

Random prompts of so many tokens are answered until all decode side by side; PyTorch's profiler then looks at the scheduler for a moment,
by SGLang's own /start_profile. Of a *step*, which is a launch of a CUDA graph, are told the time in which the device computes, on any
stream, and in which it does not; its kernels, those of two streams at once counted twice; between which two it waits longest; and the
host's calls of the driver. What the profiler itself takes is the host's: the server's rate before is told beside that meanwhile.
"""

import argparse
import gzip
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_ext.tools.server_process import ServerProcess
from sglang_ext_bench.client import SamplingSettings
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.client import total

VOCABULARY = 20000
# Categories of the profiler's events that are work of a device, and the call that launches a step.
DEVICE, HOST, STEP = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver"), "cudaGraphLaunch"
# Of lines of a table; of characters of a kernel's name.
MOST, NAME = 18, 70


@dataclass(frozen=True)
class Profile:
    """Of some steps, in microseconds.

    Attributes:
        steps: launches of graphs.
        span: from the first kernel's begin to the last one's end.
        busy: of it, in which a device computes on some stream.
        kernels: by name, how many there are and how long they take.
        waits: between two kernels, by their names, how often and how long nothing computes.
        calls: of the host, by name, how many and how long.
    """

    steps: int
    span: float
    busy: float
    kernels: dict[str, tuple[int, float]]
    waits: dict[tuple[str, str], tuple[int, float]]
    calls: dict[str, tuple[int, float]]


def profile(events: Iterable[dict[str, Any]]) -> Profile:
    """Of the events of a trace in Chrome's format.

    Raises:
        ValueError: no device computed meanwhile.
    """
    timed = sorted((each for each in events if "dur" in each), key=lambda each: each["ts"])
    works = [each for each in timed if each.get("cat") in DEVICE]
    if not works:
        raise ValueError("the profiler saw no kernels")
    kernels, calls, waits = (defaultdict(lambda: (0, 0.0)) for _ in range(3))
    for each in works:
        kernels[each["name"]] = _more(kernels[each["name"]], each["dur"])
    for each in timed:
        if each.get("cat") in HOST:
            calls[each["name"]] = _more(calls[each["name"]], each["dur"])
    busy, end, last = 0.0, works[0]["ts"], works[0]["name"]
    for each in works:
        if each["ts"] > end:
            pair = last, each["name"]
            waits[pair] = _more(waits[pair], each["ts"] - end)
        until = each["ts"] + each["dur"]
        if until > end:
            busy += until - max(end, each["ts"])
            end, last = until, each["name"]
    return Profile(max(1, calls.get(STEP, (1, 0.0))[0]), end - works[0]["ts"], busy, dict(kernels), dict(waits), dict(calls))


def _more(of: tuple[int, float], took: float) -> tuple[int, float]:
    return of[0] + 1, of[1] + took


def tables(found: Profile) -> str:
    """In Markdown, by step."""
    step, busy = (each / found.steps / 1e3 for each in (found.span, found.busy))
    head = f"{found.steps} steps of {step:.2f} ms: {busy:.2f} in which the device computes, {step - busy:.2f} in which it does not"
    named = [(short(name), each) for name, each in found.kernels.items()]
    between = [(f"{short(before)} -> {short(after)}", each) for (before, after), each in found.waits.items()]
    kinds = ("kernels", named), ("waits between", between), ("calls", found.calls.items())
    parts = [_table(what, each, found.steps) for what, each in kinds]
    return "\n\n".join([head, *parts])


def _table(what: str, numbers: Iterable[tuple[str, tuple[int, float]]], steps: int) -> str:
    """Of several with one name, as long ones may have once they are short, a line each."""
    lines = [f"| {what} | a step | us a step |", "|---|---|---|"]
    longest = sorted(numbers, key=lambda each: -each[1][1])
    return "\n".join(lines + [f"| {name} | {count / steps:.2f} | {took / steps:.1f} |" for name, (count, took) in longest[:MOST]])


def short(name: str) -> str:
    """A kernel's name, of which templates are left out where it is long."""
    plain = name.removeprefix("void ")
    return plain if len(plain) <= NAME else f"{plain[: NAME - 24]}...{plain[-20:]}"


def events(folder: Path, seconds: float = 60.0) -> list[dict[str, Any]]:
    """Of the trace that the profiler writes to a folder, once it is whole.

    Raises:
        TimeoutError: it does not come.
    """
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for file in folder.glob("*.json.gz"):
            try:
                return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            except (EOFError, gzip.BadGzipFile, json.JSONDecodeError):
                continue
        time.sleep(0.5)
    raise TimeoutError(f"no trace in {folder} after {seconds:.0f} s")


def looked_at(server: ServerProcess, prompts: Sequence[tuple[int, ...]], options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """The profiler's events while all prompts are answered, and milliseconds a token of each before."""
    for prompt in prompts:
        decode_wave.run(server, [prompt], SamplingSettings(), 1)
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        sent, wave = time.perf_counter(), pool.submit(decode_wave.run, server, prompts, SamplingSettings(), options.output_len)
        while total(server.request("metrics"), "sglang:num_running_reqs") < len(prompts) and not wave.done():
            time.sleep(0.2)
        begun = time.perf_counter() - sent
        time.sleep(options.settle)
        ended = time.perf_counter() - sent
        told = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False}
        server.request("start_profile", told)
        time.sleep(options.seconds)
        server.request("stop_profile", {})
        found = events(Path(folder))
        # Of tokens as they came: SGLang's own count of them is of requests that have ended.
        rate = sum(stream.rate(begun, ended) for stream in wave.result())
    return found, 1e3 * len(prompts) / rate if rate else float("nan")


def main() -> None:
    """Print the tables of one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--batch", type=int, default=16)
    add("--tokens", type=int, default=32768)
    add("--output-len", type=int, default=2048, help="tokens of an answer (default: %(default)s)")
    add("--settle", type=float, default=3.0, help="seconds from then until the profiler looks (default: %(default)s)")
    add("--seconds", type=float, default=0.3, help="that it looks (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS")
    add("--log", type=Path, default=Path("step_profile.log"), help="of the server (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("steps are profiled on an NVIDIA GPU, and there is none")
    draw = random.Random(0)
    prompts = [tuple(draw.choices(range(1, VOCABULARY), k=options.tokens)) for _ in range(options.batch)]
    with ServerProcess(options.model, (*words(options.server_arg), "--enable-metrics"), options.log, start_timeout=600) as server:
        found, rate = looked_at(server, prompts, options)
    print(f"before: {rate:.2f} ms a token of each of {options.batch} requests")
    print(tables(profile(found)))


if __name__ == "__main__":
    main()
