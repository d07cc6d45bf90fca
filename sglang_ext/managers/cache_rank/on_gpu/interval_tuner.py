"""How many steps lie between two choices of a request: as many as its rank needs to choose for all of its requests, none fewer than asked for.

A rank that needs longer for all of them than a step takes would be waited for in each step, up to the limit, and steps would take as long
as choices. So it is asked as often as it keeps up with, and steps read what was chosen before meanwhile, and the newest tokens.

How long a step takes the host sees of whole rounds alone: it launches all steps of one at once, far ahead of the device, and waits for those
of the round before in between.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Rounds, and answers, that are looked at, and the fewest that say something: those to rare questions are old.
WINDOW, ANSWERS, LEAST = 32, 16, 8
# Beside choosing: messages, queries and rows on their way, and the rank's next look.
BESIDE_SECONDS = 1e-3
# Fewer steps are tried where a choice would take at most so much of them, so that the number does not go to and fro.
ROOM = 0.85
MOST_STEPS = 16
# Seconds of a step, at least.
SHORTEST = 1e-4


@dataclass
class IntervalTuner:
    """Of one inference rank, whose steps all its cache ranks serve.

    Args:
        least: steps between two choices that are asked for.
        most: more are never between them.

    Attributes:
        every: steps between two choices.
    """

    least: int
    most: int = MOST_STEPS
    every: int = field(init=False)
    _rounds: deque[tuple[float, float, int]] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW + 1))
    _costs: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=ANSWERS))

    def __post_init__(self) -> None:
        self.every = self.least

    def answered(self, seconds: float, together: int) -> None:
        """A rank has chosen for so many questions at once, in so many seconds; told once of all of them, so that a slow launch for many
        requests is one of those whose median counts."""
        self._costs.append(seconds / together)

    def record_round(self, now: float, waited: float, forwards: int) -> None:
        """A round begins.

        Args:
            now: seconds of a clock that does not go back.
            waited: seconds that all steps so far have waited for choices.
            forwards: of the round, each of which counts as a step.
        """
        self._rounds.append((now, waited, forwards))

    def record_step(self, requests: int) -> int:
        """A step was launched; :attr:`every` from here on. ``requests``: most that one rank chooses for."""
        if len(self._rounds) > LEAST and len(self._costs) >= LEAST and requests:
            self._settle(requests * median(self._costs) + BESIDE_SECONDS)
        return self.every

    @property
    def step_seconds(self) -> float:
        """That a step takes without its waits: the median of rounds, as some come after a prefill, and waits are told a step late."""
        rounds = zip(self._rounds, list(self._rounds)[1:])
        return max(SHORTEST, median((after[0] - before[0] - (after[1] - before[1])) / before[2] for before, after in rounds))

    def _settle(self, cycle: float) -> None:
        steps = cycle / self.step_seconds
        if steps > self.every or steps < ROOM * (self.every - 1):
            self.every = max(self.least, min(self.most, math.ceil(steps)))
