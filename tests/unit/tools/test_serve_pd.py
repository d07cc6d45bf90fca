"""``python -m sglang_ext.serve_pd``: refused options, the started processes, and the end of all three processes."""

import importlib.util
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_ext import serve_pd
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import free_port


@pytest.fixture
def port(monkeypatch):
    """The first of four free ports, with a fake installation of the router."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for _ in range(20):
        first = free_port()
        try:
            serve_pd.check_ports(first)
        except CommandError:
            continue
        return first
    raise AssertionError("no four free ports in a row")


@pytest.fixture
def checked(monkeypatch):
    """Collects the checked flags by role. The flag ``nosuch`` is refused."""
    found = {}

    def check(model, servers):
        found.update(servers)
        if any("nosuch" in flags for flags in servers.values()):
            raise CommandError(f"{model}: no method nosuch")

    monkeypatch.setattr(serve_pd, "check_servers", check)
    return found


def parsed(port, *arguments):
    return serve_pd.parser().parse_args(["--model", "m", "--port", str(port), *arguments])


def test_both_servers_get_their_role_and_what_is_said_of_both_and_of_each(port, checked):
    args = parsed(port, "--arg=--dtype float32 --kv-reference int8", "--prefill-arg=--kv-link-gbps 2", "--decode-arg=--kv-budget '0.5'")
    flags = serve_pd.check(args)
    shared = ("--kv-mode", "verified", "--sleep-on-idle", "--disaggregation-transfer-backend", "progressive")
    shared += ("--dtype", "float32", "--kv-reference", "int8")
    bootstrap = ("--disaggregation-bootstrap-port", str(port + 3))
    assert flags == checked == {
        "prefill": ("--disaggregation-mode", "prefill", *bootstrap, *shared, "--kv-link-gbps", "2"),
        "decode": ("--disaggregation-mode", "decode", *bootstrap, *shared, "--kv-budget", "0.5"),
    }


def test_the_router_leads_to_both(tmp_path):
    command = serve_pd.Router(8000, (8001, 8002), 8003, tmp_path / "log").command
    assert command[2] == "sglang_router.launch_router"
    # Its metrics use the loopback interface, and a port that another router does not use.
    assert "--prometheus-host 127.0.0.1 --prometheus-port " in " ".join(command) and "29000" not in command
    assert " ".join(command).endswith("--port 8000 --prefill http://127.0.0.1:8001 8003 --decode http://127.0.0.1:8002")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--arg=--port=8000"], "--arg has --port=8000, .*: pass --port .*and leave it out there"),
        (["--arg=--model-path a"], "--arg has --model-path, .*: pass --model .*and leave it out there"),
        (["--prefill-arg=--disaggregation-mode decode"], "--prefill-arg has --disaggregation-mode, which this command sets itself: leave it out"),
        (["--arg=--host 0.0.0.0"], "--arg has --host, .*start the servers by hand"),
        (["--decode-arg=--served-model-name 'a"], "--decode-arg .*No closing quotation; close it"),
        (["--port", "65533"], "--port 65533: the next three are used too: pass 1 to 65532"),
        (["--decode-arg=--kv-compressor nosuch"], "m: no method nosuch"),
    ],
    ids=["port", "model", "role", "host", "quote", "last-port", "flag"],
)
def test_what_cannot_start_is_refused_before_anything_does(port, checked, arguments, why, tmp_path):
    with pytest.raises(CommandError, match=why):
        serve_pd.check(parsed(port, "--logs", str(tmp_path / "logs"), *arguments))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_a_time_to_start_in_that_is_none_is_refused(port, seconds, capsys):
    with pytest.raises(SystemExit):
        parsed(port, "--start-timeout", seconds)
    assert f"argument --start-timeout: '{seconds}': pass seconds above 0" in capsys.readouterr().err


def test_a_folder_for_logs_that_cannot_be_made_is_named(port, checked):
    with pytest.raises(CommandError, match="--logs /proc/none cannot be created: .*pass a folder that can"):
        serve_pd.serve(parsed(port, "--logs", "/proc/none"), {})


def test_a_port_that_is_taken_is_refused_whichever_of_the_four_it_is(port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        with pytest.raises(CommandError, match=f"port {port + 2} is taken") as refused:
            serve_pd.check(parsed(port))
        # The proposed port is free.
        other = int(re.search(r"pass --port (\d+) \(make serve-pd PORT=\1\)", str(refused.value))[1])
        assert other >= port + 4
        serve_pd.check_ports(other)


def test_a_router_that_is_not_installed_is_told_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    assert serve_pd.main(["--model", "m"]) == 2
    assert "SGLang's router (sglang_router) is not installed: pip install --no-deps -r requirements/pd.txt" in capsys.readouterr().err


# Servers that only respond to health checks, or end by themselves.
STAND_INS = """
    import runpy, signal, sys
    from sglang_ext import serve_pd
    from sglang_ext.tools.server_process import ServerProcess

    # The default of a terminal; under nohup the signal would be ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    class Quick(ServerProcess):
        def __init__(self, model, flags, log, port, **named):
            super().__init__(model, flags, log, port=port, **named)
            self.command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", {folder!r}, str(port)]

    class QuickRouter(serve_pd.Router):
        def __init__(self, port, servers, bootstrap, log):
            super().__init__(port, servers, bootstrap, log)
            self.command = Quick("", (), log, port).command
            if {dies}:
                self.command = [sys.executable, "-c", {dying!r}, *self.command[1:]]

    serve_pd.ServerProcess, serve_pd.Router, serve_pd.check = Quick, QuickRouter, serve_pd.role_flags
    serve_pd.leave_on_signals(serve_pd._leave)
    sys.exit(serve_pd.main(["--model", "m", "--port", {port!r}, "--logs", {logs!r}]))
"""
DYING = """
import os, sys, threading, runpy
threading.Timer(5.0, lambda: (print("last words", flush=True), os._exit(3))).start()
sys.argv = sys.argv[2:]
runpy.run_module("http.server", run_name="__main__")
"""


def serving(port: int, folder: Path, dies: bool) -> subprocess.Popen[str]:
    for name in ("health", "readiness"):
        (folder / name).touch()
    script = textwrap.dedent(STAND_INS).format(folder=str(folder), dies=dies, dying=DYING, port=str(port), logs=str(folder / "logs"))
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def all_closed(port: int) -> bool:
    def is_closed(each: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", each)) != 0

    return all(is_closed(each) for each in range(port, port + 4))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_three(port, tmp_path, number, code):
    with serving(port, tmp_path, dies=False) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert [line.split(":")[0] for line in lines] == ["prefill server", "decode server", "listening on http"]
        process.send_signal(number)
        assert process.wait(20) == code
        assert "stopping the servers and the router" in process.stderr.read()
    assert all_closed(port)


def test_where_one_ends_all_do_and_its_last_words_are_shown(port, tmp_path):
    with serving(port, tmp_path, dies=True) as process:
        assert process.wait(30) == 2
        assert "the router ended, so that all are stopped" in (told := process.stderr.read()) and "last words" in told
    assert all_closed(port)


def test_a_server_that_ends_while_it_starts_is_named_by_its_role(port, tmp_path, monkeypatch):
    start, ending = subprocess.Popen, [sys.executable, "-c", "print('does not fit the model'); exit(2)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **given: start(ending, **given))
    args = parsed(port, "--logs", str(tmp_path))
    with pytest.raises(CommandError, match="(?s)the prefill server: the server ended with code 2.*does not fit the model"):
        serve_pd.serve(args, serve_pd.role_flags(args))
