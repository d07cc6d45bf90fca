"""State of a request at a cache rank, as the inference rank sees it: its lease, open selection requests, and the tokens of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases


@dataclass(frozen=True)
class PendingSelection:
    """A selection request whose selection the compressed KV will apply: its sequence, covered tokens, and tokens to keep for each head."""

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
class RankRequest:
    """A request at a rank.

    Attributes:
        leases: Leases at the process that has the keys.
        lease: The request's lease.
        names: Names of its prompt's blocks, which requests with the same prefix share.
        pending: The newest selection request of each pack, by the pack's first layer, until its selection is applied or dropped.
        unanswered: Sequence of the selection request of each pack whose reply has not arrived, by the pack's first layer. Unused where the
            device waits for replies.
        is_remote_only: The request's full KV is remote-only.
    """

    leases: KeyLeases
    lease: KeyLease
    names: Sequence[bytes] = ()
    pending: dict[int, PendingSelection] = field(default_factory=dict)
    unanswered: dict[int, int] = field(default_factory=dict)
    is_remote_only: bool = False

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys has ended."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch

    def extend(self, slots: torch.Tensor) -> bool:
        """See :meth:`KeyLeases.extend`. Blocks are named by hashes of tokens."""
        return self.leases.extend(self.lease, slots, lambda index: self.names[index] if index < len(self.names) else None)
