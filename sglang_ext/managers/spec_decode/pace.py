"""Keeps the times of iterations, and says how many tokens the next drafts: so many as were asked for, or as draft_length.py chooses."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.core import CURABLE, RequestState
from sglang_ext.device import Mark
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.ranks import Ranks

if TYPE_CHECKING:
    from sglang_ext.managers.spec_decode.draft_length import DraftLength
    from sglang_ext.managers.spec_decode.round import Round

# Newest times whose median is believed: a stall, as when a kernel is compiled, is in one of them.
RECENT_TIMES = 5


class Choice(NamedTuple):
    """What a batch shall do in its next iteration.

    Attributes:
        drafts: of each request; 0 for plain decoding.
        trial: the drafts only look whether drafting pays: copies shall be made for a few requests, which are enough.
    """

    drafts: int
    trial: bool = False


class Load(NamedTuple):
    """What times are kept apart by: powers of 2 that hold the requests of a batch and their mean context."""

    requests: int
    context: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Load":
        """Of requests with so many tokens."""
        mean = sum(lengths) // len(lengths)
        return cls((len(lengths) - 1).bit_length(), mean.bit_length())


class Spent(NamedTuple):
    """An iteration's seconds.

    Attributes:
        drafts: of each request; 0 for plain decoding.
        steps: of plain decoding; 0 where tokens were drafted.
        copying: until drafting or decoding began.
        drafting: of all drafts.
        whole: from where drafting or decoding began to the next iteration.
        share: of the requests that drafted on copies, in a trial; the others answered on full KV.
    """

    drafts: int
    steps: int
    copying: float
    drafting: float
    whole: float
    share: float = 1.0


@dataclass
class Recent:
    """Times of one kind.

    Attributes:
        newest: the last that were seen, in seconds.
    """

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TIMES))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.newest)

    @property
    def seconds(self) -> float:
        """The median of the newest; of two the shorter; 0 before the first."""
        return median_low(self.newest) if self.newest else 0.0


@dataclass(frozen=True)
class FixedLength:
    """A draft length that was asked for.

    Attributes:
        drafts: of each iteration.
    """

    drafts: int

    def observe(self, load: Load, spent: Spent) -> None:
        """Nothing is learned."""


@dataclass
class Timed:
    """An iteration's marks; each is set as its work is launched.

    Attributes:
        round: what its requests did.
        begun: copies are made.
        planned: they are there, drafting begins.
        drafted: the last draft is done.
        ended: all of it is done.
        next: the next iteration of the same requests began, or where other work came between, :attr:`ended`.
    """

    round: "Round"
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
    """Chooses draft lengths (draft_length.py) by the times of the iterations before.

    What copies cost is kept apart: it belongs to no single round.

    Attributes:
        lengths: the choice.
        device: whose work is timed.
        metrics: told of each iteration's times.
        ranks: who must choose alike.
        watch: told of each iteration and its seconds.
        rounds: seconds of the newest whole iterations.
    """

    lengths: "DraftLength | FixedLength"
    device: torch.device
    metrics: KVMetrics
    ranks: Ranks = Ranks()
    watch: "Callable[[Round, Spent], None] | None" = None
    rounds: Recent = field(default_factory=Recent)
    _begun: Mark | None = None
    _running: Timed | None = None
    _pending: list[Timed] = field(default_factory=list)
    _gathering: Spent | None = None

    def begin(self, lengths: list[int], states: list[RequestState]) -> Choice:
        """An iteration of requests with so many tokens begins: what they shall do."""
        before = [] if self._running is None else self._running.round.states
        same = len(before) == len(states) and all(a is b for a, b in zip(before, states))
        self._begun = Mark.now(self.device)
        self._close(self._begun if same else None)
        self._learn()
        if isinstance(self.lengths, FixedLength):
            return Choice(self.lengths.drafts)
        # Those that are never drafted gain as much either way.
        able = [state.acceptance.probability for state in states if state.fallback in CURABLE]
        choice = self.lengths.choose(Load.of(lengths), able or [0.0])
        return self.ranks.agree(choice)

    @property
    def running(self) -> Timed | None:
        """The iteration that was planned last; its marks are set as it goes."""
        return self._running

    def planned(self, round_: "Round") -> None:
        """Drafting begins; its drafts may be fewer than were chosen."""
        self._running = Timed(round_, self._begun, Mark.now(self.device))

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
            share = round_.share_on_copies if round_.trial else 1.0
            spent = Spent(round_.drafts, round_.plain_steps, copying, drafting, whole, share)
            if share and not round_.early and (told := self._gathered(round_, spent)) is not None:
                # Where all lacked queries for copies, it tells nothing of drafts on them.
                self.lengths.observe(Load.of(round_.lengths), told)
            self.rounds.newest.append(copying + whole)
            if self.watch is not None:
                self.watch(round_, spent)
            self.metrics.observe_round(round_.drafts, round_.steps, drafting, whole)

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
        sums = (a + b for a, b in zip(before[:5], spent[:5]))
        whole = Spent(*sums, share=spent.share)
        self._gathering = None if round_.due else whole
        return whole if round_.due else None
