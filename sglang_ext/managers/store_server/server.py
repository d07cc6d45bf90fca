"""The store process: a thread that reads the requests of all clients, and threads that check objects and use the disk.

Bytes that are in memory are sent without a copy. An invalid or unexpected message ends its connection, never the thread.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import zmq

from sglang_ext.managers.kv_transfer.connection import ProtocolViolation
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.limits import NetworkInterface
from sglang_ext.managers.kv_transfer.server_socket import ServerSocket
from sglang_ext.managers.kv_transfer.wire import (
    Message,
    WireError,
    encode,
    version_mismatch,
)
from sglang_ext.managers.store_server import wire
from sglang_ext.mem_cache.prefix_store.backend import (
    StoredObject,
    StoreError,
    StoreStatistics,
)
from sglang_ext.mem_cache.prefix_store.object_cache import ObjectCache

logger = logging.getLogger(__name__)

THREADS = 4
"""Threads that check objects and use the disk."""
MAX_CLIENTS = 1024
"""Most connections. A client has one for each thread that asks."""
OUTSTANDING = 8
"""Requests without an answer that a client may have."""
MAX_WAITING = 4 * OUTSTANDING
"""Requests and unsent answers from which a client is dropped: it ignores :data:`OUTSTANDING`, or reads nothing."""
MAX_IN_A_ROW, CHECK_SECONDS = 64, 0.1
"""Most messages read in a row, and seconds between checks of timeouts."""
WAITING_SECONDS = 2.0
"""Time without an answer after which a client learns that its reads wait for the rate limit. It gives up a store that is silent for longer."""
SILENCE_SECONDS = 600.0
"""Time after which a silent client is forgotten. It connects again when it has a request."""
REPORT_SECONDS = 60.0
"""Time between two log lines about the contents."""


@dataclass(eq=False)
class PartialObject:
    """An object that a client is sending, its reserved memory, and the number of bytes that arrived."""

    request: int
    name: str
    memory: memoryview
    filled: int = 0


@dataclass(eq=False)
class Client:
    """A connection of a client. Used by the server's thread.

    Attributes:
        address: Its address at the socket.
        heard: When it sent its last message.
        answered: When the last message was sent to it.
        partial: The object that it is sending.
        listing: The objects of its listing that it did not get yet.
        working: Requests at which other threads work.
        unsent: Answers that wait for the rate limit: the message, and the ranges that follow it.
        sending: Answers that libzmq may still read.
    """

    address: bytes
    heard: float
    answered: float
    partial: PartialObject | None = None
    listing: Iterator[StoredObject] = iter(())
    working: int = 0
    unsent: deque[tuple[wire.Content, list[memoryview]]] = field(default_factory=deque)
    sending: deque[zmq.MessageTracker] = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Requests and answers that need memory of the server."""
        while self.sending and self.sending[0].done:
            self.sending.popleft()
        return self.working + len(self.unsent) + len(self.sending)


class StoreServer:
    """A store that clients of this machine, and with keys of other machines, use over TCP. It starts at once.

    Args:
        endpoint: ``tcp://ADDRESS:PORT``; port 0 takes a free one.
        cache: Holds the objects. The server closes it.
        keys: Key pair of the store and its clients; None for no encryption, on this machine only.
        gbps: Gbit/s of objects that the store sends to all clients together; None for no limit.
        put_seconds: Time without a message of its client after which an unfinished object is dropped.

    Attributes:
        endpoint: The endpoint with its port.
        found, missed: Ranges that were read, and that were not there.
        refused: Invalid messages.

    Raises:
        LinkError: The endpoint is refused or in use.
    """

    def __init__(
        self, endpoint: str, cache: ObjectCache, keys: LinkKeys | None = None, gbps: float | None = None, put_seconds: float = 15.0
    ) -> None:
        # A client that reads nothing is refused before libzmq would drop its answers.
        self._socket = ServerSocket(endpoint, keys, 2 * MAX_WAITING)
        self.endpoint = self._socket.endpoint
        self.cache, self._interface, self._put_seconds = cache, NetworkInterface(gbps), put_seconds
        self.found = self.missed = self.refused = 0
        self._clients: dict[bytes, Client] = {}
        # Clients with unsent answers. The first one is next.
        self._unsent: OrderedDict[bytes, Client] = OrderedDict()
        self._reported: tuple[int, ...] = ()
        self._refusal_logged = self._closing = False
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="store-work")
        self._thread = threading.Thread(target=self._run, name=f"prefix store {self.endpoint}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the threads, and write the last objects to the disk."""
        self._closing = True
        self._socket.wake()
        self._thread.join()
        self._pool.shutdown()
        self.cache.close()

    @property
    def is_running(self) -> bool:
        """Whether the server answers. After an internal error it does not."""
        return self._thread.is_alive()

    def report(self) -> str:
        """One line about the contents."""
        cache, counts = self.cache, self.cache.counters
        disk = "" if cache.disk is None else f"; disk: {counts.written} written, {counts.loaded} loaded, {counts.lost} lost"
        return (
            f"{cache.num_objects} objects, {cache.size / 1e9:.3f} of {cache.max_bytes / 1e9:.3f} GB of memory; {len(self._clients)} connections; "
            f"since the start {counts.stored} stored, {counts.dropped} dropped, {self.found} ranges read, {self.missed} not found, "
            f"{counts.damaged} damaged, {self.refused} messages refused{disk}"
        )

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the prefix store at %s ended", self.endpoint)
        for client in list(self._clients.values()):
            self._drop(client)
        self._socket.close()

    def _serve(self) -> None:
        checked = reported = time.monotonic()
        while not self._closing:
            self._socket.wait(min(CHECK_SECONDS, self._send_unsent()))
            for _ in range(MAX_IN_A_ROW):
                received = self._socket.receive()
                if received is None:
                    break
                self._handle(*received)
            self._socket.run_calls()
            now = time.monotonic()
            if now - checked > CHECK_SECONDS:
                checked = now
                self._drop_silent(now)
                self._tell_waiting(now)
            if now - reported > REPORT_SECONDS:
                reported = now
                self._log_report()

    def _log_report(self) -> None:
        """Log what the store holds, if that changed."""
        counts = self.cache.counters
        state = (self.cache.num_objects, self.cache.size, counts.stored, counts.written, counts.loaded, self.found, self.missed, self.refused)
        if state != self._reported:
            self._reported, self._refusal_logged = state, False
            logger.info("prefix store %s: %s", self.endpoint, self.report())

    def _handle(self, address: bytes, frames: list[zmq.Frame]) -> None:
        client = self._clients.get(address)
        try:
            if not 1 <= len(frames) <= 2:
                raise WireError(f"a message of {len(frames)} frames; one or two are read")
            message = wire.decode_from_client(frames[0].buffer)
            if isinstance(message, wire.ObjectPart) != (len(frames) == 2):
                raise ProtocolViolation(f"a {type(message).__name__} of {len(frames)} frames")
            if isinstance(message, wire.StoreHello):
                self._welcome(address, message)
                return
            if client is None:
                # The store was restarted, or has dropped this client. It connects again.
                self._socket.send(address, encode(wire.StoreRefused("no hello was received on this connection")))
                return
            client.heard = time.monotonic()
            if client.waiting >= MAX_WAITING:
                raise ProtocolViolation(f"{client.waiting} requests wait; a client may have {OUTSTANDING}")
            self._answer(client, message, frames)
        except (ProtocolViolation, WireError) as error:
            self._refuse(address, error)

    def _refuse(self, address: bytes, error: Exception) -> None:
        """Count an invalid message, and drop its client."""
        self._count_refused(str(error))
        client = self._clients.get(address)
        if client is not None:
            self._drop(client)
        # A peer that is no client may be any program. It is answered only if its message is valid.
        if client is not None or isinstance(error, ProtocolViolation):
            self._socket.send(address, encode(wire.StoreRefused(str(error)[:1024])))

    def _count_refused(self, problem: str) -> None:
        """Count a refused message. The log has the first one of each report."""
        self.refused += 1
        if not self._refusal_logged:
            self._refusal_logged = True
            logger.warning("prefix store %s refused a message: %s; further ones are counted only", self.endpoint, problem)

    def _welcome(self, address: bytes, hello: wire.StoreHello) -> None:
        problem = version_mismatch(wire.VERSION, hello.protocol)
        if problem is None and address not in self._clients and len(self._clients) >= MAX_CLIENTS:
            problem = f"the store has {MAX_CLIENTS} connections, which is its maximum"
        if problem is not None:
            self._count_refused(problem)
            self._socket.send(address, encode(wire.StoreRefused(problem)))
            return
        if address in self._clients:
            self._drop(self._clients[address])
        now = time.monotonic()
        self._clients[address] = Client(address, heard=now, answered=now)
        self._socket.send(address, encode(wire.StoreWelcome(OUTSTANDING)))

    def _answer(self, client: Client, message: wire.Request, frames: list[zmq.Frame]) -> None:
        cache, request = self.cache, message.request

        def answer(value: int) -> None:
            self._send(client, wire.Answer(request, value))

        match message:
            case wire.Put(_, name):
                self._work(client, request, lambda: cache.touch(name), lambda has: self._begin(client, message, has))
            case wire.ObjectPart(_, offset):
                self._part(client, request, offset, frames[1].buffer)
            case wire.Count(_, names):
                self._work(client, request, lambda: cache.count_run(names), answer)
            case wire.Read(_, ranges):
                self._read(client, request, ranges)
            case wire.Delete(_, names):
                self._work(client, request, lambda: cache.delete(names), lambda _: answer(0))
            case wire.List(_, first):
                self._list(client, request, first)
            case wire.Statistics():
                self._work(client, request, cache.statistics, lambda found: self._send_totals(client, request, found))

    def _send_totals(self, client: Client, request: int, found: StoreStatistics) -> None:
        self._send(client, wire.Totals(request, found.objects, found.size, found.max_size or 0))

    def _work(self, client: Client, request: int, work: Callable[[], object], then: Callable[..., None]) -> None:
        """Run ``work`` in another thread. This thread then calls ``then`` with the result, unless the client is gone."""
        client.working += 1
        self._pool.submit(self._run_work, client, request, work, then)

    def _run_work(self, client: Client, request: int, work: Callable[[], object], then: Callable[..., None]) -> None:
        """Called by another thread."""
        try:
            result, reason = work(), None
        except StoreError as error:
            result, reason = None, str(error)
        except Exception:
            logger.exception("prefix store %s: a request failed", self.endpoint)
            result, reason = None, "an internal error; the store's log has it"
        self._socket.call(self._finish_work, client, request, then, result, reason)

    def _finish_work(self, client: Client, request: int, then: Callable[..., None], result: object, reason: str | None) -> None:
        client.working -= 1
        if self._clients.get(client.address) is not client:
            return
        if reason is None:
            then(result)
        else:
            self._send(client, wire.Failed(request, reason[:1024]))

    def _begin(self, client: Client, put: wire.Put, has: bool) -> None:
        """Reserve memory for an object that the store lacks, and answer."""
        self._drop_partial(client)
        if not has:
            try:
                client.partial = PartialObject(put.request, put.name, self.cache.reserve(put.size))
            except StoreError as error:
                self._send(client, wire.Failed(put.request, str(error)))
                return
        self._send(client, wire.Answer(put.request, int(not has)))

    def _part(self, client: Client, request: int, offset: int, payload: memoryview) -> None:
        partial = client.partial
        end = offset + payload.nbytes
        if partial is None or partial.request != request or partial.filled != offset or not offset < end <= partial.memory.nbytes:
            raise ProtocolViolation(f"bytes {offset} to {end} of an object do not follow the previous ones")
        # Unlike an assignment to a memoryview, this releases the GIL.
        np.copyto(np.frombuffer(partial.memory, np.uint8)[offset:end], np.frombuffer(payload, np.uint8))
        partial.filled = end
        if end < partial.memory.nbytes:
            self._send(client, wire.Answer(request, end))
            return
        client.partial = None
        name, memory = partial.name, partial.memory
        self._work(client, request, lambda: self.cache.store(name, memory), lambda is_new: self._send(client, wire.Answer(request, int(is_new))))

    def _read(self, client: Client, request: int, ranges: Sequence[wire.ByteRange]) -> None:
        contents = {name: self.cache.get(name) for name in {each.name for each in ranges}}
        if None not in contents.values() or self.cache.disk is None:
            self._send_ranges(client, request, ranges, contents)
            return

        def load() -> dict[str, memoryview | None]:
            return {name: self.cache.load(name) for name in contents}

        self._work(client, request, load, lambda loaded: self._send_ranges(client, request, ranges, loaded))

    def _send_ranges(self, client: Client, request: int, ranges: Sequence[wire.ByteRange], contents: dict[str, memoryview | None]) -> None:
        payloads, filled = [], []
        for each in ranges:
            content, end = contents[each.name], each.offset + each.size
            filled.append(content is not None and end <= content.nbytes)
            if filled[-1]:
                payloads.append(content[each.offset : end])
        self.found += len(payloads)
        self.missed += len(ranges) - len(payloads)
        client.unsent.append((wire.Content(request, tuple(filled)), payloads))
        self._unsent[client.address] = client
        self._send_unsent()

    def _send_unsent(self) -> float:
        """Send answers with ranges, one of each client in turn. Return the seconds until the next one may be sent."""
        while self._unsent:
            wait = self._interface.wait(time.monotonic())
            if wait:
                return wait
            address, client = self._unsent.popitem(last=False)
            message, payloads = client.unsent.popleft()
            tracker = self._socket.send(address, encode(message), *payloads, track=True)
            if not tracker:
                self._drop(client)
                continue
            client.sending.append(tracker)
            client.answered = time.monotonic()
            self._interface.take(sum(each.nbytes for each in payloads), client.answered)
            if client.unsent:
                self._unsent[address] = client
        return CHECK_SECONDS

    def _list(self, client: Client, request: int, first: bool) -> None:
        if client.working:
            raise ProtocolViolation("a listing while other requests wait")
        if first:
            client.listing = self.cache.objects()
        listing = client.listing

        def send(found: list[StoredObject]) -> None:
            self._send(client, wire.Listing(request, tuple(wire.Listed(each.name, each.size, each.used_at) for each in found)))

        self._work(client, request, lambda: list(islice(listing, wire.MAX_LISTED)), send)

    def _send(self, client: Client, message: Message) -> None:
        client.answered = time.monotonic()
        if not self._socket.send(client.address, encode(message)):
            self._drop(client)

    def _tell_waiting(self, now: float) -> None:
        """Tell clients whose answers wait for the rate limit that the store is alive."""
        for client in list(self._unsent.values()):
            if now - client.answered > WAITING_SECONDS:
                self._send(client, wire.Waiting())

    def _drop_silent(self, now: float) -> None:
        """Forget clients that ended, and the objects that they did not finish."""
        for client in list(self._clients.values()):
            silent = now - client.heard
            if silent > self._put_seconds:
                self._drop_partial(client)
            if silent > SILENCE_SECONDS:
                self._drop(client)

    def _drop(self, client: Client) -> None:
        self._drop_partial(client)
        self._unsent.pop(client.address, None)
        if self._clients.get(client.address) is client:
            del self._clients[client.address]

    def _drop_partial(self, client: Client) -> None:
        if client.partial is not None:
            self.cache.release(client.partial.memory)
            client.partial = None
