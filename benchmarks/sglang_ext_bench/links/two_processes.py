"""Measures a transfer between two processes, beside a bare ZMQ stream.

Each measurement is a pair of functions. The receiver runs in a process of its own:

    receive(endpoint, args, parent)   # sends the address and then the rate, in bytes per second, to `parent`; ends after a message
    send(endpoint, args)              # sends all bytes, and returns a function that closes the connection
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import zmq

from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_counts

Receive = Callable[[str, argparse.Namespace, Connection], None]
Send = Callable[[str, argparse.Namespace], Callable[[], None]]

BARE = "bare"
# Bytes of the first message of each frame of the bare stream.
HEADER_BYTES = 100
# Messages that the bare stream queues.
QUEUED_MESSAGES = 16


def add_arguments(parser: argparse.ArgumentParser, transport: str, mib: int, mib_help: str) -> None:
    """Add the options that all measurements have.

    Args:
        parser: The parser.
        transport: Default of --transport.
        mib: Default of --mib.
        mib_help: Help of --mib.
    """
    add = parser.add_argument
    add("--transport", choices=("ipc", "tcp"), default=transport, help="local socket or loopback interface (default: %(default)s)")
    most = LinkLimits().frame_bytes >> 10
    add("--frame-kib", type=int, choices=range(1, most + 1), metavar=f"1..{most}", default=most, help="KiB of a frame (default: %(default)s)")
    add("--mib", type=int, default=mib, help=f"{mib_help} (default: %(default)s)")
    add("--repeats", type=int, default=3, help="runs of each, in turn (default: %(default)s)")


def compare(args: argparse.Namespace, name: str, receive: Receive, send: Send) -> int:
    """Measure ``name`` and the bare stream in turn, and print one line of JSON with the median rates and their ratio. Returns 0.

    Raises:
        CommandError: An option is wrong, or a transfer failed.
    """
    check_counts({"--frame-kib": args.frame_kib, "--mib": args.mib, "--repeats": args.repeats})
    pairs: Mapping[str, tuple[Receive, Send]] = {BARE: (receive_bare, send_bare), name: (receive, send)}
    rates: dict[str, list[float]] = {each: [] for each in pairs}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.repeats):
            for each, pair in pairs.items():
                endpoint = f"ipc://{Path(folder, f'{each}{number}')}" if args.transport == "ipc" else "tcp://127.0.0.1:0"
                rates[each].append(measure_rate(*pair, endpoint, args) / 1e9)
    medians = {each: round(statistics.median(values), 3) for each, values in rates.items()}
    print(json.dumps({**vars(args), "GB/s": medians, f"{name}/{BARE}": round(medians[name] / medians[BARE], 3)}))
    return 0


def measure_rate(receive: Receive, send: Send, endpoint: str, args: argparse.Namespace) -> float:
    """Transfer once. Returns bytes per second.

    Raises:
        CommandError: The receiver failed.
    """
    parent, child = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(endpoint, args, child), daemon=True)
    receiver.start()
    child.close()
    try:
        close = send(parent.recv(), args)
        rate = parent.recv()
    except EOFError as error:
        raise CommandError("the receiving process failed: its error is above") from error
    close()
    parent.send("done")
    receiver.join()
    return rate


def wait_for_end(done: Event, seconds: float, get_reason: Callable[[], Any]) -> None:
    """Wait for the end of a transfer.

    Args:
        done: Set at the end.
        seconds: Longest wait.
        get_reason: Returns why the transfer failed; None if it succeeded.

    Raises:
        CommandError: The transfer failed or is late.
    """
    if not done.wait(seconds):
        raise CommandError(f"the transfer did not end within {seconds:g} s: pass a smaller --mib")
    if (reason := get_reason()) is not None:
        raise CommandError(f"the transfer failed: {reason}")


def written_memory(args: argparse.Namespace) -> memoryview:
    """Allocate --mib MiB to send. All bytes are written, because the kernel keeps unwritten memory as one shared page of zeros."""
    return memoryview(np.full(args.mib << 20, 1, np.uint8))


def receive_bare(endpoint: str, args: argparse.Namespace, parent: Connection) -> None:
    """Receive frames and drop them."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
        parent.send(socket.last_endpoint.rstrip(b"\0").decode())
        socket.recv_multipart()
        start, size = time.perf_counter(), 0
        while size < (args.mib << 20) - (args.frame_kib << 10):
            size += len(socket.recv_multipart(copy=False)[2])
        parent.send(size / (time.perf_counter() - start))
        parent.recv()


def send_bare(endpoint: str, args: argparse.Namespace) -> Callable[[], None]:
    """Send frames, each with a header. Returns a function that closes the socket."""
    size, header, data = args.frame_kib << 10, bytes(HEADER_BYTES), written_memory(args)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(QUEUED_MESSAGES)
    socket.connect(endpoint)
    for begin in range(0, len(data), size):
        socket.send(header, zmq.SNDMORE)
        socket.send(data[begin : begin + size], copy=False)
    return lambda: context.destroy(0)
