"""Measures where the decode steps of a server spend their time on a GPU: kernels, gaps between kernels, and calls of the host.

    sglang-ext-bench step-profile --model MODEL --batch 16 --tokens 32768 --settle 3 --seconds 0.3 --server-arg=FLAGS

Sends --batch random prompts of --tokens tokens, and waits until all decode. --settle seconds later, PyTorch's profiler records the scheduler's
process for --seconds seconds, through SGLang's /start_profile. A *step* is one launch of a CUDA graph.

The first line has milliseconds per token of each request before the profiler started. The second one has the length of a step while the
profiler runs, and how much of it the device computes on any stream. The profiler slows the host, so steps may be longer than before.
Three tables follow, with counts and microseconds per step: kernels by name, gaps by the kernels before and after, and calls of the CUDA driver.
Kernels that run at once on two streams count twice in the first table.
"""

import argparse
import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.client import SamplingSettings, total
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.prompts import random_prompts
from sglang_ext_bench.server import BenchServer

VOCABULARY = 20000
# Categories of the profiler's events for work of the device and for calls of the host, and the call that launches a step.
DEVICE_CATEGORIES, HOST_CATEGORIES, STEP_CALL = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver"), "cudaGraphLaunch"
# Rows of a table, the longest kernel name that is not shortened, and the characters of its beginning and end that are kept.
MAX_ROWS, MAX_NAME, NAME_BEGIN, NAME_END = 18, 70, 46, 20
START_TIMEOUT = 600.0
TRACE_TIMEOUT = 60.0

Event = dict[str, Any]
"""An event of a trace in Chrome's format, with times in microseconds."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Total:
    """Number and total microseconds of some events."""

    count: int = 0
    microseconds: float = 0.0

    def add(self, microseconds: float) -> "Total":
        """The total with one more event."""
        return Total(self.count + 1, self.microseconds + microseconds)


@dataclass(frozen=True)
class StepProfile:
    """The profile of some steps. Times are in microseconds.

    Attributes:
        steps: Launches of CUDA graphs.
        span: From the start of the first kernel to the end of the last one.
        busy: Part of the span in which the device computes on any stream.
        kernels: By name of the kernel.
        gaps: Times in which the device does not compute, by the names of the kernels before and after.
        calls: Calls of the host, by name.
    """

    steps: int
    span: float
    busy: float
    kernels: dict[str, Total]
    gaps: dict[tuple[str, str], Total]
    calls: dict[str, Total]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder, or a folder with config.json and --load-format dummy")
    add("--batch", type=int, default=16, help="requests at once (default: %(default)s)")
    add("--tokens", type=int, default=32768, help="tokens of each prompt (default: %(default)s)")
    add("--output-len", type=int, default=2048, help="output tokens of each request (default: %(default)s)")
    add("--settle", type=float, default=3.0, help="seconds between the start of the last request and the profile (default: %(default)s)")
    add("--seconds", type=float, default=0.3, help="seconds that are profiled (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of the server")
    add("--log", type=Path, default=Path("step_profile.log"), help="log of the server (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Profile a server and print its tables. Returns 0."""
    import torch

    check_counts({"--batch": args.batch, "--tokens": args.tokens, "--output-len": args.output_len})
    for option, value in (("--settle", args.settle), ("--seconds", args.seconds)):
        if value <= 0:
            raise CommandError(f"{option} {value:g}: pass seconds above 0")
    if not torch.cuda.is_available():
        raise CommandError("steps are profiled on an NVIDIA GPU, and this machine has none: run the command on a machine with one")
    prompts = random_prompts(args.batch, args.tokens, VOCABULARY)
    flags = (*split_flags(args.server_arg), "--enable-metrics")
    with BenchServer(args.model, flags, args.log, start_timeout=START_TIMEOUT) as server:
        events, token_ms = record_events(server, prompts, args)
    before = "-" if token_ms is None else f"{token_ms:.2f}"
    print(f"before: {before} ms a token of each of {args.batch} requests")
    print(describe(analyze(events)))
    return 0


def record_events(
    server: BenchServer, prompts: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> tuple[list[Event], float | None]:
    """Profile the server while all prompts decode.

    Returns:
        The profiler's events, and milliseconds per token of each request before the profiler started; None if a request had fewer than
        two bursts of tokens.
    """
    from sglang_ext_bench.speed import decode_wave

    for prompt in prompts:
        decode_wave.run(server, [prompt], SamplingSettings(), 1)
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        sent = time.perf_counter()
        wave = pool.submit(decode_wave.run, server, prompts, SamplingSettings(), args.output_len)
        while total(server.request("metrics"), "sglang:num_running_reqs") < len(prompts) and not wave.done():
            time.sleep(0.2)
        begin = time.perf_counter() - sent
        time.sleep(args.settle)
        end = time.perf_counter() - sent
        options = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False}
        server.request("start_profile", options)
        time.sleep(args.seconds)
        server.request("stop_profile", {})
        events = read_trace(Path(folder), TRACE_TIMEOUT)
        # SGLang's own counter has only tokens of finished requests.
        rates = [stream.rate(begin, end) for stream in wave.result()]
    return events, 1e3 * len(prompts) / sum(rates) if all(rates) else None


def read_trace(folder: Path, seconds: float) -> list[Event]:
    """Wait until the profiler has written its trace to ``folder``, and read the events.

    Raises:
        CommandError: There is no complete trace after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for file in folder.glob("*.json.gz"):
            try:
                return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            except (EOFError, gzip.BadGzipFile, json.JSONDecodeError):
                continue
        time.sleep(0.5)
    raise CommandError(f"the profiler wrote no trace within {seconds:.0f} s: see the server's log, or pass fewer --seconds")


def analyze(events: Iterable[Event]) -> StepProfile:
    """Compute the profile from the events of a trace.

    Raises:
        CommandError: The trace has no kernels.
    """
    timed = sorted((event for event in events if "dur" in event), key=lambda event: event["ts"])
    works = [event for event in timed if event.get("cat") in DEVICE_CATEGORIES]
    if not works:
        raise CommandError("the profiler saw no kernels: pass more --seconds, or a longer --output-len")
    kernels: dict[str, Total] = defaultdict(Total)
    calls: dict[str, Total] = defaultdict(Total)
    gaps: dict[tuple[str, str], Total] = defaultdict(Total)
    for event in works:
        _add(kernels, event["name"], event["dur"])
    for event in timed:
        if event.get("cat") in HOST_CATEGORIES:
            _add(calls, event["name"], event["dur"])
    busy, end, last = 0.0, works[0]["ts"], works[0]["name"]
    for event in works:
        if event["ts"] > end:
            _add(gaps, (last, event["name"]), event["ts"] - end)
        event_end = event["ts"] + event["dur"]
        if event_end > end:
            busy += event_end - max(end, event["ts"])
            end, last = event_end, event["name"]
    steps = calls[STEP_CALL].count if STEP_CALL in calls else 1
    return StepProfile(steps, end - works[0]["ts"], busy, dict(kernels), dict(gaps), dict(calls))


def _add(totals: dict[Key, Total], key: Key, microseconds: float) -> None:
    totals[key] = totals[key].add(microseconds)


def describe(profile: StepProfile) -> str:
    """The profile in Markdown, per step."""
    step, busy = (microseconds / profile.steps / 1e3 for microseconds in (profile.span, profile.busy))
    head = f"{profile.steps} steps of {step:.2f} ms: the device computes for {busy:.2f} ms, and does not for {step - busy:.2f} ms"
    kernels = [(shorten(name), totals) for name, totals in profile.kernels.items()]
    gaps = [(f"{shorten(before)} -> {shorten(after)}", totals) for (before, after), totals in profile.gaps.items()]
    tables = (("kernel", kernels), ("gap between", gaps), ("call", list(profile.calls.items())))
    return "\n\n".join([head, *(_table(title, rows, profile.steps) for title, rows in tables)])


def _table(title: str, rows: Sequence[tuple[str, Total]], steps: int) -> str:
    """A table of the longest entries. Entries with the same shortened name have one row each."""
    lines = [f"| {title} | per step | us per step |", "|---|---|---|"]
    longest = sorted(rows, key=lambda row: -row[1].microseconds)[:MAX_ROWS]
    lines += [f"| {name} | {found.count / steps:.2f} | {found.microseconds / steps:.1f} |" for name, found in longest]
    return "\n".join(lines)


def shorten(name: str) -> str:
    """A kernel's name. The middle of long names, which has template arguments, is left out."""
    plain = name.removeprefix("void ")
    return plain if len(plain) <= MAX_NAME else f"{plain[:NAME_BEGIN]}...{plain[-NAME_END:]}"
