"""The sender's end of a link: a thread with one socket to one receiver.

A connection starts with Hello and Welcome. The sender then opens each room, and the receiver answers which parts of it it has; for a new
room, none. When a connection breaks, the next one repeats this, and missing parts are sent again.

The receiver's grants bound the bytes in flight, and a token bucket paces them, so that an anchor waits for few earlier bytes. All links of
a prefill rank share the bucket. No link sends a residual while another link has an anchor to send (limits.py:NetworkInterface).
"""

import logging
import math
import os
import threading
import time
from collections import deque
from contextlib import suppress

import zmq

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.connection import BrokenConnection, Connection, Reachability
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys, check_endpoint
from sglang_ext.managers.kv_transfer.limits import LinkLimits, NetworkInterface
from sglang_ext.managers.kv_transfer.outgoing_queue import OutgoingQueue, OutgoingRoom, SendListener
from sglang_ext.managers.kv_transfer.transfer_metrics import WaitTimer, stream_label
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, LayerRange, LinkError, LinkSettings, RoomShape, Stream
from sglang_ext.managers.metrics import MetricSet

logger = logging.getLogger(__name__)

# Maximum of frames sent, and of messages read, in a row.
MAX_IN_A_ROW = 32
# Maximum of cancelled rooms to report once an unreachable receiver is back.
MAX_CANCELS = 4096
# Seconds between timeout checks, before a reconnection, and for the last messages of a link that closes.
CHECK_SECONDS, RECONNECT_SECONDS, CLOSE_SECONDS = 0.05, 0.1, 0.2
# Seconds between checks whether libzmq still reads the bytes of a room that ended.
POLL_SECONDS = 0.002
# Seconds without an anchor after which residuals are sent before the room's remaining anchors.
QUIET_SECONDS = 0.02
# Layers in the headers of auxiliary records, which have no meaning.
AUX_LAYERS = LayerRange(0, 1)


class Link:
    """Rooms that one sender sends to one receiver, a ``LinkServer``. All methods may be called from any thread; none waits for the network.

    Args:
        settings: Settings of this end, which must equal the receiver's.
        interface: Rate limit and priority that it shares with other links; None: no limit, shared with no other link.
        keys: Key pair of both ends; None for no encryption, on this machine only.

    Attributes:
        refusal: Why the receiver no longer serves this link; None while it does.
        outstanding_bytes: Sent bytes that the receiver has not granted again; at most its window.

    Raises:
        LinkError: The endpoint is refused (endpoints.py).
    """

    def __init__(
        self,
        endpoint: str,
        settings: LinkSettings,
        limits: LinkLimits = LinkLimits(),
        interface: NetworkInterface | None = None,
        keys: LinkKeys | None = None,
        metrics: MetricSet = MetricSet(),
    ) -> None:
        check_endpoint(endpoint, keys)
        self._metrics, self._waits = metrics, WaitTimer(metrics)
        self.endpoint, self._settings, self._limits, self._keys = endpoint, settings, limits, keys
        self._interface = interface or NetworkInterface()
        self._frame_bytes = self._interface.frame_bytes(limits.frame_bytes)
        self._link = os.urandom(16)
        self._context = zmq.Context()
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The lock guards the queue, the rooms and the requests of other threads. No listener is called while it is held.
        self._lock = threading.Lock()
        self._queue = OutgoingQueue(settings.codec, settings.tp_rank)
        self._unopened: list[int] = []
        self._cancels: deque[tuple[int, str]] = deque(maxlen=MAX_CANCELS)
        # Ended rooms whose listeners were not notified.
        self._ended: deque[tuple[OutgoingRoom, str | None]] = deque()
        self.refusal: str | None = None
        self._closing = False
        # Used by the link's thread only.
        self.outstanding_bytes, self._quiet_from = 0, 0.0
        self._receiver = Reachability(endpoint, limits, metrics)
        self._thread = threading.Thread(target=self._run, name=f"kv-link {endpoint}", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of parts that are not acknowledged."""
        return self._queue.queued

    def unsent(self, stream: Stream) -> int:
        """Return the number of offered parts of a stream that are not completely sent."""
        with self._lock:
            return self._queue.unsent(stream)

    @property
    def connected(self) -> bool:
        """Whether the receiver answers."""
        return self._receiver.connected

    def open(self, room: int, shape: RoomShape, listener: SendListener) -> None:
        """Open a room whose parts will be offered. Raise ``LinkError`` if the room is open, or the link is closed or was refused.

        An early call lets the receiver answer early which parts it has.
        """
        with self._lock:
            if self.refusal or self._closing:
                raise LinkError(f"the link to {self.endpoint} takes no rooms: {self.refusal or 'it is closed'}")
            self._queue.open(room, shape, listener)
            self._unopened.append(room)
            self._metrics.count("kv_link_rooms", 1)
            self._notify()

    def offer(
        self, room: int, stream: Stream, payload: memoryview | bytes, page: int = 0, layers: LayerRange = AUX_LAYERS, prefix_hash: bytes = b""
    ) -> bool:
        """Queue a part, described as in its :class:`PageHeader`. Return False if the room has ended.

        ``payload`` is not copied. It is contiguous, and must not change until the part is acknowledged or the room has ended.

        Raises:
            LinkError: The room has no such part, the part was offered before, or too many bytes are queued.
        """
        payload = memoryview(payload).cast("B")
        # The checksum is computed here, because the link's own thread is busy.
        header = self._queue.header(room, stream, payload, page, layers, prefix_hash)
        with self._lock:
            if self._queue.queued + len(payload) > self._limits.queued_bytes and room in self._queue.rooms:
                raise LinkError(
                    f"{self._queue.queued} bytes are queued for {self.endpoint}, and {len(payload)} more exceed queued_bytes, "
                    f"{self._limits.queued_bytes}; wait until some are acknowledged, or raise it"
                )
            live = self._queue.offer(header, payload)
            self._notify()
        return live

    def cancel(self, room: int, reason: str = "cancelled") -> None:
        """Send nothing more of a room, if it is open. Its listener's ``ended`` follows."""
        with self._lock:
            self._end(room, f"the sender ended it: {reason}")
            self._cancels.append((room, reason))
            self._notify()

    def close(self, timeout: float = 5.0) -> None:
        """Cancel all rooms and end the thread. Wait for the thread at most ``timeout`` seconds."""
        with self._lock:
            self._closing = True
            self._notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _notify(self) -> None:
        """Wake the thread if it has not ended. The caller holds the lock."""
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def _end(self, room: int, reason: str | None) -> None:
        """End a room. The thread notifies its listener once its bytes are no longer read. The caller holds the lock."""
        ended = self._queue.end(room)
        if ended is not None:
            self._ended.append((ended, reason))
            self._metrics.count("kv_link_rooms", -1)

    def _notify_ended(self, seconds: float = 0.0) -> None:
        """Notify the listeners of ended rooms whose bytes libzmq no longer reads. With ``seconds``, wait that long, then notify all."""
        until = time.monotonic() + seconds
        for _ in range(len(self._ended)):
            room, reason = self._ended.popleft()
            while not room.is_idle() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            if not room.is_idle() and not seconds:
                self._ended.append((room, reason))
                continue
            try:
                room.listener.ended(room.number, reason)
            except Exception:  # An error of a listener must not end the other rooms.
                logger.exception("a listener of the link to %s raised", self.endpoint)

    def _run(self) -> None:
        try:
            while not self._closing and not self.refusal:
                self._connect_once()
        except Exception:
            logger.exception("the link to %s ended; rooms on it fail", self.endpoint)
            self.refusal = "an internal error ended the link; the log has it"
        with self._lock:
            self._closing = True
            for room in list(self._queue.rooms):
                self._end(room, self.refusal or "this side closed the link")
        # The sockets are closed, but libzmq may still read bytes for a moment.
        self._context.destroy(0)
        self._notify_ended(CLOSE_SECONDS)
        with self._lock:
            os.close(self._wake)
            self._wake = None

    def _connect_once(self) -> None:
        connection = Connection(self._context, self.endpoint, self._keys, self._limits.silence_seconds)
        last_words = 0.0
        try:
            self._send_message(connection, wire.Hello(wire.VERSION, self._link, wire.encode(self._settings)))
            self._serve(connection)
            last_words = CLOSE_SECONDS
        except BrokenConnection as broken:
            reason = self._receiver.count_break(connection.is_welcomed, str(broken))
            if reason is not None:
                self._fail_all(reason)
        finally:
            with self._lock:
                rooms = list(self._queue.rooms)
                self._queue.pause()
            if last_words and connection.is_welcomed and not self.refusal:
                with suppress(BrokenConnection):
                    for room in rooms:
                        self._send_message(connection, wire.Cancel(room, "its side closed the link"))
            connection.close(last_words)
            self.outstanding_bytes = 0
            self._interface.set_urgent(id(self), False)
            self._waits.set_wait_reason(None)
            self._receiver.disconnect()
        if not self._closing and not self.refusal:
            self._check_timeouts(None, time.monotonic())
            self._notify_ended()
            time.sleep(RECONNECT_SECONDS)

    def _serve(self, connection: Connection) -> None:
        """Send and read until the link is closed or refused. Raise ``BrokenConnection`` if the connection cannot be used any more."""
        poller = zmq.Poller()
        for source in (connection.socket, connection.monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        checked = 0.0
        while not self._closing and not self.refusal:
            now = time.monotonic()
            if now - checked >= CHECK_SECONDS:
                self._check_timeouts(connection, now)
                checked = now
            wait = self._send_frames(connection)
            ready = dict(poller.poll(math.ceil(1000 * min(wait, POLL_SECONDS if self._ended else CHECK_SECONDS))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for _ in range(MAX_IN_A_ROW if connection.socket in ready else 0):
                message = connection.read()
                if message is None:
                    break
                self._handle(connection, message)
            if connection.monitor in ready:
                connection.read_event()
            self._notify_ended()

    def _send_frames(self, connection: Connection) -> float:
        """Send all frames that may be sent now. Return the seconds until more may be sent."""
        if not connection.is_welcomed:
            return CHECK_SECONDS
        with self._lock:
            cancels = [self._cancels.popleft() for _ in range(len(self._cancels))]
            opened, self._unopened = self._unopened, []
            shapes = [(room, self._queue.rooms[room].shape) for room in opened if room in self._queue.rooms]
        for room, reason in cancels:
            self._send_message(connection, wire.Cancel(room, reason))
        for room, shape in shapes:
            self._send_message(connection, wire.Open(room, shape))
        for _ in range(MAX_IN_A_ROW):
            wait = self._send_frame(connection)
            if wait:
                return wait
        return 0.0

    def _send_frame(self, connection: Connection) -> float:
        now = time.monotonic()
        quiet = now >= self._quiet_from
        with self._lock:
            queued_part = self._queue.next() or (self._queue.next_early_residual() if quiet else None)
            room = self._queue.rooms.get(queued_part.header.room) if queued_part is not None else None
        if room is None:
            self._waits.set_wait_reason(None)
            self._interface.set_urgent(id(self), False)
            return CHECK_SECONDS if quiet else QUIET_SECONDS
        begin, stream = queued_part.offset, queued_part.header.stream
        payload = queued_part.payload[begin : begin + self._frame_bytes]
        is_residual = stream is Stream.RESIDUAL
        most_residual = max(self._limits.residual_bytes, connection.rate * self._limits.residual_seconds)
        exceeds_limit = is_residual and connection.outstanding >= most_residual
        takes = len(payload) + FRAME_OVERHEAD <= connection.credit and not exceeds_limit
        self._interface.set_urgent(id(self), takes and not is_residual)
        if not takes:
            self._waits.set_wait_reason("credit")
            return CHECK_SECONDS
        if is_residual and self._interface.is_another_urgent(id(self)):
            self._waits.set_wait_reason("priority")
            return POLL_SECONDS
        wait = self._interface.wait(now)
        if wait:
            self._waits.set_wait_reason("rate")
            return wait
        self._waits.set_wait_reason(None)
        size, tracker = connection.send_frame(wire.Frame(queued_part.header, begin), payload)
        self.outstanding_bytes = connection.outstanding
        self._interface.take(size, now := time.monotonic())
        if not is_residual:
            self._quiet_from = now + QUIET_SECONDS
        self._metrics.count("kv_link_sent_bytes", len(payload), stream_label(stream, room.shape))
        room.is_idle()
        room.reading.append(tracker)
        with self._lock:
            self._queue.advance(queued_part, len(payload))
        return 0.0

    def _send_message(self, connection: Connection, message: wire.FromSender) -> None:
        self._interface.take(connection.send_message(message), time.monotonic())

    def _handle(self, connection: Connection, message: wire.FromReceiver) -> None:
        match message:
            case wire.Refused(reason):
                logger.error("the receiver at %s refuses this sender: %s", self.endpoint, reason)
                self.refusal = f"refused by {self.endpoint}: {reason}"
            case wire.HelloFirst(reason):
                raise BrokenConnection(f"the receiver got an unexpected message: {reason}")
            case wire.Welcome(window):
                most = min(connection.welcome(window), self._limits.frame_bytes)
                self._frame_bytes = self._interface.frame_bytes(most)
                self._receiver.welcome()
                with self._lock:
                    self._unopened = list(self._queue.rooms)
            case wire.Have():
                self._confirm(message)
            case wire.Received(granted, acked):
                self._acknowledge(connection, granted, acked)
            case wire.Retransmit(room, stream, part):
                try:
                    with self._lock:
                        self._queue.retransmit(room, stream, part, self._limits.repeats)
                except LinkError as error:
                    self.cancel(room, str(error))
            case wire.Ended(room, reason):
                with self._lock:
                    self._end(room, f"the receiver ended it: {reason}")

    def _confirm(self, have: wire.Have) -> None:
        with self._lock:
            state = self._queue.rooms.get(have.room)
            if state is None or state.confirmed:
                return
            try:
                self._queue.confirm(have)
            except LinkError as error:
                self._end(have.room, str(error))
                self._cancels.append((have.room, str(error)))
                return
            self._end_complete(have.room)
        self._receiver.record_progress()

    def _acknowledge(self, connection: Connection, granted: int, acked: tuple[wire.Acked, ...]) -> None:
        connection.grant(granted)
        self.outstanding_bytes = connection.outstanding
        self._receiver.record_progress(acknowledged=bool(acked))
        for part in acked:
            with self._lock:
                self._queue.arrived(part.room, part.stream, part.part)
                self._end_complete(part.room)

    def _end_complete(self, number: int) -> None:
        """End a room if the receiver has all of it. The caller holds the lock."""
        room = self._queue.rooms.get(number)
        if room is not None and room.complete:
            self._end(number, None)

    def _fail_all(self, reason: str, opened_before: float = float("inf")) -> None:
        with self._lock:
            failing = [number for number, room in self._queue.rooms.items() if room.opened < opened_before]
            for room in failing:
                self._end(room, reason)
                self._cancels.append((room, reason))

    def _check_timeouts(self, connection: Connection | None, now: float) -> None:
        """Fail rooms that exceed a timeout. Raise ``BrokenConnection`` if the receiver is silent."""
        limits = self._limits
        reason = self._receiver.unreachable_reason(now)
        if reason is not None:
            self._fail_all(reason, opened_before=now - limits.resume_seconds)
        if connection is None:
            return
        if now - connection.heard > limits.silence_seconds:
            raise BrokenConnection(f"it is silent for {limits.silence_seconds:g} s")
        if not connection.is_welcomed:
            return
        if now - connection.pinged > limits.ping_seconds:
            connection.pinged = now
            self._send_message(connection, wire.Ping())
        with self._lock:
            busy = connection.outstanding or self._queue.next() or not all(room.confirmed for room in self._queue.rooms.values())
        reason = self._receiver.stall_reason(now, bool(busy))
        if reason is not None:
            self._fail_all(reason)
