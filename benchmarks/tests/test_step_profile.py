"""The command that profiles decode steps: what it computes from a trace as PyTorch's profiler writes it."""

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.serving.step_profile import (
    Total,
    analyze,
    describe,
    read_trace,
    record_events,
    shorten,
)


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    """A finished event of a trace."""
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "ph": "X"}


TRACE = [
    event("cuda_runtime", "cudaGraphLaunch", 0, 5),
    event("kernel", "attend", 10, 30),
    event("kernel", "choose", 20, 40),  # on another stream, beyond the first one's end
    event("kernel", "join", 60, 10),
    event("cuda_runtime", "cudaGraphLaunch", 75, 5),
    event("kernel", "attend", 90, 30),
    event("gpu_memcpy", "Memcpy DtoH", 121, 4),
    event("cpu_op", "aten::add", 0, 400),
    {"ph": "M", "name": "process_name"},
]


def test_overlapping_kernels_are_busy_once_and_gaps_name_the_kernels_around_them():
    found = analyze(TRACE)
    assert (found.steps, found.span, found.busy) == (2, 115, 94)
    assert found.kernels == {"attend": Total(2, 60), "choose": Total(1, 40), "join": Total(1, 10), "Memcpy DtoH": Total(1, 4)}
    assert found.gaps == {("join", "attend"): Total(1, 20), ("attend", "Memcpy DtoH"): Total(1, 1)}
    assert found.calls == {"cudaGraphLaunch": Total(2, 10)}
    text = describe(found)
    assert "2 steps of 0.06 ms: the device computes for 0.05 ms, and does not for 0.01 ms" in text
    assert "| attend | 1.00 | 30.0 |" in text and "| join -> attend | 0.50 | 10.0 |" in text


def test_kernels_whose_long_names_differ_only_in_the_middle_have_one_row_each():
    first, second = ("a" * 60 + middle + "b" * 60 for middle in "xy")
    text = describe(analyze([event("kernel", first, 0, 10), event("kernel", second, 15, 20), event("kernel", first, 40, 10)]))
    assert f"| {shorten(first)} | 2.00 | 20.0 |\n| {shorten(second)} | 1.00 | 20.0 |" in text
    assert text.count(f"| {shorten(first)} -> {shorten(first)} | 1.00 | 5.0 |") == 2


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(CommandError, match="no kernels"):
        analyze([event("cpu_op", "aten::add", 0, 4)])


def test_a_trace_is_read_once_it_is_complete(tmp_path):
    packed = gzip.compress(json.dumps({"traceEvents": TRACE}).encode())
    (tmp_path / "a.trace.json.gz").write_bytes(packed[:-9])
    with pytest.raises(CommandError, match="no trace"):
        read_trace(tmp_path, 0.1)
    (tmp_path / "a.trace.json.gz").write_bytes(packed)
    assert read_trace(tmp_path, 5) == TRACE


def test_a_machine_without_a_gpu_is_refused_before_a_server_starts(monkeypatch, launches, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["step-profile", "--model", "nowhere"]) == 2
    assert "an NVIDIA GPU, and this machine has none" in capsys.readouterr().err and not launches.made


class SlowServer:
    """A server that needs at least 4 ms for a token.

    Attributes:
        gaps: Milliseconds between the tokens of a request.
        paths: Paths of the requests that are no streams.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.gaps: list[float] = []
        self.running, self.ended = 0, 0

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.running, last = self.running + 1, None
        for token in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            time.sleep(0.004)
            now = time.perf_counter()
            self.gaps += [] if last is None else [1e3 * (now - last)]
            last = now
            yield {"meta_info": {"completion_tokens": token}}
        self.running, self.ended = self.running - 1, self.ended + token

    def request(self, path: str, body: dict[str, Any] | None = None) -> str:
        self.paths.append(path)
        if path == "start_profile":
            self.folder = Path(body["output_dir"])
        elif path == "stop_profile":
            (self.folder / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
        return f'sglang:num_running_reqs{{a="b"}} {self.running}\nsglang:generation_tokens_total{{a="b"}} {self.ended}\n'


def test_the_time_before_the_profile_is_that_of_tokens_while_all_requests_decode():
    server = SlowServer()
    options = SimpleNamespace(settle=0.4, seconds=0.05, output_len=200)
    found, milliseconds = record_events(server, [(1, 2), (3, 4)], options)
    assert found == TRACE and server.paths[-2:] == ["start_profile", "stop_profile"]
    assert min(server.gaps) <= milliseconds <= max(server.gaps)


def test_shortened_names_keep_both_ends():
    assert shorten("void attend") == "attend"
    assert shorten("a" * 90 + "b" * 90) == "a" * 46 + "..." + "b" * 20
