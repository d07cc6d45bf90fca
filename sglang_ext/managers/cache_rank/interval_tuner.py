"""Tunes the selection interval: the steps that a rank needs to select for all its requests, but at least the configured number.

If the selection for all requests takes longer than the interval, each step waits for it, up to the limit, and steps become as slow as
selections. So the client asks less often. In between, steps read the previous selection and the newest tokens.

The host can measure only whole rounds. It launches all steps of a round at once, far ahead of the device, and waits for the previous
round in between.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Rounds and replies in the sliding windows, and the minimum number of each; replies to rare selection requests are old.
WINDOW, ANSWERS, LEAST = 32, 16, 8
# Time in addition to the selection: messages, transfer of queries and rows, and the rank's polling.
BESIDE_SECONDS = 1e-3
# Reduce the interval only if a selection takes at most this share of the shorter one. This avoids oscillation.
SHORTEN_SHARE = 0.85
MOST_STEPS = 16
# Minimum seconds of a step.
SHORTEST = 1e-4


@dataclass
class IntervalTuner:
    """Selection interval of one inference rank, for all its cache ranks.

    Args:
        least: Minimum selection interval, in steps.
        most: Maximum selection interval, in steps.

    Attributes:
        every: Selection interval, in steps.
    """

    least: int
    most: int = MOST_STEPS
    every: int = field(init=False)
    _rounds: deque[tuple[float, float, int]] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW + 1))
    _costs: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=ANSWERS))

    def __post_init__(self) -> None:
        self.every = self.least

    def record_replies(self, seconds: float, together: int) -> None:
        """Record one batch of ``together`` replies and its seconds. Call once per batch, so that a slow launch for many requests counts
        once in the median."""
        self._costs.append(seconds / together)

    def record_round(self, now: float, waited: float, forwards: int) -> None:
        """Record the start of a round.

        Args:
            now: Seconds of a monotonic clock.
            waited: Seconds that all steps so far have waited for selections.
            forwards: Forwards of the round, each of which counts as a step.
        """
        self._rounds.append((now, waited, forwards))

    def record_step(self, requests: int) -> int:
        """Record a launched step and return the new :attr:`every`. ``requests``: maximum requests at one rank."""
        if len(self._rounds) > LEAST and len(self._costs) >= LEAST and requests:
            self._update_interval(requests * median(self._costs) + BESIDE_SECONDS)
        return self.every

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without its waits: the median over rounds, because some rounds follow a prefill and waits are counted a step
        late."""
        rounds = zip(self._rounds, list(self._rounds)[1:])
        return max(SHORTEST, median((after[0] - before[0] - (after[1] - before[1])) / before[2] for before, after in rounds))

    def _update_interval(self, cycle: float) -> None:
        steps = cycle / self.step_seconds
        if steps > self.every or steps < SHORTEN_SHARE * (self.every - 1):
            self.every = max(self.least, min(self.most, math.ceil(steps)))
