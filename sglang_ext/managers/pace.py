"""Keeps the times of iterations, and chooses the draft length of the next by them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import RequestState
from sglang_ext.managers.clock import Mark
from sglang_ext.managers.draft_length import DraftLength, FixedLength, Load
from sglang_ext.managers.ranks import Ranks
from sglang_ext.metrics import KVMetrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass
class Timed:
    """An iteration's marks; each is set as its work is launched.

    Attributes:
        load: of the requests.
        requests: how many.
        drafts: of each request.
        steps: of plain decoding, where none are drafted.
        planned: copies are made, drafting begins.
        drafted: the last draft is done.
        ended: all of it is done.
        next: the next iteration of the same requests began, or where other work came between, :attr:`ended`.
    """

    load: Load
    requests: int
    drafts: int
    steps: int
    planned: Mark
    drafted: Mark | None = None
    ended: Mark | None = None
    next: Mark | None = None

    @property
    def complete(self) -> bool:
        """Whether the device passed all marks."""
        return self.next is not None and self.next.reached


@dataclass
class Pace:
    """Chooses draft lengths (draft_length.py) by the times of the iterations before.

    What copies cost is left out: it belongs to no single round.

    Attributes:
        lengths: the choice.
        device: whose work is timed.
        metrics: told of each iteration's times.
        ranks: who must choose alike.
    """

    lengths: DraftLength | FixedLength
    device: torch.device
    metrics: KVMetrics
    ranks: Ranks = Ranks()
    _load: Load | None = None
    _running: Timed | None = None
    _pending: list[Timed] = field(default_factory=list)

    def begin(self, batch: "ScheduleBatch", states: list[RequestState]) -> int:
        """An iteration of these requests begins: how many tokens they draft."""
        same = self._running is not None and self._running.requests == len(states)
        self._close(Mark.now(self.device) if same else None)
        self._learn()
        self._load = Load.of(batch.seq_lens_cpu.tolist())
        if isinstance(self.lengths, FixedLength):
            return self.lengths.drafts
        chosen = self.lengths.choose(self._load, [state.acceptance.probability for state in states])
        return self.ranks.agree(chosen)

    def planned(self, requests: int, drafts: int, steps: int) -> None:
        """Drafting begins; ``drafts`` may be fewer than were chosen."""
        self._running = Timed(self._load, requests, drafts, steps, Mark.now(self.device))

    def drafted(self) -> None:
        """The drafts of the running iteration were launched."""
        self._running.drafted = Mark.now(self.device)

    def ended(self) -> None:
        """All of the running iteration was launched."""
        self._running.ended = Mark.now(self.device)

    def interrupt(self) -> None:
        """Other work came: what passes from now on is not the running iteration's time."""
        self._close(None)

    def _close(self, following: Mark | None) -> None:
        """The running iteration reaches to ``following``, or to its own end."""
        running, self._running = self._running, None
        if running is not None and running.ended is not None:
            running.next = following or running.ended
            self._pending.append(running)

    def _learn(self) -> None:
        done = [timed for timed in self._pending if timed.complete]
        self._pending = [timed for timed in self._pending if not timed.complete]
        for timed in done:
            drafting = timed.planned.until(timed.drafted)
            whole = timed.planned.until(timed.next)
            self.lengths.observe(timed.load, timed.drafts, timed.steps, drafting, whole)
            self.metrics.observe_round(timed.drafts, timed.steps, drafting, whole)
