"""Interface of full KV that mode lossy frees while its request runs, because other KV replaces it: the methods that the hooks call."""

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
    """Pool slots that a request will need.

    Attributes:
        compressed_slots: Slots for its compressed KV, or for the next refresh of it, while its full KV still exists.
        own_slots_freed: Slots of its own full KV that are freed after that.
        path_slots_freed: For nodes on its path, the slots whose full KV it no longer needs after that. They are freed when no request that
            locks the node needs them.
        growth: Slots that the remaining output needs.
        new_segments: Segments of the tree that its compressed KV will include and that have no users yet, so that they count as evictable.
    """

    compressed_slots: int = 0
    own_slots_freed: int = 0
    path_slots_freed: "Mapping[TieredNode, int]" = field(default_factory=dict)
    growth: float = 0
    new_segments: "tuple[Segment, ...]" = ()


@dataclass
class FreedFullKV(ABC):
    """The full KV that one scheduler process has freed. Rows point to SGLang's padding page there.

    Attributes:
        tree: The prefix tree.
        compressed_kv: The running requests' compressed KV.
    """

    tree: "TieredRadixCache"
    compressed_kv: "CompressedKVCache"
    # For each row, positions of its own tokens whose slots were freed, or never existed.
    _own: dict[int, range] = field(default_factory=dict, init=False)

    @property
    def own_tokens(self) -> int:
        """Running requests' own tokens whose slots were freed, or never existed."""
        return sum(map(len, self._own.values()))

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens without full KV, which other KV replaces."""

    def own_start(self, row: int, protected: int) -> int:
        """The position where a row's own slots begin. Slots before it are the tree's, ``protected`` tokens, or were freed."""
        return self._own[row].stop if row in self._own else protected

    def _free_own_slots(self, row: int, protected: int, covered: int) -> None:
        """Free the slots of a request's own tokens, after the tree's ``protected`` ones, that its compressed KV covers."""
        begin = self.own_start(row, protected)
        if covered <= begin:
            return
        slots = self.compressed_kv.token_table[row, begin:covered]
        self.tree.token_to_kv_pool_allocator.free_segment(slots.to(torch.int64, copy=True), start_pos=begin)
        slots.zero_()
        self._own[row] = range(self._own[row].start if row in self._own else begin, covered)

    @abstractmethod
    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which a request's row points to its own full KV."""

    @abstractmethod
    def can_lack_full_kv(self, row: int) -> bool:
        """Whether the request in ``row`` may lack full KV, so that it depends on its compressed KV."""

    @abstractmethod
    def slot_demand(self, req: "Req", more: int, share: float = 1.0) -> SlotDemand:
        """Pool slots that a running or waiting request will need, in addition to its prompt's full KV.

        Args:
            more: Maximum number of tokens left to generate.
            share: Expected share of ``more``.
        """

    def slot_demands(self, requests: "Iterable[tuple[Req, int]]", share: float = 1.0) -> list[SlotDemand]:
        """Return :meth:`slot_demand` of each request, given with its maximum number of tokens left to generate, in order of admission.

        Space that one request takes outside the pool is not available to later ones.
        """
        return [self.slot_demand(req, more, share) for req, more in requests]

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended."""
        self._own.pop(row, None)

    def clear(self) -> None:
        """Remove all requests. The pool is being cleared."""
        self._own.clear()

    def on_admitted(self, req: "Req") -> None:
        """Hold what a waiting request attends to. It begins in the next forward."""

    def peak_slots(self, req: "Req", rest: int) -> int:
        """Maximum slots for full KV of a prompt's last ``rest`` tokens while they are computed, in addition to the slots that it has."""
        return rest

    def reads_quantized(self, req: "Req | None", best: "TieredNode") -> bool:
        """Whether a prompt reads the replacement of full KV on the path to ``best`` directly, so that it needs no slots for it."""
        return False

    def begin_prompts(self, prompts: "Iterable[tuple[Req, int, int]]") -> None:
        """Prepare the next tokens of prompts (quantized_prompts.py).

        Args:
            prompts: For each, the request, the tokens that were in the tree when it arrived, and the tokens before the next ones.
        """

    def block_slots(self, row: int) -> torch.Tensor | None:
        """Slots of the blocks in the pool that a prompt attends to. None if there are none."""
        return None

    def can_insert(self, row: int) -> bool:
        """Whether a finished request's prompt may enter the tree: its row points to all full KV that the tree lacks."""
        return True

    def is_lost(self, row: int) -> bool:
        """Whether the replacement of a request's full KV is lost, so that the request must be recomputed."""
        return False

    def recompute_source(self, row: int) -> "RecomputeSource | None":
        """The source that recomputes a request without full KV. None if it has all full KV, or is recomputed here."""
        return None

    def max_node_end(self, tokens: int) -> int:
        """The last position, of a context's first ``tokens`` tokens, where chunks of prompts and partial matches may end a tree node."""
        return tokens

    def write_restored(self) -> None:
        """Write full KV that the next forward reads and that must be restored from its replacement."""
