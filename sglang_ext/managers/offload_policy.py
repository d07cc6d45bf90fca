"""How much full KV may leave the device, and how long its requests draft, by what rounds and loads were measured to take.

``--kv-full-tier auto``: full KV stays on the device while it fits. For more requests than fit, some of it leaves where
VeriCache's optimum (equations (5)-(11), placement.py) says that more tokens a second come of it; else the others
wait, as in stock SGLang. ``host``: all of it leaves, and the optimum says after how many drafts it is loaded.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.managers import placement
from sglang_ext.managers.costs import CostError, Costs, Timed
from sglang_ext.managers.draft_length import Recent, Spent
from sglang_ext.managers.rolling_plan import RollingRound

# The optimum gains less than its equations say where requests come and go (docs/results/simulate.md).
MARGIN = 1.1
# Drafts before a load until times are known.
FIRST_DRAFTS = 64


class Offload(NamedTuple):
    """What may leave the device.

    Attributes:
        requests: whose full KV may be off the device at once; None for any number.
        drafts: that such a request gathers before its full KV is loaded.
    """

    requests: int | None
    drafts: int


@dataclass
class OffloadPolicy:
    """Learns from rounds, and chooses.

    Attributes:
        bytes_per_token: of full KV.
        memory: tokens that the device's pool holds.
        drafts: of a round.
        longest: drafts that a request gathers at most.
        requests: that run at once at most.
        tier: ``auto`` or ``host``.
    """

    bytes_per_token: int
    memory: int
    drafts: int
    longest: int
    requests: int
    tier: placement.Tier = "auto"
    _draft: Recent = field(default_factory=Recent)
    _verify: Recent = field(default_factory=Recent)
    _drafting: int = 0
    _verifying: int = 0
    _context: float = 0.0

    @property
    def unknown(self) -> Offload:
        """What may leave the device before enough was measured."""
        return Offload(None if self.tier == "host" else 0, min(self.longest, FIRST_DRAFTS))

    def observe(self, round_: RollingRound, spent: Spent) -> None:
        """Take a round's seconds."""
        if not spent.drafts:
            return
        if len(round_.states) != self._drafting:
            self._draft, self._drafting = Recent(), len(round_.states)
        self._draft.newest.append(spent.drafting / spent.drafts)
        self._context = sum(round_.lengths) / len(round_.lengths)
        if round_.due:
            if len(round_.due) != self._verifying:
                self._verify, self._verifying = Recent(), len(round_.due)
            self._verify.newest.append(spent.whole - spent.drafting)

    def choose(self, probability: float, link: float, share: float) -> Offload:
        """What may leave the device from now on; :attr:`unknown` before enough was measured.

        Args:
            probability: that a draft is accepted when those before it were.
            link: bytes per second of loads.
            share: of full KV that copies keep.
        """
        if not self._verify.count or not self._draft.count:
            return self.unknown
        try:
            costs = Costs.measured(
                Timed(self._drafting, self._draft.seconds),
                Timed(self._verifying, self._verify.seconds),
                context=self._context * self.bytes_per_token,
                link=link,
                memory=self.memory * self.bytes_per_token,
                budget=share,
                drafts=self.drafts,
            )
        except CostError:
            # Times that are not those of reading KV, as of short contexts, where launches take longer.
            return self.unknown
        if self.tier == "host":
            # Of those that run: more may not come.
            found = placement.best(costs, round(probability, 3), self._drafting, "host", self.longest)
            return Offload(None, found.drafts_offloaded or self.longest)
        found = placement.best(costs, round(probability, 3), self.requests, "auto", self.longest)
        stays = placement.best(costs, round(probability, 3), self.requests, "device", self.longest)
        if found.tokens_per_second < MARGIN * stays.tokens_per_second:
            return self.unknown
        return Offload(found.offloaded, found.drafts_offloaded or self.longest)
