"""Whose full KV is there for a verification: what the plan of a round asks, and the answers where none ever leaves the device.

``managers/kv_offload/`` has those where it comes from host memory or is given back, ``managers/kv_transfer/arriving_full_kv.py`` those where it
is on its way from a prefill server.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class FullKVProvider:
    """Turns of requests that begin when all of their full KV is there."""

    def is_early(self, row: int) -> bool:
        """Whether a request drafts on the anchor of its full KV (managers/kv_transfer/arriving_full_kv.py)."""
        return False

    def has_arrived(self, row: int) -> bool:
        """Whether the rest of an early request's full KV has come."""
        return True

    def end_early_decoding(self, row: int) -> None:
        """Nothing that an early request drafted is left unverified at the end of this round."""

    def free_full_kv(self, requests: "Sequence[Req]") -> None:
        """A round of these begins: give back full KV that nobody needs any more (mem_cache/prefix_cache/remote_only.py)."""


class ResidentFullKV(FullKVProvider):
    """Whose full KV is there for a verification, where none ever leaves the device: a request is verified as soon as it has enough drafts.

    ``managers/kv_offload/offloaded_full_kv.py`` has the same methods for full KV that comes from host memory.

    Attributes:
        drafts_per_load: that a request gathers while its full KV is loaded; none is.
        residency: of requests whose full KV may leave; None.
    """

    drafts_per_load = 0
    residency = None

    def deferring_loads(self) -> AbstractContextManager[None]:
        """While a round is planned and launched, in which loads may be put off to its end."""
        return nullcontext()

    def on_round_start(self, drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """A round begins, of which these requests draft on copies, by row of the token table."""

    def is_offloaded(self, row: int) -> bool:
        """Whether a request's row must not be read: full KV is missing, or lies elsewhere."""
        return False

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to full KV; the prefix tree has ``protected`` tokens of it."""
        return 0

    def is_lost(self, row: int) -> bool:
        """Whether some of a request's full KV is in no tier."""
        return False

    def pin_while_reading(self, row: int) -> AbstractContextManager[None]:
        """Keep what is on the device of a request's full KV."""
        return nullcontext()

    def pin_for_round(self, row: int) -> None:
        """The request in ``row`` reads its full KV in this round."""

    def schedule_verifications(self, rounds: dict[int, int], ripe: set[int]) -> set[int]:
        """Rows that are verified in this round: those that have enough drafts."""
        return ripe

    def restore(self, row: int) -> None:
        """Let a request's row lead to its full KV."""

    def on_round_launched(self) -> None:
        """The round was launched."""

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
