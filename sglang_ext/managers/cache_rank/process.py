"""Starts and ends the process of a cache rank, with the socket and the memory that it has in common with this one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from sglang_ext.managers.cache_rank.protocol import MAX_MESSAGE_BYTES, BufferShape
from sglang_ext.managers.cache_rank.shared_memory import SharedMemory, allocate, map_memory

if TYPE_CHECKING:
    from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import ExchangeBuffer

# Messages that wait for a process that takes none; then sending fails at once.
QUEUED = 4096


class RankProcess:
    """One process of a cache rank, from its start to its end.

    Args:
        shape: of the memory in common.
        epoch: its number among the processes that this one begins for the rank.
        threads: that its products take.
        arena: memory of a GPU that both map, in the place of shared memory; None on a CPU.

    Attributes:
        socket: to it; nobody else can connect, as the folder is this user's.
        memory: that both map; new with each process.

    Raises:
        OSError: the system has no memory, or no process.
    """

    def __init__(self, shape: BufferShape, epoch: int, threads: int, arena: "ExchangeBuffer | None" = None):
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-ext-cache-rank-")  # mode 700
        descriptor = allocate(shape) if arena is None else arena.begin(epoch)
        try:
            self.memory: SharedMemory | ExchangeBuffer = map_memory(shape, descriptor) if arena is None else arena
            self.socket = zmq.Context.instance().socket(zmq.DEALER)
            self.socket.set_hwm(QUEUED)
            self.socket.linger, self.socket.maxmsgsize = 0, MAX_MESSAGE_BYTES
            endpoint = f"ipc://{Path(self._folder.name, 'socket')}"
            self._bind(endpoint)
            self._process = self._start(endpoint, descriptor, epoch, threads, None if arena is None else arena.rank_device)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _bind(self, endpoint: str) -> None:
        """As any lack of the system's, what ZMQ cannot bind to is an :class:`OSError`: a TMPDIR of more than about 70 characters."""
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise OSError(error.errno, f"{error.strerror}; let TMPDIR name a folder of a shorter name", endpoint) from error

    def _start(self, endpoint: str, descriptor: int | None, epoch: int, threads: int, device: str | None) -> subprocess.Popen:
        given = {
            "endpoint": endpoint, "memory": descriptor, "epoch": epoch, "threads": threads, "parent": os.getpid(), "device": device
        }  # fmt: skip
        flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        # No kernel waits in a spin for the next product: the inference rank needs the cores.
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "sglang_ext.managers.cache_rank", *flags]
        return subprocess.Popen(command, pass_fds=() if descriptor is None else (descriptor,), stdin=subprocess.DEVNULL, env=env)

    def connected(self) -> None:
        """It has connected: the socket's file is of no more use, and would outlive a process that is killed."""
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it at once, even where it was stopped; what it held is gone."""
        self._process.kill()
        self._process.wait()
        self.socket.close(0)
        self._folder.cleanup()
