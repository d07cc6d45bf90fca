"""Layers that choose what they read by the step's own query."""

from types import SimpleNamespace

import pytest
import torch
from test_slot_pointers import guided_views, led_to
from test_views import DIM, HEADS, LAYERS

from sglang_ext.core import RequestState
from sglang_ext.managers.integrity import check_copies
from sglang_ext.mem_cache.compressed.chosen_elsewhere import watch_step
from sglang_ext.mem_cache.compressed.due_copies import ensure_copy
from sglang_ext.mem_cache.compressed.query_window import Recorded
from sglang_ext.mem_cache.compressors import ContextKV, best
from sglang_ext.mem_cache.compressors.each_step.quest import Quest
from sglang_ext.mem_cache.compressors.each_step.tova import Tova
from sglang_ext.mem_cache.compressors.each_step.true_query import OwnQuery


def views_with_copy(method):
    """Views with a copy of a request of 150 tokens in row 1, and what a step at a position does."""
    views, keep = guided_views(method)
    keep(range(100, 150), 1)
    assert ensure_copy(views, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), 150, 0) == 0

    def step(position):
        queries = torch.randn(LAYERS, 1, HEADS, DIM, generator=torch.Generator().manual_seed(position)) * 3
        seen = []
        with views.queries.recording((Recorded(1, 0, 1, position),), watch_step(views, {1: position + 1}, True)):
            for layer in range(LAYERS):
                views.queries.record(layer, queries[layer])
                seen.append(led_to(views)[layer])
        return seen

    return views, step


def by_own(views, method, position):
    """Slots that each head is led to by the query of ``position``, by layer and head, as the method's own scores say."""
    queries, found = views.queries.get(1, position + 1, 1)
    context = ContextKV(views.buffers, views.token_table[1, :150].long(), queries, found, views.rotary)
    kept = [best(method.scores(context.layer(layer)), views.get(1).own_tokens) for layer in range(LAYERS)]
    return [context.slots[of_layer].tolist() for of_layer in kept]


@pytest.mark.parametrize("method", [OwnQuery(), Quest()], ids=lambda each: each.name)
def test_a_layer_attends_to_what_its_own_query_chose_in_the_same_step(method):
    views, step = views_with_copy(method)
    newest = views.token_table[1, 150 - views.get(1).own_tokens : 150].tolist()
    assert led_to(views) == [[newest] * len(layer) for layer in led_to(views)], "nothing is chosen before the first step"
    for position in (150, 151, 152):
        seen = step(position)
        assert seen == by_own(views, method, position)
        check_copies(views)
        views.choose_anew(1, position + 1, views.method(1).compressor.every)
        assert led_to(views) == seen, "nothing is chosen between steps"
    assert views.get(1).covered == 150 and views.made == {method.name: 4}


def test_with_every_a_layer_chooses_in_the_first_step_and_after_so_many():
    views, step = views_with_copy(OwnQuery(every=3))
    assert len({tuple(head) for layer in led_to(views) for head in layer}) > 1, "until then by the newest query before"
    before, changed = led_to(views), []
    for position in range(150, 157):
        seen = step(position)
        changed.append(seen != before)
        before = seen
    assert changed == [True, False, False, True, False, False, True]


def test_others_are_told_of_no_layer():
    views, _ = views_with_copy(Tova())
    assert watch_step(views, {1: 151}, True) is None and watch_step(views, {}, True) is None
