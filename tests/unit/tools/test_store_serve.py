"""The command that serves a prefix store, as a process: several clients, signals, a kill and a restart."""

import hashlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from sglang_ext import store
from sglang_ext.doctor import checks
from sglang_ext.mem_cache.prefix_store.backend import (
    StoreBackend,
    StoreError,
    open_backend,
)
from sglang_ext.mem_cache.prefix_store.objects import (
    ObjectFormat,
    StoredPage,
    encode_object,
    read_page,
)

FORM = ObjectFormat("a model", torch.bfloat16, layers=2, heads=2, head_dim=16, page_size=64, form="raw")


@contextmanager
def serving(folder: Path, listen: str = "tcp://127.0.0.1:0") -> Iterator[tuple[subprocess.Popen, str]]:
    """A store process and its URL. It is killed at the end, unless it has ended."""
    command = [sys.executable, "-m", "sglang_ext.store", "serve", "--listen", listen, "--memory-gb", "0.1", "--disk", str(folder), "--disk-gb", "0.2"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r"tcp://127\.0\.0\.1:\d+", line)
        assert found, f"{line!r} {(folder / 'log').read_text()}"
        yield process, found[0]
    finally:
        process.kill()
        process.wait(10)


def page(number: int) -> StoredPage:
    return StoredPage(FORM, hashlib.sha256(str(number).encode()).digest(), 64)


def kv(number: int) -> torch.Tensor:
    return torch.full((4, 64, 2, 16), float(number)).bfloat16()


def put(backend: StoreBackend, number: int) -> bool:
    return backend.put(page(number).name, encode_object(page(number), kv(number)))


def has(backend: StoreBackend, number: int) -> bool:
    """Whether a page is restored."""
    if not backend.count_run([page(number).name]):
        return False
    found = kv(-1)
    read_page(backend, page(number), found)
    return torch.equal(found, kv(number))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Backends that are closed, also after a failed test: a context of ZMQ that nobody closes can block its collection."""
    with ExitStack() as stack:
        yield stack


def test_a_store_process_serves_until_a_signal_and_again_after_a_kill(tmp_path: Path, opened: ExitStack) -> None:
    with serving(tmp_path) as (process, url):
        first, second = (opened.enter_context(closing(open_backend(url))) for _ in range(2))
        assert put(first, 1) and not put(second, 1) and has(second, 1)
        assert checks.check_prefix_store(url).ok
        assert store.main(["list", url]) == 0 and store.main(["check", url]) == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with pytest.raises(StoreError):
            has(first, 1)
    assert not checks.check_prefix_store(url).ok
    with serving(tmp_path, url) as (process, _):
        # The clients of the first process connect again.
        assert has(first, 1) and put(first, 2)
        until = time.monotonic() + 10
        while sum(len(path.name) == 64 for path in tmp_path.glob("*/*/*")) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
        process.wait(10)
        with pytest.raises(StoreError):
            put(first, 3)
    with serving(tmp_path, url) as (process, _):
        assert has(first, 1) and has(second, 2) and not has(first, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    log = (tmp_path / "log").read_text()
    assert log.count("has ended") == 2 and "Traceback" not in log and "no --keys" in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "127.0.0.1:7100", "--memory-gb", "1"], "pass tcp://ADDRESS:PORT"),
        (["--listen", "ipc:///tmp/store", "--memory-gb", "1"], "pass tcp://ADDRESS:PORT"),
        (["--listen", "tcp://127.0.0.1:99999", "--memory-gb", "1"], "pass tcp://ADDRESS:PORT"),
        (["--listen", "tcp://0.0.0.0:1", "--memory-gb", "1"], "listens on all interfaces"),
        (["--listen", "tcp://192.0.2.1:1", "--memory-gb", "1"], "without keys"),
        (["--listen", "tcp://127.0.0.1:0", "--memory-gb", "0"], "--memory-gb 0: pass"),
        (["--listen", "tcp://127.0.0.1:0", "--memory-gb", "1e9"], "the memory of this machine"),
        (["--listen", "tcp://127.0.0.1:0", "--memory-gb", "1", "--disk-gb", "1"], "pass --disk FOLDER"),
        (["--listen", "tcp://127.0.0.1:0", "--memory-gb", "1", "--keys", "missing"], "no keys of links in missing"),
        (["--listen", "tcp://127.0.0.1:0", "--memory-gb", "1", "--gbps", "0"], "--gbps 0: pass"),
    ],
)
def test_wrong_flags_are_refused_with_the_remedy(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert store.main(["serve", *arguments]) == 2
    finally:
        for each, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(each, handler)
    assert said in capsys.readouterr().out


def test_the_doctor_leaves_a_store_as_it_was(tmp_path: Path) -> None:
    backend = open_backend(f"file:{tmp_path}/store")
    put(backend, 1)
    line = checks.check_prefix_store(f"file:{tmp_path}/store")
    assert line.ok and "MB/s" in line.found
    assert [each.name for each in backend.objects()] == [page(1).name]


def test_the_doctor_names_a_store_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "open_backend", lambda url: open_backend(url, 5 << 20))
    line = checks.check_prefix_store(f"file:{tmp_path}/store")
    assert not line.ok and "the store is full" in line.found and "more room" in line.remedy
