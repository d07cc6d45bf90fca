"""Timestamps of KV transfers and of drafting and verification, per request, in a file for benchmarks.

Times are of ``time.monotonic``, which all processes of a machine share. A line is one :class:`TransferEvent` in JSON.
"""

import threading
import time
from pathlib import Path
from typing import Literal

import msgspec
import torch

from sglang_ext.device import Mark

TransferEventKind = Literal["sending", "computed", "encoded", "expected", "anchor", "complete", "drafted", "verified", "answered"]


class TransferEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a request.

    On the prefill server the kinds are ``sending``, ``computed`` and ``encoded``. On the decode server they are ``expected``, ``anchor``,
    ``complete``, ``drafted``, ``verified`` and ``answered``.

    - ``sending``: the first of its KV is submitted for encoding.
    - ``computed``: all of its KV and its first token are computed.
    - ``encoded``: the link has all of it.
    - ``expected``: it has slots.
    - ``anchor``: the data needed to start decoding is written.
    - ``complete``: all KV is written.
    - ``drafted``: a round's steps created draft tokens.
    - ``verified``: drafts were verified, which outputs the accepted tokens and one bonus token.
    - ``answered``: a round's steps created output tokens.

    Attributes:
        room: SGLang's ``bootstrap_room`` of the request.
        kind: Kind of the event.
        at: Time in seconds.
        number: ``anchor``: bytes of anchors, without residuals that arrived earlier. ``complete``: bytes of all KV. ``drafted``: pending
            drafts after this round. ``verified``: accepted drafts. ``answered``: output tokens.
        of: ``drafted``: drafts of this round. ``verified``: verified drafts.
        early: ``drafted``, ``verified``: whether the drafts were made on an anchor.
    """

    room: int
    kind: TransferEventKind
    at: float
    number: int = 0
    of: int = 0
    early: bool = False


class TransferTimeline:
    """Appends events to a file. All methods may be called from any thread.

    Args:
        file: Created if missing; several processes may append to one file.
        device: Device whose marks are converted to times.
    """

    def __init__(self, file: str | Path, device: torch.device = torch.device("cpu")) -> None:
        self._file = Path(file).open("ab", buffering=0)
        self._lock = threading.Lock()
        self._zero = Mark.now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._began = time.monotonic()

    @classmethod
    def of(cls, file: str | None, device: torch.device = torch.device("cpu")) -> "TransferTimeline | None":
        """Create the timeline of ``--kv-bench-timeline``; None without that flag."""
        return None if file is None else cls(file, device)

    def at(self, mark: Mark) -> float:
        """Return the time in seconds of a mark that the device has reached."""
        return self._began + self._zero.until(mark)

    def add_event(
        self, room: int, kind: TransferEventKind, at: float | None = None, number: int = 0, of: int = 0, early: bool = False
    ) -> None:
        """Append an event; ``at`` defaults to the current time."""
        event = TransferEvent(room, kind, time.monotonic() if at is None else at, number, of, early)
        with self._lock:
            self._file.write(msgspec.json.encode(event) + b"\n")


def read(file: Path) -> list[TransferEvent]:
    """Return all events of a file by time. An incomplete last line is ignored."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    events = [msgspec.json.decode(line, type=TransferEvent) for line in lines if line.endswith(b"\n")]
    return sorted(events, key=lambda event: event.at)
