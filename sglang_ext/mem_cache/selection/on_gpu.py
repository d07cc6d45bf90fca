"""Tokens chosen by predicted queries on a GPU, of many requests and layers in few launches (layers/kernels/select_tokens.py)."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.device import SideStream, current_event
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import QueryPredictor

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.select_tokens import SelectionContexts, MarkedTokens

# Bytes in which tokens are chosen, where a pair of a layer and a request takes no more, or half of them where two parts are there at once,
# and share of them that predicting queries takes beside them: more of them need fewer launches.
SCRATCH, PREDICTING = 256 << 20, 1 / 2

# Queries of some requests in some layers: [requests, layers, query_heads, window, dim], oldest first, rotary embedding applied.
ReadQueryBatch = Callable[[slice, slice], torch.Tensor]


@dataclass
class MarkedPart:
    """Some layers of some requests, in which tokens are marked.

    Attributes:
        layers, requests: which.
        marked: what, until the next part is asked for, or, where parts are read beside each other, the one after that.
        there: when it is, on the device; None where the current stream reads it.
        read: when it was read (:meth:`was_read`); None where the current stream did.
    """

    layers: slice
    requests: slice
    marked: "MarkedTokens | None"
    there: torch.cuda.Event | None
    read: torch.cuda.Event | None = None

    def was_read(self, device: torch.device) -> None:
        """The current stream has read it, once it has done what it was given so far: where that is another one than the one that marks, this
        has to be said."""
        if self.there is not None:
            self.read = current_event(device)

    def drop(self) -> None:
        """Its memory is another one's from now on, on the device once it was read."""
        SideStream.wait(self.read)
        self.marked = None


@dataclass(frozen=True)
class GpuSelector:
    """Chooses tokens for predicted queries; nothing waits for the device.

    Attributes:
        predictor: says what the queries will be.
        buffers: the layers of SGLang's KV pool.
        query_heads: of a layer, on this rank.
        rotary: the embedding that was applied to queries and keys; None where queries are joined as they are.
        scratch: as :data:`SCRATCH`.
    """

    predictor: QueryPredictor
    buffers: KVBuffers
    query_heads: int
    rotary: Rotary | None = None
    scratch: int = SCRATCH

    def choose(
        self, contexts: "SelectionContexts", read: ReadQueryBatch, positions: torch.Tensor, ahead: int = 1, most: int = 0
    ) -> torch.Tensor | None:
        """Choose in all layers for all requests.

        Args:
            contexts: the requests.
            read: their queries.
            positions: int64 [requests, window], of the queries, ascending.
            ahead: for which token after the newest of them is chosen, from 1.
            most: tokens that are chosen at most, where positions are wanted.

        Returns:
            Positions, int32 [layers, requests, kv_heads, most], ascending, of each request as many as it has; None where pointers were
            written.
        """
        layers, count, heads = len(self.buffers.keys), len(contexts.lengths), self.buffers.keys[0].shape[1]
        pointing, sizes = contexts.targets is not None, (layers, count, heads, most)
        out = None if pointing else torch.empty(sizes, dtype=torch.int32, device=positions.device)
        for part in self.marked(contexts, read, positions, ahead):
            # Requests are cut where a part has one layer: what they have of it is of one piece.
            part.marked.write(None if pointing else out[part.layers, part.requests])
        return out

    def marked(
        self, contexts: "SelectionContexts", read: ReadQueryBatch, positions: torch.Tensor, ahead: int = 1, beside: bool = False
    ) -> Iterator[MarkedPart]:
        """As :meth:`choose`, by parts as these are marked: some layers of all requests, or of some of one layer.

        Args:
            contexts, read, positions, ahead: as there.
            beside: whether other streams read a part while the current one marks the next: each has half of the layers that are left at most
                then, so that the last ones are small, and is told once the next one was launched, so that a CUDA graph goes on with that.
        """
        from sglang_ext.layers.kernels.select_tokens import mark_tokens, scratch_bytes
        from sglang_ext.layers.kernels.selection.exact_logits import layer_major

        keys, codes = self.buffers.keys, self.buffers.codes
        coded = None if codes is None else codes.of_kernels
        tables = self.buffers.key_table, keys[0], self.buffers.scaling_table
        # Many small launches predict queries, few large ones choose by them and take more memory for each pair: these alone are cut finer.
        _, kv_heads, dim = keys[0].shape
        predicted = _predicted_at_once(self.scratch, predicting_bytes(self.query_heads, dim, self.predictor))
        each = scratch_bytes(max(contexts.lengths), kv_heads, self.query_heads // kv_heads, keys[0].itemsize)
        at_once = 1 + beside
        pairs, held = max(1, self.scratch // (at_once * each)), deque[MarkedPart]()
        for layers, requests in shares(len(keys), len(contexts.lengths), predicted):
            queries = self.predictor.predict(read(requests, layers), positions[requests], self.rotary, ahead)
            # As kernels take them, of which each part is contiguous.
            queries = layer_major(queries if coded else queries.to(keys[0].dtype)).transpose(0, 1)
            for of_layers, of_requests in shares(queries.shape[1], queries.shape[0], pairs, beside):
                if len(held) == at_once:
                    held.popleft().drop()
                where = _within(layers, of_layers), _within(requests, of_requests)
                marked = mark_tokens(queries[of_requests, of_layers], *tables, contexts, *where, coded)
                held.append(MarkedPart(*where, marked, current_event(positions.device) if beside else None))
                # Held by nothing else.
                del marked
                if len(held) == at_once:
                    yield held[0]
        if beside:
            yield held[-1]


def predicting_bytes(query_heads: int, dim: int, predictor: QueryPredictor) -> int:
    """Bytes in which the queries of one request in one layer are predicted, themselves among them."""
    return query_heads * predictor.head_bytes(dim)


def planned_bytes(
    pairs: int, longest: int, query_heads: int, kv_heads: int, dim: int, number_bytes: int, predictor: QueryPredictor
) -> int:
    """Bytes that choices for so many pairs of a layer and a request work in at most, of contexts of so many tokens.

    PyTorch keeps what predictions took, in parts that are too small for what chooses: each has its own.
    """
    from sglang_ext.layers.kernels.select_tokens import scratch_bytes

    each = predicting_bytes(query_heads, dim, predictor)
    predicted = each * min(pairs, _predicted_at_once(SCRATCH, each))
    return predicted + max(SCRATCH, scratch_bytes(longest, kv_heads, query_heads // kv_heads, number_bytes))


def shares(layers: int, requests: int, pairs: int, finer: bool = False) -> Iterator[tuple[slice, slice]]:
    """Layers and requests, in shares of at most so many pairs of one of each: all requests of some layers, or some of a layer; ``finer``:
    of no more than half of the layers that are left."""
    layer, each = 0, min(requests, pairs)
    while layer < layers:
        left = layers - layer
        end = layer + min(max(1, pairs // requests), -(-left // 2) if finer else left)
        for request in range(0, requests, each):
            yield slice(layer, end), slice(request, min(request + each, requests))
        layer = end


def _within(outer: slice, inner: slice) -> slice:
    """Of what ``outer`` has, the part that ``inner`` counts from its first on."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


def _predicted_at_once(scratch: int, each: int) -> int:
    """Pairs of a layer and a request whose queries are predicted in one go, where that of a pair takes ``each`` bytes."""
    return max(1, int(PREDICTING * scratch) // each)
