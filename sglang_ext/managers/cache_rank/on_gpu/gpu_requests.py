"""A request at a cache rank on another GPU: where its keys are, what was asked for it, and of which tokens its copy holds rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import QueryUpload


@dataclass(frozen=True)
class PendingSelection:
    """What was asked last for a request: by which number of its lane, among how many tokens, and how many of them for each head."""

    sequence: int
    covered: int
    keep: int


@dataclass(frozen=True)
class RowRecord:
    """Of which tokens a copy holds rows, and for how many it stands.

    Attributes:
        positions: int32 [layers, kv_heads, keep], by place; kernels change it.
        covered: tokens.
    """

    positions: torch.Tensor
    covered: int


@dataclass
class GpuRankRequest:
    """A request at a rank.

    Attributes:
        leases: of the process that has its keys.
        lease: its own.
        names: of the blocks of its prompt, which others that begin alike share.
        asked: the question whose answer its copy shall lead to; None where none is open.
        alone: whether its full KV was given back: the rank has the only one.
    """

    leases: KeyLeases
    lease: KeyLease
    names: Sequence[bytes] = ()
    asked: PendingSelection | None = None
    alone: bool = False

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys is gone."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch

    def extend(self, slots: torch.Tensor) -> bool:
        """As :meth:`KeyLeases.extend`: of slots the host knows nothing."""
        return self.leases.extend(self.lease, slots, lambda index: self.names[index] if index < len(self.names) else None)


class SelectionSubmission(NamedTuple):
    """A question that is put: whose it is, what its rank is told, and what is written to the arena."""

    request: GpuRankRequest
    ask: protocol.SelectionRequest
    asked: QueryUpload
