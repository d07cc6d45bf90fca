"""Chooses how many tokens a batch drafts before it verifies (``--kv-draft-length auto``).

All requests of a batch have the same draft length: the one with the most tokens per second (VeriCache, equation (11), with measured
times). If a draft token is accepted with probability ``p``, a round of ``x`` drafts gives ``(1 - p^(x+1)) / (1 - p)`` tokens on average.
Length 0 is plain decoding on the full KV.

A cost model (cost_model.py) predicts times, also at loads that were not measured. While drafting pays, plain steps are rarely measured.
While it does not pay, the batch decodes plainly, and now and then runs a *probe*: a short round with drafts, which measures drafting
again. Probes lose at most :data:`PROBE_SHARE` of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts, RoundTimes

# Times are noisy, and compression takes time. So another length replaces the last choice only if its rate is HYSTERESIS times as high, and
# a draft length replaces plain decoding only if its rate is MIN_GAIN times as high.
HYSTERESIS, MIN_GAIN = 1.02, 1.03
# Fewest and most draft steps of a probe: enough to measure a draft step, and few that may be lost.
PROBE_DRAFTS = 2, 4
# Share of the time that probes may lose, for compression and for rounds that gain less than plain steps.
PROBE_SHARE = 0.01
# While drafting pays, a plain step is measured after this number of draft steps.
PLAIN_AFTER = 1024
# A plain step is measured at a load that is further than this number of doublings from all measured ones.
PLAIN_REACH = 1.0


def expected_tokens(probability: np.ndarray | float, drafts: np.ndarray | int) -> np.ndarray:
    """Mean tokens of a round, with the bonus token.

    Args:
        probability: Probability that a draft token is accepted.
        drafts: Draft steps of the round.
    """
    # At probability 1 the formula divides by 0.
    p = np.minimum(probability, 1 - 1e-9)
    return (1 - p ** (drafts + 1)) / (1 - p)


@dataclass(frozen=True)
class FixedDraftLength:
    """The draft length of ``--kv-draft-length N``.

    Attributes:
        drafts: Draft steps of each round.
    """

    drafts: int
    predicted_gain: ClassVar[None] = None

    def choose(self, costs: RoundCosts, load: BatchLoad, probabilities: Sequence[float]) -> int:
        """Return the fixed length."""
        return self.drafts

    def observe(self, spent: RoundTimes) -> None:
        """Ignore the times of a round."""


@dataclass
class DraftLength:
    """Chooses the draft length of each round.

    Attributes:
        longest: The longest length.
        chosen: The last choice; probes and measurements of plain steps do not change it.
        predicted_gain: Predicted speed of the best length over that of plain decoding, at the last choice; None before the first.
    """

    longest: int
    chosen: int = 0
    predicted_gain: float | None = None
    # Draft steps since the last plain step.
    _since_plain: int = 0
    # Loads, in whole doublings, at which a plain step was requested.
    _asked: set[tuple[int, ...]] = field(default_factory=set)
    # Seconds that probes may lose now. The first probe may run at once.
    _allowance: float = float("inf")

    def choose(self, costs: RoundCosts, load: BatchLoad, probabilities: Sequence[float]) -> int:
        """Return the draft length of the next round; 0 for plain decoding.

        Args:
            costs: Predicts times.
            load: Load of the batch.
            probabilities: For each request, the probability that a draft token is accepted if the ones before it were.
        """
        drafts = np.arange(self.longest + 1)
        tokens = expected_tokens(np.asarray(probabilities)[:, None], drafts).sum(0)
        seconds = costs.round_seconds(load, drafts.tolist())
        rates = tokens / seconds
        self.predicted_gain = float(rates[1:].max() / rates[0])
        self.chosen = self._best(rates)
        if self.chosen:
            return 0 if self._plain_is_due(costs, load) else self.chosen
        if costs.draft_times.cells and not costs.plain_step_times.is_near(load.coordinates, PLAIN_REACH):
            # The loss of a probe is not known before a plain step is measured.
            return 0
        # A probe uses the short length with the smallest loss.
        least, most = (min(each, self.longest) for each in PROBE_DRAFTS)
        probe = least + int(rates[least : most + 1].argmax())
        loss = costs.compressing_seconds(load) + seconds[probe] * (1 - rates[probe] / rates[0])
        return probe if self._spend(max(0.0, loss)) else 0

    def observe(self, spent: RoundTimes) -> None:
        """Record the seconds of a round."""
        self._allowance += PROBE_SHARE * (spent.compressing + spent.whole)
        self._since_plain = self._since_plain + spent.num_draft_steps if spent.num_draft_steps else 0

    def _best(self, rates: np.ndarray) -> int:
        """The length with the highest rate. The last choice stays if it is nearly as good, and better than plain decoding."""
        best, last = int(rates.argmax()), self.chosen
        if rates[last] < rates[0]:
            last = 0
        return last if (HYSTERESIS if last else MIN_GAIN) * rates[last] > rates[best] else best

    def _plain_is_due(self, costs: RoundCosts, load: BatchLoad) -> bool:
        """Whether to measure a plain step although drafting pays: none was measured for long, or none near this load."""
        if self._since_plain >= PLAIN_AFTER:
            self._since_plain = 0
            return True
        near = tuple(map(round, load.coordinates))
        if near in self._asked or costs.plain_step_times.is_near(load.coordinates, PLAIN_REACH):
            return False
        # Ask once: the measured time arrives some rounds later.
        self._asked.add(near)
        return True

    def _spend(self, loss: float) -> bool:
        """Whether a probe that loses so many seconds may run now."""
        # Save up seconds for one probe at most.
        self._allowance = min(self._allowance, loss)
        if self._allowance < loss:
            return False
        self._allowance -= loss
        return True
