"""Keeps the times of iterations, and chooses the draft length of the next by them."""

from dataclasses import dataclass, field

import torch

from sglang_ext.core import RequestState
from sglang_ext.managers.clock import Mark
from sglang_ext.managers.draft_length import DraftLength, FixedLength
from sglang_ext.metrics import KVMetrics


@dataclass
class Timed:
    """An iteration's marks; each is set as its work is launched.

    Attributes:
        batch: requests.
        drafts: of each request.
        planned: copies are made, drafting begins.
        drafted: the last draft is done.
        next: the next iteration of the same requests began; None when another kind of work came between.
    """

    batch: int
    drafts: int
    planned: Mark
    drafted: Mark | None = None
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
    """

    lengths: DraftLength | FixedLength
    device: torch.device
    metrics: KVMetrics
    _running: Timed | None = None
    _pending: list[Timed] = field(default_factory=list)

    def begin(self, states: list[RequestState]) -> int:
        """An iteration of these requests begins: how many tokens they draft."""
        running, self._running = self._running, None
        if running is not None and running.batch == len(states) and running.drafted is not None:
            running.next = Mark.now(self.device)
            self._pending.append(running)
        self._learn()
        return self.lengths.choose([state.acceptance.probability for state in states])

    def planned(self, batch: int, drafts: int) -> None:
        """Drafting begins; ``drafts`` may be fewer than were chosen."""
        self._running = Timed(batch, drafts, Mark.now(self.device))

    def drafted(self) -> None:
        """The drafts of the running iteration were launched."""
        self._running.drafted = Mark.now(self.device)

    def interrupt(self) -> None:
        """Other work came: the running iteration's end cannot be told from it."""
        self._running = None

    def _learn(self) -> None:
        done = [timed for timed in self._pending if timed.complete]
        self._pending = [timed for timed in self._pending if not timed.complete]
        for timed in done:
            drafting = timed.planned.until(timed.drafted)
            whole = timed.planned.until(timed.next)
            self.lengths.observe(timed.batch, timed.drafts, drafting, whole)
            self.metrics.observe_round(timed.drafts, drafting, whole)
