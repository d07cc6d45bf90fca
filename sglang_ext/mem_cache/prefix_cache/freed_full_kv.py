"""The contract of full KV that mode lossy gives back while its request runs, as something else stands for it: what SGLang's seams ask."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode
    from sglang_ext.mem_cache.prefix_cache.recompute import RecomputeSource
    from sglang_ext.mem_cache.prefix_cache.segments import Segment
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


@dataclass(frozen=True)
class SlotDemand:
    """Slots that a request will need of the pool.

    Attributes:
        copy: for its copy, or what that takes up next, while its full KV is there.
        back: of its own full KV, that are given back then.
        leaves: of nodes on its path, whose full KV it needs no longer then: it goes back once all who lock them need it no longer.
        growth: that its answer takes yet.
        reads: segments of the tree that are to be part of its copy and that nobody reads yet, so that they count as evictable.
    """

    copy: int = 0
    back: int = 0
    leaves: "Mapping[TieredNode, int]" = field(default_factory=dict)
    growth: float = 0
    reads: "tuple[Segment, ...]" = ()


@dataclass
class FreedFullKV(ABC):
    """What of the full KV of one scheduler process was given back. Rows lead to SGLang's padding page there.

    Attributes:
        tree: the prefix tree.
        copies: of the running requests.
    """

    tree: "TieredRadixCache"
    copies: "CompressedKVCache"
    # Of each row, positions of its own tokens whose slots went back, or were never there.
    _own: dict[int, range] = field(default_factory=dict, init=False)

    @property
    def own_tokens(self) -> int:
        """Tokens of running requests' own whose slots went back, or were never there."""
        return sum(map(len, self._own.values()))

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of which something else stands for full KV that is not there."""

    def own_start(self, row: int, protected: int) -> int:
        """The position before which slots of a request's row are not its own: the tree's, ``protected`` tokens, or given back."""
        return self._own[row].stop if row in self._own else protected

    def _give_back_own(self, row: int, protected: int, covered: int) -> None:
        """Free the slots of a request's own tokens, behind the tree's ``protected`` ones, that its copy stands for."""
        begin = self.own_start(row, protected)
        if covered <= begin:
            return
        slots = self.copies.token_table[row, begin:covered]
        self.tree.token_to_kv_pool_allocator.free_segment(slots.to(torch.int64, copy=True), start_pos=begin)
        slots.zero_()
        self._own[row] = range(self._own[row].start if row in self._own else begin, covered)

    @abstractmethod
    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to its own full KV."""

    @abstractmethod
    def can_lack_full_kv(self, row: int) -> bool:
        """Whether the request in ``row`` may lack full KV, so that it cannot do without its copy."""

    @abstractmethod
    def slot_demand(self, req: "Req", more: int, share: float = 1.0) -> SlotDemand:
        """What a request that runs or waits will need of the pool beside its prompt's full KV.

        Args:
            more: tokens that its answer has yet at most.
            share: of these, those that are expected.
        """

    def slot_demands(self, requests: "Iterable[tuple[Req, int]]", share: float = 1.0) -> list[SlotDemand]:
        """:meth:`slot_demand` of each of these, with the tokens that its answer has yet, in the order in which they come: what one takes up
        elsewhere, there is for those after it no more."""
        return [self.slot_demand(req, more, share) for req, more in requests]

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
        self._own.pop(row, None)

    def clear(self) -> None:
        """All requests are gone, and the pool is being cleared."""
        self._own.clear()

    def admitted(self, req: "Req") -> None:
        """A request that waited begins in the next forward: keep what it attends to."""

    def peak_slots(self, req: "Req", rest: int) -> int:
        """Slots that full KV of the last ``rest`` tokens of a prompt takes at most beside what it has, while they are computed."""
        return rest

    def reads(self, req: "Req | None", best: "TieredNode") -> bool:
        """Whether a prompt reads what stands for full KV on the path to ``best`` as it is, so that it needs no slots for it."""
        return False

    def begin_prompts(self, prompts: "Iterable[tuple[Req, int, int]]") -> None:
        """Tokens of prompts are about to be computed (quantized_prompts.py); of each the request, and tokens that the tree had when it came,
        and that are before them."""

    def stored(self, row: int) -> torch.Tensor | None:
        """Slots of blocks that a prompt attends to as they lie in the pool; None for none."""
        return None

    def can_insert(self, row: int) -> bool:
        """Whether the prompt of a request that is done may enter the tree: its row leads to all of it that the tree lacks."""
        return True

    def is_lost(self, row: int) -> bool:
        """Whether what stood for a request's full KV is gone, so that it must be computed again."""
        return False

    def arrival(self, row: int) -> "RecomputeSource | None":
        """What computes a request once more that lacks full KV; None where it has all of it, or that is done here."""
        return None

    def whole(self, tokens: int) -> int:
        """Of a context's first ``tokens`` tokens, those that a node of the tree may end after while its prompt is computed in chunks."""
        return tokens

    def write(self) -> None:
        """Before a forward: make what it reads of what stands for it."""
