"""Timeline of each pack of layers in a step, from selection request to use: a file for benchmarks (``--kv-bench-timeline``).

Times are those of ``time.monotonic``, which all processes of a machine share. A line is one :class:`PackEvent` in JSON.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

PackEventKind = Literal["reached", "written", "asked", "chosen", "missed"]


class PackEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a pack of layers.

    Attributes:
        kind: ``reached``: a step's attention reaches the pack's first layer, before any wait. ``written``: the selection is written to
            the compressed KV. ``missed``: no new selection arrived in time. ``asked``: the step's queries are published. ``chosen``: the
            rank has selected.
        at: Seconds. For ``chosen``, the completion time at the rank.
        first, count: The pack.
        lane: Lane of the request; -1 for ``reached``, which concerns the whole step.
        sequence: Sequence of the selection request; 0 for none.
        seconds: For ``chosen``, duration of the selection.
        bytes: ``asked``: bytes of the published queries. ``chosen``: bytes of the received positions. ``written``: bytes of K and V at
            the selected positions, which a rank would have to send if this process had no full KV. In mode lossy, bytes of the received K
            and V.
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
        file: Path; the file is created if it does not exist.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = Path(file).open("ab", buffering=0)

    def add_event(
        self, kind: PackEventKind, pack: tuple[int, int], lane: int = -1, sequence: int = 0, at: float | None = None, seconds: float = 0.0,
        size: int = 0,
    ) -> None:  # fmt: skip
        """Append an event; its time is now unless ``at`` is given."""
        event = PackEvent(kind, time.monotonic() if at is None else at, *pack, lane, sequence, seconds, size)
        self._file.write(msgspec.json.encode(event) + b"\n")


def read(file: Path) -> Iterator[PackEvent]:
    """Yield all events of a file in the order of writing, except an incomplete last line."""
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line, type=PackEvent)
