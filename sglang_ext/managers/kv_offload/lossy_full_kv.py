"""Full-KV providers of mode lossy. Nothing is verified, and full KV is freed when compressed KV or cache ranks hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.managers.spec_decode.full_kv import ResidentFullKV
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class QuantizedOnlyFullKV(ResidentFullKV):
    """Full-KV provider of one scheduler process whose compressed KV replaces full KV.

    Attributes:
        freed_full_kv: Frees the full KV.
    """

    freed_full_kv: QuantizedOnlyKV

    def on_round_start(self, drafting: dict[int, tuple[TieredNode, int]], iteration_seconds: float | None) -> None:
        """Free full KV at the start of a round. The prefix tree already owns the prompts of requests with compressed KV."""
        self.freed_full_kv.free_full_kv(drafting)

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which a request's row points to its own full KV."""
        return self.freed_full_kv.full_kv_start(row, protected)


@dataclass(frozen=True)
class RemoteOnlyFullKV(ResidentFullKV):
    """Full-KV provider of one scheduler process with cache ranks.

    Attributes:
        remote_only: Frees the full KV that the ranks hold.
    """

    remote_only: RemoteOnlyKV

    def free_full_kv(self, requests: "Sequence[Req]") -> None:
        """See :meth:`FullKVProvider.free_full_kv`."""
        self.remote_only.free_full_kv(requests)

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which a request's row points to its own full KV."""
        return self.remote_only.full_kv_start(row, protected)
