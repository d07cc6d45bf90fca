"""Turns in mode lossy: nothing is verified, and full KV is given back as soon as copies hold it, or cache ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.managers.spec_decode.full_kv import ResidentFullKV
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class QuantizedOnlyFullKV(ResidentFullKV):
    """The turns of one scheduler process.

    Attributes:
        codes: gives it back.
    """

    codes: QuantizedOnlyKV

    def on_round_start(self, drafting: dict[int, tuple[TieredNode, int]], iteration_seconds: float | None) -> None:
        """A round begins, before which SGLang let the prefix tree take over the prompts of those that have copies."""
        self.codes.update(drafting)

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to full KV of its own."""
        return self.codes.full_kv_start(row, protected)


@dataclass(frozen=True)
class RemoteOnlyFullKV(ResidentFullKV):
    """The turns of one scheduler process with cache ranks.

    Attributes:
        held: gives back what they have.
    """

    held: RemoteOnlyKV

    def free_full_kv(self, requests: "Sequence[Req]") -> None:
        """As :meth:`FullKVProvider.free_full_kv`."""
        self.held.update(requests)

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to full KV of its own."""
        return self.held.full_kv_start(row, protected)
