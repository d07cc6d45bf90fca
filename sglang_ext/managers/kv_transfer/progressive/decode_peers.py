"""The prefill side's connection to a decode rank: a link and two threads. One starts to encode pages; the other waits for each page,
computes its checksum and offers it."""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.progressive.rooms import PageEncoding, RoomEncoder
from sglang_ext.managers.kv_transfer.wire import Stream

logger = logging.getLogger(__name__)

# Limits on the encoded bytes for one decode rank that have not arrived there. Above the first limit no residual is encoded, above the
# second nothing. So anchors do not wait for residuals. Pages that are not encoded wait in the pool.
MAX_BYTES_BEFORE_RESIDUALS, MAX_ENCODED_BYTES = 1 << 29, 1 << 30
# Limit on the encoded bytes for all decode ranks of a prefill rank together. They are in host memory, pinned on a GPU.
MAX_TOTAL_BYTES = 1 << 31
# Minimum of anchors queued for the link. Below it, the next anchor is encoded without its residual, which follows after all anchors.
MIN_QUEUED_ANCHORS = 4
# Pages encoded at a time, so that a GPU has work while the host finishes one page and launches the next.
DEPTH = 3
# Seconds between checks for free space.
POLL_SECONDS = 0.005
# Seconds after which an unreachable peer without rooms is dropped. A restarted decode rank has another endpoint.
FORGET_SECONDS = 60.0


class DecodePeer:
    """Rooms that this rank sends to one decode rank over ``link``, which it closes. All methods may be called from any thread; none blocks.

    ``free_bytes`` returns how many more bytes all peers of the process may hold. A peer holds at most as much as is still free. So each of
    n busy peers holds at most 1/(n + 1) of the limit, and another peer finds as much. Residuals wait above ``most_before_residuals`` bytes.
    """

    def __init__(
        self, link: Link, free_bytes: Callable[[], float] = lambda: math.inf, most_before_residuals: int = MAX_BYTES_BEFORE_RESIDUALS
    ) -> None:
        self._link, self._free_bytes, self._most_before_residuals = link, free_bytes, most_before_residuals
        # For the encoder thread: a room, and a function that starts its next pages.
        self._work: queue.SimpleQueue[tuple[RoomEncoder, Callable[[], None]] | None] = queue.SimpleQueue()
        # Used by the encoder thread: pages that were started without their residual.
        self._deferred: deque[tuple[RoomEncoder, int, torch.Tensor]] = deque()
        # Pages being encoded, and records, in the order in which they are offered. Changes notify ``_changed``.
        self._started: deque[PageEncoding] = deque()
        self._changed = threading.Condition()
        self._closing = self._ended = False
        self._gone_since: float | None = None
        for run, name in ((self._run, "kv-encoder"), (self._offer_all, "kv-offers")):
            threading.Thread(target=run, name=f"{name} of {link.endpoint}", daemon=True).start()

    @property
    def refused(self) -> bool:
        """Whether the decode rank has refused this link."""
        return self._link.refusal is not None

    def open(self, room: RoomEncoder) -> None:
        """Open a room on the link. Raise ``LinkError`` if it takes no rooms."""
        self._link.open(room.number, room.shape, room)

    def send(
        self,
        room: RoomEncoder,
        pages: tuple[torch.Tensor | memoryview, ...],
        record: bytes | None,
        ready: "torch.cuda.Event | None" = None,
    ) -> None:
        """Send the next pages of an open room, int64 [tokens] slots or encoded bytes; a record ends the room.

        The KV of the pages is complete after the CUDA event ``ready``. It must be kept until the room succeeds or ends.
        """
        self._work.put((room, partial(self._start_all, room, pages, record, ready)))

    def cancel(self, room: RoomEncoder, reason: str) -> None:
        """Send nothing more of a room."""
        room.cancel(self._link, reason)

    def unreachable_seconds(self, now: float) -> float:
        """Return for how long the decode rank is unreachable, in seconds; 0 while it answers, or while bytes are queued for it."""
        if self._link.connected or self._link.queued_bytes:
            self._gone_since = None
            return 0.0
        self._gone_since = now if self._gone_since is None else self._gone_since
        return now - self._gone_since

    def close(self) -> None:
        """Cancel all rooms and end all threads."""
        self._closing = True
        self._work.put(None)
        self._link.close(0)

    @torch.no_grad()
    def _run(self) -> None:
        while not self._closing:
            try:
                work = self._work.get(timeout=POLL_SECONDS if self._deferred else None)
            except queue.Empty:
                self._start_deferred()
                continue
            if work is not None:
                self._guard(*work)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _start_all(
        self, room: RoomEncoder, pages: tuple[torch.Tensor | memoryview, ...], record: bytes | None, ready: "torch.cuda.Event | None"
    ) -> None:
        if ready is not None:
            ready.synchronize()
        for slots in pages:
            while not (room.is_closed or self._closing or self._has_space(room, Stream.ANCHOR, MAX_ENCODED_BYTES)):
                time.sleep(POLL_SECONDS)
            if room.is_closed or self._closing:
                return
            now = self._has_time(room) and self._has_space(room, Stream.RESIDUAL, self._most_before_residuals)
            self._queue_started(started := room.start_page(slots, now))
            if not now:
                self._deferred.append((room, started.page, slots))
        if record is not None and not room.is_closed:
            self._queue_started(room.start_record(record))

    def _start_deferred(self) -> None:
        """Encode deferred residuals, oldest first, while there is space and no anchor to encode."""
        while self._deferred and self._work.empty() and not self._closing:
            room, page, slots = self._deferred[0]
            if not room.is_closed and not self._has_space(room, Stream.RESIDUAL, self._most_before_residuals):
                return
            self._deferred.popleft()
            if not room.is_closed:
                self._guard(room, lambda room=room, page=page, slots=slots: self._queue_started(room.start_residual(page, slots)))

    def _queue_started(self, started: PageEncoding) -> None:
        """Queue started work to be offered in order. Wait while too much is queued."""
        with self._changed:
            self._started.append(started)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._started) < DEPTH)

    @torch.no_grad()
    def _offer_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._started or self._ended)
                if not self._started:
                    return
                first = self._started[0]
            # This also applies to a room that is over: a GPU may still write to the page's memory, which is reused once nothing references
            # it.
            self._guard(first.room, partial(first.room.offer, self._link, first))
            del first
            with self._changed:
                self._started.popleft()
                self._changed.notify_all()

    def _guard(self, room: RoomEncoder, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:  # Only this room fails: the thread serves other rooms too.
            logger.exception("room %d cannot be sent", room.number)
            room.fail(f"it cannot be sent: {error}")
            self._link.cancel(room.number, str(error))

    def _has_time(self, room: RoomEncoder) -> bool:
        """Return whether a residual may be encoded with its anchor: the link has enough anchors, or the room has no residuals."""
        if not room.shape.parts(Stream.RESIDUAL):
            return True
        with self._changed:
            begun = sum(Stream.ANCHOR in started.sizes for started in self._started)
        return begun + self._link.unsent(Stream.ANCHOR) >= MIN_QUEUED_ANCHORS

    @property
    def held_bytes(self) -> int:
        """Encoded bytes that the decode rank has not acknowledged."""
        with self._changed:
            begun = sum(sum(started.sizes.values()) for started in self._started)
        return begun + self._link.queued_bytes

    def _has_space(self, room: RoomEncoder, stream: Stream, most: int) -> bool:
        """Return whether a stream of a page may be encoded: this peer then holds at most ``most`` bytes, and all peers at most their limit."""
        held, size = self.held_bytes, room.most_bytes(stream)
        # A peer that holds nothing may always encode one page. A stream that the room does not have needs no space. Residuals may use only
        # their share of the free bytes.
        return not held or not size or held + size <= min(most, self._free_bytes() * most / MAX_ENCODED_BYTES)


class DecodePeers:
    """The decode ranks that a prefill rank sends to, by endpoint. Together they hold at most ``most_in_all`` encoded bytes."""

    def __init__(
        self, connect: Callable[[str], Link], most_in_all: int = MAX_TOTAL_BYTES, most_before_residuals: int = MAX_BYTES_BEFORE_RESIDUALS
    ) -> None:
        self._connect, self._most_in_all, self._most_before_residuals = connect, most_in_all, most_before_residuals
        self._peers: dict[str, DecodePeer] = {}

    def open(self, endpoint: str, room: RoomEncoder) -> DecodePeer:
        """Open a room at the peer of an endpoint, and return the peer. Raise ``LinkError`` if it takes no rooms."""
        now = time.monotonic()
        for other, peer in list(self._peers.items()):
            if peer.refused or peer.unreachable_seconds(now) > FORGET_SECONDS:
                self._peers.pop(other).close()
        if endpoint not in self._peers:
            self._peers[endpoint] = DecodePeer(self._connect(endpoint), self.free_bytes, self._most_before_residuals)
        self._peers[endpoint].open(room)
        return self._peers[endpoint]

    def free_bytes(self) -> int:
        """Bytes that the peers may still encode. Called from any thread."""
        return self._most_in_all - sum(peer.held_bytes for peer in list(self._peers.values()))
