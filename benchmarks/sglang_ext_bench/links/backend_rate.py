"""Measures the rate of transfer backend `progressive` without a rate limit, beside a bare ZMQ stream of frames of the same size.

    sglang-ext-bench backend-rate --mib 512 --transport tcp --repeats 7
    sglang-ext-bench backend-rate --device cuda --dtype bfloat16 --layers 36 --heads 8 --dim 128 --mib 4608 --reference int8

Two processes on this machine exchange the KV of a pool, without SGLang. One encodes pages of its pool and sends them. The other decodes
them into its own pool. Two rooms are sent one after the other, and the second one is timed, because the first one allocates memory that
later rooms use again.

Prints one line of JSON: the options, the median rates in GB/s of bytes on the link, and the ratio backend/bare. With residuals, the
receiver also prints the rate of the anchors. With --stacks, both processes print the code lines in which their threads were found.
"""

import argparse
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVArgs

from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.progressive.compatibility import make_codec
from sglang_ext.managers.kv_transfer.progressive.decode_peers import DecodePeer
from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import AuxRecords, PoolBuffers
from sglang_ext.managers.kv_transfer.progressive.rooms import RoomEncoder
from sglang_ext.managers.kv_transfer.progressive.rooms import RoomWriter
from sglang_ext.managers.kv_transfer.wire import Stream
from sglang_ext.tools import CommandError
from sglang_ext_bench.links import two_processes
from sglang_ext_bench.links.link_rate import SETTINGS
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.baselines import CODECS

MAX_SECONDS = 300.0
WARM_UP_ROOM, TIMED_ROOM = 1, 2
# Seconds between two samples of the threads' stacks, and code lines that are printed for each thread.
SAMPLE_INTERVAL, PRINTED_LINES = 0.005, 6
PAGE_HASH = bytes(32)


class ThreadSampler:
    """Samples the stacks of this process's threads if --stacks is set, and keeps one thread busy if --busy is set.

    Args:
        args: The options.
        name: Name of this process in the output.
    """

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self._name, self._ended = name, Event()
        self._samples: dict[str, Counter[str]] = defaultdict(Counter)
        for is_set, work in ((args.busy, self._keep_busy), (args.stacks, self._sample)):
            if is_set:
                threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def _keep_busy(self) -> None:
        while not self._ended.is_set():
            sum(range(1000))

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL):
            names = {thread.ident: thread.name.split(" of ")[0] for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                code = frame.f_code
                self._samples[names.get(ident, "?")][f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"] += 1

    def begin(self) -> None:
        """Discard earlier samples."""
        self._samples.clear()

    def end(self) -> None:
        """Stop the threads, and print the most frequent code lines of each thread."""
        self._ended.set()
        for thread, lines in sorted(self._samples.items()):
            shown = ", ".join(f"{line} {count}" for line, count in lines.most_common(PRINTED_LINES))
            print(f"{self._name}, {thread}: {shown}", file=sys.stderr, flush=True)


class TimedRoom:
    """Waits for the end of a room.

    Attributes:
        done: Set at the end.
        reason: Why the room failed; None if it succeeded.
        ended_at: Time of the end, in seconds.
        anchors_at: Time at which all anchors had arrived.
    """

    def __init__(self) -> None:
        self.done = Event()
        self.reason: str | None = None
        self.ended_at, self.anchors_at = 0.0, 0.0

    def anchor_arrived(self) -> None:
        """Note that all anchors have arrived."""
        self.anchors_at = time.perf_counter()

    def succeed(self) -> None:
        """Note the end of the room."""
        self.ended_at = time.perf_counter()
        self.done.set()

    def fail(self, reason: str) -> None:
        """Note that the room failed."""
        self.reason = reason
        self.done.set()

    def wait(self) -> None:
        """Wait for the end of the room.

        Raises:
            CommandError: The room failed or is late.
        """
        two_processes.wait_for_end(self.done, MAX_SECONDS, lambda: self.reason)


class TimedRoomWriter(RoomWriter):
    """Writes a room, and notes when its first part arrived.

    Attributes:
        first_at: Time of the first part, in seconds.
        first_bytes: Bytes of the first part, which the rates leave out.
        anchor_bytes: Bytes of all anchors.
    """

    first_at, first_bytes, anchor_bytes = 0.0, 0, 0

    def write(self, header: Any, payload: memoryview) -> None:
        """Write a part."""
        super().write(header, payload)
        self.anchor_bytes += len(payload) if header.stream is Stream.ANCHOR else 0
        if not self.first_at:
            self.first_at, self.first_bytes = time.perf_counter(), len(payload)


def make_pool(args: argparse.Namespace) -> PoolBuffers:
    """Make a pool of --mib MiB with random numbers."""
    width, dtype = args.heads * args.dim, getattr(torch, args.dtype)
    slots = (args.mib << 20) // (2 * dtype.itemsize * args.layers * width)
    kv_args = KVArgs()
    kv_args.page_size = 1
    kv_args.tensors = [torch.randn(slots, width, device=args.device).to(dtype) for _ in range(2 * args.layers)]
    kv_args.kv_data_ptrs = [tensor.data_ptr() for tensor in kv_args.tensors]
    kv_args.kv_data_lens = [tensor.nbytes for tensor in kv_args.tensors]
    kv_args.kv_item_lens = [tensor[0].nbytes for tensor in kv_args.tensors]
    kv_args.aux = torch.zeros(16, dtype=torch.uint8)
    kv_args.aux_data_ptrs, kv_args.aux_item_lens = [kv_args.aux.data_ptr()], [16]
    return PoolBuffers(kv_args, dtype, args.heads, args.dim, args.dim, torch.device(args.device))


def split_pages(pool: PoolBuffers, size: int) -> list[PlacedPage]:
    """Split all slots into pages of ``size`` adjacent slots, as most slots of a prompt are."""
    slots = torch.arange(len(pool.keys[0]), device=pool.device)
    return [PlacedPage(begin, slots[begin : begin + size]) for begin in range(0, len(slots), size)]


def receive_backend(endpoint: str, args: argparse.Namespace, parent: Connection) -> None:
    """Receive two rooms, and decode them into a pool."""
    torch.set_num_threads(1)
    pool, sampler = make_pool(args), ThreadSampler(args, "receiver")
    codec = make_codec(args.reference, pool, CODECS.get(args.codec))
    pages = split_pages(pool, codec.page_size)
    hashes = [PAGE_HASH] * len(pages)
    listeners = {room: TimedRoom() for room in (WARM_UP_ROOM, TIMED_ROOM)}
    writers = {
        room: TimedRoomWriter(codec, AuxRecords(pool.args), 0, pages, hashes, listener)
        for room, listener in listeners.items()
    }
    limits = LinkLimits().with_part_bytes(codec.most_bytes(Stream.ANCHOR))
    server = LinkServer(endpoint, SETTINGS, limits, take=pool.blocks.take)
    for room, writer in writers.items():
        server.rooms.register(room, writer.expected, writer)
    parent.send(server.endpoint)
    listeners[WARM_UP_ROOM].wait()
    sampler.begin()
    timed, writer = listeners[TIMED_ROOM], writers[TIMED_ROOM]
    timed.wait()
    sampler.end()
    if codec.has_residual:
        rate = (writer.anchor_bytes - writer.first_bytes) / (timed.anchors_at - writer.first_at)
        print(f"anchors: {rate / 1e9:.3f} GB/s", file=sys.stderr, flush=True)
    parent.send((writer.size - writer.first_bytes) / (timed.ended_at - writer.first_at))
    parent.recv()
    server.close()


def send_backend(endpoint: str, args: argparse.Namespace) -> Callable[[], None]:
    """Encode a pool and send it as two rooms. Returns a function that closes the link."""
    torch.set_num_threads(1)
    pool = make_pool(args)
    _ = pool.blocks  # Allocate the blocks before the first room.
    codec = make_codec(args.reference, pool, CODECS.get(args.codec))
    pages = split_pages(pool, codec.page_size)
    link = Link(endpoint, SETTINGS, LinkLimits())
    peer, sampler = DecodePeer(link), ThreadSampler(args, "sender")
    for number in (WARM_UP_ROOM, TIMED_ROOM):
        listener = TimedRoom()
        room = RoomEncoder(number, codec, [page.start for page in pages], [PAGE_HASH] * len(pages), listener)
        peer.open(room)
        peer.send(room, tuple(page.slots for page in pages), bytes(16))
        # The room succeeds when it is encoded. It has arrived when the link's queue is empty.
        listener.wait()
        if number == WARM_UP_ROOM:
            _wait_until_sent(link)
            sampler.begin()
    if args.stacks:
        _wait_until_sent(link)
    sampler.end()
    return peer.close


def _wait_until_sent(link: Link) -> None:
    while link.queued_bytes:
        time.sleep(0.01)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    two_processes.add_arguments(parser, transport="ipc", mib=512, mib_help="MiB of each pool")
    add("--reference", choices=("raw", "int8", "exact"), default="raw", help="as --kv-reference of a server (default: %(default)s)")
    add("--codec", choices=CODECS, help="codec to measure in place of the one of --reference")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device of both pools (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the pools (default: %(default)s)")
    add("--layers", type=int, default=30, help="of the pools (default: %(default)s)")
    add("--heads", type=int, default=3, help="KV heads of the pools (default: %(default)s)")
    add("--dim", type=int, default=64, help="channels of a head (default: %(default)s)")
    add("--busy", action="store_true", help="run a Python thread in each process, as a scheduler does")
    add("--stacks", action="store_true", help="print where the threads of both processes are found, every 5 ms; slows them a little")


def run(args: argparse.Namespace) -> int:
    """Measure the backend and the bare stream. Returns 0."""
    check_counts({"--layers": args.layers, "--heads": args.heads, "--dim": args.dim})
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: this machine has no NVIDIA GPU; pass --device cpu")
    return two_processes.compare(args, "backend", receive_backend, send_backend)
