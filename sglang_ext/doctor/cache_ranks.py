"""Checks whether cache ranks (``--kv-cache-ranks``) work here, by starting one as a server does."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from sglang_ext.config.selection_options import max_cache_ranks
from sglang_ext.doctor.installation import Check, make_check, one_line
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import VERSION, Attach, BufferShape, RotaryParameters
from sglang_ext.managers.cache_rank.rank_link import START_SECONDS, RankLink

NAME = "cache ranks"
SHARED_FOLDER = Path("/dev/shm")
REMEDY = (
    "allow this user to start processes, to create anonymous memory (memfd_create) and sockets in TMPDIR; or serve without "
    "--kv-cache-ranks: tokens are then selected between steps"
)


def check_cache_ranks(seconds: float = START_SECONDS) -> Check:
    """Start a cache rank for a made-up model, wait until it is ready, and end it. Report the maximum number, the memory and the devices.

    Args:
        seconds: Time limit for the start.
    """
    begun, attach, link = time.monotonic(), _small(), None
    try:
        link = RankLink(attach, ExchangeBuffer(attach.shape, torch.device("cpu"), "cpu"), pack=1)
        link.poll()
        while not link.ready and link.down_reason == "starting" and time.monotonic() < begun + seconds:
            link.wait(0.05)
            link.poll()
        ready, after = link.ready, f"after {time.monotonic() - begun:.1f} s"
        started = f"a process was ready {after}" if ready else f"a process was not ready {after}: {link.down_reason}"
    except OSError as error:
        ready, started = False, f"no process was started: {one_line(error)}"
    finally:
        if link is not None:
            link.end()
    return make_check(NAME, ready, f"{started}; up to {max_cache_ranks()}, one per core; {_memory()}; {_devices()}", REMEDY)


def _small() -> Attach:
    shape = BufferShape(layers=1, query_heads=1, kv_heads=1, dim=2, dtype="float32", window=1, lanes=1, most=8, places=1)
    turning = RotaryParameters(frequencies=(1.0,), interleaved=False)
    return Attach(VERSION, 1, shape, blocks=1, scaling=(1.0,), predictor="current", sinks=0, recent=0, turning=turning)


def _memory() -> str:
    """Memory that ranks and servers can share. It is anonymous, so the size of /dev/shm, which other programs use, is no limit."""
    free = f"{psutil.virtual_memory().available / 1e9:.1f} GB of memory free"
    if not SHARED_FOLDER.is_dir():
        return f"{free}, no {SHARED_FOLDER}, which ranks do not need"
    found = shutil.disk_usage(SHARED_FOLDER)
    return f"{free}, {SHARED_FOLDER} with {found.free / 1e9:.1f} of {found.total / 1e9:.1f} GB free, which ranks do not take"


def _devices() -> str:
    """GPUs, and which can read each other's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "no GPU: ranks select on CPU cores"
    if count == 1:
        return "one GPU, on which a second stream selects instead of ranks"
    without = list(_apart(count))
    peers = f"no peer access between {', '.join(without)}" if without else "peer access between all"
    return f"{count} GPUs, {peers}"


def _apart(count: int) -> Iterator[str]:
    """Pairs of GPUs that cannot both read the other's memory."""
    for first in range(count):
        for second in range(first + 1, count):
            if not all(torch.cuda.can_device_access_peer(*pair) for pair in ((first, second), (second, first))):
                yield f"{first} and {second}"
