"""When each pack of layers of a step was reached, asked for, chosen and written: a file for benchmarks (``--kv-bench-timeline``).

Times are of ``time.monotonic``, which all processes of a machine share. A line is one :class:`PackEvent` in JSON.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

PackEventKind = Literal["reached", "written", "asked", "chosen", "missed"]


class PackEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a pack of layers.

    Attributes:
        kind: ``reached``: a step's attention comes to its first layer, nothing was waited for yet; ``written``: what was chosen for it
            leads its copies; ``missed``: nothing new was there in time; ``asked``: a step's queries of it are published; ``chosen``: the
            rank has chosen.
        at: seconds; of ``chosen`` on the rank's side, when it was done.
        first, count: the pack.
        lane: of the request; -1 for the whole step, of ``reached``.
        sequence: of the question; 0 for none.
        seconds: ``chosen``: that choosing took.
        bytes: ``asked``: of queries that were published. ``chosen``: of positions that came back. ``written``: of K and V that these
            lead to, as a rank without this process's full KV would have to send them; in mode lossy of those that one has sent.
    """

    kind: PackEventKind
    at: float
    first: int
    count: int
    lane: int = -1
    sequence: int = 0
    seconds: float = 0.0
    bytes: int = 0


class PackTimeline:
    """Appends events to a file.

    Args:
        file: made if it is not there.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = Path(file).open("ab", buffering=0)

    def add_event(
        self, kind: PackEventKind, pack: tuple[int, int], lane: int = -1, sequence: int = 0, at: float | None = None, seconds: float = 0.0,
        size: int = 0,
    ) -> None:  # fmt: skip
        """Append an event, of now unless told."""
        event = PackEvent(kind, time.monotonic() if at is None else at, *pack, lane, sequence, seconds, size)
        self._file.write(msgspec.json.encode(event) + b"\n")


def read(file: Path) -> Iterator[PackEvent]:
    """All events of a file, in the order in which they were written; a last line that is not whole is left out."""
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line, type=PackEvent)
