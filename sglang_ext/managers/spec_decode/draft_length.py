"""Chooses how many tokens a batch drafts before it verifies (``--kv-draft-length auto``).

All requests of a batch draft together, so there is one length for all: the one at which the batch gains most tokens per second (VeriCache,
equation (11), with measured times). A draft that is accepted with probability ``p`` gives rounds of ``x`` drafts a mean of
``(1 - p^(x+1)) / (1 - p)`` tokens. Length 0 is plain decoding on the full KV.

Times come from a cost model (round_costs.py), which predicts them at loads that were not measured. Where drafting pays, plain steps are measured
rarely. Where it does not pay, a short round probes now and then whether it would: probes may lose :data:`PROBE_SHARE` of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sglang_ext.managers.spec_decode.round_costs import Load, RoundCosts, Spent

# Another length must be that much better before it is taken, and any length than plain decoding: times are noisy, and copies take time.
HYSTERESIS, GAIN = 1.02, 1.03
# Drafts of a probe, at least and at most: enough for the time of one, few to lose.
PROBE_DRAFTS = 2, 4
# Share of the time that probes may lose, for copies and for rounds that gain less than plain steps.
PROBE_SHARE = 0.01
# Plain steps are measured again after so many tokens of a request, where drafting pays.
PLAIN_AFTER = 1024
# Plain steps are measured at a load if none were within so many doublings of it.
PLAIN_REACH = 1.0


def expected_tokens(probability: np.ndarray | float, drafts: np.ndarray | int) -> np.ndarray:
    """Mean tokens of rounds, the verifier's own among them."""
    # At 1 the quotient has no value, but a limit.
    p = np.minimum(probability, 1 - 1e-9)
    return (1 - p ** (drafts + 1)) / (1 - p)


@dataclass(frozen=True)
class FixedLength:
    """A draft length that was asked for.

    Attributes:
        drafts: of each iteration.
    """

    drafts: int
    predicted_gain: ClassVar[None] = None

    def choose(self, costs: RoundCosts, load: Load, probabilities: Sequence[float]) -> int:
        """The same in each iteration."""
        return self.drafts

    def observe(self, spent: Spent) -> None:
        """Nothing is learned."""


@dataclass
class DraftLength:
    """Chooses the draft length of each iteration.

    Attributes:
        longest: drafts at most.
        chosen: the last choice, probes and measurements of plain steps left out.
        predicted_gain: of the best length over plain decoding, at the last choice; None before the first.
    """

    longest: int
    chosen: int = 0
    predicted_gain: float | None = None
    # Tokens of a request since plain steps were measured, and the loads near which that was asked.
    _since_plain: int = 0
    _asked: set[tuple[int, ...]] = field(default_factory=set)
    # Seconds that probes may lose by now. The first one is not waited for.
    _allowance: float = float("inf")

    def choose(self, costs: RoundCosts, load: Load, probabilities: Sequence[float]) -> int:
        """Drafts of the next iteration; 0 for plain decoding.

        Args:
            costs: predicts times.
            load: of the batch.
            probabilities: that a draft of each request is accepted when those before it were.
        """
        drafts = np.arange(self.longest + 1)
        tokens = expected_tokens(np.asarray(probabilities)[:, None], drafts).sum(0)
        seconds = costs.round_seconds(load, drafts.tolist())
        rates = tokens / seconds
        self.predicted_gain = float(rates[1:].max() / rates[0])
        self.chosen = self._best(rates)
        if self.chosen:
            return 0 if self._plain_is_due(costs, load) else self.chosen
        # The least bad of the short lengths.
        least, most = (min(each, self.longest) for each in PROBE_DRAFTS)
        probe = least + int(rates[least : most + 1].argmax())
        loss = costs.copying_seconds(load) + seconds[probe] * (1 - rates[probe] / rates[0])
        return probe if self._spend(max(0.0, loss)) else 0

    def observe(self, spent: Spent) -> None:
        """Take the seconds of an iteration."""
        self._allowance += PROBE_SHARE * (spent.copying + spent.whole)
        self._since_plain = self._since_plain + spent.drafts if spent.drafts else 0

    def _best(self, rates: np.ndarray) -> int:
        """The length of the highest rate, or the last choice where that is nearly as good and better than plain decoding."""
        best, last = int(rates.argmax()), self.chosen
        if rates[last] < rates[0]:
            last = 0
        return last if (HYSTERESIS if last else GAIN) * rates[last] > rates[best] else best

    def _plain_is_due(self, costs: RoundCosts, load: Load) -> bool:
        """Whether a plain step is to be measured, though drafting pays: none was for long, or none near this load."""
        if self._since_plain >= PLAIN_AFTER:
            self._since_plain = 0
            return True
        near = tuple(map(round, load.place))
        if near in self._asked or costs.step.is_near(load.place, PLAIN_REACH):
            return False
        # Once, as the time comes iterations later.
        self._asked.add(near)
        return True

    def _spend(self, loss: float) -> bool:
        """Whether a probe that loses so many seconds may run now."""
        # What probes have not lost is not saved up for more than one.
        self._allowance = min(self._allowance, loss)
        if self._allowance < loss:
            return False
        self._allowance -= loss
        return True
