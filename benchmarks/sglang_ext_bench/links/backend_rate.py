"""How fast backend progressive moves a pool's KV without a limit, codec and all, beside a bare ZMQ stream of as many bytes.

    sglang-ext-bench backend-rate [--reference raw|int8|exact] [--codec int8|...] [--transport ipc|tcp] [--mib 512] [--repeats 3] \
        [--device cuda --dtype bfloat16 --layers 36 --heads 8 --dim 128] [--busy] [--stacks]

Two processes on this machine, without SGLang. One encodes pages of a pool and sends them; the other decodes them into its own pool.
The bare stream has frames of the link's size, which the receiver drops (link_rate.py). Bytes are those on the link. Two rooms go one
after the other, of which the second counts: the first takes memory of the kernel, which later ones use again. What anchors alone
came at is told where residuals follow them. --busy has a thread of each process work in Python, as a scheduler does. --stacks tells where
threads of both are found meanwhile, each 5 ms: it slows them a little.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

import torch
from sglang.srt.disaggregation.base.conn import KVArgs

from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.progressive.codecs import make_codec
from sglang_ext.managers.kv_transfer.progressive.decode_peers import DecodePeer
from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import (
    AuxRecords,
    PoolBuffers,
)
from sglang_ext.managers.kv_transfer.progressive.room_encoder import RoomEncoder
from sglang_ext.managers.kv_transfer.progressive.room_writer import RoomWriter
from sglang_ext.managers.kv_transfer.wire import LayerRange, Stream
from sglang_ext_bench.baselines import CODECS
from sglang_ext_bench.links import link_rate

PATIENCE = 300
# Seconds between looks at threads, and places that are told of each.
LOOKS, TOLD_PLACES = 0.005, 6


class Threads:
    """What threads of this process do: keeps one busy, or notes where all are found.

    Args:
        options: of the command line.
        name: of the process.
    """

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self._name, self._found, self._over = name, defaultdict(Counter), Event()
        for asked, work in ((options.busy, self._keep_busy), (options.stacks, self._look)):
            if asked:
                threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def _keep_busy(self) -> None:
        while not self._over.is_set():
            sum(range(1000))

    def _look(self) -> None:
        while not self._over.wait(LOOKS):
            names = {each.ident: each.name.split(" of ")[0] for each in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                code = frame.f_code
                self._found[names.get(ident, "?")][f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"] += 1

    def begin(self) -> None:
        """Forget what was found before."""
        self._found.clear()

    def end(self) -> None:
        """Tell what was found."""
        self._over.set()
        for thread, places in sorted(self._found.items()):
            told = ", ".join(f"{place} {count}" for place, count in places.most_common(TOLD_PLACES))
            print(f"{self._name}, {thread}: {told}", file=sys.stderr, flush=True)


class Told:
    """Waits for a room's end."""

    def __init__(self) -> None:
        self.done, self.reason, self.at, self.anchors_at = Event(), None, 0.0, 0.0

    def anchor_arrived(self) -> None:
        """More follows."""
        self.anchors_at = time.perf_counter()

    def succeed(self) -> None:
        """All of it."""
        self.at = time.perf_counter()
        self.done.set()

    def fail(self, reason: str) -> None:
        """Not all of it."""
        self.reason = reason
        self.done.set()


class First(RoomWriter):
    """Notes when the first part had come, and its size, and bytes of anchors."""

    first, skipped, anchors = 0.0, 0, 0

    def write(self, header, payload) -> None:
        """One part."""
        super().write(header, payload)
        self.anchors += len(payload) if header.stream is Stream.ANCHOR else 0
        if not self.first:
            self.first, self.skipped = time.perf_counter(), len(payload)


def make_pool(options: argparse.Namespace) -> PoolBuffers:
    """Random numbers, as many as asked for."""
    width, dtype = options.heads * options.dim, getattr(torch, options.dtype)
    slots = (options.mib << 20) // (2 * dtype.itemsize * options.layers * width)
    args = KVArgs()
    args.page_size = 1
    args.tensors = [torch.randn(slots, width, device=options.device).to(dtype) for _ in range(2 * options.layers)]
    args.kv_data_ptrs = [each.data_ptr() for each in args.tensors]
    args.kv_data_lens = [each.nbytes for each in args.tensors]
    args.kv_item_lens = [each[0].nbytes for each in args.tensors]
    args.aux = torch.zeros(16, dtype=torch.uint8)
    args.aux_data_ptrs, args.aux_item_lens = [args.aux.data_ptr()], [16]
    return PoolBuffers(args, dtype, options.heads, options.dim, options.dim, torch.device(options.device))


def pages_of(pool: PoolBuffers, size: int) -> list[PlacedPage]:
    """All slots, in pages that lie together, as a prompt's mostly do."""
    slots = torch.arange(len(pool.keys[0]), device=pool.device)
    return [PlacedPage(begin, slots[begin : begin + size]) for begin in range(0, len(slots), size)]


def receive_backend(endpoint: str, options: argparse.Namespace, parent: Connection) -> None:
    """Tell where it listens, then bytes per second."""
    torch.set_num_threads(1)
    pool, told, threads = make_pool(options), Told(), Threads(options, "receiver")
    codec, layers = make_codec(options.reference, pool, CODECS.get(options.codec)), LayerRange(0, options.layers)
    pages = pages_of(pool, codec.page_size)
    hashes = [bytes(32)] * len(pages)
    first = Told()
    before, room = (First(codec, pool, AuxRecords(pool.args), 0, layers, pages, hashes, each) for each in (first, told))
    limits = LinkLimits().with_part_bytes(codec.most_bytes(Stream.ANCHOR, layers))
    server = LinkServer(endpoint, link_rate.SETTINGS, limits, take=pool.blocks.take)
    server.register(1, before.expected, before)
    server.register(2, room.expected, room)
    parent.send(server.endpoint)
    assert first.done.wait(PATIENCE) and first.reason is None, first.reason
    threads.begin()
    assert told.done.wait(PATIENCE) and told.reason is None, told.reason
    threads.end()
    if codec.has_residual:
        print(f"anchors: {(room.anchors - room.skipped) / (told.anchors_at - room.first) / 1e9:.3f} GB/s", file=sys.stderr, flush=True)
    parent.send((room.size - room.skipped) / (told.at - room.first))
    parent.recv()
    server.close()


def send_backend(endpoint: str, options: argparse.Namespace) -> Callable[[], None]:
    """Send the pool; what ends the link."""
    torch.set_num_threads(1)
    pool = make_pool(options)
    codec, layers = make_codec(options.reference, pool, CODECS.get(options.codec)), LayerRange(0, options.layers)
    pages = pages_of(pool, codec.page_size)
    link = Link(endpoint, link_rate.SETTINGS, LinkLimits())
    peer, threads, _ = DecodePeer(link), Threads(options, "sender"), pool.blocks
    for number in (1, 2):
        told = Told()
        room = RoomEncoder(number, codec, layers, [page.start for page in pages], [bytes(32)] * len(pages), told)
        peer.open(room)
        peer.send(room, tuple(page.slots for page in pages), bytes(16))
        # It succeeds once it is encoded; all of it has arrived when nothing waits for the link.
        assert told.done.wait(PATIENCE) and told.reason is None, told.reason
        if number == 1:
            while link.queued_bytes:
                time.sleep(0.01)
            threads.begin()
    while options.stacks and link.queued_bytes:
        time.sleep(0.01)
    threads.end()
    return peer.close


def main() -> None:
    """Print GB/s of both and their ratio, medians over alternating runs, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", choices=("raw", "int8", "exact"), default="raw")
    parser.add_argument("--codec", choices=CODECS, help="a codec to compare with, instead of the one of --reference")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where both pools lie")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--mib", type=int, default=512, help="of a pool")
    parser.add_argument("--repeats", type=int, default=3)
    for name, value in (("layers", 30), ("heads", 3), ("dim", 64), ("frame-kib", LinkLimits().frame_bytes >> 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("busy", "stacks"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"bare": [], "backend": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):
            for name, receive, send in (
                ("bare", link_rate.receive_bare, link_rate.send_bare),
                ("backend", receive_backend, send_backend),
            ):
                endpoint = f"ipc://{Path(folder, f'{name}{number}')}" if options.transport == "ipc" else "tcp://127.0.0.1:0"
                rates[name].append(link_rate.rate(receive, send, endpoint, options) / 1e9)
    median = {name: round(statistics.median(values), 3) for name, values in rates.items()}
    print(json.dumps({**vars(options), "GB/s": median, "backend/bare": round(median["backend"] / median["bare"], 3)}))


if __name__ == "__main__":
    main()
