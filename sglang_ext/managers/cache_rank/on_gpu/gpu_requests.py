"""State of a request at a cache rank on a GPU: its lease, its open selection request, and the tokens of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import QueryUpload


@dataclass(frozen=True)
class PendingSelection:
    """The last selection request of a request: its sequence in the lane, covered tokens, and tokens to keep for each head."""

    sequence: int
    covered: int
    keep: int


@dataclass(frozen=True)
class RowRecord:
    """Tokens whose rows a compressed KV holds.

    Attributes:
        positions: int32 [layers, kv_heads, keep], position of each row; kernels update it.
        covered: Tokens that the compressed KV covers.
    """

    positions: torch.Tensor
    covered: int


@dataclass
class GpuRankRequest:
    """A request at a rank.

    Attributes:
        leases: Leases at the process that has the keys.
        lease: The request's lease.
        names: Names of its prompt's blocks, which requests with the same prefix share.
        pending: Open selection request, whose selection the compressed KV will apply; None if none is open.
        is_remote_only: The request's full KV is remote-only.
    """

    leases: KeyLeases
    lease: KeyLease
    names: Sequence[bytes] = ()
    pending: PendingSelection | None = None
    is_remote_only: bool = False

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys has ended."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch

    def extend(self, slots: torch.Tensor) -> bool:
        """See :meth:`KeyLeases.extend`. Blocks are named by hashes, because the host does not know the slots."""
        return self.leases.extend(self.lease, slots, lambda index: self.names[index] if index < len(self.names) else None)


class SelectionSubmission(NamedTuple):
    """A selection request to publish: its request, the message to the rank, and the data for the exchange buffer."""

    request: GpuRankRequest
    selection_request: protocol.SelectionRequest
    upload: QueryUpload
