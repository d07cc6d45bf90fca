"""Store servers of this machine, and a link that is as slow as a test wants."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def running(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server of this machine, which listens on ``port``."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, f"{command} ended"
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis server without snapshots. Skips the test if Redis or its client is not installed."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with running(program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), port=port) as process:
        yield process


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes. Skips the test if this user may not mount it."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user cannot mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class SlowLink:
    """Context manager: forwards connections to a port of this machine, and limits the bytes of its replies.

    Args:
        target: The port.
        rate: Bytes per second of all connections together.
    """

    def __init__(self, target: int, rate: float) -> None:
        self._target, self._rate = target, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __enter__(self) -> "SlowLink":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for pair, is_slow in (((near, far), False), ((far, near), True)):
                threading.Thread(target=self._forward, args=(*pair, is_slow), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_slow:
                    with self._lock:
                        self._free_at = max(time.monotonic(), self._free_at) + len(data) / self._rate
                        wait = self._free_at - time.monotonic()
                    time.sleep(max(0.0, wait))
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                each.close()
