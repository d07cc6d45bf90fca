"""Tokens chosen by predicted queries on a GPU, of many requests and layers in few launches (layers/kernels/choose_tokens.py)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import QueryPredictor

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.choose_tokens import Contexts

# Bytes that a choice works in at once, beside those of a request in one layer: more of them need fewer launches.
SCRATCH = 256 << 20

# Queries of some requests in some layers: [requests, layers, query_heads, window, dim], oldest first, rotary embedding applied.
ReadQueries = Callable[[slice, slice], torch.Tensor]


@dataclass(frozen=True)
class GpuChoice:
    """Chooses tokens for predicted queries; nothing waits for the device.

    Attributes:
        predictor: says what the queries will be.
        buffers: the layers of SGLang's KV pool.
        query_heads: of a layer, on this rank.
        rotary: the embedding that was applied to queries and keys; None where queries are joined as they are.
        scratch: bytes that it works in at once, where a request in a layer takes no more.
    """

    predictor: QueryPredictor
    buffers: KVBuffers
    query_heads: int
    rotary: Rotary | None = None
    scratch: int = SCRATCH

    def choose(
        self, contexts: "Contexts", read: ReadQueries, positions: torch.Tensor, ahead: int = 1, most: int = 0, scored: bool = False
    ) -> torch.Tensor | None:
        """Choose in all layers for all requests.

        Args:
            contexts: the requests.
            read: their queries.
            positions: int64 [requests, window], of the queries, ascending.
            ahead: for which token after the newest of them is chosen, from 1.
            most: tokens that are chosen at most, where positions are wanted.
            scored: whether their scores are wanted, too.

        Returns:
            Positions, int32 [layers, requests, kv_heads, most], ascending, of each request as many as it has; with the bits of their scores
            in float32 behind them, [2, ...], where these are wanted; None where pointers were written.
        """
        from sglang_ext.layers.kernels.choose_tokens import choose_tokens

        keys, found, codes = self.buffers.keys, [], self.buffers.codes
        coded = None if codes is None else codes.of_kernels
        _, kv_heads, dim = keys[0].shape
        each = pair_bytes(max(contexts.lengths), self.query_heads, kv_heads, dim, keys[0].itemsize, self.predictor)
        pairs = max(1, self.scratch // each)
        for layers, requests in shares(len(keys), len(contexts.lengths), pairs):
            queries = self.predictor.predict(read(requests, layers), positions[requests], self.rotary, ahead)
            tables = self.buffers.key_table, keys[0], self.buffers.scaling_table
            found.append((layers, requests, choose_tokens(queries, *tables, contexts, layers, requests, most, coded=coded, scored=scored)))
        if contexts.targets is not None:
            return None
        chosen = found[0][2].new_empty(*([2] if scored else []), len(keys), len(contexts.lengths), keys[0].shape[1], most)
        for layers, requests, positions in found:
            chosen[..., layers, requests, :, :] = positions
        return chosen


def pair_bytes(longest: int, query_heads: int, kv_heads: int, dim: int, number_bytes: int, predictor: QueryPredictor) -> int:
    """Bytes that a choice of one request in one layer works in, of a context of so many tokens."""
    from sglang_ext.layers.kernels.choose_tokens import scratch_bytes

    return scratch_bytes(longest, kv_heads, query_heads // kv_heads, number_bytes) + query_heads * predictor.head_bytes(dim)


def shares(layers: int, requests: int, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Layers and requests, in shares of at most so many pairs of one of each: all requests of some layers, or some of a layer."""
    together, each = max(1, pairs // requests), min(requests, pairs)
    for layer in range(0, layers, together):
        for request in range(0, requests, each):
            yield slice(layer, min(layer + together, layers)), slice(request, min(request + each, requests))
