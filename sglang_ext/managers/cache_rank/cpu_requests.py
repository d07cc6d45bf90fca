"""State of a request at a cache rank on a CPU, as the inference rank sees it: open selection requests, selections, and rows in its
compressed KV."""

from dataclasses import dataclass, field

import torch

from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases
from sglang_ext.managers.cache_rank.rank_link import Pack
from sglang_ext.managers.cache_rank.shared_memory import SharedMemory
from sglang_ext.mem_cache.compressed.remote_selector import extend_selection
from sglang_ext.mem_cache.compressed.row_exchange import EMPTY, ReceivedRows, RowExchange, plan_exchange, pad_places


@dataclass
class PackSelection:
    """Selection state of one pack of a request's layers.

    Attributes:
        pack: The pack.
        asked: Open selection requests by sequence: covered tokens, and tokens to keep.
        sequence: Sequence of the newest answered selection request; 0 before the first.
        covered: Tokens among which :attr:`kept` was selected.
        kept: int64 [pack layers, kv_heads, count], selected positions; None before the first selection.
        written: Sequence of the selection that the compressed KV has applied. Also advanced past a selection whose slot is requested
            again.
        held: int64 [pack layers, kv_heads, places], positions of the rows in the compressed KV; None if it holds no rows yet.
        held_covered: Tokens that the compressed KV covered when ``held`` was set.
    """

    pack: Pack
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    sequence: int = 0
    covered: int = 0
    kept: torch.Tensor | None = None
    written: int = 0
    held: torch.Tensor | None = None
    held_covered: int = 0

    def can_ask(self, sequence: int, rows: bool) -> bool:
        """Whether no open selection request uses the slots of this sequence's parity.

        With ``rows`` no selection request may be open at all: a reply's rows are those that the compressed KV lacks after it applied all
        earlier replies.
        """
        return not self.asked if rows else all((sequence - each) % 2 for each in self.asked)

    def moved(self, covered: int, keep: int, renewed: bool = True) -> RowExchange:
        """Return the row exchange for a refreshed compressed KV.

        It keeps the held rows and adds the newest tokens. If it is not ``renewed``, it starts from the last selection and the newest
        tokens.

        Args:
            covered: Tokens that the compressed KV will cover.
            keep: Tokens of these to keep for each head.
        """
        if self.held is None or not renewed:
            wanted = extend_selection(self.kept, self.covered, covered, keep)
            return plan_exchange(torch.full_like(wanted, EMPTY), wanted)
        held = self.held.sort(dim=-1).values
        return plan_exchange(pad_places(self.held, keep), extend_selection(held, self.held_covered, covered, keep))

    def base(self, covered: int, keep: int) -> torch.Tensor | None:
        """Positions held once the compressed KV covers ``covered`` tokens, like :attr:`held`; None before the first selection."""
        if self.kept is None:
            return None
        return self.held if self.held is not None and self.held_covered == covered else self.moved(covered, keep).held

    def arrived(self, memory: SharedMemory, lane: int, covered: int, keep: int) -> ReceivedRows:
        """Return the rows of the newest reply that compressed KV, covering ``covered`` tokens with ``keep`` per head, can exchange.

        The reply may lack rows, because it was requested before the compressed KV was refreshed. These rows stay unchanged.
        """
        wanted = extend_selection(self.kept, self.covered, covered, keep)
        count = self.kept.shape[-1]
        index = torch.searchsorted(self.kept, wanted).clamp(max=count - 1)
        fresh = memory.get_fresh(lane, self.sequence, self.pack.layers, count)
        available = (self.kept.gather(-1, index) == wanted) & fresh.gather(-1, index)
        found = plan_exchange(self.held, wanted, available)
        index = index[found.layers, found.heads, found.wanted]
        parts = (part[found.layers + self.pack.first, found.heads, index] for part in memory.rows(lane, self.sequence))
        return ReceivedRows(found, *parts)


@dataclass
class CpuRankRequest:
    """A request whose keys are at a cache rank, or are being sent there.

    Attributes:
        leases: Leases at the process that has the keys.
        lease: The request's lease.
        packs: Selection state of its packs of layers.
    """

    leases: KeyLeases
    lease: KeyLease
    packs: list[PackSelection]

    @property
    def complete(self) -> bool:
        """Whether every layer has had a selection."""
        return all(each.kept is not None for each in self.packs)

    @property
    def holds_rows(self) -> bool:
        """Whether the compressed KV holds rows that the rank may exchange."""
        return all(each.held is not None for each in self.packs)

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process that had its keys has ended."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch
