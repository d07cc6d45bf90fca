"""The sender's rooms: which frame goes next, what is there already, what must go again, who is told.

Strict order over all rooms: auxiliary records whose anchors have gone, anchors, residuals; within each, the order of offers.
A room's auxiliary record waits until the last of its anchors has gone, its residuals until the record has, unless the link has nothing
else to send: while a long prompt is computed it would wait from one chunk to the next. A part is cut short by one that comes first, and goes
on afterwards: of each stream at most one is begun.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.wire import MAX_PART_BYTES, Have, LayerRange, PageHeader, RoomShape, Stream

logger = logging.getLogger(__name__)

# Seconds between looks at whether libzmq still reads the bytes of a room that ended.
SOON = 0.002
# What comes first, first.
_ORDER = (Stream.AUX, Stream.ANCHOR, Stream.RESIDUAL)


@dataclass(eq=False)
class OutgoingPart:
    """A part to send; its bytes stay as they are until it has arrived or its room has ended.

    Attributes:
        stream: anchor, aux or residual.
        payload: contiguous bytes; they are not copied.
        page: counted from the first that travels; 0 for aux.
        layers: of the KV; for aux any.
        prefix_hash: 32 bytes (page_hashes.py), or none.
    """

    stream: Stream
    payload: memoryview | bytes
    page: int = 0
    layers: LayerRange = LayerRange(0, 1)
    prefix_hash: bytes = b""

    def __post_init__(self) -> None:
        self.payload = memoryview(self.payload).cast("B")
        if len(self.payload) > MAX_PART_BYTES:
            raise LinkError(f"a part of {len(self.payload)} bytes; at most {MAX_PART_BYTES} travel as one: give the room more layer ranges")


@dataclass(eq=False)
class QueuedPart:
    """A part on its way.

    Attributes:
        room, number: of the part in its stream.
        header: with the checksum.
        offset: of the next frame's bytes.
        repeats: how often its checksum was wrong.
    """

    room: int
    number: int
    part: OutgoingPart
    header: PageHeader
    offset: int = 0
    repeats: int = 0


class SendListener(Protocol):
    """Who is told of a room that is sent. The link's thread calls it, so it must be quick; a call of another room may follow."""

    def arrived(self, room: int, stream: Stream) -> None:
        """All parts of a stream were checked and written by the receiver."""

    def ended(self, room: int, reason: str | None) -> None:
        """All is there (None), or why not; the last call, once the link reads none of the room's bytes any more."""


@dataclass(eq=False)
class OutgoingRoom:
    """What is known of a room; ``OutgoingQueue`` changes it, and the link's thread what libzmq reads.

    Attributes:
        listener: who hears of it.
        opened: when, in seconds of ``time.monotonic``.
        reading: frames that libzmq may still read.
        confirmed: whether the receiver said what it has, on this connection.
        offered: parts that have not arrived, by stream and number.
        waiting: those of them that something of the room comes before.
        gone: numbers of parts that were sent whole on this connection, or are there.
        there: numbers of parts that are there.
        told: streams whose completion was told.
    """

    number: int
    shape: RoomShape
    listener: SendListener
    opened: float = field(default_factory=time.monotonic)
    reading: deque[zmq.MessageTracker] = field(default_factory=deque)
    confirmed: bool = False
    offered: dict[tuple[Stream, int], QueuedPart] = field(default_factory=dict)
    waiting: dict[Stream, deque[QueuedPart]] = field(default_factory=lambda: {stream: deque() for stream in Stream})
    gone: dict[Stream, set[int]] = field(default_factory=lambda: {stream: set() for stream in Stream})
    there: dict[Stream, set[int]] = field(default_factory=lambda: {stream: set() for stream in Stream})
    told: set[Stream] = field(default_factory=set)

    def is_idle(self) -> bool:
        """Whether libzmq reads none of its bytes any more."""
        while self.reading and self.reading[0].done:
            self.reading.popleft()
        return not self.reading

    @property
    def complete(self) -> bool:
        """Whether all is there."""
        return all(len(self.there[stream]) == self.shape.parts(stream) for stream in Stream)

    def newly_complete(self) -> list[Stream]:
        """Streams that are there and were not told before; those without parts are not told."""
        streams = [one for one in Stream if one not in self.told and 0 < self.shape.parts(one) == len(self.there[one])]
        self.told.update(streams)
        return streams

    def can_send(self, stream: Stream) -> bool:
        """Whether parts of a stream have nothing of their room left before them."""
        before = {Stream.ANCHOR: (), Stream.AUX: (Stream.ANCHOR,), Stream.RESIDUAL: (Stream.ANCHOR, Stream.AUX)}[stream]
        return self.confirmed and all(len(self.gone[one]) == self.shape.parts(one) for one in before)


class ListenerNotifier:
    """What the listeners of a link's rooms are told; of the link's thread, but for :meth:`end`.

    Args:
        endpoint: the receiver's, which the log names.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._ended: deque[tuple[OutgoingRoom, str | None]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether a room has ended whose listener does not know."""
        return bool(self._ended)

    def end(self, room: OutgoingRoom, reason: str | None) -> None:
        """A room has ended; its listener is told later, by the link's thread. Any thread."""
        self._ended.append((room, reason))

    def notify_arrived(self, room: OutgoingRoom, streams: Sequence[Stream]) -> None:
        """All parts of some streams are there."""
        for stream in streams:
            self._call(room.listener.arrived, room.number, stream)

    def notify_ended(self, seconds: float = 0.0) -> None:
        """Tell of rooms that ended and whose bytes libzmq reads no more; with ``seconds`` of all, after so long at most."""
        until = time.monotonic() + seconds
        for _ in range(len(self._ended)):
            room, reason = self._ended.popleft()
            while not room.is_idle() and time.monotonic() < until:
                time.sleep(SOON)
            if room.is_idle() or seconds:
                self._call(room.listener.ended, room.number, reason)
            else:
                self._ended.append((room, reason))

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception:  # A listener is the caller's: its error must not end the other rooms.
            logger.exception("a listener of the link to %s raised", self._endpoint)


class OutgoingQueue:
    """All rooms of one link. Whoever shares it holds a lock.

    Attributes:
        rooms: that have not ended.
        queued: bytes of parts that have not arrived.
    """

    def __init__(self, codec: str, rank: int) -> None:
        self.rooms: dict[int, OutgoingRoom] = {}
        self.queued = 0
        self._codec, self._rank = codec, rank
        self._queues: dict[Stream, deque[QueuedPart]] = {stream: deque() for stream in _ORDER}

    def open(self, room: int, shape: RoomShape, listener: SendListener) -> None:
        """A room whose parts will be offered.

        Raises:
            LinkError: it is open.
        """
        if room in self.rooms:
            raise LinkError(f"room {room} is open on this link; a room is sent once, and cancelled before it is sent anew")
        self.rooms[room] = OutgoingRoom(room, shape, listener)

    def header(self, room: int, part: OutgoingPart) -> PageHeader:
        """Of a part of a room; it reads all of the part once. Needs no lock."""
        stated = part.stream, part.page, part.layers, self._rank, self._codec, len(part.payload), part.prefix_hash
        return PageHeader(room, *stated).sealed(part.payload)

    def offer(self, part: OutgoingPart, header: PageHeader) -> bool:
        """A part to send, with its :meth:`header`; False where the room has ended.

        Raises:
            LinkError: the room has no such part, or has it already.
        """
        room = header.room
        if room not in self.rooms:
            return False
        state = self.rooms[room]
        number = state.shape.part(part.stream, part.page, part.layers)
        if number is None:
            raise LinkError(f"room {room} has no {part.stream} of page {part.page} and {part.layers}; it is {state.shape}")
        if (part.stream, number) in state.offered or number in state.there[part.stream]:
            raise LinkError(f"{part.stream} of page {part.page} and {part.layers} of room {room} was offered before; offer each part once")
        self.queued += len(part.payload)
        state.offered[part.stream, number] = sending = QueuedPart(room, number, part, header)
        state.waiting[part.stream].append(sending)
        self._release(state)
        return True

    def confirm(self, have: Have) -> list[Stream]:
        """What the receiver has of a room, which may go on now; streams that are complete with it.

        Raises:
            LinkError: it has what this room does not have.
        """
        room = self.rooms[have.room]
        found = {
            Stream.ANCHOR: set(_bits(have.anchors)),
            Stream.RESIDUAL: set(_bits(have.residuals)),
            Stream.AUX: {0} if have.aux else set(),
        }
        for stream, numbers in found.items():
            if any(number >= room.shape.parts(stream) for number in numbers):
                raise LinkError(
                    f"the receiver says it has part {max(numbers)} of {stream}; room {room.number} has {room.shape.parts(stream)}"
                )
        room.confirmed = True
        for stream, numbers in found.items():
            for number in numbers:
                self._arrived(room, stream, number)
            room.waiting[stream] = deque(sending for sending in room.waiting[stream] if sending.number not in numbers)
        self._release(room)
        return room.newly_complete()

    def next(self) -> QueuedPart | None:
        """The part whose next frame goes, as long as none comes before it."""
        for stream in _ORDER:
            if self._queues[stream]:
                return self._queues[stream][0]
        return None

    def next_early_residual(self) -> QueuedPart | None:
        """Where nothing may go: the first residual whose anchor has gone may, before the other anchors of its room."""
        for room in self.rooms.values():
            waiting = room.waiting[Stream.RESIDUAL]
            if room.confirmed and waiting and waiting[0].number in room.gone[Stream.ANCHOR]:
                self._queues[Stream.RESIDUAL].append(sending := waiting.popleft())
                return sending
        return None

    def unsent(self, stream: Stream) -> int:
        """Parts of a stream that were offered and did not go whole."""
        return len(self._queues[stream]) + sum(len(room.waiting[stream]) for room in self.rooms.values())

    def advance(self, sending: QueuedPart, size: int) -> None:
        """``size`` more bytes of the part that ``next`` gave were sent; 0 for an empty part. Its room may have ended meanwhile."""
        sending.offset += size
        room = self.rooms.get(sending.room)
        if room is None or sending.offset < len(sending.part.payload):
            return
        self._queues[sending.part.stream].popleft()
        room.gone[sending.part.stream].add(sending.number)
        self._release(room)

    def arrived(self, room: int, stream: Stream, number: int) -> list[Stream]:
        """A part is there; streams that are complete with it. Nothing happens where nobody waits for it."""
        state = self.rooms.get(room)
        if state is None or (stream, number) not in state.offered or number not in state.gone[stream]:
            return []
        self._arrived(state, stream, number)
        return state.newly_complete()

    def retransmit(self, room: int, stream: Stream, number: int, most: int) -> None:
        """Send a part once more, before others of its stream.

        Raises:
            LinkError: it was sent again ``most`` times, or it is not under way.
        """
        state = self.rooms.get(room)
        if state is None:
            return
        sending = state.offered.get((stream, number))
        if sending is None or number not in state.gone[stream]:
            raise LinkError(f"part {number} of {stream} is asked for again and is not under way: its header was changed on the way")
        if sending.repeats == most:
            raise LinkError(f"part {number} of {stream} came with a wrong checksum {most + 1} times; the network or a memory is broken")
        sending.repeats += 1
        sending.offset = 0
        state.gone[stream].discard(number)
        queue = self._queues[stream]
        # Not between the frames of another.
        queue.insert(1 if queue and queue[0].offset else 0, sending)

    def end(self, room: int) -> OutgoingRoom | None:
        """Forget a room and its parts; None where it is not open."""
        state = self.rooms.pop(room, None)
        if state is not None and state.offered:
            self.queued -= sum(len(sending.part.payload) for sending in state.offered.values())
            for stream, queue in self._queues.items():
                self._queues[stream] = deque(sending for sending in queue if sending.room != room)
        return state

    def pause(self) -> None:
        """The connection broke: nothing goes until the receiver said again what it has."""
        for queue in self._queues.values():
            queue.clear()
        for room in self.rooms.values():
            room.confirmed = False
            room.gone = {stream: set(numbers) for stream, numbers in room.there.items()}
            room.waiting = {stream: deque() for stream in Stream}
            for (stream, _), sending in room.offered.items():
                sending.offset = 0
                room.waiting[stream].append(sending)

    def _arrived(self, room: OutgoingRoom, stream: Stream, number: int) -> None:
        sending = room.offered.pop((stream, number), None)
        if sending is not None:
            self.queued -= len(sending.part.payload)
        room.gone[stream].add(number)
        room.there[stream].add(number)

    def _release(self, room: OutgoingRoom) -> None:
        for stream, waiting in room.waiting.items():
            if waiting and room.can_send(stream):
                self._queues[stream].extend(waiting)
                waiting.clear()


def _bits(bitmap: bytes) -> Iterator[int]:
    for place, byte in enumerate(bitmap):
        for bit in range(8):
            if byte >> bit & 1:
                yield 8 * place + bit
