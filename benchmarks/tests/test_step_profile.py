"""The script that tells where decode steps spend their time, of a trace as PyTorch's profiler writes it."""

import gzip
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "sglang_ext_bench/scripts"))
    import step_profile

    return step_profile


def event(cat, name, ts, dur):
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


def test_what_streams_do_at_once_is_busy_once_and_waits_are_between_the_kernels_beside_them(script):
    found = script.profile(TRACE)
    assert (found.steps, found.span, found.busy) == (2, 115, 94)
    assert found.kernels == {"attend": (2, 60), "choose": (1, 40), "join": (1, 10), "Memcpy DtoH": (1, 4)}
    assert found.waits == {("join", "attend"): (1, 20), ("attend", "Memcpy DtoH"): (1, 1)}
    assert found.calls == {"cudaGraphLaunch": (2, 10)}
    told = script.tables(found)
    assert "2 steps of 0.06 ms: 0.05 in which the device computes, 0.01 in which it does not" in told
    assert "| attend | 1.00 | 30.0 |" in told and "| join -> attend | 0.50 | 10.0 |" in told


def test_kernels_whose_long_names_differ_in_the_middle_alone_are_all_told(script):
    first, second = ("a" * 60 + middle + "b" * 60 for middle in "xy")
    told = script.tables(script.profile([event("kernel", first, 0, 10), event("kernel", second, 15, 20), event("kernel", first, 40, 10)]))
    assert f"| {script.short(first)} | 2.00 | 20.0 |\n| {script.short(second)} | 1.00 | 20.0 |" in told
    assert told.count(f"| {script.short(first)} -> {script.short(first)} | 1.00 | 5.0 |") == 2


def test_a_trace_without_kernels_is_refused(script):
    with pytest.raises(ValueError, match="no kernels"):
        script.profile([event("cpu_op", "aten::add", 0, 4)])


def test_a_trace_is_read_once_it_is_whole(script, tmp_path):
    packed = gzip.compress(json.dumps({"traceEvents": TRACE}).encode())
    (tmp_path / "a.trace.json.gz").write_bytes(packed[:-9])
    with pytest.raises(TimeoutError, match="no trace"):
        script.events(tmp_path, 0.1)
    (tmp_path / "a.trace.json.gz").write_bytes(packed)
    assert script.events(tmp_path, 5) == TRACE


def test_without_a_gpu_it_says_so_before_a_server_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--model", "nowhere"])
    with pytest.raises(SystemExit):
        script.main()
    assert "an NVIDIA GPU, and there is none" in capsys.readouterr().err


class SelectionRunner:
    """A server that takes 4 ms for a token or longer, which it notes, and counts those of answers that have ended."""

    def __init__(self):
        self.asked, self.running, self.ended, self.gaps = [], 0, 0, []

    def stream(self, path, body):
        self.running, last = self.running + 1, None
        for token in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            time.sleep(0.004)
            now = time.perf_counter()
            self.gaps += [] if last is None else [1e3 * (now - last)]
            last = now
            yield {"meta_info": {"completion_tokens": token}}
        self.running, self.ended = self.running - 1, self.ended + token

    def request(self, path, body=None):
        self.asked.append(path)
        if path == "start_profile":
            self.folder = Path(body["output_dir"])
        elif path == "stop_profile":
            (self.folder / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
        return f'sglang:num_running_reqs{{a="b"}} {self.running}\nsglang:generation_tokens_total{{a="b"}} {self.ended}\n'


def test_the_rate_before_is_that_of_tokens_that_came_while_all_decode(script):
    server = SelectionRunner()
    options = SimpleNamespace(settle=0.4, seconds=0.05, output_len=200)
    found, milliseconds = script.looked_at(server, [(1, 2), (3, 4)], options)
    assert found == TRACE and server.asked[-2:] == ["start_profile", "stop_profile"]
    assert min(server.gaps) <= milliseconds <= max(server.gaps)


def test_names_keep_both_ends(script):
    assert script.short("void attend") == "attend"
    assert script.short("a" * 90 + "b" * 90) == "a" * 46 + "..." + "b" * 20
