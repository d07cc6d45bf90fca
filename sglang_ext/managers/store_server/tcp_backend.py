"""Objects of a prefix store in a process that serves many servers (``python -m sglang_ext.store serve``).

Each thread that asks has a connection of its own for that time. A connection that broke is replaced, and the request is repeated once: the
store was restarted. Reads then go on with the missing ranges.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
import zmq

from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.connection import BrokenConnection, Connection
from sglang_ext.managers.kv_transfer.endpoints import IO_THREADS, LinkKeys, check_endpoint
from sglang_ext.managers.kv_transfer.wire import LinkError, WireError
from sglang_ext.managers.store_server import wire
from sglang_ext.mem_cache.prefix_store.backend import (
    MAX_OBJECT_BYTES,
    ReadRange,
    StoredObject,
    StoreError,
    StoreStatistics,
    check_name,
)

Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=wire.Reply)
FORM = "tcp://ADDRESS:PORT, or tcp://ADDRESS:PORT?keys=FILE"
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 10.0
"""Longest time to connect, and to wait for the next message of the store. While reads wait for its rate limit, it says so."""


class StoreConnection:
    """A connection to a store. Used by one thread at a time. Methods raise :class:`BrokenConnection` if it cannot be used any more.

    Attributes:
        outstanding: Requests that may be sent before the first answer is read.
    """

    def __init__(self, context: zmq.Context, endpoint: str, keys: LinkKeys | None) -> None:
        self._connection = Connection(context, endpoint, keys, CONNECT_SECONDS, waits=False)
        self._poller = zmq.Poller()
        for source in (self._connection.socket, self._connection.monitor):
            self._poller.register(source, zmq.POLLIN)
        self._requests = 0
        try:
            self._connection.send_message(wire.StoreHello(wire.VERSION))
            message, _ = self._receive(CONNECT_SECONDS)
            if not isinstance(message, wire.StoreWelcome):
                raise BrokenConnection(f"the store answered {message}")
            self.outstanding = message.outstanding
        except BaseException:
            self.close()
            raise

    def next_request(self) -> int:
        """The number of a new request."""
        self._requests += 1
        return self._requests

    def send(self, message: wire.Request, payload: memoryview | None = None) -> None:
        """Send a request. ``payload`` is not copied: it must not change until the answer arrived."""
        if payload is None:
            self._connection.send_message(message)
        else:
            self._connection.send_payload(message, payload)

    def receive(self, requests: Collection[int], kind: type[Kind]) -> tuple[Kind, list[zmq.Frame]]:
        """The next answer, and the bytes of its ranges.

        Args:
            requests: Numbers of the requests that have no answer. Answers come in any order.
            kind: The type of their answers.

        Raises:
            StoreError: The request failed.
        """
        message, frames = self._receive(ANSWER_SECONDS)
        if isinstance(message, wire.Failed) and message.request in requests:
            raise StoreError(message.reason)
        if not isinstance(message, kind) or message.request not in requests:
            raise BrokenConnection(f"the store sent {type(message).__name__} where {kind.__name__} is expected, to requests {[*requests]}")
        return message, frames

    def ask(self, kind: type[Kind], request: type[wire.Request], *fields: object) -> Kind:
        """Send a request without bytes, and return its answer."""
        number = self.next_request()
        self.send(request(number, *fields))
        return self.receive([number], kind)[0]

    def _receive(self, seconds: float) -> tuple[wire.FromStore, list[zmq.Frame]]:
        """The next message. Raises TimeoutError if the store is silent for ``seconds``."""
        while True:
            ready = dict(self._poller.poll(int(1000 * seconds)))
            if self._connection.socket not in ready:
                if self._connection.monitor in ready:
                    self._connection.read_event()
                raise TimeoutError(f"no answer in {seconds:g} s")
            head, *frames = self._connection.socket.recv_multipart(copy=False)
            try:
                message = wire.decode_from_store(head.buffer)
            except WireError as error:
                raise BrokenConnection(f"it is not a prefix store: {error}") from error
            if isinstance(message, wire.StoreRefused):
                raise BrokenConnection(message.reason)
            if not isinstance(message, wire.Waiting):
                return message, frames

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


class TcpBackend:
    """Objects in a store process.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` of the store.
        keys: Key pair of the store and its clients; None for a store on this machine.

    Raises:
        StoreError: The store does not answer.
        LinkError: The endpoint is malformed, or needs keys.
    """

    def __init__(self, endpoint: str, keys: LinkKeys | None) -> None:
        check_endpoint(endpoint, keys)
        self._endpoint, self._keys = endpoint, keys
        self._context = zmq.Context(IO_THREADS)
        # Guards the connections that no thread uses.
        self._lock = threading.Lock()
        self._idle: list[StoreConnection] = []
        self._closed = False
        try:
            self._ask(lambda connection: None)
        except StoreError:
            self.close()
            raise

    @classmethod
    def from_url(cls, url: str, max_bytes: int | None) -> "TcpBackend":
        """Connect to ``tcp://ADDRESS:PORT?keys=FILE``.

        Raises:
            OptionError: The URL is malformed, the keys cannot be read, or a bound is given.
            StoreError: The store does not answer.
        """
        if max_bytes is not None:
            raise OptionError(f"prefix store {url!r} cannot be bounded from here; start it with --memory-gb and --disk-gb")
        found = urlsplit(url)
        options = parse_qs(found.query, keep_blank_values=True)
        files = options.pop("keys", [])
        if options or len(files) > 1 or found.path or found.fragment or found.port is None:
            raise OptionError(f"prefix store {url!r}: pass {FORM}")
        try:
            keys = LinkKeys.read(Path(files[0])) if files else None
        except LinkError as error:
            raise OptionError(f"prefix store {url!r}: {error}") from error
        try:
            return cls(f"tcp://{found.netloc}", keys)
        except LinkError as error:
            raise OptionError(f"prefix store {url!r}: {error}; pass {FORM}") from error

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store an object, whole or not at all. Returns False if the store has it already, which then counts as used."""
        size = sum(part.nbytes for part in parts)
        if size > MAX_OBJECT_BYTES:
            raise StoreError(f"object {name} of {size} bytes: a store holds at most {MAX_OBJECT_BYTES}")
        return self._ask(partial(_put, name=check_name(name), size=size, parts=parts))

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` that the store has."""
        count = 0
        for some in _checked(names):
            found = self._ask(lambda connection, some=some: connection.ask(wire.Answer, wire.Count, some)).value
            count += found
            if found < len(some):
                break
        return count

    def read(self, ranges: Sequence[ReadRange], is_use: bool = True) -> list[bool]:
        """Fill the memory of each range. Each read is a use: it loads the object into the memory of the store."""
        filled = [True] * len(ranges)
        # Reads whose answers are missing. A second connection asks for these alone.
        missing = dict(enumerate(_batches(_pieces(ranges))))
        self._ask(partial(_read, missing=missing, filled=filled))
        return filled

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for some in _checked(names):
            self._ask(lambda connection, some=some: connection.ask(wire.Answer, wire.Delete, some))

    def objects(self) -> Iterator[StoredObject]:
        """All objects."""
        connection = self._guarded(self._connect)
        try:
            first = True
            while found := self._guarded(lambda first=first: connection.ask(wire.Listing, wire.List, first)).objects:
                yield from (StoredObject(each.name, each.size, each.used_at) for each in found)
                first = False
        finally:
            connection.close()

    def statistics(self) -> StoreStatistics:
        """Count the objects."""
        found = self._ask(lambda connection: connection.ask(wire.Totals, wire.Statistics))
        return StoreStatistics(found.objects, found.size, found.max_size)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._context.destroy(0)

    def _ask(self, work: Callable[[StoreConnection], Result]) -> Result:
        """Run ``work`` on a connection that no other thread uses. If it is broken already, run ``work`` again on a new one."""
        return self._guarded(lambda: self._attempt(work))

    def _attempt(self, work: Callable[[StoreConnection], Result]) -> Result:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._use(connection, work)
            except BrokenConnection:
                # The others are as old.
                with self._lock:
                    idle, self._idle = self._idle, []
                for each in idle:
                    each.close()
        return self._use(self._connect(), work)

    def _use(self, connection: StoreConnection, work: Callable[[StoreConnection], Result]) -> Result:
        """Run ``work`` on a connection. After an error it may have answers that nobody reads, so it is closed."""
        try:
            result = work(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return result
        connection.close()
        return result

    def _connect(self) -> StoreConnection:
        if self._closed:
            raise StoreError(f"the prefix store at {self._endpoint} is closed")
        return StoreConnection(self._context, self._endpoint, self._keys)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``. Errors of the connection become a :class:`StoreError`."""
        try:
            return work()
        except (BrokenConnection, TimeoutError, zmq.ZMQError) as error:
            raise StoreError(f"the prefix store at {self._endpoint}: {error}") from error


def _put(connection: StoreConnection, name: str, size: int, parts: Sequence[memoryview]) -> bool:
    """Send an object in frames, with several of them on the way."""
    request = connection.next_request()
    connection.send(wire.Put(request, name, size))
    if not connection.receive([request], wire.Answer)[0].value:
        return False
    offset, unanswered, answer = 0, 0, 0
    for part in parts:
        content = part.cast("B")
        for begin in range(0, content.nbytes, wire.FRAME_BYTES):
            if unanswered == connection.outstanding:
                connection.receive([request], wire.Answer)
                unanswered -= 1
            frame = content[begin : begin + wire.FRAME_BYTES]
            connection.send(wire.ObjectPart(request, offset), frame)
            offset += frame.nbytes
            unanswered += 1
    for _ in range(unanswered):
        answer = connection.receive([request], wire.Answer)[0].value
    return bool(answer)


def _read(connection: StoreConnection, missing: dict[int, "list[Piece]"], filled: list[bool]) -> None:
    """Ask for pieces, with several requests on the way, and copy each answer. Removes what is copied from ``missing``."""
    waiting, asked = deque(missing), {}
    while missing:
        while waiting and len(asked) < connection.outstanding:
            number, index = connection.next_request(), waiting.popleft()
            asked[number] = index
            connection.send(wire.Read(number, tuple(wire.ByteRange(each.name, each.offset, each.memory.nbytes) for _, each in missing[index])))
        answer, frames = connection.receive(asked, wire.Content)
        index = asked.pop(answer.request)
        _copy(missing[index], answer, frames, filled)
        del missing[index]


Piece = tuple[int, ReadRange]
"""At most :data:`wire.FRAME_BYTES` of a range, and the index of that range."""


def _copy(pieces: list[Piece], answer: wire.Content, frames: list[zmq.Frame], filled: list[bool]) -> None:
    """Copy the bytes of an answer to the memory of its pieces."""
    sizes = [each.memory.nbytes for (_, each), there in zip(pieces, answer.filled, strict=False) if there]
    if len(answer.filled) != len(pieces) or [len(frame) for frame in frames] != sizes:
        raise BrokenConnection("the store sent other ranges than those that were read")
    remaining = iter(frames)
    for (index, each), there in zip(pieces, answer.filled, strict=True):
        if there:
            # Unlike an assignment to a memoryview, this releases the GIL.
            np.copyto(np.frombuffer(each.memory, np.uint8), np.frombuffer(next(remaining).buffer, np.uint8))
        else:
            filled[index] = False


def _pieces(ranges: Sequence[ReadRange]) -> Iterator[Piece]:
    for index, each in enumerate(ranges):
        memory = each.memory.cast("B")
        for begin in range(0, memory.nbytes, wire.FRAME_BYTES):
            yield index, ReadRange(check_name(each.name), each.offset + begin, memory[begin : begin + wire.FRAME_BYTES])


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of at most :data:`wire.FRAME_BYTES` together."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and (size + piece[1].memory.nbytes > wire.FRAME_BYTES or len(batch) == wire.MAX_RANGES):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[1].memory.nbytes
    if batch:
        yield batch


def _checked(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Names in groups of one request."""
    for name in names:
        check_name(name)
    for begin in range(0, len(names), wire.MAX_NAMES):
        yield tuple(names[begin : begin + wire.MAX_NAMES])
