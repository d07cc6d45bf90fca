"""Handshakes of rooms: the control messages between the managers of two servers, and the table that matches the two sides at the prefill
server.

The decode side sends the destination of a room. Either side sends the end of a room. Control messages use the sockets of SGLang's control
plane. They are msgspec structs with bounds; nothing is unpickled. KV bytes are sent over links only.

The prefill server matches a sender with the metadata of a receiver. Either may arrive first. Several requests may have one room number at a
time: the outputs of a request with ``n`` > 1, or a request that a client sends again. So each receiver is an *attempt* with its own number,
``link_room``. All later messages name the attempt. A sender is matched with the first attempt at its room whose prompt has the same number
of tokens, else with the first attempt.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Annotated, Protocol

from msgspec import Meta

from sglang_ext.managers.kv_transfer.wire import Message, Reason, Room, make_decoder

CONTROL_VERSION = 5
MAX_CONTROL_BYTES = 1 << 16

Host = Annotated[str, Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]


class RoomMetadata(Message, tag="metadata"):
    """The decode side has allocated slots for a room and registered it with its link server.

    Attributes:
        version: ``CONTROL_VERSION`` of the decode side. The fields stay the same in all versions, so that any two versions can refuse each other.
        host, port, endpoint: Address of the decode rank's control socket, for replies, and endpoint of its link server.
        settings: ``LinkSettings`` of its end of links in MessagePack, in that version's format.
        aux_sizes: Bytes per row of each buffer of an auxiliary record, then the maximum bytes of the queries that may follow it
            (rooms.py).
        prefix, tokens: Prompt tokens whose KV the decode side already has, and all prompt tokens.
        link_room: Random number of this attempt to receive the room, which links and all later messages use.
        coded: Begin and end of the prompt tokens to transfer as quantized KV, in whole blocks. Equal if there are none.
    """

    version: Annotated[int, Meta(ge=0, le=1 << 31)]
    room: Room
    host: Host
    port: Annotated[int, Meta(ge=1, le=65535)]
    endpoint: Annotated[str, Meta(min_length=1, max_length=512)]
    settings: Annotated[bytes, Meta(max_length=1 << 15)]
    aux_sizes: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 28)], ...], Meta(max_length=64)]
    prefix: Tokens
    tokens: Tokens
    link_room: Room = 0
    coded: tuple[Tokens, Tokens] = (0, 0)


class RoomAbort(Message, tag="abort"):
    """The decode side has ended the attempt ``link_room``. Its metadata may not have been sent."""

    room: Room
    reason: Reason
    link_room: Room = 0


class RoomFailure(Message, tag="failed"):
    """The prefill side ends the attempt ``link_room``: it stops sending the room, or never started."""

    room: Room
    reason: Reason
    link_room: Room = 0


def retry_room(room: int, rid: str) -> int:
    """Return the room in which a request is prefilled again, 1 to 2**63 - 1; the same on all ranks, and another for each ``rid``.

    The first sender may still wait in the old room, where it would be matched with the attempt for the new sender.
    """
    digest = hashlib.blake2b(f"{room} {rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (1 << 63) or 1


Control = RoomMetadata | RoomAbort | RoomFailure
decode_control: Callable[[bytes], Control] = make_decoder(
    Control, "control message", CONTROL_VERSION, MAX_CONTROL_BYTES, "; use backend progressive on both sides"
)


# Most unmatched attempts, most ended senders and most finished attempts that are kept. The oldest one is dropped first.
MAX_WAITING = 4096


class WaitingSender(Protocol):
    """A sender of a prompt of ``tokens`` tokens that may be matched with an attempt. Its methods are called from any thread."""

    room: int
    tokens: int

    def on_metadata(self, metadata: RoomMetadata) -> None:
        """Begin to send: the decode side has slots for this request."""

    def fail(self, reason: str) -> None:
        """End the request, because the decode side has ended it."""


class Handshakes:
    """Senders and attempts that wait for each other. ``refuse`` is called with metadata that no sender will serve, and the reason."""

    def __init__(self, refuse: Callable[[RoomMetadata, str], None]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._senders: list[WaitingSender] = []
        # Rooms of senders that ended before they were matched with an attempt, and the reasons.
        self._ended: list[tuple[int, str]] = []
        self._attempts: list[RoomMetadata | RoomAbort] = []
        # By link_room: senders that were matched with an attempt, and attempts whose sender has left.
        self._matched: dict[int, WaitingSender] = {}
        self._over: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._senders) + len(self._matched)

    def join(self, sender: WaitingSender) -> None:
        """Add a sender. Match it with an unmatched attempt at its room, if there is one."""
        with self._lock:
            attempts = [each for each in self._attempts if each.room == sender.room]
            if not attempts:
                self._senders.append(sender)
                return
            # Prefer an attempt that has not ended, then one with the same number of tokens.
            attempt = min(attempts, key=lambda each: (isinstance(each, RoomAbort), getattr(each, "tokens", None) != sender.tokens))
            self._attempts.remove(attempt)
            if isinstance(attempt, RoomMetadata):
                self._matched[attempt.link_room] = sender
        if isinstance(attempt, RoomMetadata):
            sender.on_metadata(attempt)
        else:
            sender.fail(f"the decode side ended it: {attempt.reason}")

    def leave(self, sender: WaitingSender, reason: str) -> None:
        """Remove a sender. If it was not matched, the next attempt at its room is refused with ``reason``."""
        with self._lock:
            if sender in self._senders:
                self._senders.remove(sender)
                self._ended.append((sender.room, reason))
                del self._ended[:-MAX_WAITING]
            for link_room in [link_room for link_room, each in self._matched.items() if each is sender]:
                del self._matched[link_room]
                self._over[link_room] = None
                if len(self._over) > MAX_WAITING:
                    self._over.popitem(last=False)

    def take(self, message: RoomMetadata | RoomAbort) -> None:
        """Handle a message of the decode side."""
        with self._lock:
            call = self._take_metadata(message) if isinstance(message, RoomMetadata) else self._take_abort(message)
        if call is not None:
            call()

    def _take_metadata(self, metadata: RoomMetadata) -> Callable[[], None] | None:
        """Match an attempt with a sender. Return a call to make without the lock, as the next two methods do."""
        sender = self._pop_sender(metadata.room, metadata.tokens)
        if sender is not None:
            self._matched[metadata.link_room] = sender
            return partial(sender.on_metadata, metadata)
        reason = self._pop_ended(metadata.room)
        return self._keep(metadata) if reason is None else partial(self._refuse, metadata, reason)

    def _take_abort(self, abort: RoomAbort) -> Callable[[], None] | None:
        sender = self._matched.get(abort.link_room)
        if sender is None and abort.link_room not in self._over:
            for place, each in enumerate(self._attempts):
                if isinstance(each, RoomMetadata) and each.link_room == abort.link_room:
                    self._attempts[place] = abort
                    return None
            # The attempt ended before it had slots.
            sender = self._pop_sender(abort.room)
            if sender is None and self._pop_ended(abort.room) is None:
                return self._keep(abort)
        return None if sender is None else partial(sender.fail, f"the decode side ended it: {abort.reason}")

    def _keep(self, attempt: RoomMetadata | RoomAbort) -> Callable[[], None] | None:
        """Keep an attempt until its sender joins. The oldest one may be refused for that."""
        self._attempts.append(attempt)
        dropped = self._attempts.pop(0) if len(self._attempts) > MAX_WAITING else None
        if not isinstance(dropped, RoomMetadata):
            return None
        return partial(self._refuse, dropped, f"its request did not reach the prefill server before {MAX_WAITING} others")

    def _pop_sender(self, room: int, tokens: int | None = None) -> WaitingSender | None:
        senders = [each for each in self._senders if each.room == room]
        if not senders:
            return None
        found = next((each for each in senders if each.tokens == tokens), senders[0])
        self._senders.remove(found)
        return found

    def _pop_ended(self, room: int) -> str | None:
        for place, (ended, reason) in enumerate(self._ended):
            if ended == room:
                del self._ended[place]
                return reason
        return None
