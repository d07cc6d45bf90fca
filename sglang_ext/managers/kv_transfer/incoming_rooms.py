"""The receiver's rooms, from registration to end.

A room knows its expected and received parts, and guarantees that nothing is written after an abort.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from sglang_ext.managers.kv_transfer.wire import MAX_PART_BYTES, Ended, Have, LinkError, PageHeader, RoomShape, Stream
from sglang_ext.managers.metrics import MetricSet

logger = logging.getLogger(__name__)


class RoomSink(Protocol):
    """Destination of a room's parts. A thread of the server calls it. It must be quick, since all rooms of a server wait for it.

    Calls for one room are sequential. No call starts or is running after :meth:`IncomingRooms.abort` has returned.
    """

    def write(self, header: PageHeader, payload: memoryview) -> None:
        """Write a part with a correct checksum. Called once per part. ``payload`` may be kept. An exception fails the room."""

    def arrived(self, stream: Stream) -> None:
        """All parts of a stream were written."""

    def ended(self, reason: str | None) -> None:
        """The room is complete (None), or failed for this reason. The last call. Not called for rooms that this side aborted."""


@dataclass(frozen=True)
class ExpectedRoom:
    """The expected parts of a room. The sender must announce the same shape.

    Attributes:
        most_bytes: Maximum bytes of one part, for each stream of the shape.
        prefix_hashes: Hash of each page (page_codec.py), which anchors and residuals must carry; empty to skip the comparison.
    """

    shape: RoomShape
    most_bytes: Mapping[Stream, int]
    prefix_hashes: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        for stream in Stream:
            most = self.most_bytes.get(stream, 0)
            if not 0 <= most <= MAX_PART_BYTES or (self.shape.parts(stream) and most < 1):
                raise LinkError(f"most_bytes of {stream} is {most}; pass 1 to {MAX_PART_BYTES} for each stream that the room has")
        if self.prefix_hashes and len(self.prefix_hashes) != self.shape.pages:
            raise LinkError(f"{len(self.prefix_hashes)} prefix hashes of {self.shape.pages} pages; pass one per page, or none")


class IncomingRoom:
    """A room between its registration and its end. ``link``: id of the link that opened it, which ``IncomingRooms`` sets."""

    def __init__(self, number: int, expected: ExpectedRoom, sink: RoomSink) -> None:
        self.number, self.expected, self.sink = number, expected, sink
        self.link: bytes | None = None
        self.ended = self.complete = False
        # Numbers of written parts, and how often each part had a wrong checksum.
        self._written: dict[Stream, set[int]] = {stream: set() for stream in Stream}
        self._repeats: Counter[tuple[Stream, int]] = Counter()
        # Held during calls of the sink. Reentrant, because the sink itself may abort.
        self._lock = threading.RLock()

    def part(self, header: PageHeader) -> int:
        """Return the number of a part. Raise ``LinkError`` if it is not expected."""
        number = self.expected.shape.part(header.stream, header.page, header.layers)
        if number is None:
            raise LinkError(f"received {header.stream} of page {header.page} and {header.layers}; expected is {self.expected.shape}")
        most = self.expected.most_bytes[header.stream]
        if header.size > most:
            raise LinkError(f"{header.stream} of page {header.page} has {header.size} bytes; at most {most} are expected")
        if self.expected.prefix_hashes and header.stream is not Stream.AUX:
            hashed = self.expected.prefix_hashes[header.page]
            if header.prefix_hash != hashed:
                raise LinkError(f"page {header.page} has prefix hash {header.prefix_hash.hex()!r}; that of the prompt is {hashed.hex()!r}")
        return number

    def write(self, number: int, header: PageHeader, payload: memoryview) -> bool:
        """Pass a part to the sink, unless it was passed before. Return False if the room has ended without it."""
        stream = header.stream
        with self._lock:
            if self.ended:
                return self.complete
            if number in self._written[stream]:
                return True
            self._call(self.sink.write, header, payload)
            self._written[stream].add(number)
            if self._has_all(stream) and not self.ended:
                self._call(self.sink.arrived, stream)
            return True

    def _has_all(self, stream: Stream) -> bool:
        return len(self._written[stream]) == self.expected.shape.parts(stream)

    def finish(self) -> bool:
        """End the room if it is complete. Return whether it is."""
        with self._lock:
            complete = not self.ended and all(map(self._has_all, Stream))
            if complete:
                self.ended = self.complete = True
                self._call(self.sink.ended, None)
            return complete

    def fail(self, reason: str) -> None:
        """End the room and pass the reason to the sink. Does nothing if the room has ended."""
        with self._lock:
            if not self.ended:
                self.ended = True
                self._call(self.sink.ended, reason)

    def abort(self) -> None:
        """End the room. After this call the sink is not called any more, and no call is running in another thread."""
        with self._lock:
            self.ended = True

    def can_retry(self, stream: Stream, number: int, most: int) -> bool:
        """Count a wrong checksum of a part. Return whether it may be requested again."""
        self._repeats[stream, number] += 1
        return self._repeats[stream, number] <= most

    def have(self) -> Have:
        """Return the message that lists the written parts."""
        with self._lock:
            return Have.of(self.number, self.expected.shape, self._written)

    def _call(self, function, *arguments) -> None:
        try:
            function(*arguments)
        except Exception as error:  # An error of a sink ends its room, not the thread of all links.
            raise LinkError(f"the sink's {function.__name__} raised {error!r}") from error


class IncomingRooms:
    """All rooms of one receiver that have not ended. Called from any thread. No sink is called while the lock is held.

    ``finished`` rooms are remembered, for senders that missed the last acknowledgement. ``tell`` sends the end of a room to the sender of a
    link. It is called from any thread, so it must not block.
    """

    def __init__(self, endpoint: str, finished: int, tell: Callable[[bytes, Ended], None], metrics: MetricSet) -> None:
        self._endpoint, self._most_finished, self._tell, self._metrics = endpoint, finished, tell, metrics
        self._lock = threading.Lock()
        self._rooms: dict[int, IncomingRoom] = {}
        self._finished: OrderedDict[tuple[bytes, int], RoomShape] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._rooms)

    def get(self, number: int) -> IncomingRoom | None:
        """Return a room that has not ended; else None."""
        return self._rooms.get(number)

    def register(self, number: int, expected: ExpectedRoom, sink: RoomSink) -> None:
        """Accept a room from the first sender that opens it. Raise ``LinkError`` if it is registered, or after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise LinkError(f"{self._endpoint} takes no rooms: it is closed")
            if number in self._rooms:
                raise LinkError(f"room {number} is registered; abort it before it is received again")
            self._rooms[number] = IncomingRoom(number, expected, sink)
            self._metrics.count("kv_link_rooms", 1)

    def open(self, number: int, link: bytes) -> IncomingRoom | None:
        """Assign a room to the link of the first sender that opens it. Return it; None if it has ended."""
        with self._lock:
            room = self._rooms.get(number)
            if room is not None and room.link is None:
                room.link = link
            return room

    def finished(self, number: int, link: bytes) -> RoomShape | None:
        """Return the shape of a room that was complete when it ended for this sender; None if it is not remembered."""
        with self._lock:
            return self._finished.get((link, number))

    def abort(self, number: int) -> None:
        """Accept nothing more of a room, if it has not ended. After this call its sink is not called, so its memory may be reused.

        This waits for a running call of the sink, so the caller must hold no lock that the sink takes.
        """
        with self._lock:
            room = self._rooms.get(number)
            if room is None:
                return
            self._drop(room)
        room.abort()
        if room.link is not None:
            self._tell(room.link, Ended(number, "the receiver aborted it"))

    def finish(self, room: IncomingRoom) -> None:
        """End a room if it is complete."""
        try:
            finished = room.finish()
        except LinkError:
            logger.exception("room %d is complete, and its sink raised an exception", room.number)
            finished = True
        if finished:
            with self._lock:
                self._drop(room)
                self._finished[room.link, room.number] = room.expected.shape
                while len(self._finished) > self._most_finished:
                    self._finished.popitem(last=False)

    def fail(self, room: IncomingRoom, reason: str, tell: bool = True) -> None:
        """End a room; with ``tell``, notify its sender."""
        if tell and room.link is not None:
            self._tell(room.link, Ended(room.number, reason[:2048]))
        try:
            room.fail(reason)
        except LinkError:
            logger.exception("room %d failed (%s), and its sink raised an exception", room.number, reason)
        # Only now: an abort meanwhile waits for the running call of the sink.
        with self._lock:
            self._drop(room)

    def opened_by(self, links: Collection[bytes]) -> list[IncomingRoom]:
        """Return the rooms whose senders use ``links``."""
        with self._lock:
            return [room for room in self._rooms.values() if room.link in links]

    def close(self) -> list[IncomingRoom]:
        """Accept no more rooms. Return the rooms that have not ended."""
        with self._lock:
            self._closed = True
            return list(self._rooms.values())

    def _drop(self, room: IncomingRoom) -> None:
        """Remove a room, unless another room with its number was registered since. The caller holds the lock."""
        if self._rooms.get(room.number) is room:
            del self._rooms[room.number]
            self._metrics.count("kv_link_rooms", -1)
