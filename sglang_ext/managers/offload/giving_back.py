"""Turns in mode lossy: nothing is verified, and full KV is given back as soon as copies hold it, or cache ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.managers.spec_decode.turns import OnDevice
from sglang_ext.mem_cache.prefix_cache.codes_alone import CodesAlone
from sglang_ext.mem_cache.prefix_cache.held_elsewhere import HeldElsewhere
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class GivingBack(OnDevice):
    """The turns of one scheduler process.

    Attributes:
        codes: gives it back.
    """

    codes: CodesAlone

    def begin(self, drafting: dict[int, tuple[TieredNode, int]], iteration_seconds: float | None) -> None:
        """A round begins, before which SGLang let the prefix tree take over the prompts of those that have copies."""
        self.codes.update(drafting)

    def exact_from(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to full KV of its own."""
        return self.codes.exact_from(row, protected)


@dataclass(frozen=True)
class HandingOver(OnDevice):
    """The turns of one scheduler process with cache ranks.

    Attributes:
        held: gives back what they have.
    """

    held: HeldElsewhere

    def give_back(self, requests: "Sequence[Req]") -> None:
        """As :meth:`NeverEarly.give_back`."""
        self.held.update(requests)

    def exact_from(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to full KV of its own."""
        return self.held.exact_from(row, protected)
