"""Full-KV providers: they say where the full KV of a request is, and when it can be verified.

This file has the provider of a server on which full KV never leaves the device. Features (managers/feature.py) have the others. That of
full KV in host memory is in ``kv_offload/offloaded_full_kv.py``, that of full KV from a prefill server in
``kv_transfer/feature.py``. Those of freed full KV are in ``quantized_attention.py`` and ``cache_rank/feature.py``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.prefix_cache.freed_full_kv import EarlyRequests, FreedFullKV


class FullKVProvider:
    """Base of the providers. Here, requests do not begin before all of their full KV has arrived, and nothing is freed.

    Attributes:
        early: Requests that may draft before all of their full KV has arrived; None if there are none.
        freed_full_kv: Full KV that was freed, because compressed KV or a cache rank holds it; None if full KV stays.
    """

    early: "EarlyRequests | None" = None
    freed_full_kv: "FreedFullKV | None" = None

    def is_early(self, row: int) -> bool:
        """Whether a request drafts on the anchor of its full KV (managers/kv_transfer/feature.py)."""
        return False

    def has_arrived(self, row: int) -> bool:
        """Whether the residual of an early request has arrived."""
        return True

    def end_early_decoding(self, row: int) -> None:
        """End early decoding: the request has no unverified draft at the end of this round."""

    def free_full_kv(self, requests: "Sequence[Req]") -> None:
        """Free full KV that is no longer needed, at the start of a round (mem_cache/prefix_cache/remote_only.py)."""


class ResidentFullKV(FullKVProvider):
    """Provider of full KV that never leaves the device: a request is verified as soon as it has enough drafts.

    ``managers/kv_offload/offloaded_full_kv.py`` has the same methods for full KV in host memory.

    Attributes:
        drafts_per_load: Drafts that a request collects while its full KV is loaded; 0, since nothing is loaded.
        residency: Requests whose full KV may leave the device; None.
        policy: Chooses how much full KV may leave the device; None.
    """

    drafts_per_load = 0
    residency = None
    policy = None

    def deferring_loads(self) -> AbstractContextManager[None]:
        """A context for planning and launching a round, in which loads may be deferred to its end."""
        return nullcontext()

    def on_round_start(self, drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """Record that a round begins. ``drafting``: requests that draft on compressed KV, by row of the token table."""

    def is_offloaded(self, row: int) -> bool:
        """Whether a request's row must not be read, because full KV is missing or stored elsewhere."""
        return False

    def full_kv_start(self, row: int, protected: int) -> int:
        """First position from which a request's row points to full KV. The prefix tree holds ``protected`` of its tokens."""
        return 0

    def is_lost(self, row: int) -> bool:
        """Whether a part of the request's full KV is in no tier."""
        return False

    def pin_while_reading(self, row: int) -> AbstractContextManager[None]:
        """A context that keeps the part of a request's full KV that is on the device."""
        return nullcontext()

    def pin_for_round(self, row: int) -> None:
        """Keep the full KV of the request in ``row`` on the device, because it reads it in this round."""

    def schedule_verifications(self, rounds: dict[int, int], ripe: set[int]) -> set[int]:
        """Select the rows to verify in this round: those with enough drafts."""
        return ripe

    def restore(self, row: int) -> None:
        """Point a request's row to its full KV."""

    def on_round_launched(self) -> None:
        """Record that the round was launched."""

    def forget(self, row: int) -> None:
        """Drop all state of the request in ``row``."""
