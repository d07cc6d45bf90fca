"""Where the time of one job goes (HACK, Figure 10), from what the servers' timelines say of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext.managers.kv_transfer.timeline import TransferEvent


class Phases(NamedTuple):
    """Seconds of a job, one after the other; their sum is its completion time.

    Attributes:
        waiting: until the decode server has slots for it, without which no prefill begins.
        prefill: from then until all of its KV is computed, its place in the prefill server's queue among it.
        encoding: from then until the link has all of it, unless decoding begins before.
        transfer: from then until decoding can begin: all of it is written to the decode server's pool.
        decode: from then until its last token.
    """

    waiting: float
    prefill: float
    encoding: float
    transfer: float
    decode: float


@dataclass(frozen=True)
class Job:
    """One request that went through a prefill and a decode server.

    Attributes:
        tokens: of its prompt.
        arrived: seconds since the first arrival.
        completion: seconds from its arrival until its last token.
        first_token: seconds from its arrival until the client had the first.
        prefill_server, decode_server: which of each took it.
        phases: of its completion time; None where no timeline is kept.
    """

    tokens: int
    arrived: float
    completion: float
    first_token: float
    prefill_server: int
    decode_server: int
    phases: Phases | None


def phases_of(events: Sequence[TransferEvent], arrived: float, ended: float) -> Phases | None:
    """Of one job's events; None where they lack what a phase begins with.

    Args:
        events: of the job alone, of both servers.
        arrived, ended: seconds of the timeline's clock.
    """
    at = {event.kind: event.at for event in reversed(events)}
    # On an anchor decoding begins before the rest has come.
    begun = min((at[kind] for kind in ("anchor", "complete") if kind in at), default=math.nan)
    if math.isnan(begun) or "computed" not in at:
        return None
    # Events of processes that look at the same clock one after the other, so each is held to those before it.
    expected = max(at.get("expected", arrived), arrived)
    computed = max(at["computed"], expected)
    begun = max(begun, computed)
    encoded = min(max(at.get("encoded", computed), computed), begun)
    return Phases(expected - arrived, computed - expected, encoded - computed, begun - encoded, ended - begun)
