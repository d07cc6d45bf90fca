"""How fast a link moves parts without a limit, beside a bare ZMQ stream of frames of the same size.

    sglang-ext-bench link-rate [--transport ipc|tcp] [--frame-kib 1024] [--mib 1024] [--part-mib 4] [--repeats 3]

Two processes on this machine. The link checksums each part on both sides, puts it together from frames and hands it to a sink
that counts its bytes; the bare stream sends the same frames and drops them. Both send memory of as many bytes as travel: one frame that is
sent again and again lies in a cache, and comes to twice as much.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

import numpy as np
import zmq

from sglang_ext.managers.kv_transfer.incoming_rooms import ExpectedRoom
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.link_settings import LinkSettings
from sglang_ext.managers.kv_transfer.outgoing_queue import OutgoingPart
from sglang_ext.managers.kv_transfer.wire import LayerRange, RoomShape, Stream

SETTINGS = LinkSettings("any", "bfloat16", 1, 8, 128, 128, 256, "none", 1, {}, "raw", 0, 1)
LAYERS = LayerRange(0, 1)


class Count:
    """A sink that counts bytes from the first part on, and a listener that waits for the end."""

    def __init__(self) -> None:
        self.size, self.first, self.last, self.done = 0, 0.0, 0.0, Event()

    def write(self, header, payload) -> None:
        """One part; the clock starts when the first is there."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.size += len(payload) if self.last > self.first else 0

    def arrived(self, *_) -> None:
        """Nothing follows from one stream."""

    def ended(self, *reason) -> None:
        """The room is through."""
        self.reason = reason[-1]
        self.done.set()


def shape(options: argparse.Namespace) -> RoomShape:
    """Of a room with all bytes as anchors."""
    return RoomShape(options.mib // options.part_mib, (LAYERS,), residual=False, aux=False)


def receive_link(endpoint: str, options: argparse.Namespace, parent: Connection) -> None:
    """Tell where it listens, then bytes per second."""
    count = Count()
    server = LinkServer(endpoint, SETTINGS, LinkLimits(frame_bytes=options.frame_kib << 10))
    server.register(1, ExpectedRoom(shape(options), {Stream.ANCHOR: options.part_mib << 20}), count)
    parent.send(server.endpoint)
    assert count.done.wait(120) and count.reason is None, count.reason
    parent.send(count.size / (count.last - count.first))
    parent.recv()
    server.close()


def memory(options: argparse.Namespace) -> memoryview:
    """Bytes to send, each of them written: what was not is one page of zeros to the kernel."""
    return memoryview(np.full(options.mib << 20, 1, np.uint8))


def send_link(endpoint: str, options: argparse.Namespace) -> Callable[[], None]:
    """Send the room; what ends the link."""
    count, size, sent = Count(), options.part_mib << 20, memory(options)
    link = Link(endpoint, SETTINGS, LinkLimits(frame_bytes=options.frame_kib << 10))
    link.open(1, shape(options), count)
    for page in range(shape(options).pages):
        link.offer(1, OutgoingPart(Stream.ANCHOR, sent[page * size :][:size], page, LAYERS))
    assert count.done.wait(120) and count.reason is None, count.reason
    return link.close


def receive_bare(endpoint: str, options: argparse.Namespace, parent: Connection) -> None:
    """Tell where it listens, then bytes per second."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
        parent.send(socket.last_endpoint.rstrip(b"\0").decode())
        socket.recv_multipart()
        start, size = time.perf_counter(), 0
        while size < (options.mib << 20) - (options.frame_kib << 10):
            size += len(socket.recv_multipart(copy=False)[2])
        parent.send(size / (time.perf_counter() - start))
        parent.recv()


def send_bare(endpoint: str, options: argparse.Namespace) -> Callable[[], None]:
    """Send frames with a head each; what ends the stream."""
    size, head, sent = options.frame_kib << 10, bytes(100), memory(options)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(16)
    socket.connect(endpoint)
    for begin in range(0, len(sent), size):
        socket.send(head, zmq.SNDMORE)
        socket.send(sent[begin : begin + size], copy=False)
    return lambda: context.destroy(0)


def rate(receive: Callable, send: Callable, endpoint: str, options: argparse.Namespace) -> float:
    """Bytes per second between two processes."""
    here, there = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(endpoint, options, there))
    receiver.start()
    end = send(here.recv(), options)
    measured = here.recv()
    here.send("done")
    receiver.join()
    end()
    return measured


def main() -> None:
    """Print GB/s of both and their ratio, medians over alternating runs, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="tcp")
    parser.add_argument("--frame-kib", type=int, default=LinkLimits().frame_bytes >> 10)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--part-mib", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"bare": [], "link": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):
            for name, receive, send in (("bare", receive_bare, send_bare), ("link", receive_link, send_link)):
                file = Path(folder, f"{name}{number}")
                endpoint = f"ipc://{file}" if options.transport == "ipc" else "tcp://127.0.0.1:0"
                rates[name].append(rate(receive, send, endpoint, options) / 1e9)
    median = {name: round(statistics.median(values), 3) for name, values in rates.items()}
    print(json.dumps({**vars(options), "GB/s": median, "link/bare": round(median["link"] / median["bare"], 3)}))


if __name__ == "__main__":
    main()
