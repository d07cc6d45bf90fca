"""Chooses after how many draft steps tokens are selected anew (`--kv-select-every auto`).

A selection reads all keys, so a short interval makes draft steps slow. A long one lets drafts read an old selection, so that fewer are accepted.
Both are measured: the draft step by the cost model (round_costs.py), the acceptance by interval. Intervals are tried from the longest on, as long as
the next one would win if half of the rejections came from the longer interval, and selections took no time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.core import LONG_MEMORY, Acceptance
from sglang_ext.managers.spec_decode.draft_length import HYSTERESIS, expected_tokens
from sglang_ext.managers.spec_decode.round_costs import Load, RoundCosts

# Verifications of an interval after which its acceptance counts, and tries of an interval at most before that.
ENOUGH_VERIFIES, MOST_TRIES = 48, 64


@dataclass
class SelectionInterval:
    """Chooses the selection interval of each round.

    Attributes:
        intervals: in steps, longest first; a single one is always chosen.
        chosen: the last choice, tries left out.
        acceptance: of draft tokens, by interval.
        verifies: verifications, by interval.
    """

    intervals: Sequence[int]
    chosen: int = 0
    acceptance: dict[int, Acceptance] = field(default_factory=dict)
    verifies: Counter[int] = field(default_factory=Counter)
    _tries: Counter[int] = field(default_factory=Counter)

    def choose(self, costs: RoundCosts, load: Load, drafts: int) -> int:
        """The interval of the next round, in steps.

        Args:
            costs: predicts times.
            load: of the batch.
            drafts: draft steps of the round; 0 for plain decoding, in which nothing is selected.
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
        return self._tried(costs, load, drafts, rates) or self.chosen

    def observe(self, every: int, offered: int, accepted: int) -> None:
        """Count a verification of one request whose drafts were selected at this interval."""
        self.acceptance.setdefault(every, Acceptance(memory=LONG_MEMORY)).observe(offered, accepted)
        self.verifies[every] += 1

    @staticmethod
    def _rate(costs: RoundCosts, load: Load, drafts: int, every: int, probability: float) -> float:
        """Tokens of a request per second, at a probability that a draft is accepted."""
        return float(expected_tokens(probability, drafts)) / float(costs.round_seconds(load._replace(every=every), [drafts])[0])

    def _tried(self, costs: RoundCosts, load: Load, drafts: int, rates: dict[int, float]) -> int | None:
        """The next interval that is to be tried; None where none could win."""
        before = None
        for every in self.intervals:
            if every not in rates:
                if before is not None:
                    # It takes as long as the longer one at least.
                    probability = (1 + self.acceptance[before].probability) / 2
                    if self._rate(costs, load, drafts, before, probability) <= HYSTERESIS * rates[self.chosen]:
                        return None
                if self._tries[every] >= MOST_TRIES:
                    return None
                self._tries[every] += 1
                return every
            before = every
        return None
