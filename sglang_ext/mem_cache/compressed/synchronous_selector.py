"""Synchronous selection: each layer of a step selects tokens by the step's own query, just before attention.

Quest on a CPU selects in this way. ``observe_step`` returns the observer of a step's layers, for this and for asynchronous selection.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_ext.mem_cache.compressors import ContextKV, Part

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.compressed.queries import LayerObserver


class SynchronousSelector:
    """A :class:`~.queries.LayerObserver` that selects tokens in each layer of one step.

    Args:
        compressed_kv: The compressed KV cache.
        ends: Position after the step's token, by row, of requests that select in this step.
    """

    def __init__(self, compressed_kv: "CompressedKVCache", ends: Mapping[int, int]):
        self._compressed_kv = compressed_kv
        self._ends = ends

    def on_layer_start(self, layer: int) -> None:
        """Do nothing: the layer's queries are not recorded yet."""

    def on_queries_recorded(self, layer: int) -> None:
        """Select the tokens that the layer reads."""
        compressed_kv, layers = self._compressed_kv, slice(layer, layer + 1)
        for row, end in self._ends.items():
            compressed, chooser = compressed_kv.get(row), compressed_kv.method(row).compressor
            found = compressed_kv.queries.get(row, end, chooser.window, layers)
            if found is None:
                continue
            slots = compressed_kv.token_table[row, : compressed.covered].long()
            context = ContextKV(compressed_kv.buffers.of_layers(layers), slots, *found, compressed_kv.rotary)
            compressed_kv.write_selection(row, layers, chooser.select(context, [Part(0, compressed.covered, compressed.own_tokens)])[0])


def observe_step(compressed_kv: "CompressedKVCache", ends: dict[int, int], following: int | None) -> "LayerObserver | None":
    """The observer of a step's layers; None if no selector needs it.

    Without an asynchronous selector, it selects for the requests whose method selects in steps and whose selection interval ends. If
    attention itself selects, there is no observer, and the selections are counted here.

    Args:
        compressed_kv: The compressed KV cache.
        ends: Position after the step's token, by row, of requests that read their compressed KV.
        following: Steps until the full KV verifies them; None if nothing is verified.
    """
    if compressed_kv.async_selector is not None:
        return compressed_kv.async_selector.observe_step(compressed_kv, ends, following)
    waiting = {row: end for row, end in ends.items() if compressed_kv.method(row).compressor.synchronous}
    after = {row: end - compressed_kv.get(row).covered for row, end in waiting.items()}
    if compressed_kv.layout.selects_in_attention:
        chosen = (row for row in waiting if compressed_kv.layout.record_step(compressed_kv.draft_row(row), after[row]))
        compressed_kv.num_compressions.update(compressed_kv.get(row).method for row in chosen)
        return None
    due = {row: end for row, end in waiting.items() if not (after[row] - 1) % compressed_kv.method(row).compressor.every}
    return SynchronousSelector(compressed_kv, due) if due else None
