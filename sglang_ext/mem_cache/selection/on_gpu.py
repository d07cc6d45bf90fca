"""Selection by predicted queries on a GPU, for many requests and layers in few launches (layers/kernels/select_tokens.py)."""

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
    from sglang_ext.layers.kernels.select_tokens import MarkedTokens, SelectionContexts

# SCRATCH: bytes in which tokens are selected, if a pair of a layer and a request needs no more, or half of that if two parts exist at once.
# PREDICTING: share of SCRATCH that query prediction takes in addition. More bytes mean fewer launches.
SCRATCH, PREDICTING = 256 << 20, 1 / 2

# Reads queries of some requests in some layers: [requests, layers, query_heads, window, dim], oldest first, rotary embedding applied.
ReadQueryBatch = Callable[[slice, slice], torch.Tensor]


@dataclass
class MarkedPart:
    """Some layers of some requests whose selected tokens are marked.

    Attributes:
        marked: The marked tokens, valid until the next part is requested, or, with ``beside``, until the part after the next.
        there: Event after which ``marked`` is ready on the device; None if the current stream reads it.
        read: Event after which it was read (:meth:`was_read`); None if the current stream read it.
    """

    layers: slice
    requests: slice
    marked: "MarkedTokens | None"
    there: torch.cuda.Event | None
    read: torch.cuda.Event | None = None

    def was_read(self, device: torch.device) -> None:
        """Record that the current stream has read the part after its work so far. Needed if another stream marked it."""
        if self.there is not None:
            self.read = current_event(device)

    def drop(self) -> None:
        """Release the part's memory for others, on the device after it was read."""
        SideStream.wait(self.read)
        self.marked = None


@dataclass(frozen=True)
class GpuSelector:
    """Selects tokens for predicted queries of ``query_heads`` heads of this rank. Nothing waits for the device.

    Attributes:
        rotary: The rotary embedding that was applied to queries and keys; None if queries are joined without unrotating them.
        scratch: As :data:`SCRATCH`.
    """

    predictor: QueryPredictor
    buffers: KVBuffers
    query_heads: int
    rotary: Rotary | None = None
    scratch: int = SCRATCH

    def choose(
        self, contexts: "SelectionContexts", read: ReadQueryBatch, positions: torch.Tensor, ahead: int = 1, most: int = 0
    ) -> torch.Tensor | None:
        """Select tokens in all layers for all requests.

        Args:
            positions: int64 [requests, window], positions of the queries that ``read`` returns, ascending.
            ahead: Which token after the newest query to select for, from 1.
            most: Maximum selected tokens, if positions are wanted.

        Returns:
            Positions, int32 [layers, requests, kv_heads, most], ascending, as many per request as it selects; None if pointers were
            written.
        """
        layers, count, heads = len(self.buffers.keys), len(contexts.lengths), self.buffers.keys[0].shape[1]
        pointing, sizes = contexts.targets is not None, (layers, count, heads, most)
        out = None if pointing else torch.empty(sizes, dtype=torch.int32, device=positions.device)
        for part in self.marked(contexts, read, positions, ahead):
            # Requests are split only if a part has one layer, so that a part's slice of ``out`` is contiguous.
            part.marked.write(None if pointing else out[part.layers, part.requests])
        return out

    def marked(
        self, contexts: "SelectionContexts", read: ReadQueryBatch, positions: torch.Tensor, ahead: int = 1, beside: bool = False
    ) -> Iterator[MarkedPart]:
        """Select as :meth:`choose`, and yield parts as they are marked: some layers of all requests, or some requests of one layer.

        ``beside``: other streams read a part while the current one marks the next. Each part then has at most half of the remaining layers,
        so that the last parts are small. It is yielded after the launch of the next part, so that a CUDA graph continues with that.
        """
        from sglang_ext.layers.kernels.key_scores import layer_major
        from sglang_ext.layers.kernels.select_tokens import mark_tokens, scratch_bytes

        keys, codes = self.buffers.keys, self.buffers.codes
        coded = None if codes is None else codes.of_kernels
        tables = self.buffers.key_table, keys[0], self.buffers.scaling_table
        # Prediction has many small launches. Selection has few large ones and needs more memory per pair: only these are split further.
        _, kv_heads, dim = keys[0].shape
        predicted = _predicted_at_once(self.scratch, self.query_heads * self.predictor.head_bytes(dim))
        each = scratch_bytes(max(contexts.lengths), kv_heads, self.query_heads // kv_heads, keys[0].itemsize)
        at_once = 1 + beside
        pairs, held = max(1, self.scratch // (at_once * each)), deque[MarkedPart]()
        for layers, requests in shares(len(keys), len(contexts.lengths), predicted):
            queries = self.predictor.predict(read(requests, layers), positions[requests], self.rotary, ahead)
            # Kernels need layer-major queries, so that each part is contiguous.
            queries = layer_major(queries if coded else queries.to(keys[0].dtype)).transpose(0, 1)
            for of_layers, of_requests in shares(queries.shape[1], queries.shape[0], pairs, beside):
                if len(held) == at_once:
                    held.popleft().drop()
                where = _subslice(layers, of_layers), _subslice(requests, of_requests)
                marked = mark_tokens(queries[of_requests, of_layers], *tables, contexts, *where, coded)
                held.append(MarkedPart(*where, marked, current_event(positions.device) if beside else None))
                # Drop the local reference: only the part may hold the memory.
                del marked
                if len(held) == at_once:
                    yield held[0]
        if beside:
            yield held[-1]


def planned_bytes(
    pairs: int, longest: int, query_heads: int, kv_heads: int, dim: int, number_bytes: int, predictor: QueryPredictor
) -> int:
    """Largest memory, in bytes, of selections for ``pairs`` pairs of a layer and a request, with contexts of ``longest`` tokens.

    PyTorch caches the memory of predictions in blocks that are too small for selections, so each needs its own memory.
    """
    from sglang_ext.layers.kernels.select_tokens import scratch_bytes

    each = query_heads * predictor.head_bytes(dim)
    predicted = each * min(pairs, _predicted_at_once(SCRATCH, each))
    return predicted + max(SCRATCH, scratch_bytes(longest, kv_heads, query_heads // kv_heads, number_bytes))


def shares(layers: int, requests: int, pairs: int, finer: bool = False) -> Iterator[tuple[slice, slice]]:
    """Split layers and requests into parts of at most ``pairs`` pairs: all requests of some layers, or some requests of one layer.

    With ``finer``, a part has at most half of the remaining layers.
    """
    layer, each = 0, min(requests, pairs)
    while layer < layers:
        left = layers - layer
        end = layer + min(max(1, pairs // requests), -(-left // 2) if finer else left)
        for request in range(0, requests, each):
            yield slice(layer, end), slice(request, min(request + each, requests))
        layer = end


def _subslice(outer: slice, inner: slice) -> slice:
    """The slice ``inner`` of ``outer``, in the indices of ``outer``."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


def _predicted_at_once(scratch: int, each: int) -> int:
    """Number of pairs of a layer and a request whose queries are predicted together, if each takes ``each`` bytes."""
    return max(1, int(PREDICTING * scratch) // each)
