"""Whose turn it is to verify, and which full KV is loaded for it: Algorithm 1 of VeriCache over the requests that run.

Full KV that is on the device is verified in each round. What is on the host is reserved time on the link and room on the
device for (admission.py), once as many drafts as pay for its load will have gathered.
"""

from dataclasses import dataclass, field

from sglang_ext.managers.admission import Admission
from sglang_ext.managers.lock_step import LockStep
from sglang_ext.mem_cache.residency import Residency

# Share by which the link's bandwidth may change before loads that are planned take another time.
DRIFT = 0.1


@dataclass
class Verifications:
    """The turns of one scheduler process.

    Attributes:
        admission: the reservations, by row of the token table.
        residency: whose full KV is on the device.
        bytes_per_token: of full KV.
        drafts: that a request gathers before its full KV is loaded.
        lock_step: lets requests verify together; None where they are staggered.
        turns: rows that verify in this iteration.
        slack: iterations by which full KV was there before its turn, in all.
    """

    admission: Admission
    residency: Residency
    bytes_per_token: int
    drafts: int
    lock_step: LockStep | None = None
    turns: set[int] = field(default_factory=set)
    slack: int = 0
    _reserved: set[int] = field(default_factory=set)
    _refused: dict[int, None] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)
    _bandwidth: float | None = None

    def begin(self, iteration_seconds: float | None) -> None:
        """An iteration begins, in which those verify whose full KV has arrived.

        Args:
            iteration_seconds: as measured; None where that is not known yet.
        """
        if iteration_seconds:
            self.admission.iteration_seconds = iteration_seconds
        self.admission.memory = self.residency.room
        self._measure_link()
        self.admission.advance()
        self.turns = set()
        for row in self.admission.due():
            if self.residency.missing_tokens(row):
                # It came back changed, or lost its place on the device: it needs another reservation.
                self.forget(row)
            elif self.residency.ready(row):
                self._reserved.discard(row)
                self.turns.add(row)
            else:
                displaced = self.admission.late(row)
                self._reserved.difference_update(displaced)
                self._refused.update(dict.fromkeys(displaced))
        self.slack += sum(self.residency.waits(row) for row in self._reserved)

    def _measure_link(self) -> None:
        """Let the loads that are planned take the time that they will."""
        bandwidth = self.residency.tree.link.bandwidth
        before = self._bandwidth or bandwidth
        if bandwidth is not None and abs(bandwidth - before) > DRIFT * before:
            self.admission.slow_link(before / bandwidth)
            before = bandwidth
        self._bandwidth = before

    def want(self, rounds: dict[int, int]) -> None:
        """Requests shall verify: now, if their full KV is on the device, or else after so many rounds.

        Loads whose time has come begin first: for them full KV leaves that would be verified now, else those that are on the
        device would stay for good, and the others wait. Where nothing fits they wait, and want it again.

        Args:
            rounds: by row of the token table, of drafts after this one until enough are gathered, at least 1.
        """
        if self.lock_step is not None:
            away = {row: left for row, left in rounds.items() if self._is_away(row)}
            rounds = {row: left for row, left in rounds.items() if row not in away} | self.lock_step.allowed(away)
        here = [row for row in rounds if row not in self._reserved and not self.residency.missing_tokens(row)]
        self._reserve(rounds)
        self._start()
        for row in here:
            if not self.residency.missing_tokens(row) and self.residency.load(row) and self.residency.ready(row):
                self.turns.add(row)
        # What left the device for a load.
        self._reserve({row: rounds[row] for row in here})
        self._start()

    def _reserve(self, rounds: dict[int, int]) -> None:
        """Give a place to those whose full KV is on the host alone, first to who was refused before, in that order."""
        for row in [*(row for row in self._refused if row in rounds), *(row for row in rounds if row not in self._refused)]:
            tokens = 0 if row in self.turns or row in self._reserved else self.residency.missing_tokens(row)
            if tokens:
                # One that takes longer than the horizon gets all of it, and is late.
                seconds = min(tokens * self.bytes_per_token / self.residency.tree.link.bandwidth, self.admission.longest_load)
                if self.admission.admit(row, seconds, tokens, rounds[row]) is not None:
                    self._reserved.add(row)
                    self._refused.pop(row, None)
                else:
                    self._refused[row] = None

    def _is_away(self, row: int) -> bool:
        """Whether a request's full KV has to come, or is on its way, before it verifies."""
        return row not in self.turns and (row in self._reserved or self.residency.missing_tokens(row) > 0)

    def keep(self, row: int) -> None:
        """The request in ``row``, whose full KV is on the device, decodes on it in this iteration."""
        self.residency.load(row)
        self._kept.add(row)

    def _start(self) -> None:
        """Begin the loads whose time has come."""
        for row in self.admission.starting():
            if not self.residency.load(row):
                self.forget(row)

    def end(self) -> None:
        """The iteration was launched: full KV that was read may leave the device again."""
        if self.lock_step is not None:
            self.lock_step.verified(self.turns)
        for row in self.turns | self._kept:
            self.residency.release(row)
        self._kept.clear()

    def waits(self, row: int) -> bool:
        """Whether a request verified, and what it drafts until the others have is of no use."""
        return self.lock_step is not None and row in self.lock_step.waiting

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone, or has to be reserved anew."""
        self._reserved.discard(row)
        self._refused.pop(row, None)
        self.admission.cancel(row)
        self.residency.release(row)
