"""Connection of the inference rank to one cache rank: starts, watches and restarts its process, and exchanges messages."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import zmq

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.kv_transfer.wire import WireError, encode

logger = logging.getLogger(__name__)

# The client ends a process that sends no message for this time. A process sends a heartbeat every 0.2 s, and between two selection
# requests.
SILENCE_SECONDS = 3.0
# Timeouts until the first heartbeat, while the process loads PyTorch, and until it is ready. In the second phase a thread sends
# heartbeats, but it waits for compilers.
START_SECONDS, ATTACH_SECONDS = 120.0, 30.0
# Delay before a restart, doubled with each process that ended before it sent a reply; and the maximum number of such processes.
RESTART_SECONDS, MAX_STARTS = 0.5, 6
# A process that was ready for this long resets the failure count, like one that sent a reply.
SETTLED_SECONDS = 60.0
# Bounds of the measured pack size (AsyncSpade, section 4.4). Messages take at most this share of the selection time.
MIN_PACK, MAX_PACK, MESSAGE_SHARE = 4, 12, 0.1
# Number of pings, and the wait for each. A later look, as by an idle scheduler, would measure its own delay.
PINGS, PING_SECONDS = 5, 0.02
# Maximum queued messages to a process that reads none. Beyond that, sending fails at once.
QUEUED = 4096


class RankProcess:
    """One process of a cache rank, from start to end.

    The words of the ``exchange_buffer`` are reset for it. ``epoch`` is its number among the processes of the rank. Its matrix products use
    ``threads``. No other user can connect to the ``socket``, because its folder belongs to this user.

    Raises:
        OSError: The system has no memory, cannot start a process, or cannot bind the socket (a TMPDIR of more than about 70 characters).
    """

    def __init__(self, exchange_buffer: ExchangeBuffer, epoch: int, threads: int):
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-ext-cache-rank-")  # mode 700
        descriptor = exchange_buffer.begin(epoch)
        try:
            self.socket = zmq.Context.instance().socket(zmq.DEALER)
            self.socket.set_hwm(QUEUED)
            self.socket.linger, self.socket.maxmsgsize = 0, protocol.MAX_MESSAGE_BYTES
            endpoint = f"ipc://{Path(self._folder.name, 'socket')}"
            try:
                self.socket.bind(endpoint)
            except zmq.ZMQError as error:
                self.socket.close(0)
                raise OSError(error.errno, f"{error.strerror}; set TMPDIR to a shorter path", endpoint) from error
            given = {"endpoint": endpoint, "epoch": epoch, "threads": threads, "parent": os.getpid(), "device": exchange_buffer.rank_device}
            if descriptor is not None:
                given["memory"] = descriptor
            flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
            # Idle OpenMP threads must not spin, because the inference rank needs the cores.
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            command = [sys.executable, "-m", "sglang_ext.managers.cache_rank", *flags]
            inherited = () if descriptor is None else (descriptor,)
            self._process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=env)
            self.pid = self._process.pid
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def connected(self) -> None:
        """Delete the socket's file, because the process has connected. The file would outlive a killed process."""
        self._folder.cleanup()

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


class RankUnavailable(Exception):
    """The rank cannot be used now. The text is the reason as metrics name it."""


class Pack(NamedTuple):
    """Layers that one selection request covers: ``first`` to ``first + count``."""

    first: int
    count: int

    @property
    def layers(self) -> slice:
        """The layers as a slice."""
        return slice(self.first, self.first + self.count)


def split_into_packs(layers: int, count: int) -> tuple[Pack, ...]:
    """Split all layers into packs of at most ``count``, as even as possible."""
    number = -(-layers // min(count, layers))
    bounds = [layers * each // number for each in range(number + 1)]
    return tuple(Pack(begin, end - begin) for begin, end in zip(bounds, bounds[1:]))


class RankLink:
    """Connection to a cache rank across restarts of its process.

    Args:
        attach: First message, without the epoch and the device's numbers.
        exchange_buffer: Memory that is shared with each process of the rank.
        silence: Seconds without a message after which a process is ended.
        pack: Layers of a pack; 0 to measure it; None for all layers of a step in one selection request.
        threads: Threads of each process.

    Attributes:
        down_reason: Why the rank is not ready, as metrics name it.
        epoch: Number of processes started. It numbers the running one. Leases name it, and are void in another epoch.
        packs: Division of the layers; set once the rank is :attr:`ready`.
        seconds: Duration of the last pack's selection.
        replies: Replies of this process that were not processed yet, newest last.
    """

    def __init__(
        self, attach: protocol.Attach, exchange_buffer: ExchangeBuffer, silence: float = SILENCE_SECONDS, pack: int | None = None,
        threads: int = 1, start_process: Callable[[ExchangeBuffer, int, int], RankProcess] = RankProcess,
    ):  # fmt: skip
        apart = attach.apart or exchange_buffer.device != torch.device(exchange_buffer.rank_device)
        self.attach = msgspec.structs.replace(attach, arena=exchange_buffer.handle, apart=apart)
        self.exchange_buffer, self._silence_when_ready, self._threads = exchange_buffer, silence, threads
        self._pack = attach.shape.layers if pack is None else pack
        self.epoch = 0
        self.packs: tuple[Pack, ...] = ()
        self.seconds = 0.0
        self.replies: list[protocol.SelectionReply] = []
        self._start_process = start_process
        self._process: RankProcess | None = None
        self.down_reason = "starting"
        self._failures = 0
        self._restart_time = self._ready_since = 0.0
        # State of the running process: time of its last message, whether `Attach` was sent, seconds of one layer's selection.
        self._last_message_time = 0.0
        self._attach_sent = False
        self._layer_seconds = 0.0
        self._free_places: list[int] = []
        self._pinged: dict[int, float] = {}
        self._round_trips: list[float] = []

    @property
    def ready(self) -> bool:
        """Whether the rank accepts selection requests."""
        return bool(self.packs)

    @property
    def has_given_up(self) -> bool:
        """Whether no more processes will be started."""
        return self._failures >= MAX_STARTS

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.pid

    def poll(self) -> None:
        """Receive messages, end a silent process, and start a new one if none runs. Does not block."""
        if self._process is None:
            if not self.has_given_up and time.monotonic() >= self._restart_time:
                self._start()
            return
        self._receive_messages()
        if self._process is None:
            return
        silence, allowed = time.monotonic() - self._last_message_time, self._silence_when_ready
        if not self.ready:
            allowed = max(ATTACH_SECONDS, allowed) if self._attach_sent else START_SECONDS
        if not self._has_ended() and silence > allowed:
            self._fail("silent", f"it sent nothing for {silence:.1f} s")

    def _has_ended(self) -> bool:
        """Return whether the process has ended; if so, record the failure."""
        status = self._process.ended
        if status is not None:
            self._fail("ended", f"it ended with status {status}")
        return status is not None

    def _start(self) -> None:
        self.epoch += 1
        self._last_message_time, self._attach_sent, self._pinged, self._round_trips = time.monotonic(), False, {}, []
        self._free_places = list(range(self.attach.shape.places))
        try:
            self._process = self._start_process(self.exchange_buffer, self.epoch, self._threads)
        except OSError as error:
            self._fail("ended", f"it did not start: {error}")

    def _fail(self, down_reason: str, told: str) -> None:
        if self.ready and time.monotonic() - self._ready_since >= SETTLED_SECONDS:
            self._failures = 0
        self.packs, self.replies, self._free_places, self.down_reason = (), [], [], down_reason
        if self._process is not None:
            alone = "; requests with remote-only KV there are computed again" if self.attach.shape.rows else ""
            logger.warning("sglang-ext: cache rank (process %s): %s; its requests continue without it for now%s", self.pid, told, alone)
            self._process.end()
            self._process = None
        self._restart_time = time.monotonic() + RESTART_SECONDS * 2**self._failures
        self._failures += 1
        if self.has_given_up:
            logger.error(
                "sglang-ext: cache rank: %d processes ended before they answered; no more are started, and requests go without it until "
                "the server is restarted. The last: %s", MAX_STARTS, told,
            )  # fmt: skip

    def end(self) -> None:
        """End the process, and start no other."""
        self.packs, self._failures = (), MAX_STARTS
        if self._process is not None:
            self._process.end()
            self._process = None

    def send_message(self, message: protocol.ToRank) -> None:
        """Send a message.

        Raises:
            RankUnavailable: The rank is not ready, or its queue is full. In the second case its process is ended.
        """
        if self._process is None:
            raise RankUnavailable(self.down_reason)
        try:
            self._process.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            if not self._has_ended():
                self._fail("silent", "it accepts no more messages")
            raise RankUnavailable(self.down_reason) from None

    @property
    def has_free_place(self) -> bool:
        """Whether :meth:`place` would return a slot."""
        return bool(self._free_places)

    def place(self) -> int | None:
        """Take a staging slot for keys until the rank has copied them; None if no slot is free."""
        return self._free_places.pop() if self._free_places else None

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most this long, and process received messages."""
        if self._process is not None and self._process.socket.poll(max(0, int(seconds * 1000))):
            self._receive_messages()

    def _receive_messages(self) -> None:
        while self._process is not None:
            try:
                message = protocol.decode_from_rank(self._process.socket.recv(zmq.NOBLOCK))
                # Messages of another process can only arrive through a fault.
                if message.epoch == self.epoch:
                    self._last_message_time = time.monotonic()
                    self._handle_message(message)
            except (zmq.Again, RankUnavailable):
                return
            except WireError as error:
                self._fail("wrong", f"it sent an invalid message: {error}")
                return

    def _handle_message(self, message: protocol.FromRank) -> None:
        match message:
            case protocol.SelectionReply():
                self._failures = 0
                self.seconds = message.seconds if message.chosen else self.seconds
                self.replies.append(message)
            case protocol.PlacesFreed():
                self._free_places += (place for place in message.places if place not in self._free_places)
            case protocol.Heartbeat() if not self._attach_sent:
                self._attach_sent = True
                self._process.connected()
                self.send_message(msgspec.structs.replace(self.attach, epoch=self.epoch))
            case protocol.Heartbeat() if message.number in self._pinged:
                self._round_trips.append(time.monotonic() - self._pinged.pop(message.number))
                if len(self._round_trips) == PINGS:
                    self._become_ready()
            case protocol.Attached():
                self._layer_seconds = message.layer_seconds
                self._ping()
            case protocol.AttachRefused():
                self._fail("wrong", f"it refuses: {message.reason}")

    def _ping(self) -> None:
        """Measure the round trip of messages. A heartbeat later than PING_SECONDS is received in a later poll."""
        for number in range(1, PINGS + 1):
            begun = self._pinged[number] = time.monotonic()
            self.send_message(protocol.RankPing(number))
            while number in self._pinged and (left := begun + PING_SECONDS - time.monotonic()) > 0:
                self.wait(left)

    def _become_ready(self) -> None:
        count = self._pack or choose_pack_size(min(self._round_trips), self._layer_seconds)
        self.packs, self._ready_since = split_into_packs(self.attach.shape.layers, count), time.monotonic()
        logger.info(
            "sglang-ext: cache rank (process %d, start %d) is ready: room for %d tokens, packs of up to %d layers, a message and back "
            "%.2f ms, a layer of 1024 tokens %.2f ms",
            self.pid, self.epoch, self.attach.blocks * protocol.BLOCK, max(pack.count for pack in self.packs),
            min(self._round_trips) * 1e3, self._layer_seconds * 1e3,
        )  # fmt: skip


def choose_pack_size(message_seconds: float, layer_seconds: float) -> int:
    """Return the layers of a pack, so that messages take at most a tenth of the selection time; 4 to 12."""
    wanted = message_seconds / MESSAGE_SHARE / max(layer_seconds, 1e-9)
    return int(min(MAX_PACK, max(MIN_PACK, wanted)))
