"""Tokens that each layer of a step chooses by the step's own query, just before it attends to them: what predictions are compared with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews


class OwnQueries:
    """A :class:`~.chosen_elsewhere.LayerWatch` of one step.

    Args:
        views: the copies.
        ends: position after the step's token, by row, of requests whose tokens are chosen in this step.
    """

    def __init__(self, views: "CompressedViews", ends: Mapping[int, int]):
        self._views = views
        self._ends = ends

    def reached(self, layer: int) -> None:
        """Its queries are not there yet."""

    def recorded(self, layer: int) -> None:
        """Choose what the layer reads."""
        for row, end in self._ends.items():
            self._choose(row, end, slice(layer, layer + 1))

    def _choose(self, row: int, end: int, layers: slice) -> None:
        views, view, chooser = self._views, self._views.get(row), self._views.method(row).compressor
        found = views.queries.get(row, end, chooser.window, layers)
        if found is None:
            return
        slots = views.token_table[row, : view.covered].long()
        context = ContextKV(views.buffers.of_layers(layers), slots, *found, views.rotary)
        views.write_chosen(row, layers, chooser.select(context, [Part(0, view.covered, view.own_tokens)])[0])


def own_queries(views: "CompressedViews", ends: Mapping[int, int]) -> OwnQueries | None:
    """Who chooses in a step for those whose method waits for its query, and whose turn it is; None for nobody, or where attention itself
    chooses, whose choices are counted here.

    Args:
        views: the copies.
        ends: position after the step's token, by row, of requests that read their copies.
    """
    waiting = {row: end for row, end in ends.items() if views.method(row).compressor.synchronous}
    if not waiting:
        return None
    after = {row: end - views.get(row).covered for row, end in waiting.items()}
    if views.form.chooses:
        chosen = (row for row in waiting if views.form.step_chooses(views.draft_row(row), after[row]))
        views.made.update(views.get(row).method for row in chosen)
        return None
    due = {row: end for row, end in waiting.items() if not (after[row] - 1) % views.method(row).compressor.every}
    return OwnQueries(views, due) if due else None


def until_own(chooser: Compressor, buffers: KVBuffers, covered: int, keep: int) -> torch.Tensor | None:
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
