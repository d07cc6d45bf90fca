"""Measures the rate of a link without a rate limit, beside a bare ZMQ stream of frames of the same size.

    sglang-ext-bench link-rate --transport tcp --repeats 5

Two processes on this machine exchange the bytes. The link computes checksums of each part on both sides, assembles parts from frames and
passes them to a sink, which counts bytes. The receiver of the bare stream drops the frames. Both send different memory for all bytes,
because a frame that is sent again and again stays in a cache and is twice as fast.

Prints one line of JSON: the options, the median rates in GB/s, and the ratio link/bare.
"""

import argparse
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

from sglang_ext.managers.kv_transfer.incoming_rooms import ExpectedRoom
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.wire import LinkSettings
from sglang_ext.managers.kv_transfer.wire import LayerRange, RoomShape, Stream
from sglang_ext.tools import CommandError
from sglang_ext_bench.links import two_processes
from sglang_ext_bench.options import check_counts

SETTINGS = LinkSettings("any", "bfloat16", 1, 8, 128, 128, 256, "none", 1, {}, "raw", 0, 1)
LAYERS = LayerRange(0, 1)
ROOM = 1
MAX_SECONDS = 120.0


class ByteCounter:
    """Sink of a room that counts bytes after the first part, and listener that waits for the room's end.

    Attributes:
        size: Bytes after the first part.
        first: Time of the first part, in seconds.
        last: Time of the last part.
        done: Set at the end of the room.
        reason: Why the room failed; None if it succeeded.
    """

    def __init__(self) -> None:
        self.size, self.first, self.last = 0, 0.0, 0.0
        self.done = Event()
        self.reason: str | None = None

    def write(self, header: Any, payload: memoryview) -> None:
        """Count a part. The time begins with the first one."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.size += len(payload) if self.last > self.first else 0

    def arrived(self, *_: Any) -> None:
        """Ignore the end of a stream."""

    def ended(self, *reason: Any) -> None:
        """Note the end of the room; its last argument is the reason of a failure."""
        self.reason = reason[-1]
        self.done.set()

    def wait(self) -> None:
        """Wait for the end of the room.

        Raises:
            CommandError: The room failed or is late.
        """
        two_processes.wait_for_end(self.done, MAX_SECONDS, lambda: self.reason)


def room_shape(args: argparse.Namespace) -> RoomShape:
    """The shape of a room that has all bytes as anchors."""
    return RoomShape(args.mib // args.part_mib, (LAYERS,), residual=False, aux=False)


def receive_link(endpoint: str, args: argparse.Namespace, parent: Connection) -> None:
    """Receive a room over a link."""
    counter = ByteCounter()
    server = LinkServer(endpoint, SETTINGS, LinkLimits(frame_bytes=args.frame_kib << 10))
    server.rooms.register(ROOM, ExpectedRoom(room_shape(args), {Stream.ANCHOR: args.part_mib << 20}), counter)
    parent.send(server.endpoint)
    counter.wait()
    parent.send(counter.size / (counter.last - counter.first))
    parent.recv()
    server.close()


def send_link(endpoint: str, args: argparse.Namespace) -> Callable[[], None]:
    """Send a room over a link. Returns a function that closes the link."""
    counter, size, data = ByteCounter(), args.part_mib << 20, two_processes.written_memory(args)
    link = Link(endpoint, SETTINGS, LinkLimits(frame_bytes=args.frame_kib << 10))
    link.open(ROOM, room_shape(args), counter)
    for page in range(room_shape(args).pages):
        link.offer(ROOM, Stream.ANCHOR, data[page * size :][:size], page, LAYERS)
    counter.wait()
    return link.close


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    two_processes.add_arguments(parser, transport="tcp", mib=1024, mib_help="MiB to send")
    parser.add_argument("--part-mib", type=int, default=4, help="MiB of a part of the link (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure the link and the bare stream. Returns 0."""
    check_counts({"--part-mib": args.part_mib})
    if args.mib < 2 * args.part_mib:
        raise CommandError(f"--mib {args.mib}: must be at least two parts of --part-mib {args.part_mib}, because the first one is not timed")
    return two_processes.compare(args, "link", receive_link, send_link)
