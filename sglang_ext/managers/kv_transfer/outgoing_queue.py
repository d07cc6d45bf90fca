"""The sender's rooms: the order of frames, acknowledged parts, retransmissions, and calls of listeners.

The order over all rooms is strict: auxiliary records whose anchors were sent, then anchors, then residuals. Within a stream, parts are sent
in the order of their offers. A room's auxiliary record waits for its last anchor, and its residuals wait for the record.

There is one exception. If the link has no anchor to send, it sends residuals early. Otherwise they would wait from one prefill chunk to the
next.

A part of a higher stream interrupts a lower one, which continues afterwards. At most one part of each stream is partially sent.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from sglang_ext.managers.kv_transfer.wire import MAX_PART_BYTES, Have, LayerRange, LinkError, PageHeader, RoomShape, Stream

# Streams by descending priority.
_ORDER = (Stream.AUX, Stream.ANCHOR, Stream.RESIDUAL)


@dataclass(eq=False)
class QueuedPart:
    """A part that is queued or being sent. ``number`` is its number in its stream, ``offset`` that of its next frame in bytes."""

    header: PageHeader
    payload: memoryview
    number: int
    offset: int = 0
    repeats: int = 0


class SendListener(Protocol):
    """Callback for an outgoing room. The link's thread calls it, so it must be quick. It may call methods for other rooms."""

    def ended(self, room: int, reason: str | None) -> None:
        """The room is complete (None), or failed for this reason. The last call, once the link reads none of the room's bytes."""


@dataclass(eq=False)
class OutgoingRoom:
    """State of an outgoing room. ``OutgoingQueue`` changes it; the link's thread changes ``reading``.

    Attributes:
        reading: Trackers of frames that libzmq may still read.
        confirmed: Whether the receiver has answered on this connection which parts it has.
        offered: Parts that are not acknowledged, by stream and number.
        waiting: Offered parts that wait for other parts of the room.
        sent_parts: Numbers of parts that were completely sent on this connection, or are acknowledged.
    """

    number: int
    shape: RoomShape
    listener: SendListener
    opened: float = field(default_factory=time.monotonic)
    reading: deque[zmq.MessageTracker] = field(default_factory=deque)
    confirmed: bool = False
    offered: dict[tuple[Stream, int], QueuedPart] = field(default_factory=dict)
    waiting: dict[Stream, deque[QueuedPart]] = field(default_factory=lambda: {stream: deque() for stream in Stream})
    sent_parts: dict[Stream, set[int]] = field(default_factory=lambda: {stream: set() for stream in Stream})
    acknowledged_parts: dict[Stream, set[int]] = field(default_factory=lambda: {stream: set() for stream in Stream})

    def is_idle(self) -> bool:
        """Return whether libzmq no longer reads any of its bytes."""
        while self.reading and self.reading[0].done:
            self.reading.popleft()
        return not self.reading

    @property
    def complete(self) -> bool:
        """Whether all parts are acknowledged."""
        return all(len(self.acknowledged_parts[stream]) == self.shape.parts(stream) for stream in Stream)

    def can_send(self, stream: Stream) -> bool:
        """Return whether no part of the room must be sent before those of a stream."""
        before = {Stream.ANCHOR: (), Stream.AUX: (Stream.ANCHOR,), Stream.RESIDUAL: (Stream.ANCHOR, Stream.AUX)}[stream]
        return self.confirmed and all(len(self.sent_parts[earlier]) == self.shape.parts(earlier) for earlier in before)


class OutgoingQueue:
    """All rooms of one link that have not ended, and the ``queued`` bytes of parts that are not acknowledged. Callers hold a lock.

    Methods raise ``LinkError`` for parts and rooms that the state does not allow.
    """

    def __init__(self, codec: str, rank: int) -> None:
        self.rooms: dict[int, OutgoingRoom] = {}
        self.queued = 0
        self._codec, self._rank = codec, rank
        self._queues: dict[Stream, deque[QueuedPart]] = {stream: deque() for stream in _ORDER}

    def open(self, room: int, shape: RoomShape, listener: SendListener) -> None:
        """Open a room whose parts will be offered."""
        if room in self.rooms:
            raise LinkError(f"room {room} is open on this link; cancel the room before it is sent again")
        self.rooms[room] = OutgoingRoom(room, shape, listener)

    def header(self, room: int, stream: Stream, payload: memoryview, page: int, layers: LayerRange, prefix_hash: bytes) -> PageHeader:
        """Return the header of a part of a room. Reads the whole part once. Needs no lock."""
        if len(payload) > MAX_PART_BYTES:
            raise LinkError(f"a part of {len(payload)} bytes; a part has at most {MAX_PART_BYTES}: give the room more layer ranges")
        return PageHeader(room, stream, page, layers, self._rank, self._codec, len(payload), prefix_hash).sealed(payload)

    def offer(self, header: PageHeader, payload: memoryview) -> bool:
        """Queue a part with its :meth:`header`. Return False if the room has ended."""
        room, stream = header.room, header.stream
        if room not in self.rooms:
            return False
        state = self.rooms[room]
        number = state.shape.part(stream, header.page, header.layers)
        if number is None:
            raise LinkError(f"room {room} has no {stream} of page {header.page} and {header.layers}; it is {state.shape}")
        if (stream, number) in state.offered or number in state.acknowledged_parts[stream]:
            raise LinkError(f"{stream} of page {header.page} and {header.layers} of room {room} was offered before; offer each part once")
        self.queued += len(payload)
        state.offered[stream, number] = sending = QueuedPart(header, payload, number)
        state.waiting[stream].append(sending)
        self._release(state)
        return True

    def confirm(self, have: Have) -> None:
        """Record which parts of a room the receiver has; the room may then be sent."""
        room = self.rooms[have.room]
        found = have.parts()
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

    def next(self) -> QueuedPart | None:
        """Return the part whose next frame is sent, until a part of higher priority is queued."""
        for stream in _ORDER:
            if self._queues[stream]:
                return self._queues[stream][0]
        return None

    def next_early_residual(self) -> QueuedPart | None:
        """Queue and return the first residual whose anchor was sent, before the other anchors of its room."""
        for room in self.rooms.values():
            waiting = room.waiting[Stream.RESIDUAL]
            if room.confirmed and waiting and waiting[0].number in room.sent_parts[Stream.ANCHOR]:
                self._queues[Stream.RESIDUAL].append(sending := waiting.popleft())
                return sending
        return None

    def unsent(self, stream: Stream) -> int:
        """Return the number of offered parts of a stream that are not completely sent."""
        return len(self._queues[stream]) + sum(len(room.waiting[stream]) for room in self.rooms.values())

    def advance(self, sending: QueuedPart, size: int) -> None:
        """Record that ``size`` more bytes of the part of :meth:`next` were sent; 0 for an empty part. Its room may have ended."""
        sending.offset += size
        room, stream = self.rooms.get(sending.header.room), sending.header.stream
        if room is None or sending.offset < len(sending.payload):
            return
        self._queues[stream].popleft()
        room.sent_parts[stream].add(sending.number)
        self._release(room)

    def arrived(self, room: int, stream: Stream, number: int) -> None:
        """Record the acknowledgement of a part. Unexpected acknowledgements are ignored."""
        state = self.rooms.get(room)
        if state is not None and (stream, number) in state.offered and number in state.sent_parts[stream]:
            self._arrived(state, stream, number)

    def retransmit(self, room: int, stream: Stream, number: int, most: int) -> None:
        """Send a part again, before other parts of its stream, at most ``most`` times."""
        state = self.rooms.get(room)
        if state is None:
            return
        sending = state.offered.get((stream, number))
        if sending is None or number not in state.sent_parts[stream]:
            raise LinkError(f"part {number} of {stream} cannot be retransmitted, it is not under way: its header was corrupted")
        if sending.repeats == most:
            raise LinkError(
                f"part {number} of {stream} was received with a wrong checksum {most + 1} times; the network or a memory is broken"
            )
        sending.repeats += 1
        sending.offset = 0
        state.sent_parts[stream].discard(number)
        queue = self._queues[stream]
        # Not between the frames of another part.
        queue.insert(1 if queue and queue[0].offset else 0, sending)

    def end(self, room: int) -> OutgoingRoom | None:
        """Remove a room and its parts, and return it; None if it is not open."""
        state = self.rooms.pop(room, None)
        if state is not None and state.offered:
            self.queued -= sum(len(sending.payload) for sending in state.offered.values())
            for stream, queue in self._queues.items():
                self._queues[stream] = deque(sending for sending in queue if sending.header.room != room)
        return state

    def pause(self) -> None:
        """Send nothing until the receiver has reported which parts it has. Called when the connection breaks."""
        for queue in self._queues.values():
            queue.clear()
        for room in self.rooms.values():
            room.confirmed = False
            room.sent_parts = {stream: set(numbers) for stream, numbers in room.acknowledged_parts.items()}
            room.waiting = {stream: deque() for stream in Stream}
            for (stream, _), sending in room.offered.items():
                sending.offset = 0
                room.waiting[stream].append(sending)

    def _arrived(self, room: OutgoingRoom, stream: Stream, number: int) -> None:
        sending = room.offered.pop((stream, number), None)
        if sending is not None:
            self.queued -= len(sending.payload)
        room.sent_parts[stream].add(number)
        room.acknowledged_parts[stream].add(number)

    def _release(self, room: OutgoingRoom) -> None:
        for stream, waiting in room.waiting.items():
            if waiting and room.can_send(stream):
                self._queues[stream].extend(waiting)
                waiting.clear()
