"""Tokens chosen by predicted queries on a GPU, of many requests and layers in few launches (layers/kernels/choose_tokens.py)."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.device import Finishing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import QueryPredictor

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.choose_tokens import Contexts, Marked

# Bytes in which tokens are chosen, where a pair of a layer and a request takes no more, and share of them that predicting queries takes
# beside them: more of them need fewer launches.
SCRATCH, PREDICTING = 256 << 20, 1 / 2

# Queries of some requests in some layers: [requests, layers, query_heads, window, dim], oldest first, rotary embedding applied.
ReadQueries = Callable[[slice, slice], torch.Tensor]


class Part(NamedTuple):
    """What was chosen in some layers.

    Attributes:
        layers: which.
        chosen: as :meth:`GpuChoice.in_parts` has it, of these layers; None where pointers were written.
        there: when it is, on the device; None where the current stream chose.
    """

    layers: slice
    chosen: torch.Tensor | None
    there: torch.cuda.Event | None


@dataclass(frozen=True)
class GpuChoice:
    """Chooses tokens for predicted queries; nothing waits for the device.

    Attributes:
        predictor: says what the queries will be.
        buffers: the layers of SGLang's KV pool.
        query_heads: of a layer, on this rank.
        rotary: the embedding that was applied to queries and keys; None where queries are joined as they are.
        scratch: as :data:`SCRATCH`, for each part that is not finished (device.py:Finishing).
    """

    predictor: QueryPredictor
    buffers: KVBuffers
    query_heads: int
    rotary: Rotary | None = None
    scratch: int = SCRATCH

    def choose(
        self, contexts: "Contexts", read: ReadQueries, positions: torch.Tensor, ahead: int = 1, most: int = 0
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
        parts = list(self.in_parts(contexts, read, positions, ahead, most))
        if contexts.targets is not None:
            return None
        return parts[0].chosen if len(parts) == 1 else torch.cat([part.chosen for part in parts])

    def in_parts(
        self,
        contexts: "Contexts",
        read: ReadQueries,
        positions: torch.Tensor,
        ahead: int = 1,
        most: int = 0,
        scored: bool = False,
        finishing: Finishing | None = None,
        finer: bool = False,
    ) -> Iterator[Part]:
        """As :meth:`choose`, by layers as these are chosen.

        Args:
            contexts, read, positions, ahead, most: as there.
            scored: whether scores of what is chosen are wanted, too: their bits in float32 are behind the positions then, [2, ...].
            finishing: writes down what the current stream marks, part by part; None for the same.
            finer: whether each part has a third of the layers that are left at most, so that the last ones are small.
        """
        from sglang_ext.layers.kernels.choose_tokens import mark_tokens, scratch_bytes
        from sglang_ext.layers.kernels.choosing.exact_logits import by_layers

        keys, codes, count = self.buffers.keys, self.buffers.codes, len(contexts.lengths)
        coded, finishing = None if codes is None else codes.of_kernels, finishing or Finishing()
        tables = self.buffers.key_table, keys[0], self.buffers.scaling_table
        # Many small launches predict queries, few large ones choose by them and take more memory for each pair: these alone are cut finer.
        _, kv_heads, dim = keys[0].shape
        predicted = _predicted_at_once(self.scratch, predicting_bytes(self.query_heads, dim, self.predictor))
        each = scratch_bytes(max(contexts.lengths), kv_heads, self.query_heads // kv_heads, keys[0].itemsize)
        pairs, found = max(1, self.scratch // each), []
        begun: deque[tuple[slice, slice, Marked, torch.cuda.Event | None]] = deque()

        def finished(more: int) -> Iterator[Part]:
            """Finish what has begun, but for so many parts."""
            while len(begun) > more:
                of_layers, of_requests, marked, moment = begun.popleft()
                # Where requests are cut, they are of one layer.
                last = of_requests.stop == count
                with finishing.part(moment, (marked, *found)):
                    found.append(marked.written(most, scored))
                    whole = torch.cat(found, -3) if last and len(found) > 1 and found[0] is not None else found[0]
                if last:
                    found.clear()
                    yield Part(of_layers, whole, finishing.last)

        for layers, requests in shares(len(keys), count, predicted):
            queries = self.predictor.predict(read(requests, layers), positions[requests], self.rotary, ahead)
            # As kernels take them, of which each part is contiguous.
            queries = by_layers(queries if coded else queries.to(keys[0].dtype)).transpose(0, 1)
            for of_layers, of_requests in shares(queries.shape[1], queries.shape[0], pairs, finer):
                where = _within(layers, of_layers), _within(requests, of_requests)
                finishing.make_room(len(begun))
                # Held by nothing else: memory of the part before is taken again.
                begun.append((*where, mark_tokens(queries[of_requests, of_layers], *tables, contexts, *where, coded), finishing.moment()))
                yield from finished(finishing.parts - 1)
        yield from finished(0)


def predicting_bytes(query_heads: int, dim: int, predictor: QueryPredictor) -> int:
    """Bytes in which the queries of one request in one layer are predicted, themselves among them."""
    return query_heads * predictor.head_bytes(dim)


def planned_bytes(
    pairs: int, longest: int, query_heads: int, kv_heads: int, dim: int, number_bytes: int, predictor: QueryPredictor
) -> int:
    """Bytes that choices for so many pairs of a layer and a request work in at most, of contexts of so many tokens.

    PyTorch keeps what predictions took, in parts that are too small for what chooses: each has its own.
    """
    from sglang_ext.layers.kernels.choose_tokens import scratch_bytes

    each = predicting_bytes(query_heads, dim, predictor)
    predicted = each * min(pairs, _predicted_at_once(SCRATCH, each))
    return predicted + max(SCRATCH, scratch_bytes(longest, kv_heads, query_heads // kv_heads, number_bytes))


def shares(layers: int, requests: int, pairs: int, finer: bool = False) -> Iterator[tuple[slice, slice]]:
    """Layers and requests, in shares of at most so many pairs of one of each: all requests of some layers, or some of a layer; ``finer``:
    of no more than a third of the layers that are left."""
    layer, each = 0, min(requests, pairs)
    while layer < layers:
        left = layers - layer
        end = layer + min(max(1, pairs // requests), -(-left // 3) if finer else left)
        for request in range(0, requests, each):
            yield slice(layer, end), slice(request, min(request + each, requests))
        layer = end


def _within(outer: slice, inner: slice) -> slice:
    """Of what ``outer`` has, the part that ``inner`` counts from its first on."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


def _predicted_at_once(scratch: int, each: int) -> int:
    """Pairs of a layer and a request whose queries are predicted in one go, where that of a pair takes ``each`` bytes."""
    return max(1, int(PREDICTING * scratch) // each)
