"""Both ends of links for tests: what they agree on, sinks and listeners that remember, and a sender made of raw messages."""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.incoming_rooms import ExpectedRoom
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.wire import LayerRange, LinkSettings, PageHeader, RoomShape, Stream
from sglang_ext.managers.metrics import MetricSet

LAYERS = LayerRange(0, 30)
SETTINGS = LinkSettings("0f" * 16, "bfloat16", 30, 3, 64, 64, 256, "lynx", 1, {"sinks": 4, "wide": True}, "int8", 0, 1)
# Quick to notice what goes wrong.
QUICK = LinkLimits(ping_seconds=0.1, silence_seconds=1.5, resume_seconds=4.0, stall_seconds=4.0)
MOST = {Stream.ANCHOR: 1 << 24, Stream.AUX: 1 << 16, Stream.RESIDUAL: 1 << 24}


def shape(pages: int, residual: bool = True, aux: bool = True) -> RoomShape:
    """A room of pages in one range of layers."""
    return RoomShape(pages, (LAYERS,), residual, aux)


def expected(of: RoomShape, **others) -> ExpectedRoom:
    """Parts of up to 16 MiB."""
    return ExpectedRoom(of, MOST, **others)


def part(stream: Stream, payload: bytes, page: int = 0) -> tuple[Stream, bytes, int, LayerRange]:
    """Of the one range of layers, as ``Link.offer`` takes it."""
    return stream, payload, page, LAYERS


class CountedMetrics(MetricSet):
    """Sums by metric, whatever the label."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Counter[str] = Counter()

    def count(self, name: str, amount: float, *label: str) -> None:
        """Add."""
        self.sums[name] += amount


class Sink:
    """Remembers what a room brought: (stream, page, bytes, when), and how it ended."""

    def __init__(self, delay: float = 0.0) -> None:
        self.parts: list[tuple[Stream, int, bytes, float]] = []
        self.streams: list[Stream] = []
        self.reasons: list[str | None] = []
        self.delay, self.over = delay, threading.Event()

    def write(self, header: PageHeader, payload: memoryview) -> None:
        """Keep a copy."""
        time.sleep(self.delay)
        self.parts.append((header.stream, header.page, bytes(payload), time.monotonic()))

    def arrived(self, stream: Stream) -> None:
        """Keep the stream."""
        self.streams.append(stream)

    def ended(self, reason: str | None) -> None:
        """Keep the reason."""
        self.reasons.append(reason)
        self.over.set()

    def content(self) -> dict[tuple[Stream, int], bytes]:
        """Bytes by stream and page; each came once."""
        found = {(stream, page): payload for stream, page, payload, _ in self.parts}
        assert len(found) == len(self.parts)
        return found


class Listener:
    """Remembers what a sender was told, by room."""

    def __init__(self) -> None:
        self.reasons: dict[int, str | None] = {}

    def ended(self, room: int, reason: str | None) -> None:
        """Keep the reason; it is the only one."""
        assert room not in self.reasons
        self.reasons[room] = reason


class RawSender:
    """A sender that says whatever a test wants."""

    def __init__(self, endpoint: str, link: bytes = b"0123456789abcdef") -> None:
        self._context, self.link = zmq.Context(), link
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def say(self, message: wire.FromSender, *payload: bytes) -> None:
        """Send a message, or a frame with its payload."""
        self.socket.send_multipart([wire.encode(message), *payload])

    def hear(self, seconds: float = 5.0) -> wire.FromReceiver:
        """The next message of the receiver."""
        assert self.socket.poll(1000 * seconds), "the receiver says nothing"
        return wire.decode_from_receiver(self.socket.recv())

    def hear_of(self, kind: type, seconds: float = 5.0) -> wire.FromReceiver:
        """The next message of a kind."""
        while not isinstance(message := self.hear(seconds), kind):
            pass
        return message

    def hello(self, settings: LinkSettings = SETTINGS, protocol: int = wire.VERSION) -> wire.FromReceiver:
        """Say Hello; the answer."""
        self.say(wire.Hello(protocol, self.link, wire.encode(settings)))
        return self.hear()

    def open(self, room: int, of: RoomShape) -> wire.FromReceiver:
        """Open a room; the answer."""
        self.say(wire.Open(room, of))
        return self.hear_of(wire.Have | wire.Ended)

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(0)


def header(room: int, stream: Stream, payload: bytes, page: int = 0, **others) -> PageHeader:
    """Of a part, with its checksum."""
    return PageHeader(room, stream, page, LAYERS, 0, "lynx", len(payload), **others).sealed(payload)


class Proxy:
    """Passes bytes between senders and a server on TCP, until it is told to cut what there is, or to pass nothing on.

    Args:
        endpoint: the server's.
        delay: seconds by which the next bytes come late.
    """

    def __init__(self, endpoint: str, delay: Callable[[], float] = lambda: 0.0) -> None:
        self._delay = delay
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._pairs: list[socket.socket] = []
        self.passed, self.mute, self.closed = 0, False, False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections; new ones are passed on."""
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all for good."""
        self.closed = True
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.closed:
                    return
                far = socket.create_connection(self._target)
                self._pairs += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._delay())
                if not self.mute:
                    target.sendall(data)
                    self.passed += len(data)
        for one in (source, target):
            one.close()
