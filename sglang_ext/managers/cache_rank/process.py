"""Starts and ends the process of a cache rank, and creates its socket."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import zmq

from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import MAX_MESSAGE_BYTES

# Maximum queued messages to a process that reads none. Beyond that, sending fails at once.
QUEUED = 4096


class RankProcess:
    """One process of a cache rank, from start to end.

    Args:
        exchange_buffer: Memory that both map. Its words are reset for this process.
        epoch: Number of this process among those started for the rank.
        threads: Threads for its matrix products.

    Attributes:
        socket: Socket to the process. No other user can connect, because the folder belongs to this user.

    Raises:
        OSError: The system has no memory or cannot start a process.
    """

    def __init__(self, exchange_buffer: ExchangeBuffer, epoch: int, threads: int):
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-ext-cache-rank-")  # mode 700
        descriptor = exchange_buffer.begin(epoch)
        try:
            self.socket = zmq.Context.instance().socket(zmq.DEALER)
            self.socket.set_hwm(QUEUED)
            self.socket.linger, self.socket.maxmsgsize = 0, MAX_MESSAGE_BYTES
            endpoint = f"ipc://{Path(self._folder.name, 'socket')}"
            self._bind(endpoint)
            self._process = self._start(endpoint, descriptor, epoch, threads, exchange_buffer.rank_device)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _bind(self, endpoint: str) -> None:
        """Bind the socket. A bind error is raised as :class:`OSError`, like other system errors; a TMPDIR of more than about 70
        characters causes one."""
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise OSError(error.errno, f"{error.strerror}; set TMPDIR to a shorter path", endpoint) from error

    def _start(self, endpoint: str, descriptor: int | None, epoch: int, threads: int, device: str) -> subprocess.Popen:
        given = {
            "endpoint": endpoint, "memory": descriptor, "epoch": epoch, "threads": threads, "parent": os.getpid(), "device": device
        }  # fmt: skip
        flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        # Idle OpenMP threads must not spin, because the inference rank needs the cores.
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "sglang_ext.managers.cache_rank", *flags]
        return subprocess.Popen(command, pass_fds=() if descriptor is None else (descriptor,), stdin=subprocess.DEVNULL, env=env)

    def connected(self) -> None:
        """Delete the socket's file, because the process has connected. The file would outlive a killed process."""
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """Exit status; None while the process runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kill the process, even if it is stopped, and free its resources."""
        self._process.kill()
        self._process.wait()
        self.socket.close(0)
        self._folder.cleanup()
