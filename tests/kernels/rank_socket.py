"""A socket in the place of a cache rank's, and turns of the rank's loop, for ranks in the process of a test."""

from collections import deque

import zmq

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.selection_server import SelectionServer
from sglang_ext.managers.kv_transfer.wire import encode


class RankSocket:
    """Gives a cache rank its messages, and keeps those that it sends.

    Attributes:
        messages: Messages of the rank without heartbeats, oldest first.
    """

    def __init__(self) -> None:
        self.messages: list[protocol.FromRank] = []
        self._frames: deque[bytes] = deque()

    def tell(self, *messages: protocol.ToRank) -> None:
        """Send messages to the rank. It receives them in its next turn."""
        self._frames.extend(map(encode, messages))

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Keep a message of the rank."""
        message = protocol.decode_from_rank(frame)
        if not isinstance(message, protocol.Heartbeat):
            self.messages.append(message)

    def poll(self, milliseconds: int) -> bool:
        """Whether a message waits for the rank. Returns at once."""
        return bool(self._frames)

    def recv(self, flags: int = 0) -> bytes:
        """The next message for the rank.

        Raises:
            zmq.Again: There is none.
        """
        if not self._frames:
            raise zmq.Again
        return self._frames.popleft()


def serve(rank: SelectionServer, turns: int = 1) -> None:
    """Let a rank receive its messages and answer, as often as ``turns`` says."""
    left = iter(range(turns))
    rank.serve(lambda: next(left, None) is not None)
