"""Turns in mode lossy: nothing is verified, and full KV is given back as soon as copies hold it."""

from dataclasses import dataclass

from sglang_ext.managers.spec_decode.round import OnDevice
from sglang_ext.mem_cache.prefix_cache.codes_alone import CodesAlone
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode


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
