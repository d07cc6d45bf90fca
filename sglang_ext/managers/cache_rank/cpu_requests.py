"""What an inference rank knows of a request at a cache rank: what was asked, what was chosen, and what its copy holds."""

from dataclasses import dataclass, field

import torch

from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases
from sglang_ext.managers.cache_rank.rank_link import Pack
from sglang_ext.managers.cache_rank.shared_memory import SharedMemory
from sglang_ext.mem_cache.compressed.remote_selector import extend_selection
from sglang_ext.mem_cache.compressed.row_exchange import EMPTY, ReceivedRows, RowExchange, exchange, pad_places


@dataclass
class PackSelection:
    """What is known of one pack of a request's layers.

    Attributes:
        pack: which.
        asked: questions without an answer: covered tokens and tokens to keep, by sequence.
        sequence: of the newest question that was answered; 0 before.
        covered: tokens among which :attr:`kept` was chosen.
        kept: int64 [pack layers, kv_heads, count], positions; None before the first answer.
        written: sequence of what the copy leads to, or has taken; of an answer whose place is asked for anew, too.
        held: int64 [pack layers, kv_heads, places], positions whose rows the copy holds, where it holds rows; None before it does.
        stands_for: tokens that the copy stood for then.
    """

    pack: Pack
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    sequence: int = 0
    covered: int = 0
    kept: torch.Tensor | None = None
    written: int = 0
    held: torch.Tensor | None = None
    stands_for: int = 0

    def can_ask(self, sequence: int, rows: bool) -> bool:
        """Whether both places of that parity are free: what was asked there was answered. Where ``rows`` come back, no question may be
        open: those of its answer are what a copy lacks that has taken all answers before."""
        return not self.asked if rows else all((sequence - each) % 2 for each in self.asked)

    def moved(self, covered: int, keep: int, renewed: bool = True) -> RowExchange:
        """How the copy comes to hold what it holds, or, where it is not ``renewed``, what was chosen last, and the newest tokens.

        Args:
            covered: tokens that it is to stand for.
            keep: of these, tokens of each head.
        """
        if self.held is None or not renewed:
            wanted = extend_selection(self.kept, self.covered, covered, keep)
            return exchange(torch.full_like(wanted, EMPTY), wanted)
        held = self.held.sort(dim=-1).values
        return exchange(pad_places(self.held, keep), extend_selection(held, self.stands_for, covered, keep))

    def base(self, covered: int, keep: int) -> torch.Tensor | None:
        """What the copy holds once it stands for ``covered`` tokens, as :attr:`held`; None where nothing was chosen yet."""
        if self.kept is None:
            return None
        return self.held if self.held is not None and self.stands_for == covered else self.moved(covered, keep).held

    def arrived(self, memory: SharedMemory, lane: int, covered: int, keep: int) -> ReceivedRows:
        """What the newest answer lets the copy exchange, which stands for ``covered`` tokens and holds ``keep`` of each head.

        What the answer has no rows of, as it was asked for before the copy was renewed, is left as it is.
        """
        wanted = extend_selection(self.kept, self.covered, covered, keep)
        count = self.kept.shape[-1]
        index = torch.searchsorted(self.kept, wanted).clamp(max=count - 1)
        fresh = memory.get_fresh(lane, self.sequence, self.pack.layers, count)
        available = (self.kept.gather(-1, index) == wanted) & fresh.gather(-1, index)
        found = exchange(self.held, wanted, available)
        index = index[found.layers, found.heads, found.wanted]
        parts = (part[found.layers + self.pack.first, found.heads, index] for part in memory.rows(lane, self.sequence))
        return ReceivedRows(found, *parts)


@dataclass
class CpuRankRequest:
    """A request whose keys a cache rank has, or is given.

    Attributes:
        leases: of the process that has them.
        lease: its own.
        packs: of its layers.
    """

    leases: KeyLeases
    lease: KeyLease
    packs: list[PackSelection]

    @property
    def complete(self) -> bool:
        """Whether something was ever chosen for all its layers."""
        return all(each.kept is not None for each in self.packs)

    @property
    def holds_rows(self) -> bool:
        """Whether its copy holds rows that the rank may exchange."""
        return all(each.held is not None for each in self.packs)

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys is gone."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch
