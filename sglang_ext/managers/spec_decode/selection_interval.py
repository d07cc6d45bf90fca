"""Chooses the selection interval, the number of draft steps between two selections (``--kv-select-every auto``).

A selection reads all keys. So with a short interval draft steps are slow, and with a long one drafts read an old selection and fewer are
accepted. Both effects are measured for each interval: the time of a draft step by the cost model (cost_model.py), and the acceptance here.

Intervals are tried from the longest to the shortest. The next shorter one is tried only if it could win: if it avoided half of the
rejections and its selections took no time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.core import SLOW_DECAY, AcceptanceTracker
from sglang_ext.managers.spec_decode.draft_length import HYSTERESIS, expected_tokens
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts

# The acceptance of an interval counts after ENOUGH_VERIFIES verifications. Before that the interval is tried in at most MOST_TRIES rounds.
ENOUGH_VERIFIES, MOST_TRIES = 48, 64


@dataclass
class SelectionInterval:
    """Chooses the selection interval of each round.

    Attributes:
        intervals: Allowed intervals in steps, longest first. A single one is always chosen.
        chosen: The last choice; tries do not change it.
        acceptance: Acceptance of draft tokens, by interval.
        verifies: Number of verifications, by interval.
    """

    intervals: Sequence[int]
    chosen: int = 0
    acceptance: dict[int, AcceptanceTracker] = field(default_factory=dict)
    verifies: Counter[int] = field(default_factory=Counter)
    _tries: Counter[int] = field(default_factory=Counter)

    def choose(self, costs: RoundCosts, load: BatchLoad, drafts: int) -> int:
        """Return the interval of the next round, in steps.

        Args:
            costs: Predicts times.
            load: Load of the batch.
            drafts: Draft steps of the round; 0 for plain decoding, which selects nothing.
        """
        longest = self.intervals[0]
        self.chosen = self.chosen or longest
        if len(self.intervals) == 1 or not drafts:
            return self.chosen
        known = {each: self.acceptance[each].probability for each in self.intervals if self.verifies[each] >= ENOUGH_VERIFIES}
        rates = {each: self._rate(costs, load, drafts, each, probability) for each, probability in known.items()}
        best = max(rates, key=rates.get, default=longest)
        if self.chosen not in rates or rates[best] > HYSTERESIS * rates[self.chosen]:
            self.chosen = best
        return self._next_try(costs, load, drafts, rates) or self.chosen

    def observe(self, every: int, offered: int, accepted: int) -> None:
        """Count a verification of one request, in a round with the interval ``every``."""
        self.acceptance.setdefault(every, AcceptanceTracker(decay=SLOW_DECAY)).observe(offered, accepted)
        self.verifies[every] += 1

    @staticmethod
    def _rate(costs: RoundCosts, load: BatchLoad, drafts: int, every: int, probability: float) -> float:
        """Tokens per second of a request whose draft tokens are accepted with ``probability``."""
        return float(expected_tokens(probability, drafts)) / float(costs.round_seconds(load._replace(every=every), [drafts])[0])

    def _next_try(self, costs: RoundCosts, load: BatchLoad, drafts: int, rates: dict[int, float]) -> int | None:
        """The next interval to try; None if no other could win."""
        before = None
        for every in self.intervals:
            if every not in rates:
                if before is not None:
                    # A draft step takes at least as long as with the longer interval. Assume half of its rejections.
                    probability = (1 + self.acceptance[before].probability) / 2
                    if self._rate(costs, load, drafts, before, probability) <= HYSTERESIS * rates[self.chosen]:
                        return None
                if self._tries[every] >= MOST_TRIES:
                    return None
                self._tries[every] += 1
                return every
            before = every
        return None
