"""The compressor interface: what a method reads of the full KV and what it returns.

A compressor reads one layer's KV of a context and scores how much each KV head needs each token. Heads keep the same number of tokens,
at positions that differ by head: slot ``j`` of the compressed KV has the ``j``-th kept token of each head. Or heads share one budget and
keep different numbers of tokens (ragged_heads.py). SGLang applies the rotary embedding before caching, so a kept token needs no new
position (VeriCache, section 6).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
    from sglang_ext.mem_cache.compressed.rotary import Rotary


class ScoresError(Exception):
    """Scores that cannot be used for a selection, or a user's method that raised. Its method then creates no compressed KV any more."""


class Always(NamedTuple):
    """Numbers of a context's first and newest tokens that have infinite scores in all heads."""

    first: int = 0
    newest: int = 0

    def among(self, start: int, end: int, tokens: int) -> int:
        """How many of the positions ``[start, end)`` of a context of ``tokens`` tokens have infinite scores."""
        sinks, window = min(self.first, tokens), max(self.first, tokens - self.newest)
        return max(0, min(end, sinks) - start) + max(0, end - max(start, window))


class RequiredFolder(NamedTuple):
    """A folder that a compressor reads: the flag that names it, why the method needs it, and the module that writes it, with arguments."""

    flag: str
    why: str
    maker: str


def _top_overall(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the highest scores over all layers and heads, ``count`` per head on average, as KVzip selects (arXiv 2505.23416)."""
    # Infinite scores come first, but at most `count` per head. Otherwise heads could lack always-kept tokens if the budget is too small for all.
    always = scores == float("inf")
    too_many = always & (always.cumsum(dim=-1, dtype=torch.int32) > count)
    ranked = scores.masked_fill(too_many, torch.finfo(scores.dtype).max).flatten()
    return ranked.topk(scores[..., 0].numel() * count, sorted=False).indices


def _top_per_head(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest scores of each head."""
    layers, heads, tokens = scores.shape
    firsts = torch.arange(layers * heads, device=scores.device).view(layers, heads, 1) * tokens
    return (scores.topk(count, dim=-1).indices + firsts).flatten()


@dataclass(frozen=True)
class LayerKV:
    """One layer's full KV of a context, and the newest queries.

    Attributes:
        keys: [tokens, kv_heads, head_dim], in the cache's dtype, rotary embedding applied.
        values: [tokens, kv_heads, head_dim].
        queries: [window, query_heads, head_dim], queries of the newest tokens, oldest first, rotary embedding applied. The window is
            at most :attr:`Compressor.window` and may be 0.
        query_positions: int64 [window], absolute positions of the queries, ascending, possibly with gaps.
        scaling: Factor on query-key products before softmax.
        layer_id: Index of the layer.
        rotary: The rotary embedding that was applied; None if no compressor :attr:`~Compressor.needs_rotary`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    scaling: float
    layer_id: int
    rotary: "Rotary | None" = None


@dataclass(frozen=True)
class ContextKV:
    """The full KV of a context over all layers, in SGLang's pool.

    Attributes:
        buffers: The pool's layers (kv_buffers.py).
        slots: int64 [tokens], slots of the context's tokens, in order.
        queries: [layers, window, query_heads, head_dim], as in :class:`LayerKV`.
        query_positions: int64 [window], as in :class:`LayerKV`.
        rotary: As in :class:`LayerKV`.
        prompt: Prompt token ids of the request. The prompt may be longer or shorter than the context.
        seeds: int32 [tokens], rounding seeds of a stochastic method (layouts/block_layout.py); None if no method needs them.
    """

    buffers: "KVBuffers"
    slots: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    rotary: "Rotary | None" = None
    prompt: Sequence[int] = ()
    seeds: torch.Tensor | None = None

    def layer(self, index: int) -> LayerKV:
        """One layer's KV, gathered from the pool."""
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


class RaggedSelection(NamedTuple):
    """The tokens that all heads keep of a context: positions, int64 [cells], ascending within a head.

    ``bounds`` is int32 [layers * kv_heads + 1]. Head ``i = layer * kv_heads + head`` has cells ``[bounds[i], bounds[i + 1])``.
    """

    tokens: torch.Tensor
    bounds: torch.Tensor


class Compressor(ABC):
    """Scores how much each token of a context matters. Compressed KV keeps the highest scores.

    Example::

        @register("key-norm")
        class KeyNorm(Compressor):
            def scores(self, layer):
                return -layer.keys.float().norm(dim=-1).T

    Attributes:
        name: Name in ``--kv-compressor`` and in ``kv_compressor`` of ``meta_info``.
        window: Number of newest queries that :meth:`scores` needs; 0 for none.
        held_bytes: Bytes of device memory that it holds outside the KV pool.
        needs_rotary: Whether it reads :attr:`LayerKV.rotary`. Models without a known one are then refused.
        comparable: Whether scores of one head compare with those of other heads, in all layers.
        keeps_all: Whether it drops nothing.
        each_round: Whether it selects again after each verification, by the verification's queries.
        every: Selection interval in steps: it also selects between steps of a round, by the steps' queries. 0 for none.
        synchronous: Whether each layer selects by the step's own query, while attention waits. :attr:`every` counts the steps.
        in_attention: Whether attention itself selects (compressed/layouts/pointers.py).
        most: Maximum tokens that each head keeps. Shorter contexts are not compressed. 0: the budget decides.
        always_kept: Of a method with step queries: number of kept tokens of each head that do not depend on queries.
        points: Whether compressed KV points to the kept tokens in full KV instead of storing them (pointers.py).
        reads: The folder that it needs; None for methods that only read KV and queries.
        better_uneven: Whether the acceptance rate is higher if heads keep different numbers of tokens (docs/benchmarks.md).
    """

    name: ClassVar[str] = ""
    window: int = 0
    keeps_all: bool = False
    needs_rotary: ClassVar[bool] = False
    comparable: ClassVar[bool] = False
    each_round: bool = False
    every: int = 0
    synchronous: ClassVar[bool] = False
    in_attention: bool = False
    most: int = 0
    always_kept: int = 0
    points: ClassVar[bool] = False
    reads: ClassVar[RequiredFolder | None] = None
    better_uneven: ClassVar[bool] = False
    held_bytes: int = 0

    @property
    def follows_queries(self) -> bool:
        """Whether it selects again while the compressed KV is in use, so that queries of all tokens are useful."""
        return self.each_round or self.every > 0

    def for_context(self, context: ContextKV) -> "Compressor":
        """The compressor that selects for this context: another one if this method supports only some contexts."""
        return self

    @abstractmethod
    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Scores of one layer: float32 [kv_heads, tokens]. Higher scores are kept first.

        Infinity is allowed for tokens that are always kept. :meth:`always` must then declare them.
        """

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores` of all layers: float32 [layers, kv_heads, tokens]. Override it if one kernel for all layers is faster."""
        found = []
        for index, keys in enumerate(context.buffers.keys):
            found.append(self.scores(context.layer(index)))
            _check_scores(self.name, found[-1], (keys.shape[1], len(context.slots)), keys.device)
        return torch.stack(found)

    def _checked_scores(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores_all`, checked."""
        scores = self.scores_all(context)
        keys = context.buffers.keys
        _check_scores(self.name, scores, (len(keys), keys[0].shape[1], len(context.slots)), keys[0].device)
        return scores

    def always(self, context: ContextKV) -> Always:
        """Tokens with infinite scores, known before the scores are computed."""
        return Always()

    def cuts(self, context: ContextKV, part: Part) -> list[Part]:
        """Split ``part`` into runs of tokens with comparable scores, each with its share of the count. Does not wait for the device."""
        return [part]

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Positions that the heads keep of each part: int64 [layers, kv_heads, part.count], ascending.

        Raises:
            ScoresError: The scores break the interface's contract.
        """
        scores = self._checked_scores(context)
        return [
            torch.cat([top_positions(scores[..., cut.start : cut.end], cut.count) + cut.start for cut in self.cuts(context, part)], dim=-1)
            for part in parts
        ]

    def select_ragged(self, context: ContextKV, part: Part) -> RaggedSelection:
        """Tokens kept of a part by heads that may keep different numbers, on average its count. Does not wait for the device.

        Raises:
            ScoresError: The scores break the interface's contract.
        """
        scores = self._checked_scores(context)
        tokens, chosen = scores.shape[-1], []
        for cut in self.cuts(context, part):
            choose = _top_overall if self.comparable else _top_per_head
            places = choose(scores[..., cut.start : cut.end], cut.count)
            head, token = places // (cut.end - cut.start), places % (cut.end - cut.start)
            chosen.append(head * tokens + token + cut.start)
        # By head: head * tokens + position.
        kept = torch.cat(chosen).sort().values
        firsts = torch.arange(scores[..., 0].numel() + 1, device=kept.device) * tokens
        return RaggedSelection(kept % tokens, torch.searchsorted(kept, firsts, out_int32=True))


def top_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest scores, ascending: int64 [..., count]."""
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


def kept_count(tokens: int, budget: float, page_size: int) -> int:
    """Tokens that compressed KV keeps of ``tokens``: a share ``budget``, in (0, 1], rounded up to whole pages, at most all."""
    pages = -(-int(-(-tokens * budget // 1)) // page_size)
    return min(tokens, max(1, pages) * page_size)


@dataclass(frozen=True)
class KeepAll(Compressor):
    """Scores all tokens alike. The default selection of a quantizer; with a budget of 1 it drops none."""

    keeps_all: bool = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        tokens, heads = layer.keys.shape[:2]
        return layer.keys.new_zeros(heads, tokens, dtype=torch.float32)

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """The first tokens of each part, without reading the KV. With a budget of 1, a part's count is all its tokens."""
        keys = context.buffers.keys
        starts = torch.zeros(len(keys), keys[0].shape[1], 1, dtype=torch.int64, device=keys[0].device)
        return [starts + torch.arange(part.start, part.start + part.count, device=starts.device) for part in parts]


def _check_scores(compressor: str, scores: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Check that ``scores`` is a float32 tensor of this shape, which ends in [kv_heads, tokens], on this device."""
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
    """Turn exceptions from a user's method into :class:`ScoresError`: they cost the method its compressed KV, not the server."""
    try:
        yield
    except (ScoresError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ScoresError(
            f"compressor {compressor!r} raised {type(error).__name__}: {error}: correct its class (docs/guides/adding-a-compressor.md)"
        ) from error
