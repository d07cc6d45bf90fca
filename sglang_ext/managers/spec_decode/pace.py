"""Measures the times of iterations, and says how many tokens the next one drafts (draft_length.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import CURABLE, NO_QUERIES, NO_SELECTION, RequestState
from sglang_ext.device import Mark
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.draft_length import DraftLength, FixedLength
from sglang_ext.managers.spec_decode.round_costs import Load, Recent, RoundCosts, Spent
from sglang_ext.managers.spec_decode.selection_interval import SelectionInterval
from sglang_ext.ranks import Ranks

if TYPE_CHECKING:
    from sglang_ext.managers.spec_decode.draft_report import DraftReport
    from sglang_ext.managers.spec_decode.round import Round

# Fallbacks that end within rounds: rounds with such requests say nothing of those that follow.
PASSING = (NO_QUERIES, NO_SELECTION)

@dataclass
class Timed:
    """An iteration's marks; each is set as its work is launched.

    Attributes:
        round: what its requests did.
        load: of its batch.
        begun: copies are made.
        planned: they are there, drafting begins.
        drafted: the last draft is done.
        ended: all of it is done.
        next: the next iteration of the same requests began, or where other work came between, :attr:`ended`.
    """

    round: "Round"
    load: Load
    begun: Mark
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
    """Measures iterations, and chooses draft lengths by the times of those before.

    Attributes:
        lengths: chooses the draft length.
        device: whose work is timed.
        metrics: gets each iteration's times.
        ranks: must choose alike.
        costs: predicts the times of rounds from those that were measured.
        renews: whether each round makes its copies anew, so that their time belongs to the round.
        watch: called with each iteration and its seconds.
        interval: chooses the selection interval.
        report: gets the seconds of each iteration; None where nothing is reported.
        rounds: seconds of the newest whole iterations.
    """

    lengths: DraftLength | FixedLength
    device: torch.device
    metrics: KVMetrics
    ranks: Ranks = Ranks()
    costs: RoundCosts = field(default_factory=RoundCosts)
    renews: bool = False
    watch: "Callable[[Round, Spent], None] | None" = None
    interval: SelectionInterval = field(default_factory=lambda: SelectionInterval((1,)))
    report: "DraftReport | None" = None
    rounds: Recent = field(default_factory=Recent)
    _begun: Mark | None = None
    _load: Load = Load(0, 0)
    _drafts: int = 1
    _running: Timed | None = None
    _pending: list[Timed] = field(default_factory=list)
    _gathering: Spent | None = None

    def begin(self, lengths: list[int], states: list[RequestState]) -> int:
        """Begin an iteration of requests with so many tokens each. Returns the drafts of each request; 0 for plain decoding."""
        before = [] if self._running is None else self._running.round.states
        same = len(before) == len(states) and all(a is b for a, b in zip(before, states))
        self._begun = Mark.now(self.device)
        self._close(self._begun if same else None)
        self._learn()
        # Requests that are never drafted gain as much either way.
        able = [state.acceptance.probability for state in states if state.fallback in CURABLE]
        uncopied = sum(length for length, state in zip(lengths, states) if not state.compressor and state.fallback in CURABLE)
        load = Load.of(lengths, uncopied)
        load = load._replace(every=self.interval.choose(self.costs, load, self._drafts))
        drafts, every = self.ranks.agree((self.lengths.choose(self.costs, load, able or [0.0]), load.every))
        self._load, self._drafts = load._replace(every=every), drafts or self._drafts
        return drafts

    @property
    def every(self) -> int:
        """Selection interval of the iteration that began last, in steps."""
        return self._load.every

    @property
    def running(self) -> Timed | None:
        """The iteration that was planned last; its marks are set as it goes."""
        return self._running

    def planned(self, round_: "Round") -> None:
        """Drafting begins; its drafts may be fewer than were chosen."""
        self._running = Timed(round_, self._load, self._begun, Mark.now(self.device))

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
            round_ = timed.round
            copying = timed.begun.until(timed.planned)
            drafting = timed.planned.until(timed.drafted)
            whole = timed.planned.until(timed.next)
            spent = Spent(round_.drafts, round_.plain_steps, copying, drafting, whole)
            if self._tells(round_) and (told := self._gathered(round_, spent)) is not None:
                if self.renews and told.drafts:
                    told = told._replace(copying=0.0, whole=told.whole + told.copying)
                self.lengths.observe(told)
                self.costs.observe(timed.load, told)
            self.rounds.newest.append(copying + whole)
            if self.watch is not None:
                self.watch(round_, spent)
            if self.report is not None:
                self.report.timed(round_, copying + whole)
            self.metrics.observe_round(round_.drafts, round_.steps, drafting, whole)

    @staticmethod
    def _tells(round_: "Round") -> bool:
        """Whether a round's times tell of rounds like it: no request waits for its copy or for its full KV."""
        if not round_.drafts:
            return True
        return not (round_.early or round_.on_full_kv or any(reason in PASSING for reason in round_.fallbacks))

    def _gathered(self, round_: "Round", spent: Spent) -> Spent | None:
        """What is to be learned of a round: of short ones whose drafts gather, that of all together, once they are verified.

        A round of full length in which nobody is verified tells nothing: what a verification takes is missing.
        """
        if not round_.held:
            self._gathering = None
            return spent if round_.due or not round_.drafts else None
        if not round_.drafts:
            return spent
        before = self._gathering or Spent(0, 0, 0.0, 0.0, 0.0)
        whole = Spent(*(a + b for a, b in zip(before, spent)))
        self._gathering = None if round_.due else whole
        return whole if round_.due else None
