"""Requests that decode before all of their KV is here: on anchors, while residuals are on their way (Lynx, section 5).

Such a request drafts on its own row, whose slots hold what the anchor says. The residual is written into the same slots; once all of
it is there, the drafts are verified, and from then on the request is like any other. Nothing that was drafted on an anchor is an
answer before that, and no prefix tree is told of its KV.
"""

from typing import TYPE_CHECKING, Protocol

from sglang_ext.managers.spec_decode.full_kv import ResidentFullKV
from sglang_ext.tp_ranks import TPRanks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

class Arrival(Protocol):
    """The rest of one request's KV. Threads of links advance it.

    Attributes:
        complete: whether all is written.
        failure: why the rest will not come; None while it may.
    """

    complete: bool
    failure: str | None

    def cancel(self) -> None:
        """Once it returned, nothing is written to the request's slots any more."""

    def prefill_again(self, req: "Req") -> None:
        """Let the prefill server compute a request once more that gave its slots back; it begins when all of its KV is there."""


class ArrivingFullKV(ResidentFullKV):
    """Whose full KV is there for a verification, where some comes over a link.

    Args:
        ranks: that must agree on what is there.
    """

    def __init__(self, ranks: TPRanks = TPRanks()) -> None:
        self._ranks = ranks
        self._arrivals: dict[int, Arrival] = {}
        self._here: set[int] = set()
        self._lost: set[int] = set()

    def expect(self, row: int, arrival: Arrival) -> None:
        """The request in ``row`` of the token table begins on its anchor; on all ranks between the same two rounds."""
        self._arrivals[row] = arrival

    def on_round_start(self, drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """A round begins: what is complete on all ranks can be verified at its end."""
        waiting = sorted(self._arrivals.keys() - self._here - self._lost)
        if not waiting:
            return
        seen = [(self._arrivals[row].complete, self._arrivals[row].failure is not None) for row in waiting]
        for row, *ranks in zip(waiting, *self._ranks.gather(seen), strict=True):
            if any(failed for _, failed in ranks):
                self._lost.add(row)
            elif all(complete for complete, _ in ranks):
                self._here.add(row)

    def is_early(self, row: int) -> bool:
        """Whether a request drafts on its anchor, or has drafts of it that are not verified."""
        return row in self._arrivals

    def has_arrived(self, row: int) -> bool:
        """Whether all of an early request's KV has come."""
        return row in self._here

    def is_lost(self, row: int) -> bool:
        """Whether the rest of a request's KV will not come."""
        return row in self._lost

    def arrival(self, row: int) -> Arrival | None:
        """The rest of an early request's KV; None of others."""
        return self._arrivals.get(row)

    def end_early_decoding(self, row: int) -> None:
        """Nothing that an early request drafted is left unverified at the end of this round: it is like any other then."""
        self.forget(row)

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone, or like any other; its slots are written to no more."""
        arrival = self._arrivals.pop(row, None)
        self._here.discard(row)
        self._lost.discard(row)
        if arrival is not None:
            arrival.cancel()
