"""Connections, as each end knows them: the sender's socket until it breaks, whether its receiver is reached by one after another, and what
the receiver has granted and taken.
"""

import logging
import time
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.part_assembly import Assembly, ReceivedPart
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.link_metrics import LinkMetrics
from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, MAX_ACKS

logger = logging.getLogger(__name__)

# Until libzmq has told why it gave a connection up.
EVENT_MS = 100
# Seconds over which is measured how fast a receiver takes bytes.
MEASURED = 0.02
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class BrokenConnection(Exception):
    """This connection is of no more use; the next may be."""


class ProtocolViolation(Exception):
    """A sender said what cannot be followed: it has to connect anew."""


class Connection:
    """A socket to one receiver. One thread uses it.

    Args:
        context: of the link.
        endpoint: the receiver's.
        keys: of both ends, or None.
        handshake_seconds: after which libzmq tries anew.

    Attributes:
        heard, pinged: when the receiver last said something, and when it was last asked to.
        window: bytes that may be under way; 0 until the receiver answered Hello.
        credit: bytes that may be sent now.
        rate: bytes per second that the receiver took lately.
    """

    def __init__(self, context: zmq.Context, endpoint: str, keys: LinkKeys | None, handshake_seconds: float) -> None:
        self._endpoint = endpoint
        self._named_keys = "no keys" if keys is None else f"keys with the public part {keys.public.decode()}"
        self.socket = context.socket(zmq.DEALER)
        # What is queued here is bounded by the receiver's window, and a message that was begun must not be lost.
        self.socket.set_hwm(0)
        self.socket.linger, self.socket.maxmsgsize = 0, wire.MAX_MESSAGE_BYTES
        self.socket.handshake_ivl = int(1000 * handshake_seconds)
        self.socket.ipv6 = "[" in endpoint
        if keys is not None:
            keys.connect(self.socket)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES)
        self.socket.connect(endpoint)
        self.heard = self.pinged = time.monotonic()
        self.window = self.credit = 0
        # Bytes that were taken since then, and since when none are under way: that time says nothing of how fast they are.
        self.rate, self._taken, self._taken_since, self._idle_since = 0.0, 0, self.heard, self.heard

    @property
    def is_welcomed(self) -> bool:
        """Whether the receiver answered Hello."""
        return self.window > 0

    @property
    def outstanding(self) -> int:
        """Bytes that were sent and not granted again."""
        return self.window - self.credit

    def welcome(self, window: int) -> int:
        """The receiver grants a window; the longest payload of which two frames fit.

        Raises:
            BrokenConnection: none does.
        """
        if window // 2 <= FRAME_OVERHEAD:
            raise BrokenConnection(f"a window of {window} bytes is too small for two frames")
        self.window = self.credit = window
        return window // 2 - FRAME_OVERHEAD

    def grant(self, size: int) -> None:
        """The receiver has taken ``size`` bytes."""
        self.credit = min(self.window, self.credit + size)
        self._taken += size
        seconds = self.heard - self._taken_since
        if seconds >= MEASURED:
            self.rate, self._taken, self._taken_since = self._taken / seconds, 0, self.heard
        if not self.outstanding:
            self._idle_since = self.heard

    def send_message(self, message: wire.FromSender) -> int:
        """Send a message; its bytes.

        Raises:
            BrokenConnection: libzmq has given the connection up.
        """
        data = wire.encode(message)
        self._send(data)
        return len(data)

    def send_frame(self, frame: wire.Frame, payload: memoryview) -> tuple[int, zmq.MessageTracker]:
        """Send bytes of a part without a copy; how many in all, and what tells when libzmq has read them.

        Raises:
            BrokenConnection: as of :meth:`send_message`.
        """
        if not self.outstanding:
            self._taken_since += time.monotonic() - self._idle_since
        head = wire.encode(frame)
        self._send(head, zmq.SNDMORE)
        tracker = self.socket.send(payload, copy=False, track=True)
        self.credit -= len(payload) + FRAME_OVERHEAD
        return len(head) + len(payload), tracker

    def _send(self, data: bytes, flags: int = 0) -> None:
        # After a handshake that failed for good there is nobody to send to: libzmq would wait for ever.
        try:
            self.socket.send(data, flags | zmq.NOBLOCK)
        except zmq.Again:
            if self.monitor.poll(EVENT_MS):
                self.read_event()
            raise BrokenConnection("the connection was lost") from None

    def read(self) -> wire.FromReceiver | None:
        """What the receiver said; None where it said nothing.

        Raises:
            BrokenConnection: it is no message.
        """
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            message = wire.decode_from_receiver(frames[0] if len(frames) == 1 else b"")
        except wire.WireError as error:
            raise BrokenConnection(f"it said what is no message: {error}") from error
        self.heard = time.monotonic()
        return message

    def read_event(self) -> None:
        """Take what libzmq says of the connection.

        Raises:
            BrokenConnection: always; with the reason.
        """
        if parse_monitor_message(self.monitor.recv_multipart())["event"] & _FAILED_HANDSHAKES:
            raise BrokenConnection(
                f"no handshake: this side has {self._named_keys}, the receiver others or none; give both the same file of keys"
            )
        raise BrokenConnection("the connection was lost")

    def close(self, linger: float = 0.0) -> None:
        """Drop what was not sent within ``linger`` seconds."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(1000 * linger))


@dataclass(eq=False)
class Reachability:
    """Whether the receiver of a link answers, over all connections to it, and what took too long. One thread uses it.

    Attributes:
        endpoint: the receiver's.
        limits: times, and connections that may break.
        metrics: told when it is reached and when no more.
        connected: whether it answers.
    """

    endpoint: str
    limits: LinkLimits
    metrics: LinkMetrics
    connected: bool = False
    _was_connected: bool = False
    _problem: str = "it does not answer"
    # Connections that broke since something was acknowledged.
    _broken: int = 0
    _gone_since: float = field(default_factory=time.monotonic)
    _progressed: float = field(default_factory=time.monotonic)

    def welcome(self) -> None:
        """It answered Hello."""
        if not self.connected:
            self.metrics.add_links(1)
            if self._was_connected:
                self.metrics.count_reconnect()
        self.connected = self._was_connected = True
        self.record_progress()

    def record_progress(self, acknowledged: bool = False) -> None:
        """It did what it was waited for; where ``acknowledged``, it took parts."""
        self._progressed = time.monotonic()
        self._broken = 0 if acknowledged else self._broken

    def count_break(self, is_welcomed: bool, problem: str) -> str | None:
        """A connection broke, which was ``is_welcomed`` or not: why its rooms fail now, or None where another is tried."""
        if not is_welcomed and problem != self._problem:
            logger.error("no link to %s: %s", self.endpoint, problem)
        self._problem = problem
        if is_welcomed:
            logger.warning("the link to %s broke: %s; it is tried again", self.endpoint, problem)
            self._broken += 1
        if self._broken <= self.limits.reconnects:
            return None
        self._broken = 0
        return f"connections to {self.endpoint} broke, and nothing was acknowledged between them; the last: {problem}"

    def disconnect(self) -> None:
        """The connection is closed, whatever ended it."""
        if self.connected:
            self.connected, self._gone_since = False, time.monotonic()
            self.metrics.add_links(-1)

    def unreachable_reason(self, now: float) -> str | None:
        """Why rooms fail that have waited for a connection as long as they may; None while one is there, or was lately."""
        if self.connected or now - self._gone_since <= self.limits.resume_seconds:
            return None
        return f"the receiver at {self.endpoint} is not reached for {self.limits.resume_seconds:g} s: {self._problem}"

    def stall_reason(self, now: float, busy: bool) -> str | None:
        """Why rooms fail whose receiver answers and takes nothing; None while it does, or nothing is to be taken (not ``busy``)."""
        if not busy:
            self._progressed = now
        elif now - self._progressed > self.limits.stall_seconds:
            return f"the receiver at {self.endpoint} acknowledged nothing for {self.limits.stall_seconds:g} s"
        return None


@dataclass(eq=False)
class SenderConnection:
    """A connection of a sender, at its receiver. One thread uses it.

    Attributes:
        address: by which the receiver's socket knows it.
        link: which stays the same when the sender connects again.
        allowance: bytes that it may still send.
        heard: when it last said something.
        assembly: what has come of its parts.
        ungranted: bytes that were taken and not granted again.
        waiting: bytes of whole parts that are not written.
        acked: parts that were written, and that it was not told of.
    """

    address: bytes
    link: bytes
    allowance: int
    heard: float
    assembly: Assembly
    ungranted: int = 0
    waiting: int = 0
    acked: list[wire.Acked] = field(default_factory=list)

    def take(self, size: int) -> None:
        """A frame with ``size`` bytes of a part came.

        Raises:
            ProtocolViolation: that is more than was granted.
        """
        cost = size + FRAME_OVERHEAD
        if cost > self.allowance:
            raise ProtocolViolation(f"{cost} bytes came where {self.allowance} were granted")
        self.allowance -= cost
        self.ungranted += cost

    def assemble(self, frame: wire.Frame, payload: memoryview) -> ReceivedPart | None:
        """A frame is put to its part; that part, once it is whole.

        Raises:
            ProtocolViolation: the frame does not follow the one before.
        """
        try:
            return self.assembly.add(frame, payload)
        except LinkError as error:
            raise ProtocolViolation(str(error)) from error

    def grant(self, window: int) -> wire.Received | None:
        """What was taken is granted again, and what was written told; None where there is nothing to tell.

        While more than half a window waits to be written, nothing is granted: a part that is written asks again.
        """
        granted, acked = 0 if 2 * self.waiting > window else self.ungranted, tuple(self.acked[:MAX_ACKS])
        self.allowance += granted
        self.ungranted -= granted
        del self.acked[: len(acked)]
        return wire.Received(granted, acked) if granted or acked else None
