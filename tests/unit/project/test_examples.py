"""The examples where no server answers, and `make serve` where another one does."""

import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.serve_pd import check_ports

ROOT = Path(__file__).parents[3]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture
def closed() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_curl_alone_says_that_no_server_answers(closed: int) -> None:
    done = subprocess.run([ROOT / "examples/curl.sh", f"http://127.0.0.1:{closed}"], capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout == ""
    assert done.stderr.startswith("curl: (7)") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("example", ["openai_client.py", "frontend_program.py"])
def test_a_python_example_says_in_a_sentence_that_no_server_answers(
    closed: int, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{closed}"
    monkeypatch.setattr(sys, "argv", [example, url])
    with pytest.raises(SystemExit, match=f"^no server answers at {url}.*: start one with `make serve`") as ended:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prometheus", "http://127.0.0.1:{}"], "start Prometheus"),
        (["--out", "no-folder/x.png"], "no-folder"),
        (["--minutes", "0"], "--minutes 0"),
    ],
)
def test_the_panels_are_refused_in_a_sentence(
    closed: int, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_panels.py", *(each.format(closed) for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples/monitoring/draw_panels.py"), run_name="__main__")
    assert ended.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["PORT={}", "ARGS=--port {}", "ARGS=--log-level info --port={} --kv-budget 0.5"])
def test_make_looks_at_the_port_that_will_be_served(taken: int, asked: str) -> None:
    command = ["make", "-s", "HARDWARE=cpu", "port-is-free", asked.format(taken)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"port {taken} is taken" in done.stderr


@pytest.mark.parametrize("place", [0, 3])
def test_make_serve_pd_looks_at_its_four_ports_and_names_itself_and_free_ones_as_the_remedy(taken: int, place: int) -> None:
    # Where the port were not looked at, neither an install nor a server would begin.
    command = ["make", "-s", "HARDWARE=cpu", "PYTHON=false", "MODEL=/proc/nope", "serve-pd", f"PORT={taken - place}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and f"port {taken} is taken: " in done.stderr
    other = int(re.search(r"make serve-pd PORT=(\d+)", done.stderr)[1])
    assert not set(range(other, other + 4)) & set(range(taken - place, taken - place + 4))
    check_ports(other)


def test_a_port_in_the_arguments_wins(taken: int, closed: int) -> None:
    command = ["make", "-s", "HARDWARE=cpu", "port-is-free", f"PORT={taken}", f"ARGS=--grpc-port {taken} --port {closed}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("port", ["abc", "0", "65536", "8000x", "123456789012345678901"])
@pytest.mark.parametrize("asked", ["PORT={}", "ARGS=--port {}"])
def test_make_refuses_what_is_no_port_before_it_installs(port: str, asked: str) -> None:
    command = ["make", "-s", "HARDWARE=cpu", "port-is-free", asked.format(port)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode != 0
    assert f"the port is '{port}': pass a number from 1 to 65535" in ended.stderr.splitlines()[0]
