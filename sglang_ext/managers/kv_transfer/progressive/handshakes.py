"""Matches the two sides of each room at the prefill server: a sender, and the metadata of a receiver. Either may arrive first.

Several requests may have one room number at a time: the outputs of a request with ``n`` > 1, or a request that a client sends again. So
each receiver is an *attempt* with its own number, ``link_room``. All later messages name the attempt. A sender is matched with the first
attempt at its room whose prompt has the same number of tokens, else with the first attempt.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang_ext.managers.kv_transfer.progressive.control import Abort, RoomMetadata

# Most unmatched attempts, most ended senders and most finished attempts that are kept. The oldest one is dropped first.
MAX_WAITING = 4096


class WaitingSender(Protocol):
    """A sender that may be matched with an attempt. Its methods are called from any thread.

    Attributes:
        room: SGLang's ``bootstrap_room``.
        tokens: Tokens of the prompt.
    """

    room: int

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""

    def on_metadata(self, metadata: RoomMetadata) -> None:
        """Begin to send: the decode side has slots for this request."""

    def fail(self, reason: str) -> None:
        """End the request, because the decode side has ended it."""


@dataclass(frozen=True)
class _Ended:
    """A sender that ended before it was matched with an attempt."""

    room: int
    reason: str


class Handshakes:
    """Senders and attempts that wait for each other.

    Args:
        refuse: Called with metadata that no sender will serve, and the reason.
    """

    def __init__(self, refuse: Callable[[RoomMetadata, str], None]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._senders: list[WaitingSender] = []
        self._ended: list[_Ended] = []
        self._attempts: list[RoomMetadata | Abort] = []
        # By link_room: senders that were matched with an attempt, and attempts whose sender has left.
        self._matched: dict[int, WaitingSender] = {}
        self._over: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """The number of senders that have not left."""
        return len(self._senders) + len(self._matched)

    def join(self, sender: WaitingSender) -> None:
        """Add a sender. Match it with an unmatched attempt at its room, if there is one."""
        with self._lock:
            attempts = [each for each in self._attempts if each.room == sender.room]
            # Prefer an attempt that has not ended, then one with the same number of tokens.
            attempts.sort(key=lambda each: (isinstance(each, Abort), isinstance(each, RoomMetadata) and each.tokens != sender.tokens))
            if not attempts:
                self._senders.append(sender)
                return
            attempt = attempts[0]
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
                self._ended.append(_Ended(sender.room, reason))
                del self._ended[:-MAX_WAITING]
            for link_room in [link_room for link_room, each in self._matched.items() if each is sender]:
                del self._matched[link_room]
                self._over[link_room] = None
                if len(self._over) > MAX_WAITING:
                    self._over.popitem(last=False)

    def take(self, message: RoomMetadata | Abort) -> None:
        """Handle a message of the decode side."""
        if isinstance(message, RoomMetadata):
            self._take_metadata(message)
        else:
            self._take_abort(message)

    def _take_metadata(self, metadata: RoomMetadata) -> None:
        dropped = reason = None
        with self._lock:
            sender = self._pop_sender(metadata.room, metadata.tokens)
            if sender is not None:
                self._matched[metadata.link_room] = sender
            else:
                reason = self._pop_ended(metadata.room)
                if reason is None:
                    dropped = self._keep(metadata)
        if sender is not None:
            sender.on_metadata(metadata)
        elif reason is not None:
            self._refuse(metadata, reason)
        self._refuse_dropped(dropped)

    def _take_abort(self, abort: Abort) -> None:
        dropped = None
        with self._lock:
            sender = self._matched.get(abort.link_room)
            if sender is None and abort.link_room not in self._over:
                waiting = [each for each in self._attempts if isinstance(each, RoomMetadata) and each.link_room == abort.link_room]
                if waiting:
                    self._attempts[self._attempts.index(waiting[0])] = abort
                else:
                    # The attempt ended before it had slots.
                    sender = self._pop_sender(abort.room)
                    if sender is None and self._pop_ended(abort.room) is None:
                        dropped = self._keep(abort)
        if sender is not None:
            sender.fail(f"the decode side ended it: {abort.reason}")
        self._refuse_dropped(dropped)

    def _pop_sender(self, room: int, tokens: int | None = None) -> WaitingSender | None:
        senders = [each for each in self._senders if each.room == room]
        if not senders:
            return None
        found = next((each for each in senders if each.tokens == tokens), senders[0])
        self._senders.remove(found)
        return found

    def _pop_ended(self, room: int) -> str | None:
        found = next((each for each in self._ended if each.room == room), None)
        if found is None:
            return None
        self._ended.remove(found)
        return found.reason

    def _keep(self, attempt: RoomMetadata | Abort) -> RoomMetadata | Abort | None:
        """Keep an attempt until its sender joins. Return the oldest attempt if it is dropped, else None."""
        self._attempts.append(attempt)
        return self._attempts.pop(0) if len(self._attempts) > MAX_WAITING else None

    def _refuse_dropped(self, dropped: RoomMetadata | Abort | None) -> None:
        if isinstance(dropped, RoomMetadata):
            self._refuse(dropped, f"its request did not reach the prefill server before {MAX_WAITING} others")
