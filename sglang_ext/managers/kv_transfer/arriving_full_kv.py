"""Early decoding: requests decode on anchors while their residuals are being transferred (Lynx, section 5).

Such a request drafts on its own row, whose slots hold the values of the anchor. The residual is written into the same slots. Once all
residuals are written, the drafts are verified, and the request is an ordinary one.

Before that, drafts on an anchor are not output, and the KV is not inserted into a prefix tree.
"""

from typing import TYPE_CHECKING, Protocol

from sglang_ext.core import TPRanks
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Arrival(Protocol):
    """The remaining KV of one request. Threads of links advance it.

    Attributes:
        complete: Whether all KV is written.
        failure: Why the rest will not arrive; None while it may.
    """

    complete: bool
    failure: str | None

    def cancel(self) -> None:
        """Stop the writes. After this call nothing is written to the request's slots any more."""

    def prefill_again(self, req: "Req") -> None:
        """Let the prefill server compute the request again, after its slots were freed. It resumes when all of its KV has arrived."""


class ArrivingFullKV(FullKVProvider):
    """Full-KV provider for requests whose full KV may still arrive over a link.

    Args:
        ranks: Ranks that must agree on which KV has arrived.
    """

    def __init__(self, ranks: TPRanks = TPRanks()) -> None:
        self._ranks = ranks
        self._arrivals: dict[int, Arrival] = {}
        self._here: set[int] = set()
        self._lost: set[int] = set()
        self.early = self

    def expect(self, row: int, arrival: Arrival) -> None:
        """Register the request in ``row`` of the token table, which decodes on its anchor. Called on all ranks between the same two rounds.
        """
        self._arrivals[row] = arrival

    def on_round_start(self, reqs: "list[Req]", drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """Update the arrived requests: KV that is complete on all ranks can be verified at the end of this round."""
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
        """Return whether a request drafts on its anchor, or has pending drafts that were made on it."""
        return row in self._arrivals

    def has_arrived(self, row: int) -> bool:
        """Return whether all KV of an early request has arrived."""
        return row in self._here

    def is_lost(self, row: int) -> bool:
        """Return whether the rest of a request's KV will not arrive."""
        return row in self._lost

    def recompute_source(self, row: int) -> Arrival | None:
        """Return the remaining KV of an early request; None for other requests."""
        return self._arrivals.get(row)

    def end_early_decoding(self, row: int) -> None:
        """Make an early request an ordinary one: all of its drafts are verified at the end of this round."""
        self.forget(row)

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which ended or is an ordinary one. Its slots are no longer written to."""
        arrival = self._arrivals.pop(row, None)
        self._here.discard(row)
        self._lost.discard(row)
        if arrival is not None:
            arrival.cancel()
