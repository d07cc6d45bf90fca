"""BenchServer and its client against a small HTTP server in place of SGLang."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.tools import CommandError, server_flags
from sglang_ext.tools import server_process as server_module
from sglang_ext.tools.server_process import check_servers, free_port, leave_on_signals, stop_all
from sglang_ext_bench.baselines import CODECS
from sglang_ext_bench.client import SamplingSettings, generate
from sglang_ext_bench.server import BenchServer, RequestClient, check_length


class Handler(BaseHTTPRequestHandler):
    """``/text`` returns text, ``/refuse`` an error, ``/cut`` an incomplete response. Other paths return the method and body as JSON."""

    def do_GET(self) -> None:
        self.answer(b'{"method": "GET"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'{"method": "POST", "body": ' + body + b"}")

    def answer(self, content: bytes) -> None:
        if self.path == "/stream":
            content = b'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
        if self.path == "/text":
            content = b"plain words"
        if self.path.startswith(("/refuse", "/flush_cache")):
            self.send_response(400)
            content = b'{"error": {"message": "not now"}}'
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) + (self.path == "/cut")))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[RequestClient]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield RequestClient(server.server_address[1], request_timeout=10)
        server.shutdown()
        thread.join()


def is_running(process: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


class TestClient:
    def test_no_body_is_a_get_and_a_body_a_post(self, client: RequestClient) -> None:
        assert client.request("/any") == {"method": "GET"}
        assert client.request("any", {"a": 1}) == {"method": "POST", "body": {"a": 1}}
        assert client.request("/any", {}) == {"method": "POST", "body": {}}

    def test_answer_that_is_no_json_is_text(self, client: RequestClient) -> None:
        assert client.request("/text") == "plain words"

    @pytest.mark.parametrize("path", ["/refuse", "/cut"])
    def test_refused_and_broken_answers_are_os_errors(self, client: RequestClient, path: str) -> None:
        with pytest.raises(OSError):
            client.request(path)

    def test_stream_gives_each_event_but_its_end(self, client: RequestClient) -> None:
        assert list(client.stream("/stream", {})) == [{"a": 1}, {"a": 2}]
        with pytest.raises(OSError):
            list(client.stream("/refuse", {}))

    def test_url_has_no_slash_at_its_end(self, client: RequestClient) -> None:
        assert client.url == f"http://127.0.0.1:{client.port}"

    def test_alive_tells_an_answer_from_none(self, client: RequestClient) -> None:
        assert client.alive()
        assert not RequestClient(free_port()).alive()

    def test_a_free_port_is_none_that_the_kernel_gives_to_others_meanwhile(self) -> None:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert free_port() < lowest or lowest < 32768  # a machine may have widened its range

    def test_a_free_port_is_given_once_and_to_no_process_beside_this_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mine = [free_port() for _ in range(50)]
        monkeypatch.setattr(os, "getpid", lambda: pid)
        pid = mine[0] + 1
        assert len({*mine}) == 50 and not {*mine} & {free_port() for _ in range(50)}

    def test_refused_flush_shows_the_servers_words(self, client: RequestClient) -> None:
        with pytest.raises(CommandError, match="HTTP 400: not now"):
            client.flush_cache()

    def test_answer_without_tokens_is_an_error_of_the_prompt(self, client: RequestClient) -> None:
        answer = generate(client, (1,), SamplingSettings(), 1)
        assert answer.error is not None and "no output_ids" in answer.error

    def test_request_to_no_server_is_an_error_of_the_prompt(self) -> None:
        answer = generate(RequestClient(free_port()), (1,), SamplingSettings(), 1)
        assert answer.error is not None and "refused" in answer.error


@pytest.fixture
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grace periods shorter than a user's. Tests whose processes ignore SIGTERM wait for them."""
    for name in ("INTERRUPTED_GRACE", "ORPHAN_GRACE"):
        monkeypatch.setattr(server_module, name, 0.5)


class TestServerProcess:
    def test_taken_port_is_refused(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            server = BenchServer("m", (), tmp_path / "log", port=taken.getsockname()[1])
            with pytest.raises(CommandError, match="is taken"):
                server.__enter__()

    def test_server_that_ends_shows_its_last_words(self, tmp_path: Path) -> None:
        server = BenchServer("m", (), tmp_path / "log")
        server.command = (sys.executable, "-c", "print('last words'); raise SystemExit(3)")
        with pytest.raises(CommandError, match="(?s)code 3.*last words"):
            server.__enter__()

    def test_server_that_ends_shows_its_first_error_though_more_followed(self, tmp_path: Path) -> None:
        server = BenchServer("m", (), tmp_path / "log")
        lines = "print('fine'); print('ERROR: [Errno 98] address in use'); [print('more') for _ in range(99)]"
        server.command = (sys.executable, "-c", lines)
        with pytest.raises(CommandError, match="first error in its log: ERROR: .Errno 98. address in use"):
            server.__enter__()

    def test_extra_variables_reach_the_server_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BENCH_KEPT", "kept")
        monkeypatch.setenv("BENCH_CHANGED", "old")
        server = BenchServer("m", (), tmp_path / "log", env={"BENCH_CHANGED": "new"})
        show = "import os; print(os.environ['BENCH_KEPT'], os.environ['BENCH_CHANGED'])"
        server.command = (sys.executable, "-c", show)
        with pytest.raises(CommandError, match="kept new"):
            server.__enter__()

    def test_runs_from_entry_to_exit(self, tmp_path: Path) -> None:
        server = BenchServer("m", (), tmp_path / "log")
        server.command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(server.port))
        (tmp_path / "health").touch()
        server.command += ("--directory", str(tmp_path))
        assert not server.running
        with server:
            assert server.running and server.alive()
        assert not server.running

    @pytest.mark.usefixtures("short_graces")
    def test_stop_ends_the_children_of_a_leader_that_is_gone(self, tmp_path: Path) -> None:
        server = BenchServer("m", (), tmp_path / "log", start_timeout=3.0, stop_grace=0.1)
        child = "import os, signal, time; signal.signal(15, 1); print(os.getpid(), flush=True); time.sleep(60)"
        leader = f"import subprocess as s; s.run([{sys.executable!r}, '-c', {child!r}])"
        server.command = (sys.executable, "-c", leader)
        with pytest.raises(CommandError, match="not healthy after 3 s"):
            server.__enter__()
        assert not is_running(int(server.log.read_text()))

    @pytest.mark.usefixtures("short_graces")
    def test_stop_waits_not_for_ever_for_what_a_signal_interrupted(self, tmp_path: Path) -> None:
        """A signal handler that stops servers may have interrupted code that holds the lock of a process."""
        server = BenchServer("m", (), tmp_path / "log", stop_grace=0.1)
        server.command = (sys.executable, "-c", "import time; time.sleep(60)")
        server.start()
        process = server._process
        assert process is not None
        with process._waitpid_lock:
            stopping = threading.Thread(target=server.stop, daemon=True)
            stopping.start()
            stopping.join(20)
            ended = not stopping.is_alive()
        assert ended and process.wait(20) < 0

    def test_servers_that_take_their_time_are_ended_at_once(self, tmp_path: Path) -> None:
        stubborn = "import os, signal, time; signal.signal(15, 1); print(os.getpid(), flush=True); time.sleep(60)"
        servers = [BenchServer("m", (), tmp_path / f"log{place}") for place in range(4)]
        for server in servers:
            server.command = (sys.executable, "-c", stubborn)
            server.start()
        deadline = time.monotonic() + 20
        while not all(server.log.read_text() for server in servers) and time.monotonic() < deadline:
            time.sleep(0.05)
        begun = time.monotonic()
        stop_all()
        # Servers that are stopped one after another would each take two grace periods.
        assert time.monotonic() - begun < len(servers) * (server_module.INTERRUPTED_GRACE + server_module.ORPHAN_GRACE)
        assert not any(server.running or is_running(int(server.log.read_text())) for server in servers)
        for server in servers:
            server.stop()

    @pytest.mark.parametrize("times", [1, 2])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_benchmark_that_is_ended_leaves_no_server(self, tmp_path: Path, number: int, times: int) -> None:
        """A second signal during the end changes nothing. Another thread waits for the server, which ignores SIGTERM."""
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
        script = f"""
import runpy, signal, sys, threading, time
from pathlib import Path
from sglang_ext.tools import server_process as server
from sglang_ext_bench.server import BenchServer
# The default of a terminal; under nohup the signal would be ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
server.INTERRUPTED_GRACE = server.ORPHAN_GRACE = 0.2
process = BenchServer("m", (), Path({str(tmp_path / "log")!r}))
process.command = (sys.executable, "-c", {stubborn!r})
process.alive = lambda timeout: True
def run(args):
    with process:
        while not process.log.read_text():
            time.sleep(0.02)
        print(process._process.pid, flush=True)
        waiting = threading.Thread(target=process._process.wait)
        waiting.start()
        # In short steps: Python handles a signal that comes just before a sleep only after it.
        while True:
            time.sleep(0.05)
from sglang_ext_bench import corpus
corpus.run = run
sys.argv = ["bench", "prompts", "--out", {str(tmp_path / "out")!r}, "--tokenizer", "t"]
runpy.run_module("sglang_ext_bench", run_name="__main__")
"""
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as bench:
            server = int(bench.stdout.readline())
            assert is_running(server)
            for _ in range(times):
                bench.send_signal(number)
                time.sleep(0.2)
            assert bench.wait(60) == 128 + number
        assert not is_running(server)

    def test_a_benchmark_that_is_ended_starts_no_further_server(self, tmp_path: Path) -> None:
        """A thread would start the next server when one has ended."""
        script = f"""
import runpy, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sglang_ext_bench import corpus
from sglang_ext.tools import CommandError
from sglang_ext_bench.server import BenchServer
BenchServer.alive = lambda self, timeout: True
def ask(place):
    process = BenchServer("m", (), Path({str(tmp_path)!r}) / str(place))
    process.command = (sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)")
    try:
        with process:
            print(place, flush=True)
            process._process.wait()
    except CommandError:
        pass
def run(args):
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(ask, range(3)))
corpus.run = run
sys.argv = ["bench", "prompts", "--out", {str(tmp_path / "out")!r}, "--tokenizer", "t"]
runpy.run_module("sglang_ext_bench", run_name="__main__")
"""
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as bench:
            assert bench.stdout.readline() == "0\n"
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(20) == 128 + signal.SIGTERM
            assert bench.stdout.read() == ""


def test_where_nohup_lets_a_closed_terminal_be_ignored_it_stays_ignored() -> None:
    before, left = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}, []
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        leave_on_signals(lambda number, frame: left.append(number))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert left == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_flags_are_checked_in_a_process_that_is_gone_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="the server second cannot start: unrecognized arguments: --nonsense"):
        check_servers("m", {"first": ("--kv-mode", "verified"), "other": ("--config", "c.yaml"), "second": ("--nonsense",)})
    assert capfd.readouterr() == ("", "")
    assert not multiprocessing.active_children()


def test_what_flags_of_a_benchmark_do_is_not_said_before_its_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Warnings about benchmark flags, such as a file that is written, belong to the servers' logs."""
    # A fork has SGLang loaded. The test above starts a process anew.
    monkeypatch.setattr(server_module.multiprocessing, "get_context", lambda kind, get=multiprocessing.get_context: get("fork"))
    links = ("--disaggregation-transfer-backend", "progressive", "--disaggregation-mode", "prefill")
    (tmp_path / "config.json").write_text("{}")
    check_servers(str(tmp_path), {"raw prefill": (*links, "--kv-bench-timeline", str(tmp_path / "any-timeline.jsonl"), "--kv-bench-codec", CODECS["int4"])})
    assert capfd.readouterr() == ("", "")


def test_partitions_that_do_not_divide_the_models_heads_are_refused_before_servers_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 9, "hidden_size": 576, "num_key_value_heads": 3}')
    flags = "--kv-mode", "lossy", "--kv-compressor", "hack", "--kv-partition"
    with pytest.raises(CommandError, match="the server hack4:128 cannot start: --kv-partition is 128, which does not divide the 64 channels"):
        server_flags.check(str(tmp_path), {"hack4:64": (*flags, "64"), "hack4:128": (*flags, "128")})


def test_packs_of_more_layers_than_the_model_has_are_refused_before_servers_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    flags = "--kv-mode", "lossy", "--kv-compressor", "spade", "--device", "cpu", "--kv-cache-ranks", "1", "--kv-pack-layers"
    with pytest.raises(CommandError, match="the server packs cannot start: --kv-pack-layers is 31, and the model has 30 layers: pass a number up"):
        server_flags.check(str(tmp_path), {"packs": (*flags, "31")})
    server_flags.check(str(tmp_path), {"packs": (*flags, "30")})


@pytest.mark.parametrize(
    ("flags", "config", "longest"),
    [
        ((), '{"max_position_embeddings": 8192}', 8190),
        (("--context-length", "4096"), '{"max_position_embeddings": 8192}', 4094),
        (("--context-length", "20000"), '{"max_position_embeddings": 8192}', 19998),
        ((), '{"max_position_embeddings": 8192, "rope_scaling": {"factor": 4.0}}', None),
        (("--json-model-override-args", '{"max_position_embeddings": 16384}'), '{"max_position_embeddings": 8192}', None),
    ],
)
def test_prompts_longer_than_the_context_that_is_served_are_refused_before_servers_start(
    tmp_path: Path, flags: tuple[str, ...], config: str, longest: int | None
) -> None:
    (tmp_path / "config.json").write_text(config)
    check_length(tmp_path, "hack4 prefill", flags, longest or 10**9)
    said = f"the server hack4 prefill serves prompts of up to {longest} tokens with .* pass shorter prompts .--load. or a shorter"
    refused = pytest.raises(CommandError, match=said)
    with nullcontext() if longest is None else refused:
        check_length(tmp_path, "hack4 prefill", flags, (longest or 10**9) + 1, "--load")


def test_what_a_longer_prompt_is_told_to_pass_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    with pytest.raises(CommandError, match='--context-length 8193"'):
        check_length(tmp_path, "stock", (), 8191)
    check_length(tmp_path, "stock", ("--context-length", "8193"), 8191)


@pytest.mark.parametrize(("config", "refused"), [('{"num_attention_heads": 9', True), ("[]", True), ('{"num_attention_heads": 9}', False)])
def test_a_config_that_tells_no_shape_of_heads_is_its_servers_to_read_and_one_that_is_no_json_is_refused(
    tmp_path: Path, config: str, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(config)
    words = "the server lossy cannot start: --model .*config.json.* pass a Hugging Face folder"
    with pytest.raises(CommandError, match=words) if refused else nullcontext():
        server_flags.check(str(tmp_path), {"lossy": ("--kv-mode", "lossy", "--kv-compressor", "hack", "--kv-partition", "128")})


def test_a_prefill_and_a_decode_server_whose_links_would_not_fit_are_refused() -> None:
    links = ("--disaggregation-transfer-backend", "progressive", "--disaggregation-mode")
    servers = {"prefill": (*links, "prefill"), "decode": (*links, "decode", "--kv-reference", "int8")}
    with pytest.raises(CommandError, match="--kv-reference is exact of the server prefill and int8 of the server decode: give both the same"):
        # check_servers calls this function in another process.
        server_flags.check("m", servers)


def check_pair(prefill: tuple[str, ...], decode: tuple[str, ...], why: str | None) -> None:
    """Check a prefill and a decode server with these flags. ``why`` is the expected error, or None."""
    links = ("--disaggregation-transfer-backend", "progressive", "--disaggregation-mode")
    servers = {"prefill": (*links, "prefill", *prefill), "decode": (*links, "decode", *decode)}
    with nullcontext() if why is None else pytest.raises(CommandError, match=why):
        server_flags.check("m", servers)


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (("--dtype", "float32"), ("--dtype", "bfloat16"), "the KV pool is float32 of the server prefill and bfloat16 of the server decode"),
        (("--kv-cache-dtype", "fp8_e5m2"), ("--dtype", "half"), "the KV pool is fp8_e5m2 .* and float16 .*the same --dtype and the same"),
        (("--dtype", "bfloat16"), ("--dtype", "half", "--kv-cache-dtype", "bf16"), None),
        (("--dtype", "float32"), (), None),
    ],
)
def test_a_prefill_and_a_decode_server_whose_pools_differ_are_refused_where_flags_say_so(
    prefill: tuple[str, ...], decode: tuple[str, ...], why: str | None
) -> None:
    check_pair(prefill, decode, why)


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (("--kv-mode", "lossy"), ("--kv-mode", "lossy", "--page-size", "128"), "--page-size is 1 of the server prefill and 128 "),
        (("--page-size", "64"), ("--page-size", "16"), "--page-size is 64 .* and 16 of the server decode: give both the same"),
        ((), ("--page-size", "16"), None),
        (("--kv-mode", "verified"), ("--kv-mode", "verified", "--page-size", "1"), None),
    ],
)
def test_a_prefill_and_a_decode_server_with_other_pages_are_refused(
    prefill: tuple[str, ...], decode: tuple[str, ...], why: str | None
) -> None:
    check_pair(prefill, decode, why)


def test_keys_of_links_at_one_server_alone_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    LinkKeys.generate().write(keys)
    links = ("--disaggregation-transfer-backend", "progressive", "--disaggregation-mode")
    servers = {"prefill": (*links, "prefill"), "decode": (*links, "decode", "--kv-link-keys", str(keys))}
    with pytest.raises(CommandError, match="the server decode has --kv-link-keys and the server prefill has none: give both the same file"):
        server_flags.check("m", servers)
