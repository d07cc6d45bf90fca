"""Connections, seen from each end.

- The sender: its socket until it breaks, and the receiver's reachability over successive connections.
- The receiver: the flow control of a sender, and the assembly of parts from frames. A link has at most one partial part of each stream,
  since a sender completes a part before the next one.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash
import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, MAX_ACKS, Frame, PageHeader, Stream

if TYPE_CHECKING:
    from sglang_ext.managers.metrics import MetricSet

logger = logging.getLogger(__name__)

# From this many bytes, another thread computes a frame's checksum while this one copies the frame.
MUCH = 1 << 18


# Milliseconds to wait for libzmq's reason why it gave up a connection.
EVENT_MS = 100
# Minimum seconds over which the receiver's rate is measured.
MEASURED = 0.02
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class BrokenConnection(Exception):
    """This connection cannot be used any more. The next one may work."""


class ProtocolViolation(Exception):
    """A sender sent an unexpected message. It must reconnect."""


class Connection:
    """A socket to one receiver. Used by one thread.

    After ``handshake_seconds`` libzmq retries the handshake. Methods that send or read raise :class:`BrokenConnection`: libzmq has given up
    the connection, or the data is not a message.

    Args:
        waits: Whether the connection waits for a receiver that does not listen yet. Otherwise it is broken then.

    Attributes:
        window: Bytes that may be in flight; 0 until the receiver has answered Hello.
        credit: Bytes that may be sent now.
        rate: Bytes per second that the receiver took recently.
    """

    def __init__(self, context: zmq.Context, endpoint: str, keys: LinkKeys | None, handshake_seconds: float, waits: bool = True) -> None:
        self._named_keys = "no keys" if keys is None else f"keys with the public part {keys.public.decode()}"
        self.socket = context.socket(zmq.DEALER)
        # The receiver's window bounds the queued bytes. A message that was started must not be lost.
        self.socket.set_hwm(0)
        self.socket.linger, self.socket.maxmsgsize = 0, wire.MAX_MESSAGE_BYTES
        self.socket.handshake_ivl = int(1000 * handshake_seconds)
        self.socket.ipv6 = "[" in endpoint
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = keys.public, keys.secret, keys.public
        refused = 0 if waits else zmq.EVENT_CONNECT_RETRIED
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES | refused)
        self.socket.connect(endpoint)
        # Times of the receiver's last message, and of the last ping to it.
        self.heard = self.pinged = time.monotonic()
        self.window = self.credit = 0
        # Bytes taken since ``_taken_since``, and when the link became idle: idle time does not count for the rate.
        self.rate, self._taken, self._taken_since, self._idle_since = 0.0, 0, self.heard, self.heard

    @property
    def is_welcomed(self) -> bool:
        """Whether the receiver has answered Hello."""
        return self.window > 0

    @property
    def outstanding(self) -> int:
        """Sent bytes that the receiver has not granted again."""
        return self.window - self.credit

    def welcome(self, window: int) -> int:
        """Set the window that the receiver grants. Return the longest payload of which two frames fit into it, at least one byte."""
        if window // 2 <= FRAME_OVERHEAD:
            raise BrokenConnection(f"a window of {window} bytes is too small for two frames")
        self.window = self.credit = window
        return window // 2 - FRAME_OVERHEAD

    def grant(self, size: int) -> None:
        """Record that the receiver has taken ``size`` bytes."""
        self.credit = min(self.window, self.credit + size)
        self._taken += size
        seconds = self.heard - self._taken_since
        if seconds >= MEASURED:
            self.rate, self._taken, self._taken_since = self._taken / seconds, 0, self.heard
        if not self.outstanding:
            self._idle_since = self.heard

    def send_message(self, message: wire.Message) -> int:
        """Send a message. Return its bytes."""
        data = wire.encode(message)
        self._send(data)
        return len(data)

    def send_frame(self, frame: wire.Frame, payload: memoryview) -> tuple[int, zmq.MessageTracker]:
        """Send bytes of a part without a copy. Return the total bytes, and a tracker that is done once libzmq has read them."""
        if not self.outstanding:
            self._taken_since += time.monotonic() - self._idle_since
        size, tracker = self.send_payload(frame, payload)
        self.credit -= len(payload) + FRAME_OVERHEAD
        return size, tracker

    def send_payload(self, message: wire.Message, payload: memoryview) -> tuple[int, zmq.MessageTracker]:
        """Send a message, and bytes without a copy in a second frame. See :meth:`send_frame` for the result."""
        head = wire.encode(message)
        self._send(head, zmq.SNDMORE)
        return len(head) + len(payload), self.socket.send(payload, copy=False, track=True)

    def _send(self, data: bytes, flags: int = 0) -> None:
        # After a permanently failed handshake there is no peer, and a blocking send would wait forever.
        try:
            self.socket.send(data, flags | zmq.NOBLOCK)
        except zmq.Again:
            if self.monitor.poll(EVENT_MS):
                self.read_event()
            raise BrokenConnection("the connection was lost") from None

    def read(self) -> wire.FromReceiver | None:
        """Return the receiver's next message; None if there is none."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            message = wire.decode_from_receiver(frames[0] if len(frames) == 1 else b"")
        except wire.WireError as error:
            raise BrokenConnection(f"the receiver sent an invalid message: {error}") from error
        self.heard = time.monotonic()
        return message

    def read_event(self) -> None:
        """Raise :class:`BrokenConnection` with the reason of libzmq's event of a lost connection."""
        event = parse_monitor_message(self.monitor.recv_multipart())["event"]
        if event == zmq.EVENT_CONNECT_RETRIED:
            raise BrokenConnection("nothing listens there")
        if event & _FAILED_HANDSHAKES:
            raise BrokenConnection(
                f"no handshake: this side has {self._named_keys}, the receiver has other keys or none; give both the same key file"
            )
        raise BrokenConnection("the connection was lost")

    def close(self, linger: float = 0.0) -> None:
        """Close the socket. Messages not sent within ``linger`` seconds are dropped."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(1000 * linger))


@dataclass(eq=False)
class Reachability:
    """Whether the receiver of a link answers, over all connections to it, and which timeouts expired. Used by one thread."""

    endpoint: str
    limits: LinkLimits
    metrics: "MetricSet"
    connected: bool = False
    _was_connected: bool = False
    _problem: str = "it does not answer"
    # Connections that broke since the last acknowledgement.
    _broken: int = 0
    _gone_since: float = field(default_factory=time.monotonic)
    _progressed: float = field(default_factory=time.monotonic)

    def welcome(self) -> None:
        """Record that the receiver answered Hello."""
        if not self.connected:
            self.metrics.count("kv_links", 1)
            if self._was_connected:
                self.metrics.count("kv_link_reconnects", 1)
        self.connected = self._was_connected = True
        self.record_progress()

    def record_progress(self, acknowledged: bool = False) -> None:
        """Record progress of the receiver; with ``acknowledged``, it has written parts."""
        self._progressed = time.monotonic()
        self._broken = 0 if acknowledged else self._broken

    def count_break(self, is_welcomed: bool, problem: str) -> str | None:
        """Record a broken connection. Return why its rooms fail now; None if the link reconnects."""
        if not is_welcomed and problem != self._problem:
            logger.error("no link to %s: %s", self.endpoint, problem)
        self._problem = problem
        if is_welcomed:
            logger.warning("the link to %s broke: %s; reconnecting", self.endpoint, problem)
            self._broken += 1
        if self._broken <= self.limits.reconnects:
            return None
        self._broken = 0
        return f"connections to {self.endpoint} broke, and nothing was acknowledged between them; the last error: {problem}"

    def disconnect(self) -> None:
        """Record that the connection is closed, for whatever reason."""
        if self.connected:
            self.connected, self._gone_since = False, time.monotonic()
            self.metrics.count("kv_links", -1)

    def unreachable_reason(self, now: float) -> str | None:
        """Return why rooms fail that waited too long for a connection; None while one exists, or existed recently."""
        if self.connected or now - self._gone_since <= self.limits.resume_seconds:
            return None
        return f"the receiver at {self.endpoint} is not reached for {self.limits.resume_seconds:g} s: {self._problem}"

    def stall_reason(self, now: float, busy: bool) -> str | None:
        """Return why rooms fail whose receiver answers but takes nothing; None while it takes parts, or if not ``busy``."""
        if not busy:
            self._progressed = now
        elif now - self._progressed > self.limits.stall_seconds:
            return f"the receiver at {self.endpoint} acknowledged nothing for {self.limits.stall_seconds:g} s"
        return None


@dataclass(eq=False)
class ReceivedPart:
    """A part of which at least one frame has arrived: its checksum so far, its bytes, which may be kept, and the number received."""

    header: PageHeader
    digest: xxhash.xxh3_64
    content: memoryview
    # The last update of the checksum in another thread.
    reading: Future | None = None
    filled: int = 0

    def has_valid_checksum(self) -> bool:
        """Return whether the checksum of the complete part is correct. Waits until it is computed."""
        if self.reading is not None:
            self.reading.result()
        return self.digest.intdigest() == self.header.checksum


@dataclass(eq=False)
class SenderConnection:
    """A sender's connection, seen from its receiver. Used by one thread.

    Attributes:
        link: Id of the link, which stays the same when the sender reconnects.
        allowance, ungranted: Bytes that the sender may still send, and bytes taken and not granted again.
        allocate: Allocates this many bytes, for a part in several frames.
        reader: Thread that updates checksums, in order; None to use the caller's thread.
        waiting: Bytes of complete parts that are not written.
        acked: Written parts whose acknowledgement is not sent.
    """

    address: bytes
    link: bytes
    allowance: int
    allocate: Callable[[int], bytearray | np.ndarray] = bytearray
    reader: ThreadPoolExecutor | None = None
    ungranted: int = 0
    waiting: int = 0
    acked: list[wire.Acked] = field(default_factory=list)
    _partial: dict[Stream, ReceivedPart] = field(default_factory=dict)

    def take(self, size: int) -> None:
        """Count a received frame with ``size`` bytes of a part. Raise :class:`ProtocolViolation` beyond the granted bytes."""
        cost = size + FRAME_OVERHEAD
        if cost > self.allowance:
            raise ProtocolViolation(f"received {cost} bytes where {self.allowance} were granted")
        self.allowance -= cost
        self.ungranted += cost

    def assemble(self, frame: Frame, payload: memoryview) -> ReceivedPart | None:
        """Add a frame to its part. Return the part once it is complete. Raise :class:`ProtocolViolation` if a frame is missing."""
        header, stream = frame.header, frame.header.stream
        end = frame.offset + len(payload)
        if frame.offset == 0:
            content = memoryview(self.allocate(header.size)) if 0 < end < header.size else payload
            self._partial[stream] = ReceivedPart(header, header.digest(), content)
        partial = self._partial.get(stream)
        if (
            partial is None
            or partial.header != header
            or partial.filled != frame.offset
            or end > header.size
            or not (payload or end == header.size)
        ):
            raise ProtocolViolation(f"a frame of bytes {frame.offset} to {end} of a part of {header.size} does not follow the previous frame")
        partial.filled = end
        # Small frames after a large one go to that thread too, because a checksum reads its bytes in order.
        if self.reader is not None and (partial.reading is not None or len(payload) >= MUCH):
            partial.reading = self.reader.submit(partial.digest.update, payload)
        else:
            partial.digest.update(payload)
        if partial.content is not payload:
            # Unlike an assignment to a memoryview, this releases the GIL.
            np.copyto(np.frombuffer(partial.content, np.uint8)[frame.offset : end], np.frombuffer(payload, np.uint8))
        return None if end < header.size else self._partial.pop(stream)

    def drop(self, stream: Stream) -> None:
        """Discard a partial part."""
        self._partial.pop(stream, None)

    def grant(self, window: int) -> wire.Received | None:
        """Return a message that grants the taken bytes again and acknowledges written parts; None if there is nothing to send."""
        # While more than half a window waits to be written, nothing is granted. The caller asks again after each written part.
        granted, acked = 0 if 2 * self.waiting > window else self.ungranted, tuple(self.acked[:MAX_ACKS])
        self.allowance += granted
        self.ungranted -= granted
        del self.acked[: len(acked)]
        return wire.Received(granted, acked) if granted or acked else None
