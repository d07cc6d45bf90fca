"""Reads the files of ``--kv-bench-timeline``: events of KV transfers, and of cache ranks on a CPU. A line is one event in JSON."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from sglang_ext.managers.cache_rank.layerwise_client import PackEventKind
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferEventKind


class TransferEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a request.

    - ``sending``: the prefill server submits the first of its KV for encoding.
    - ``computed``: all of its KV and its first token are computed.
    - ``encoded``: the link has all of it.
    - ``expected``: it has slots at the decode server.
    - ``anchor``: the data needed to start decoding is written.
    - ``complete``: all KV is written.
    - ``drafted``: a round's steps created draft tokens.
    - ``verified``: drafts were verified, which outputs the accepted tokens and one bonus token.
    - ``answered``: a round's steps created output tokens.

    Attributes:
        room: SGLang's ``bootstrap_room`` of the request.
        at: Time in seconds.
        number: ``anchor``: bytes of anchors, without residuals that arrived earlier. ``complete``: bytes of all KV. ``drafted``: pending
            drafts after this round. ``verified``: accepted drafts. ``answered``: output tokens.
        of: ``drafted``: drafts of this round. ``verified``: verified drafts.
        early: Whether the drafts were made on an anchor.
    """

    room: int
    kind: TransferEventKind
    at: float
    number: int = 0
    of: int = 0
    early: bool = False


class PackEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a pack of layers. Times are those of ``time.monotonic``, which all processes of a machine share.

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


Event = TypeVar("Event", TransferEvent, PackEvent)


def read_events(file: Path, kind: type[Event]) -> Iterator[Event]:
    """Yield the events of a file, in its order. An incomplete last line is ignored. A missing file has none."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return (msgspec.json.decode(line, type=kind) for line in lines if line.endswith(b"\n"))


def read_timeline(file: Path) -> list[TransferEvent]:
    """Return all events of KV transfers of a file by time."""
    return sorted(read_events(file, TransferEvent), key=lambda event: event.at)
