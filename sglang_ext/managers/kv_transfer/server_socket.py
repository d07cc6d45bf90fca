"""The socket of a server that any number of peers connect to, and the calls that other threads leave to the server's thread."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from sglang_ext.managers.kv_transfer.endpoints import IO_THREADS, ZAP_DOMAIN, ZAP_ENDPOINT, LinkKeys, check_endpoint, lock_socket_folder
from sglang_ext.managers.kv_transfer.wire import MAX_MESSAGE_BYTES, LinkError

logger = logging.getLogger(__name__)

# Maximum of messages that libzmq queues to one peer, or from one.
MOST_WAITING = 4096


class ServerSocket:
    """A bound socket. One thread uses it. Only :meth:`call` and :meth:`wake` may be called from any thread.

    Args:
        endpoint: Where it listens (endpoints.py). TCP port 0 takes a free port.
        keys: Key pair of both ends; None for no encryption, on this machine only.
        most_waiting: Maximum of messages that libzmq queues to one peer, or from one.

    Attributes:
        endpoint: The endpoint with the port that was bound.

    Raises:
        LinkError: The endpoint is refused or in use.
    """

    def __init__(self, endpoint: str, keys: LinkKeys | None, most_waiting: int = MOST_WAITING) -> None:
        check_endpoint(endpoint, keys)
        self._keys = keys
        self._context = zmq.Context(IO_THREADS)
        self._socket = self._context.socket(zmq.ROUTER)
        # With keys, the socket on which libzmq asks who may connect.
        self._zap = None if keys is None else self._context.socket(zmq.REP)
        # A message is only started if it can be completed. Peers that do not read are dropped.
        self._socket.router_mandatory = True
        self._socket.set_hwm(most_waiting)
        self._socket.linger, self._socket.maxmsgsize = 0, MAX_MESSAGE_BYTES
        self._socket.ipv6 = "[" in endpoint
        try:
            if self._zap is not None:
                self._zap.bind(ZAP_ENDPOINT)
                self._socket.curve_server, self._socket.zap_domain = True, ZAP_DOMAIN
                self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            with lock_socket_folder(endpoint):
                # Only the port is a wildcard, never the host: libzmq writes port 0 as *.
                self._socket.bind(f"{endpoint[:-2]}:*" if endpoint.startswith("tcp") and endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise LinkError(f"no link can listen on {endpoint}: {error}; name a free port or file, and an address of this machine") from error
        self.endpoint = self._socket.last_endpoint.rstrip(b"\0").decode()
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._socket, self._zap, self._wake):
            if source is not None:
                self._poller.register(source, zmq.POLLIN)
        # Guards the calls, and the file that wakes the thread.
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Let the server's thread call a function. A closed socket ignores it."""
        with self._lock:
            self._calls.append(partial(function, *arguments))
            self._notify()

    def wake(self) -> None:
        """End the :meth:`wait` of the server's thread."""
        with self._lock:
            self._notify()

    def _notify(self) -> None:
        """Wake the thread if the socket is open. The caller holds the lock."""
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def wait(self, seconds: float) -> bool:
        """Wait for messages and calls, and answer libzmq who may connect. Return False if nothing came within ``seconds``."""
        ready = dict(self._poller.poll(1000 * seconds))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._zap in ready:
            refused = self._keys.answer_zap(self._zap)
            if refused is not None:
                logger.error("%s refused a connection from %s: its keys differ", self.endpoint, refused)
        return bool(ready)

    def run_calls(self) -> None:
        """Run the calls of other threads."""
        while self._calls:
            self._calls.popleft()()

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Return the address of a peer and up to three frames of its message; None if there is none. More frames are dropped."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            frame = self._socket.recv(copy=False)
            frames = frames[:3] + [frame]
        return frames[0].bytes, frames[1:]

    def send(self, address: bytes, *frames: bytes | memoryview, track: bool = False) -> zmq.MessageTracker | bool:
        """Send a message to a peer. Return False if the peer is gone, or does not read.

        With ``track``, frames are not copied. The result is a tracker, which is done once libzmq has read them.
        """
        try:
            return self._socket.send_multipart([address, *frames], zmq.NOBLOCK, copy=not track, track=track) or True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False

    def close(self) -> None:
        """Close the socket. Later calls of other threads are ignored."""
        self._context.destroy(0)
        with self._lock:
            if self._wake is not None:
                os.close(self._wake)
                self._wake = None
