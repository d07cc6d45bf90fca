"""Expected attention (Devoto et al. 2025, arXiv 2510.00636): keep the tokens that future queries will attend to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.device import tf32_matmuls
from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.compressors.contracts.registry import register


@register("expected-attention")
@dataclass(frozen=True)
class ExpectedAttention(Compressor):
    """Score each key by the expected attention of future queries, times the norm of its value.

    Queries before rotary embedding are modelled as Gaussian, with mean ``m`` and covariance ``C`` of the newest queries. ``R`` is the
    mean of the rotations of future positions. Rotated queries then have mean ``R m`` and covariance ``R C R^T``. The expected exponential
    of a key's logit is ``exp(k R m / sqrt(d) + k R C R^T k / 2 d)``. It is normalized over the keys (softmax), averaged over the query
    heads of a KV head, and multiplied by the value's norm.

    Attributes:
        window: Newest queries from which mean and covariance are computed.
        coming: Number of future positions over which rotations are averaged.
        sinks: First tokens, always kept. Their keys and queries are excluded from the computation.
        covariance: Whether the second term is included.
        value_norm: Whether norms of values are included.
        epsilon: Added to the attention before the multiplication with the norm.
        block: Keys that are processed together. It bounds the memory.
    """

    window: int = 128
    coming: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    block: int = 16384
    needs_rotary: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        """The first tokens."""
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Expected attention times norm of value: float32 [kv_heads, tokens], infinite for the first tokens.

        Without any query, newer tokens have higher scores.
        """
        tokens, kv_heads, _ = layer.keys.shape
        if len(layer.queries):
            scores = torch.cat(list(self._attention_logits(layer)), dim=-1)[..., self.sinks :].softmax(dim=-1).mean(dim=1)
            if self.value_norm:
                norms = torch.linalg.vector_norm(layer.values[self.sinks :], dim=-1, dtype=torch.float32)
                scores = (scores + self.epsilon) * norms.t()
        else:
            scores = torch.arange(tokens - self.sinks, device=layer.keys.device).float().expand(kv_heads, -1)
        return torch.nn.functional.pad(scores, (self.sinks, 0), value=float("inf"))

    def _attention_logits(self, layer: LayerKV) -> Iterator[torch.Tensor]:
        """Yield logarithms of the expected exponentials, by blocks of keys: float32 [kv_heads, group, keys of the block]."""
        tokens, kv_heads, dim = layer.keys.shape
        mean, covariance = self._coming_queries(layer)
        mean = mean.view(kv_heads, -1, dim) * layer.scaling
        covariance = covariance.view(kv_heads, -1, dim, dim) * (layer.scaling**2 / 2)
        for begin in range(0, tokens, self.block):
            keys = layer.keys[begin : begin + self.block].float().transpose(0, 1)
            logits = mean @ keys.transpose(1, 2)
            if self.covariance:
                # TF32 suffices: keys have no more bits, and the covariance is an estimate from few queries.
                with tf32_matmuls(keys.device):
                    for member in range(covariance.shape[1]):
                        logits[:, member] += ((keys @ covariance[:, member]) * keys).sum(dim=-1)
            yield logits

    def _coming_queries(self, layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean, float32 [query_heads, dim], and covariance, [query_heads, dim, dim], of the queries at future positions."""
        queries = layer.rotary.unrotated(layer.queries.float(), layer.query_positions)
        weights = (layer.query_positions >= self.sinks).float()
        weights = weights / weights.sum()
        mean = torch.einsum("w,whd->hd", weights, queries)
        centered = queries - mean
        covariance = torch.einsum("w,whd,whe->hde", weights, centered, centered)
        rotation = layer.rotary.mean_rotation(len(layer.keys), self.coming, queries.shape[-1])
        return mean @ rotation.t(), rotation @ covariance @ rotation.t()
