"""The compressor interface: what a method sees of the full KV and what it answers.

A compressor looks at one layer's KV of a context and says how much each KV head needs each token. Heads keep
the same number of tokens, at positions of their own: slot ``j`` of the compressed copy holds, for each head, that
head's own ``j``-th kept token. Or they share one budget, and keep different numbers (ragged_heads.py). Rotary embedding
was applied before caching, so a kept token needs no position again (VeriCache, section 6).

Adding a method is one file: subclass :class:`Compressor`, register it (registry.py).

Scores that are not as the contract says, and what a user's own method raises, cost its copies: :class:`ScoresError`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedSelection
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary


class ScoresError(Exception):
    """Scores by which nothing can be chosen; says whose, what they are and what they must be."""


class Always(NamedTuple):
    """So many of a context's first and newest tokens have infinite scores in all heads."""

    first: int = 0
    newest: int = 0

    def among(self, start: int, end: int, tokens: int) -> int:
        """Of the positions ``[start, end)`` of ``tokens``, those that have them."""
        sinks, window = min(self.first, tokens), max(self.first, tokens - self.newest)
        return max(0, min(end, sinks) - start) + max(0, end - max(start, window))


class RequiredFolder(NamedTuple):
    """What is to be said where it lacks, or where nobody reads it.

    Attributes:
        flag: that names it.
        why: the method needs it.
        maker: the module that writes it, and its arguments.
    """

    flag: str
    why: str
    maker: str


def top_overall(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The highest scores wherever they are, as KVzip does (arXiv 2505.23416): int64 [layers * kv_heads * count], places in
    ``scores.flatten()``, in any order.

    Infinite scores come first, but no head has more than ``count`` of them: what is kept in any case shall not leave others
    without it where the budget is too small for all.

    Args:
        scores: float32 [layers, kv_heads, tokens].
        count: tokens that a head keeps on the average.
    """
    always = scores == float("inf")
    too_many = always & (always.cumsum(dim=-1, dtype=torch.int32) > count)
    ranked = scores.masked_fill(too_many, torch.finfo(scores.dtype).max).flatten()
    return ranked.topk(scores[..., 0].numel() * count, sorted=False).indices


def top_per_head(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` highest scores of each head; arguments and result as :func:`top_overall`'s."""
    layers, heads, tokens = scores.shape
    firsts = torch.arange(layers * heads, device=scores.device).view(layers, heads, 1) * tokens
    return (scores.topk(count, dim=-1).indices + firsts).flatten()


@dataclass(frozen=True)
class LayerKV:
    """One layer's full KV of a context, and the newest queries over it.

    Attributes:
        keys: [tokens, kv_heads, head_dim], in the cache's dtype, rotary embedding applied.
        values: [tokens, kv_heads, head_dim].
        queries: [window, query_heads, head_dim], the queries of the newest tokens, oldest first,
            rotary embedding applied; window is at most :attr:`Compressor.window` and may be 0.
        query_positions: int64 [window], absolute positions of the queries, ascending; some may be missing between.
        scaling: factor on query-key products before softmax.
        layer_id: index of the layer.
        rotary: the rotary embedding that was applied; None where no compressor :attr:`~Compressor.needs_rotary`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    scaling: float
    layer_id: int
    rotary: Rotary | None = None


@dataclass(frozen=True)
class ContextKV:
    """The full KV of a context over all layers, where it lies in SGLang's pool.

    Attributes:
        buffers: the pool's layers (kv_buffers.py).
        slots: int64 [tokens], slots of the context's tokens, in order.
        queries: [layers, window, query_heads, head_dim], as in :class:`LayerKV`.
        query_positions: int64 [window], as in :class:`LayerKV`.
        rotary: as in :class:`LayerKV`.
        prompt: token ids of the request's prompt, which may be longer than the context, or shorter.
        seeds: int32 [tokens], by which a method draws its codes (layouts/rounding.py); None where none does.
    """

    buffers: KVBuffers
    slots: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    rotary: Rotary | None = None
    prompt: Sequence[int] = ()
    seeds: torch.Tensor | None = None

    def layer(self, index: int) -> LayerKV:
        """One layer's KV, gathered."""
        return LayerKV(
            keys=self.buffers.keys[index][self.slots],
            values=self.buffers.values[index][self.slots],
            queries=self.queries[index],
            query_positions=self.query_positions,
            scaling=self.buffers.scaling[index],
            layer_id=self.buffers.layer_ids[index],
            rotary=self.rotary,
        )


class Part(NamedTuple):
    """Tokens ``[start, end)`` of a context, of which each KV head keeps ``count``, at least 1."""

    start: int
    end: int
    count: int


class Compressor(ABC):
    """Says how much each token of a context matters; the copy keeps those that matter most.

    Attributes:
        name: as ``--kv-compressor`` and ``kv_compressor`` of ``meta_info`` name it.
        window: how many of the newest queries :meth:`scores` wants, 0 for none.
        held_bytes: bytes of device memory, outside the KV pool, that it holds.
        needs_rotary: whether it reads :attr:`LayerKV.rotary`; models without a known one are refused then.
        comparable: whether scores of one head compare with those of another, of any layer.
        keeps_all: whether it drops nothing.
        each_round: whether it chooses anew after each verification, by the queries of that.
        every: steps after which it chooses anew, between two steps of a round as well, by the queries of steps; 0: never so soon.
        synchronous: whether it chooses in each layer by the step's own query, for which attention waits; :attr:`every` counts the steps.
        most: tokens that each head keeps, whatever the budget's share; shorter contexts have no copy. 0: the share says how many.
        always_kept: tokens that a method that chooses for steps keeps whatever the queries, of those that each head keeps.
        points: whether copies lead to what it keeps in full KV, instead of holding it (pointers.py).
        reads: the folder without which it knows nothing; None for methods that look at KV and queries as they are made.
        better_uneven: whether more drafts are accepted where heads keep different numbers of tokens (docs/benchmarks.md).
    """

    name: ClassVar[str] = ""
    window: int = 0
    keeps_all: bool = False
    needs_rotary: ClassVar[bool] = False
    comparable: ClassVar[bool] = False
    each_round: bool = False
    every: int = 0
    synchronous: ClassVar[bool] = False
    most: int = 0
    always_kept: int = 0
    points: ClassVar[bool] = False
    reads: ClassVar[RequiredFolder | None] = None
    better_uneven: ClassVar[bool] = False
    held_bytes: int = 0

    @property
    def follows_queries(self) -> bool:
        """Whether it chooses anew before a copy has grown old, so that queries of all tokens are of use."""
        return self.each_round or self.every > 0

    def for_context(self, context: ContextKV) -> "Compressor":
        """Who chooses what a copy of this context keeps: another, where a method knows some contexts only."""
        return self

    @abstractmethod
    def scores(self, layer: LayerKV) -> torch.Tensor:
        """How much each KV head needs each token: float32 [kv_heads, tokens], more for what is kept first.

        Infinity is allowed for what is kept whatever the others score, and :meth:`always` says so.
        """

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores` in all layers: float32 [layers, kv_heads, tokens]; overridden where one kernel for all is faster."""
        found = []
        for index, keys in enumerate(context.buffers.keys):
            found.append(self.scores(context.layer(index)))
            check_scores(self.name, found[-1], (keys.shape[1], len(context.slots)), keys.device)
        return torch.stack(found)

    def checked_scores(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores_all`, for what selects by them.

        Raises:
            ScoresError: they are not as the interface says.
        """
        scores = self.scores_all(context)
        keys = context.buffers.keys
        check_scores(self.name, scores, (len(keys), keys[0].shape[1], len(context.slots)), keys[0].device)
        return scores

    def always(self, context: ContextKV) -> Always:
        """Which tokens score infinity, known before any score is."""
        return Always()

    def cuts(self, context: ContextKV, part: Part) -> list[Part]:
        """``part`` in runs of tokens whose scores compare, each with its share of the count; does not wait for the device."""
        return [part]

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Positions that the heads keep of each part: int64 [layers, kv_heads, its count], ascending.

        Raises:
            ScoresError: as :meth:`checked_scores`.
        """
        scores = self.checked_scores(context)
        return [
            torch.cat([best(scores[..., cut.start : cut.end], cut.count) + cut.start for cut in self.cuts(context, part)], dim=-1)
            for part in parts
        ]

    def select_ragged(self, context: ContextKV, part: Part) -> RaggedSelection:
        """What heads keep of a part that may keep different numbers, on the average its count; does not wait for the device.

        Raises:
            ScoresError: as :meth:`checked_scores`.
        """
        scores = self.checked_scores(context)
        tokens, chosen = scores.shape[-1], []
        for cut in self.cuts(context, part):
            choose = top_overall if self.comparable else top_per_head
            places = choose(scores[..., cut.start : cut.end], cut.count)
            head, token = places // (cut.end - cut.start), places % (cut.end - cut.start)
            chosen.append(head * tokens + token + cut.start)
        return RaggedSelection.of(torch.cat(chosen), scores[..., 0].numel(), tokens)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest scores, ascending: int64 [..., count]."""
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


def kept_count(tokens: int, budget: float, page_size: int) -> int:
    """Tokens that a compressed copy keeps: the budget, rounded up to whole pages, at most all.

    Args:
        tokens: tokens of the context, a multiple of ``page_size``.
        budget: share to keep, in (0, 1].
        page_size: tokens per page.
    """
    pages = -(-int(-(-tokens * budget // 1)) // page_size)
    return min(tokens, max(1, pages) * page_size)


@dataclass(frozen=True)
class KeepAll(Compressor):
    """All tokens are alike: what a quantizer selects that is not told to drop any; with a budget of 1 none is dropped."""

    keeps_all: bool = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Zero for all."""
        tokens, heads = layer.keys.shape[:2]
        return layer.keys.new_zeros(heads, tokens, dtype=torch.float32)

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """The first of each part, without a look at the KV; with a budget of 1 a part's count is all of them."""
        keys = context.buffers.keys
        starts = torch.zeros(len(keys), keys[0].shape[1], 1, dtype=torch.int64, device=keys[0].device)
        return [starts + torch.arange(part.start, part.start + part.count, device=starts.device) for part in parts]


def check_scores(compressor: str, scores: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse what is no float32 tensor of this shape, which ends in [kv_heads, tokens], on this device.

    Raises:
        ScoresError: it is none.
    """
    if isinstance(scores, torch.Tensor) and scores.dtype == torch.float32 and scores.shape == shape and scores.device == device:
        return
    found = f"{scores.dtype} {list(scores.shape)} on {scores.device}" if isinstance(scores, torch.Tensor) else type(scores).__name__
    dimensions = ", ".join(("layers", "kv_heads", "tokens")[-len(shape) :])
    raise ScoresError(
        f"compressor {compressor!r} scored a context with {found}; scores are torch.float32 {list(shape)} [{dimensions}] on {device}: "
        "correct its `scores` or `scores_all` (docs/guides/adding-a-compressor.md)"
    )


@contextmanager
def as_scores_error(compressor: str) -> Iterator[None]:
    """Let what a user's own method raises cost its copies, not the server.

    Raises:
        ScoresError: names the method and what it raised.
    """
    try:
        yield
    except (ScoresError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ScoresError(
            f"compressor {compressor!r} raised {type(error).__name__}: {error}: correct its class (docs/guides/adding-a-compressor.md)"
        ) from error
