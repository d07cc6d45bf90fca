"""The prefill side's rooms before they go anywhere: a sender and the decode side's metadata, whichever comes first."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from sglang_ext.managers.disaggregation.progressive.control import Abort, Metadata

# Rooms that one side named and the other never did, of which the oldest is given up.
MOST_WAITING = 4096


class Waiting(Protocol):
    """A sender, as it is told of its decode side. Calls come from any thread."""

    room: int

    def meet(self, metadata: Metadata) -> bool:
        """The decode side is ready; False where it said so before: this is of a next request with the room's number."""

    def fail(self, reason: str) -> None:
        """The decode side is not, or not any more."""


class Handshakes:
    """Who waits for whom.

    Args:
        refuse: told of metadata whose request does not come, and why.
    """

    def __init__(self, refuse: Callable[[Metadata, str], None]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._senders: dict[int, Waiting] = {}
        self._early: OrderedDict[int, Metadata | Abort] = OrderedDict()
        # Of rooms whose sender is gone: what metadata of them is told, None where the sender had met its decode side.
        self._left: OrderedDict[int, str | None] = OrderedDict()

    def join(self, sender: Waiting) -> None:
        """A request came to this server."""
        with self._lock:
            self._senders[sender.room] = sender
            self._left.pop(sender.room, None)
            early = self._early.pop(sender.room, None)
        if isinstance(early, Metadata):
            sender.meet(early)
        elif early is not None:
            sender.fail(f"the decode side ended it: {early.reason}")

    def leave(self, sender: Waiting, reason: str | None) -> None:
        """A sender needs no more of its decode side; with a reason where it never met it, which is kept for metadata to come."""
        with self._lock:
            if self._senders.get(sender.room) is not sender:
                return
            del self._senders[sender.room]
            self._left[sender.room] = reason
            if len(self._left) > MOST_WAITING:
                self._left.popitem(last=False)

    def take(self, message: Metadata | Abort) -> None:
        """The decode side said something of a room."""
        left = given_up = None
        with self._lock:
            sender = self._senders.get(message.room)
            if sender is not None and isinstance(message, Metadata) and not sender.meet(message):
                self._early[message.room] = message
            elif sender is None:
                if isinstance(message, Metadata):
                    left = self._left.pop(message.room, None)
                # An abort of a room whose sender has left is late: a next request may have the same number.
                if left is None and (isinstance(message, Metadata) or message.room not in self._left):
                    self._early[message.room] = message
                    if len(self._early) > MOST_WAITING:
                        _, given_up = self._early.popitem(last=False)
        if isinstance(given_up, Metadata):
            self._refuse(given_up, f"its request did not come to the prefill server before {MOST_WAITING} others")
        if sender is not None and isinstance(message, Abort):
            sender.fail(f"the decode side ended it: {message.reason}")
        elif left is not None:
            self._refuse(message, left)
