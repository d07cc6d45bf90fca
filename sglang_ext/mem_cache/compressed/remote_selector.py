"""The contract of tokens that another process chooses, while this one computes (managers/cache_rank/): for copies of pointers, or of rows,
where that process has the full KV and sends the rows that a copy lacks.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_ext.core import CompressedKV
from sglang_ext.mem_cache.compressed.row_exchange import ReceivedRows, RowExchange
from sglang_ext.mem_cache.compressed.synchronous_selector import synchronous_selector

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache

# Queries of a request before a position, of some layers, and their positions, as queries.py:QueryWindows.get has them.
ReadQueryWindow = Callable[[int, int, slice], tuple[torch.Tensor, torch.Tensor]]
# Let the copy of a request lead to chosen tokens in some layers, int64 [layers, kv_heads, count]; or take rows.
WriteSelection = Callable[[int, slice, torch.Tensor | ReceivedRows], None]


@dataclass(frozen=True)
class StepRequest:
    """A request with a copy, in one step.

    Attributes:
        row: the request's row in the token table.
        covered: tokens that its copy stands for.
        keep: of these, tokens that each KV head is led to.
        end: position after the step's token.
        asks: whether tokens are chosen anew by the step's queries.
    """

    row: int
    covered: int
    keep: int
    end: int
    asks: bool


@dataclass
class FreeBlocks:
    """Room for requests that are to be handed over, where any of several takes them.

    Attributes:
        blocks: that each of these has free.
        size: tokens of a block.
        requests: that each of these takes yet; None for any number.
    """

    blocks: list[int]
    size: int = 1
    requests: list[int] | None = None

    def take(self, tokens: int) -> bool:
        """Whether a request of so many tokens has room beside those that took theirs before: it goes where there is most."""
        needed, takes = -(-tokens // self.size), self.requests or [1] * len(self.blocks)
        most = max((i for i, more in enumerate(takes) if more), key=self.blocks.__getitem__, default=None)
        if most is None or needed > self.blocks[most]:
            return False
        self.blocks[most] -= needed
        if self.requests is not None:
            self.requests[most] -= 1
        return True


class LayerObserver(Protocol):
    """Is told how far a forward has come; layers are counted from 0."""

    def on_layer_start(self, layer: int) -> None:
        """The layer's attention comes next."""

    def on_queries_recorded(self, layer: int) -> None:
        """The layer's queries are there."""


class RowSender:
    """Who may have the full KV of requests, so that this process can do without: the contract of giving it back (remote_only.py).

    Attributes:
        sends_rows: whether it has the full KV of its requests, and K and V of what is chosen come with it.
        processes: that can be asked, and that were started, where others choose.
    """

    sends_rows: bool = False
    processes: tuple[int, int] = (0, 0)

    def holds(self, row: int) -> int:
        """First tokens of a request whose K and V it has, and sends rows of; 0 where it cannot, or the copy holds no rows yet."""
        return 0

    def leave_slots(self, row: int, alone: bool) -> None:
        """Slots of a request's full KV are about to be free; ``alone``: it has no others, and cannot be handed over again."""

    def is_lost(self, row: int) -> bool:
        """Whether the only full KV of a request is gone with the process that had it."""
        return False

    def free_blocks(self) -> FreeBlocks:
        """Room now for requests that were not handed over yet."""
        return FreeBlocks([])

    def has_request(self, row: int) -> bool:
        """Whether a request was handed over, or is about to be: it needs no room any more."""
        return False


class RemoteSelector(RowSender, ABC):
    """Who chooses tokens in the place of a compressor of this process.

    Attributes:
        missed: choices that were not there when they were needed, by reason.
    """

    missed: Counter[str]

    @abstractmethod
    def prepare(self, row: int, slots: torch.Tensor, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> bool:
        """A copy of a request is to be made, or made anew: hand over what keys are new, and ask for its tokens. Waits for nothing.

        Args:
            row: the request's row in the token table.
            slots: int64 [covered], of full KV of the tokens among which is chosen, whose keys are exact.
            keep: tokens of each KV head.
            queries: [layers, window, query_heads, dim], the newest, oldest first.
            positions: int64 [window], of these.

        Returns:
            Whether a copy can be made: something was chosen for the request, of late; where rows are sent, all that it would stand for
            was handed over, too.
        """

    @abstractmethod
    def kept(self, row: int, covered: int, keep: int) -> torch.Tensor:
        """What was chosen last for a request that is prepared, and the newest tokens: int64 [layers, kv_heads, keep], ascending."""

    def moved(self, row: int, covered: int, keep: int, renewed: bool) -> RowExchange:
        """As :meth:`kept`, where rows are sent: which of them a copy takes from the request's own full KV, over all layers.

        Args:
            row: of a request that is prepared.
            covered: tokens that the copy is to stand for.
            keep: of these, tokens of each KV head.
            renewed: whether it holds rows already.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def poll(self) -> None:
        """Look whether the other processes run, take what they said, and start those that ended anew. Waits for nothing."""

    @abstractmethod
    def step(self, requests: Sequence[StepRequest], read: ReadQueryWindow, write: WriteSelection) -> LayerObserver:
        """A step begins: what comes in time is written before a layer needs it, and questions are asked as queries are there."""

    @abstractmethod
    def forget(self, row: int) -> None:
        """The request in ``row`` is gone, or its full KV lies elsewhere; no-op where it is not known."""

    @abstractmethod
    def forget_all(self) -> None:
        """All requests are gone."""


def prepare(compressed_kv: "CompressedKVCache", row: int, tokens: int) -> bool:
    """Ask for what a copy over a request's first ``tokens`` tokens keeps; whether one can be made."""
    method = compressed_kv.method(row)
    covered, found = method.covered(compressed_kv.reach(row, tokens)), compressed_kv.queries.get(row, tokens, method.compressor.window)
    if not covered or found is None:
        return False
    slots = compressed_kv.token_table[row, :covered].long()
    keep = method.own(CompressedKV(slots[:0], covered, sinks=method.sinks), method.sinks, 0)
    return compressed_kv.remote_selector.prepare(row, slots, keep, *found)


def observe_step(compressed_kv: "CompressedKVCache", ends: dict[int, int], asks: bool) -> LayerObserver | None:
    """Who is told of the layers of a step; None where nobody chooses elsewhere or by a step's own queries, or nobody's tokens are chosen.

    Args:
        compressed_kv: the copies.
        ends: position after the step's token, by row, of requests that read their copies.
        asks: whether another step follows that reads the same copies.
    """
    if compressed_kv.remote_selector is None:
        return synchronous_selector(compressed_kv, ends)
    if not ends:
        return None
    requests = []
    for row, end in ends.items():
        view, every = compressed_kv.get(row), compressed_kv.method(row).compressor.every
        requests.append(StepRequest(row, view.covered, view.own_tokens, end, asks and not (end - view.covered) % every))

    def read(row: int, end: int, layers: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return compressed_kv.queries.get(row, end, compressed_kv.method(row).compressor.window, layers)

    return compressed_kv.remote_selector.step(requests, read, compressed_kv.write_selection)


def extend_selection(kept: torch.Tensor, before: int, covered: int, keep: int) -> torch.Tensor:
    """What was chosen of a shorter context, and the tokens that are new: in number as many as a choice of the longer one.

    The newest tokens take the places of those that were the newest.

    Args:
        kept: int64 [layers, kv_heads, count], positions below ``before``, ascending, of which the last are the newest tokens.
        before: tokens of the context at that time.
        covered: tokens of the context now, no fewer.
        keep: positions of each head that are wanted; of more than ``count`` at most as many more as there are new tokens.

    Returns:
        int64 [layers, kv_heads, keep], positions below ``covered``, ascending.
    """
    if covered == before and kept.shape[-1] == keep:
        return kept
    new = min(covered - before, keep)
    newest = torch.arange(covered - new, covered, device=kept.device).expand(*kept.shape[:-1], new)
    old, count = kept, kept.shape[-1]
    # Room for the new ones: the oldest of those that stand at the end go, as they are the newest tokens of before.
    leaving = count + new - keep
    if leaving > 0:
        window = count_trailing_run(kept)
        begin = max(0, count - max(window, leaving))
        old = torch.cat([kept[..., :begin], kept[..., begin + leaving :]], dim=-1)
    return torch.cat([old, newest], dim=-1)


def count_trailing_run(kept: torch.Tensor) -> int:
    """Of the positions at the end of each head's, those that follow one another and that all heads have."""
    ends = kept[..., -1:] - torch.arange(kept.shape[-1] - 1, -1, -1, device=kept.device)
    return int((kept == ends).flip(-1).cumprod(-1).sum(-1).min())
