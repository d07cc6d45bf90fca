"""Methods that score tokens by attention during serving, without files: SnapKV, expected attention, verify-guided; and sinks with recent ones."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.device import tf32_matmuls
from sglang_ext.mem_cache.compressors.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.compressors.registry import register
from sglang_ext.mem_cache.selection.scoring import mark_always


@dataclass(frozen=True)
class WindowAttention(Compressor):
    """Scores tokens by the mean attention of the newest queries, the window: on a GPU by one kernel over all layers."""

    window: int = 32

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        attention = _window_attention_all(context)
        return super().scores_all(context) if attention is None else self.scores_of(attention, context.queries.shape[1])

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Importance of each token: float32 [kv_heads, tokens]. Without any query, newer tokens have higher scores."""
        return self.scores_of(_window_attention(layer), len(layer.queries))

    @abstractmethod
    def scores_of(self, attention: torch.Tensor, window: int) -> torch.Tensor:
        """Scores, shaped as ``attention``, float32 [..., tokens], which is the mean over ``window`` queries."""


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(WindowAttention):
    """SnapKV (Li et al. 2024, arXiv 2404.14469): score each key by the attention of an observation window, and pool the scores.

    Scores are the window's mean attention, average-pooled over neighbouring tokens so that kept tokens include their surroundings, then
    averaged over the query heads of a KV head. The window itself, the newest tokens, is always kept.

    Attributes:
        kernel: Width of the average pooling, odd, in tokens.
    """

    kernel: int = 5
    comparable: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        return Always(newest=context.queries.shape[1])

    def scores_of(self, attention: torch.Tensor, window: int) -> torch.Tensor:
        """Pooled attention, infinite inside the window."""
        if not window:
            return attention
        tokens = attention.shape[-1]
        observed = torch.arange(tokens, device=attention.device) >= tokens - window
        # The window's attention to itself is excluded: it must not raise the scores of tokens just before it.
        flat = attention.masked_fill(observed, 0.0).reshape(-1, 1, tokens)
        pooled = torch.nn.functional.avg_pool1d(flat, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.view_as(attention).masked_fill(observed, float("inf"))


@register("verify-guided")
@dataclass(frozen=True)
class VerifyGuided(WindowAttention):
    """Score each key, of prompt and output alike, by the mean attention of the last verified tokens' queries.

    The idea is that of SparseSpec's PillarAttn (Zhao et al. 2025, arXiv 2512.01278) and of Vegas (Yue et al. 2026, arXiv 2602.07223).
    A verification reads full KV anyway, and new tokens attend to many of the tokens that the previous ones attended to. The mean is over
    the window and the query heads of a KV head. Scores are not pooled over neighbours as SnapKV's are: the needs of the next few tokens
    are known better than those of a whole output. The newest tokens, ``recent``, are always kept.
    """

    recent: int = 32
    each_round: ClassVar[bool] = True
    points: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        return Always(newest=self.recent)

    def scores_of(self, attention: torch.Tensor, window: int) -> torch.Tensor:
        """The attention, infinite for the newest tokens."""
        return mark_always(attention, 0, self.recent)


@register("expected-attention")
@dataclass(frozen=True)
class ExpectedAttention(Compressor):
    """Score each key by the expected attention of future queries, times the norm of its value (Devoto et al. 2025, arXiv 2510.00636).

    Queries before rotary embedding are modelled as Gaussian, with mean ``m`` and covariance ``C`` of the newest queries. ``R`` is the
    mean of the rotations of future positions. Rotated queries then have mean ``R m`` and covariance ``R C R^T``. The expected exponential
    of a key's logit is ``exp(k R m / sqrt(d) + k R C R^T k / 2 d)``. It is normalized over the keys (softmax), averaged over the query
    heads of a KV head, and multiplied by the value's norm.

    Attributes:
        window: Newest queries from which mean and covariance are computed.
        coming: Number of future positions over which rotations are averaged.
        sinks: First tokens, always kept. Their keys and queries are excluded from the computation.
        block: Keys that are processed together. It bounds the memory.
    """

    window: int = 128
    coming: int = 512
    sinks: int = 4
    block: int = 16384
    needs_rotary: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Expected attention times norm of value: float32 [kv_heads, tokens], infinite for the first tokens.

        Without any query, newer tokens have higher scores.
        """
        tokens, kv_heads, _ = layer.keys.shape
        if len(layer.queries):
            scores = torch.cat(list(self._attention_logits(layer)), dim=-1)[..., self.sinks :].softmax(dim=-1).mean(dim=1)
            scores = scores * torch.linalg.vector_norm(layer.values[self.sinks :], dim=-1, dtype=torch.float32).t()
        else:
            scores = torch.arange(tokens - self.sinks, device=layer.keys.device).float().expand(kv_heads, -1)
        return torch.nn.functional.pad(scores, (self.sinks, 0), value=float("inf"))

    def _attention_logits(self, layer: LayerKV) -> Iterator[torch.Tensor]:
        """Yield logarithms of the expected exponentials by blocks of keys: float32 [kv_heads, group, keys of the block]."""
        tokens, kv_heads, dim = layer.keys.shape
        mean, covariance = self._coming_queries(layer)
        mean = mean.view(kv_heads, -1, dim) * layer.scaling
        covariance = covariance.view(kv_heads, -1, dim, dim) * (layer.scaling**2 / 2)
        for begin in range(0, tokens, self.block):
            keys = layer.keys[begin : begin + self.block].float().transpose(0, 1)
            logits = mean @ keys.transpose(1, 2)
            # TF32 suffices: keys have no more bits, and the covariance is an estimate from few queries.
            with tf32_matmuls(keys.device):
                for member in range(covariance.shape[1]):
                    logits[:, member] += ((keys @ covariance[:, member]) * keys).sum(dim=-1)
            yield logits

    def _coming_queries(self, layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean, float32 [query_heads, dim], and covariance, [query_heads, dim, dim], of the queries at future positions."""
        queries = layer.rotary.unrotate(layer.queries.float(), layer.query_positions)
        weights = (layer.query_positions >= self.sinks).float()
        weights = weights / weights.sum()
        mean = torch.einsum("w,whd->hd", weights, queries)
        centered = queries - mean
        covariance = torch.einsum("w,whd,whe->hde", weights, centered, centered)
        rotation = layer.rotary.mean_rotation(len(layer.keys), self.coming, queries.shape[-1])
        return mean @ rotation.t(), rotation @ covariance @ rotation.t()


@register("sink-recent")
@dataclass(frozen=True)
class SinkRecent(Compressor):
    """Keep the first tokens, which absorb attention, and the newest ones (StreamingLLM, Xiao et al. 2024, arXiv 2309.17453)."""

    sinks: int = 4

    def always(self, context: ContextKV) -> Always:
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """The position, equal for all heads; infinite for the first tokens."""
        tokens, heads = layer.keys.shape[:2]
        scores = torch.arange(tokens, dtype=torch.float32, device=layer.keys.device)
        scores[: self.sinks] = float("inf")
        return scores.expand(heads, -1)


def _window_attention(layer: LayerKV) -> torch.Tensor:
    """Mean attention over the queries and the query heads of a KV head: float32 [kv_heads, tokens]; positions if there is no query."""
    tokens, kv_heads, dim = layer.keys.shape
    window, query_heads = layer.queries.shape[:2]
    positions = torch.arange(tokens, device=layer.keys.device)
    if window == 0:
        return positions.float().expand(kv_heads, -1)
    queries = layer.queries.float().view(window, kv_heads, query_heads // kv_heads, dim)
    logits = torch.einsum("whgd,thd->hgwt", queries, layer.keys.float()) * layer.scaling
    hidden = positions[None, :] > layer.query_positions[:, None]
    return logits.masked_fill(hidden, float("-inf")).softmax(dim=-1).mean(dim=-2).mean(dim=1)


def _window_attention_all(context: ContextKV) -> torch.Tensor | None:
    """The same of all layers at once, on a GPU: float32 [layers, kv_heads, tokens]; None if no kernel supports it."""
    buffers = context.buffers
    if not buffers.on_gpu or context.queries.shape[1] == 0 or len(set(buffers.scaling)) > 1:
        return None
    from sglang_ext.layers.kernels.key_scores import window_scores

    place = buffers.key_table, buffers.keys[0], context.slots
    return window_scores(context.queries, *place, context.query_positions, buffers.scaling[0])
