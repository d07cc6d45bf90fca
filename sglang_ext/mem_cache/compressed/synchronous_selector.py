"""Tokens that each layer of a step chooses by the step's own query, just before it attends to them: what predictions are compared with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache


class SynchronousSelector:
    """A :class:`~.chosen_elsewhere.LayerObserver` of one step.

    Args:
        compressed_kv: the copies.
        ends: position after the step's token, by row, of requests whose tokens are chosen in this step.
    """

    def __init__(self, compressed_kv: "CompressedKVCache", ends: Mapping[int, int]):
        self._views = compressed_kv
        self._ends = ends

    def on_layer_start(self, layer: int) -> None:
        """Its queries are not there yet."""

    def on_queries_recorded(self, layer: int) -> None:
        """Choose what the layer reads."""
        for row, end in self._ends.items():
            self._choose(row, end, slice(layer, layer + 1))

    def _choose(self, row: int, end: int, layers: slice) -> None:
        compressed_kv, view, chooser = self._views, self._views.get(row), self._views.method(row).compressor
        found = compressed_kv.queries.get(row, end, chooser.window, layers)
        if found is None:
            return
        slots = compressed_kv.token_table[row, : view.covered].long()
        context = ContextKV(compressed_kv.buffers.of_layers(layers), slots, *found, compressed_kv.rotary)
        compressed_kv.write_selection(row, layers, chooser.select(context, [Part(0, view.covered, view.own_tokens)])[0])


def synchronous_selector(compressed_kv: "CompressedKVCache", ends: Mapping[int, int]) -> SynchronousSelector | None:
    """Who chooses in a step for those whose method waits for its query, and whose turn it is; None for nobody, or where attention itself
    chooses, whose choices are counted here.

    Args:
        compressed_kv: the copies.
        ends: position after the step's token, by row, of requests that read their copies.
    """
    waiting = {row: end for row, end in ends.items() if compressed_kv.method(row).compressor.synchronous}
    if not waiting:
        return None
    after = {row: end - compressed_kv.get(row).covered for row, end in waiting.items()}
    if compressed_kv.layout.chooses:
        chosen = (row for row in waiting if compressed_kv.layout.step_chooses(compressed_kv.draft_row(row), after[row]))
        compressed_kv.made.update(compressed_kv.get(row).method for row in chosen)
        return None
    due = {row: end for row, end in waiting.items() if not (after[row] - 1) % compressed_kv.method(row).compressor.every}
    return SynchronousSelector(compressed_kv, due) if due else None


def initial_selection(chooser: Compressor, buffers: KVBuffers, covered: int, keep: int) -> torch.Tensor | None:
    """What a copy leads to until its layers choose: the newest tokens; None where something is to be chosen before, by a query that was kept.

    Args:
        chooser: the copy's compressor.
        buffers: the pool's.
        covered: tokens that the copy stands for.
        keep: of these, tokens of each head.
    """
    if not chooser.synchronous or (chooser.every > 1 and chooser.window):
        return None
    keys = buffers.keys[0]
    return torch.arange(covered - keep, covered, device=keys.device).expand(len(buffers.keys), keys.shape[1], keep)
