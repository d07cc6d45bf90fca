"""Whose turn it is to verify, and which full KV is loaded for it: Algorithm 1 of VeriCache over the requests that run.

Full KV that is on the device is verified as soon as a round's drafts are there. What is on the host is reserved time on the link and
room on the device for (verification_scheduler.py), once as many drafts as pay for its load will have gathered.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext.managers.spec_decode.full_kv import FullKVProvider
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode
from sglang_ext.mem_cache.prefix_cache.residency import Residency

# Share by which the link's bandwidth may change before loads that are planned take another time.
DRIFT = 0.1


@dataclass
class OffloadedFullKV(FullKVProvider):
    """The turns of one scheduler process.

    Attributes:
        admission: the reservations, by row of the token table.
        residency: whose full KV is on the device.
        bytes_per_token: of full KV.
        drafts_per_load: that a request gathers before its full KV is loaded.
        verifying_rows: rows that verify in this iteration.
        slack: iterations by which full KV was there before its turn, in all.
    """

    admission: VerificationScheduler
    residency: Residency
    bytes_per_token: int
    drafts_per_load: int
    verifying_rows: set[int] = field(default_factory=set)
    slack: int = 0
    _reserved: set[int] = field(default_factory=set)
    _refused: dict[int, None] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)
    _bandwidth: float | None = None

    def deferring_loads(self) -> AbstractContextManager[None]:
        """While a round is planned and launched: loads are put off to its end."""
        return self.residency.tree.host.tier.defer_transfers()

    def on_round_start(self, drafting: dict[int, tuple[TieredNode, int]], iteration_seconds: float | None) -> None:
        """A round begins, in which those verify whose full KV has arrived.

        Args:
            drafting: requests that draft on copies, by row: the end of the path, and the tokens that the copy covers.
            iteration_seconds: of a round, as measured; None where that is not known yet.
        """
        self.residency.collect_loads()
        self.residency.update(drafting)
        if iteration_seconds:
            self.admission.iteration_seconds = iteration_seconds
        self.admission.memory = self.residency.room
        self._measure_link()
        self.admission.advance()
        self.verifying_rows = set()
        for row in self.admission.due():
            if self.residency.missing_tokens(row):
                # It came back changed, or lost its place on the device: it needs another reservation.
                self._give_up(row)
            elif self.residency.ready(row):
                self._reserved.discard(row)
                self.verifying_rows.add(row)
            else:
                displaced = self.admission.late(row)
                self._reserved.difference_update(displaced)
                self._refused.update(dict.fromkeys(displaced))
        self.slack += sum(self.residency.waits(row) for row in self._reserved)

    def _measure_link(self) -> None:
        """Let the loads that are planned take the time that they will."""
        bandwidth = self.residency.tree.reloads.link.restored
        before = self._bandwidth or bandwidth
        if bandwidth is not None and abs(bandwidth - before) > DRIFT * before:
            self.admission.rescale_link(before / bandwidth)
            before = bandwidth
        self._bandwidth = before

    def schedule_verifications(self, rounds: dict[int, int], ripe: set[int]) -> set[int]:
        """Rows that are verified in this round.

        Loads whose time has come begin first: for them full KV leaves that would be verified now, else those that are on the
        device would stay for good, and the others wait. Where nothing fits they wait, and want it again.

        Args:
            rounds: by row of the token table, of drafts after this one until enough are gathered for a load, at least 1.
            ripe: rows with enough drafts for a verification of what is on the device.
        """
        away = {row for row in rounds if row in self._reserved or self.residency.missing_tokens(row)}
        here = [row for row in rounds if row in ripe and row not in away]
        self._reserve(rounds)
        self._start()
        for row in here:
            if not self.residency.missing_tokens(row) and self.residency.load(row) and self.residency.ready(row):
                self.verifying_rows.add(row)
        # What left the device for a load.
        self._reserve({row: rounds[row] for row in here})
        self._start()
        return self.verifying_rows

    def _reserve(self, rounds: dict[int, int]) -> None:
        """Give a place to those whose full KV is on the host alone, first to who was refused before, in that order."""
        for row in [*(row for row in self._refused if row in rounds), *(row for row in rounds if row not in self._refused)]:
            tokens = 0 if row in self.verifying_rows or row in self._reserved else self.residency.missing_tokens(row)
            if tokens:
                # One that takes longer than the horizon gets all of it, and is late.
                seconds = min(tokens * self.bytes_per_token / self.residency.tree.reloads.link.restored, self.admission.max_load_seconds)
                if self.admission.admit(row, seconds, tokens, rounds[row]) is not None:
                    self._reserved.add(row)
                    self._refused.pop(row, None)
                else:
                    self._refused[row] = None

    def is_offloaded(self, row: int) -> bool:
        """Whether a request's row must not be read: full KV is missing, or lies elsewhere."""
        return self.residency.is_offloaded(row)

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to full KV; the prefix tree has ``protected`` tokens of it."""
        return protected if self.is_offloaded(row) else 0

    def is_lost(self, row: int) -> bool:
        """Whether some of a request's full KV is in no tier: it has to be computed again."""
        return self.residency.is_lost(row)

    def pin_while_reading(self, row: int) -> AbstractContextManager[None]:
        """Keep what is on the device of a request's full KV."""
        return self.residency.pin_while_reading(row)

    def restore(self, row: int) -> None:
        """Let the row of a request whose turn it is lead to its full KV."""
        self.residency.restore(row)

    def pin_for_round(self, row: int) -> None:
        """The request in ``row``, whose full KV is on the device, decodes on it in this iteration."""
        self.residency.load(row)
        self._kept.add(row)

    def _start(self) -> None:
        """Begin the loads whose time has come."""
        for row in self.admission.loads_to_start():
            if not self.residency.load(row):
                self._give_up(row)

    def on_round_launched(self) -> None:
        """The iteration was launched: full KV that was read may leave the device again."""
        for row in self.verifying_rows | self._kept:
            self.residency.release(row)
        self._kept.clear()

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
        self._give_up(row)
        self.residency.forget(row)

    def _give_up(self, row: int) -> None:
        """The request in ``row`` has to be reserved anew."""
        self._reserved.discard(row)
        self._refused.pop(row, None)
        self.admission.cancel(row)
        self.residency.release(row)
