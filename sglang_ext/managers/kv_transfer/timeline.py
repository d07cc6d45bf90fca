"""When the KV of requests was computed, sent and received, and when their tokens were drafted and verified: a file for benchmarks.

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
    """Something that became of a request.

    Attributes:
        room: SGLang's ``bootstrap_room`` of it.
        kind: at the prefill server ``sending`` (the first of its KV goes to be encoded), ``computed`` (all of its KV is there, and its
            first token), ``encoded`` (the link has all); at the decode server ``expected`` (it has slots), ``anchor`` (what a request
            can begin on is written), ``complete`` (all is); ``drafted`` (a round's steps made drafts), ``verified`` (and so answered
            one token more than were accepted), ``answered`` (a round's steps gave answers).
        at: seconds.
        number: ``anchor``: bytes of anchors, without residuals that came before; ``complete``: of all KV. ``drafted``: drafts that wait
            for their verification by now. ``verified``: drafts that were accepted. ``answered``: tokens.
        of: ``drafted``: those of this round. ``verified``: drafts that were offered.
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
        file: made if it is not there; several processes may append to one.
        device: whose marks are told.
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
        """That of ``--kv-bench-timeline``; None without."""
        return None if file is None else cls(file, device)

    def at(self, mark: Mark) -> float:
        """Seconds of a mark that the device has reached."""
        return self._began + self._zero.until(mark)

    def add_event(self, room: int, kind: TransferEventKind, at: float | None = None, number: int = 0, of: int = 0, early: bool = False) -> None:
        """Append an event, of now unless told."""
        event = TransferEvent(room, kind, time.monotonic() if at is None else at, number, of, early)
        with self._lock:
            self._file.write(msgspec.json.encode(event) + b"\n")


def read(file: Path) -> list[TransferEvent]:
    """All events of a file, in the order of their times; a last line that is not whole is left out."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    events = [msgspec.json.decode(line, type=TransferEvent) for line in lines if line.endswith(b"\n")]
    return sorted(events, key=lambda event: event.at)
