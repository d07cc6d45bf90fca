"""Selects the requests to verify and the full KV to load: Algorithm 1 of VeriCache over the running requests.

Full KV on the device is verified when a round's drafts are complete. For full KV on the host, link time and device memory are reserved
(verification_scheduler.py). The load is due when the request will have enough pending drafts to pay for it.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.managers.kv_offload.offload_policy import OffloadPolicy
from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode
from sglang_ext.mem_cache.prefix_cache.residency import Residency

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Relative change of the link's bandwidth from which planned loads are rescaled.
BANDWIDTH_TOLERANCE = 0.1


@dataclass
class OffloadedFullKV(FullKVProvider):
    """Full-KV provider of one scheduler process whose full KV may be on the host. For members without a description see the base class.

    Attributes:
        scheduler: The reservations, by row of the token table.
        bytes_per_token: Bytes of full KV per token.
        verifying_rows: Rows that verify in this iteration.
        waited_rounds: Iterations that loaded full KV waited for its verification, in total.
    """

    scheduler: VerificationScheduler
    residency: Residency = field()
    bytes_per_token: int
    drafts_per_load: int = field()
    policy: OffloadPolicy | None = None
    verifying_rows: set[int] = field(default_factory=set)
    waited_rounds: int = 0
    _reserved: set[int] = field(default_factory=set)
    _refused: dict[int, None] = field(default_factory=dict)
    _pinned: set[int] = field(default_factory=set)
    _bandwidth: float | None = None

    def deferring_loads(self) -> AbstractContextManager[None]:
        """Postpone loads to the end of the context, in which a round is planned and launched."""
        return self.residency.host.tier.defer_transfers()

    def on_round_start(self, reqs: "list[Req]", drafting: dict[int, tuple[TieredNode, int]], iteration_seconds: float | None) -> None:
        """See :meth:`FullKVProvider.on_round_start`. Requests whose full KV has arrived verify in this round."""
        self.residency.collect_loads()
        self.residency.update(drafting)
        if iteration_seconds:
            self.scheduler.link.capacity = iteration_seconds
        self.scheduler.memory.capacity = self.residency.load_capacity
        self._measure_link()
        self.scheduler.advance()
        self.verifying_rows = set()
        for row in self.scheduler.due():
            if self.residency.missing_tokens(row):
                # The loaded KV had changed, or its device slots were freed: it needs another reservation.
                self._cancel(row)
            elif self.residency.ready(row):
                self._reserved.discard(row)
                self.verifying_rows.add(row)
            else:
                displaced = self.scheduler.late(row)
                self._reserved.difference_update(displaced)
                self._refused.update(dict.fromkeys(displaced))
        self.waited_rounds += sum(self.residency.is_loaded(row) for row in self._reserved)

    def _measure_link(self) -> None:
        """Rescale the planned loads to the measured bandwidth."""
        bandwidth = self.residency.host.link.restored
        before = self._bandwidth or bandwidth
        if bandwidth is not None and abs(bandwidth - before) > BANDWIDTH_TOLERANCE * before:
            self.scheduler.rescale_link(before / bandwidth)
            before = bandwidth
        self._bandwidth = before

    def schedule_verifications(self, rounds: dict[int, int], ripe: set[int]) -> set[int]:
        """See :meth:`FullKVProvider.schedule_verifications`.

        The loads of this iteration start first. They may drop full KV that could be verified now. Otherwise resident requests would keep
        the device slots forever. Requests that do not fit wait, and are scheduled again later.
        """
        offloaded = {row for row in rounds if row in self._reserved or self.residency.missing_tokens(row)}
        resident = [row for row in rounds if row in ripe and row not in offloaded]
        self._reserve_and_start(rounds)
        for row in resident:
            if not self.residency.missing_tokens(row) and self.residency.load(row) and self.residency.ready(row):
                self.verifying_rows.add(row)
        # Their full KV left the device for a load.
        self._reserve_and_start({row: rounds[row] for row in resident})
        return self.verifying_rows

    def _reserve_and_start(self, rounds: dict[int, int]) -> None:
        """Schedule verifications of requests whose full KV is on the host only, refused ones first, and start the loads of this iteration."""
        for row in [*(row for row in self._refused if row in rounds), *(row for row in rounds if row not in self._refused)]:
            tokens = 0 if row in self.verifying_rows or row in self._reserved else self.residency.missing_tokens(row)
            if tokens:
                # A load longer than the horizon is planned for the whole horizon, and is late.
                seconds = min(tokens * self.bytes_per_token / self.residency.host.link.restored, self.scheduler.max_load_seconds)
                if self.scheduler.admit(row, seconds, tokens, rounds[row]) is not None:
                    self._reserved.add(row)
                    self._refused.pop(row, None)
                else:
                    self._refused[row] = None
        for row in self.scheduler.loads_to_start():
            if not self.residency.load(row):
                self._cancel(row)

    def is_offloaded(self, row: int) -> bool:
        return self.residency.is_offloaded(row)

    def full_kv_start(self, row: int, protected: int) -> int:
        return protected if self.is_offloaded(row) else 0

    def is_lost(self, row: int) -> bool:
        return self.residency.is_lost(row)

    def pin_while_reading(self, row: int) -> AbstractContextManager[None]:
        return self.residency.pin_while_reading(row)

    def restore(self, row: int) -> None:
        self.residency.restore(row)

    def pin_for_round(self, row: int) -> None:
        self.residency.load(row)
        self._pinned.add(row)

    def on_round_launched(self) -> None:
        """Allow full KV that this iteration reads to leave the device again, after the iteration was launched."""
        for row in self.verifying_rows | self._pinned:
            self.residency.release(row)
        self._pinned.clear()

    def forget(self, row: int) -> None:
        self._cancel(row)
        self.residency.forget(row)

    def _cancel(self, row: int) -> None:
        """Cancel the reservations of a request. It must be scheduled again."""
        self._reserved.discard(row)
        self._refused.pop(row, None)
        self.scheduler.cancel(row)
        self.residency.release(row)
