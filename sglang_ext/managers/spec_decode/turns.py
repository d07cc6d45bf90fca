"""Whose full KV is there for a verification, where all of it lies on the device: everybody's.

``managers/offload/verifications.py`` has the same methods for full KV that comes from host memory.
"""

from contextlib import AbstractContextManager, nullcontext


class OnDevice:
    """Full KV that never leaves the device: a request is verified as soon as it has enough drafts.

    Attributes:
        drafts: that a request gathers while its full KV is loaded; none is.
        residency: of requests whose full KV may leave; None.
    """

    drafts = 0
    residency = None

    def launching(self) -> AbstractContextManager[None]:
        """While a round is planned and launched, in which loads may be put off to its end."""
        return nullcontext()

    def begin(self, drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """A round begins, of which these requests draft on copies, by row of the token table."""

    def is_stale(self, row: int) -> bool:
        """Whether a request's row must not be read: full KV is missing, or lies elsewhere."""
        return False

    def is_lost(self, row: int) -> bool:
        """Whether some of a request's full KV is in no tier."""
        return False

    def reading(self, row: int) -> AbstractContextManager[None]:
        """Keep what is on the device of a request's full KV."""
        return nullcontext()

    def keep(self, row: int) -> None:
        """The request in ``row`` reads its full KV in this round."""

    def take(self, rounds: dict[int, int], ripe: set[int]) -> set[int]:
        """Rows that are verified in this round: those that have enough drafts."""
        return ripe

    def restore(self, row: int) -> None:
        """Let a request's row lead to its full KV."""

    def end(self) -> None:
        """The round was launched."""

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
