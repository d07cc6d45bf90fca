"""Interface of selection in another process, while this one computes (managers/cache_rank/).

It serves compressed KV of pointers. It also serves compressed KV of rows, if the other process has the full KV and sends missing rows.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_ext.mem_cache.compressed.row_exchange import ReceivedRows, RowExchange
from sglang_ext.mem_cache.compressed.synchronous_selector import synchronous_selector

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache

# Reads a request's queries before a position, of some layers, and their positions, as queries.py:QueryWindows.get does.
ReadQueryWindow = Callable[[int, int, slice], tuple[torch.Tensor, torch.Tensor]]
# Points a request's compressed KV to selected tokens in some layers, int64 [layers, kv_heads, count], or stores received rows.
WriteSelection = Callable[[int, slice, torch.Tensor | ReceivedRows], None]


@dataclass(frozen=True)
class StepRequest:
    """A request with compressed KV in one step.

    Attributes:
        row: The request's row in the token table.
        covered: Tokens that its compressed KV covers.
        keep: Selected tokens per KV head.
        end: Position after the step's token.
        starts_selection: Whether the step's queries start a new selection.
    """

    row: int
    covered: int
    keep: int
    end: int
    starts_selection: bool


@dataclass
class FreeBlocks:
    """Free memory for new requests at each of several cache ranks, any of which can take a request.

    Attributes:
        blocks: Free blocks of each cache rank.
        size: Tokens of a block.
        requests: Number of further requests that each cache rank accepts; None for any number.
    """

    blocks: list[int]
    size: int = 1
    requests: list[int] | None = None

    def take(self, tokens: int) -> bool:
        """Reserve memory for a request of ``tokens`` tokens at the rank with the most free blocks. Returns whether it fits."""
        needed, takes = -(-tokens // self.size), self.requests or [1] * len(self.blocks)
        most = max((i for i, more in enumerate(takes) if more), key=self.blocks.__getitem__, default=None)
        if most is None or needed > self.blocks[most]:
            return False
        self.blocks[most] -= needed
        if self.requests is not None:
            self.requests[most] -= 1
        return True


class LayerObserver(Protocol):
    """Receives the progress of a forward. Layers are counted from 0."""

    def on_layer_start(self, layer: int) -> None:
        """Called before the layer's attention."""

    def on_queries_recorded(self, layer: int) -> None:
        """Called when the layer's queries are recorded."""


class RowSender:
    """A selector that may hold the full KV of requests, so that this process can free it (remote_only.py).

    Attributes:
        sends_rows: Whether it holds its requests' full KV, and sends K and V of the selected tokens.
        processes: Numbers of running and of started processes, if other processes select.
    """

    sends_rows: bool = False
    processes: tuple[int, int] = (0, 0)

    def num_held_tokens(self, row: int) -> int:
        """Number of a request's first tokens whose K and V it holds and sends; 0 if it cannot, or the compressed KV has no rows yet."""
        return 0

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        """Handle that slots of a request's full KV are about to be freed. With ``is_remote_only``, no slots of the request remain, so its keys
        cannot be sent again."""

    def is_lost(self, row: int) -> bool:
        """Whether a request's only full KV was lost with its process."""
        return False

    def free_blocks(self) -> FreeBlocks:
        """Free memory for requests that were not sent yet."""
        return FreeBlocks([])

    def has_request(self, row: int) -> bool:
        """Whether the request was sent or is being sent, so that it needs no more memory."""
        return False


class RemoteSelector(RowSender, ABC):
    """Selects tokens in place of a compressor of this process.

    Attributes:
        missed: Number of selections that were late, by reason.
    """

    missed: Counter[str]

    @abstractmethod
    def request_selection(self, row: int, slots: torch.Tensor, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> bool:
        """Send a request's new keys and ask for a selection, before its compressed KV is created or refreshed. Does not wait.

        Args:
            row: The request's row in the token table.
            slots: int64 [covered], slots of the full KV of the tokens to select from. Their keys are exact.
            keep: Tokens per KV head.
            queries: [layers, window, query_heads, dim], the newest queries, oldest first.
            positions: int64 [window], positions of the queries.

        Returns:
            Whether compressed KV can be made: a recent selection exists and, if rows are sent, all tokens to cover were sent.
        """

    @abstractmethod
    def last_selection(self, row: int, covered: int, keep: int) -> torch.Tensor:
        """The last selection for a prepared request, and the newest tokens: int64 [layers, kv_heads, keep], ascending."""

    def plan_row_copies(self, row: int, covered: int, keep: int, renewed: bool) -> RowExchange:
        """The rows to copy from the request's own full KV, over all layers, where rows are sent; see :meth:`last_selection`.

        Args:
            row: Row of a prepared request.
            covered: Tokens that the compressed KV will cover.
            keep: Tokens per KV head.
            renewed: Whether the compressed KV already has rows.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no rows")

    def poll(self) -> None:
        """Poll the other processes, read their messages, and restart those that ended. Does not wait."""

    @abstractmethod
    def step(self, requests: Sequence[StepRequest], read: ReadQueryWindow, write: WriteSelection) -> LayerObserver:
        """Start a step. The observer writes arriving selections before a layer needs them, and sends queries once they are recorded."""

    @abstractmethod
    def forget(self, row: int) -> None:
        """Forget the request in ``row``: it ended, or its full KV moved to other slots. No-op if unknown."""

    @abstractmethod
    def forget_all(self) -> None:
        """Forget all requests."""


def observe_step(compressed_kv: "CompressedKVCache", ends: dict[int, int], starts_selection: bool) -> LayerObserver | None:
    """The observer of a step's layers; None if no selector needs it, or no request reads compressed KV.

    Remote selectors need it, and methods that select by a step's own query.

    Args:
        compressed_kv: The compressed KV cache.
        ends: Position after the step's token, by row, of requests that read their compressed KV.
        starts_selection: Whether a later step reads the same compressed KV.
    """
    if compressed_kv.remote_selector is None:
        return synchronous_selector(compressed_kv, ends)
    if not ends:
        return None
    requests = []
    for row, end in ends.items():
        compressed, every = compressed_kv.get(row), compressed_kv.method(row).compressor.every
        requests.append(StepRequest(row, compressed.covered, compressed.own_tokens, end, starts_selection and not (end - compressed.covered) % every))

    def read(row: int, end: int, layers: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return compressed_kv.queries.get(row, end, compressed_kv.method(row).compressor.window, layers)

    return compressed_kv.remote_selector.step(requests, read, compressed_kv.write_selection)


def extend_selection(kept: torch.Tensor, before: int, covered: int, keep: int) -> torch.Tensor:
    """Extend the selection of a shorter context with the new tokens, to the size of a selection of the longer context.

    The newest tokens replace the previously newest ones.

    Args:
        kept: int64 [layers, kv_heads, count], positions below ``before``, ascending. The last are the newest tokens.
        before: Tokens of the shorter context.
        covered: Tokens of the longer context, at least ``before``.
        keep: Wanted positions per head. It exceeds ``count`` by at most the number of new tokens.

    Returns:
        int64 [layers, kv_heads, keep], positions below ``covered``, ascending.
    """
    if covered == before and kept.shape[-1] == keep:
        return kept
    new = min(covered - before, keep)
    newest = torch.arange(covered - new, covered, device=kept.device).expand(*kept.shape[:-1], new)
    old, count = kept, kept.shape[-1]
    # Make room for the new tokens: drop the oldest of the trailing run, which are the previously newest tokens.
    leaving = count + new - keep
    if leaving > 0:
        window = count_trailing_run(kept)
        begin = max(0, count - max(window, leaving))
        old = torch.cat([kept[..., :begin], kept[..., begin + leaving :]], dim=-1)
    return torch.cat([old, newest], dim=-1)


def count_trailing_run(kept: torch.Tensor) -> int:
    """Length of the run of consecutive positions at the end of each head's positions that all heads share."""
    ends = kept[..., -1:] - torch.arange(kept.shape[-1] - 1, -1, -1, device=kept.device)
    return int((kept == ends).flip(-1).cumprod(-1).sum(-1).min())
