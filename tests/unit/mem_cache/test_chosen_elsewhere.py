"""Copies whose tokens others choose: when there is one, what it leads to, and what the others are told of a step."""

from collections import Counter
from types import SimpleNamespace

import torch
from test_slot_pointers import guided_views, led_to, spade_of
from test_views import DIM, HEADS, LAYERS

from sglang_ext.core import FALLBACK_REASONS, NO_SELECTION, RequestState
from sglang_ext.managers.integrity import check_copies
from sglang_ext.mem_cache.compressed.chosen_elsewhere import ChosenElsewhere, FreeBlocks, watch_step
from sglang_ext.mem_cache.compressed.due_copies import ensure_copy
from sglang_ext.mem_cache.compressed.query_window import Recorded
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.spade import Spade


class Others(ChosenElsewhere):
    """Chooses in this process, as another would; nothing before the second question where it is ``slow``.

    Attributes:
        views: whose tokens it chooses.
        told: what it heard, in order.
    """

    def __init__(self, views, slow=False):
        self.views, self.slow, self.told, self.missed = views, slow, [], Counter()

    def choose(self, slots, keep, queries, positions):
        context = ContextKV(self.views.buffers, slots, queries, positions, self.views.rotary)
        return Spade().select(context, [Part(0, len(slots), keep)])[0]

    def prepare(self, row, slots, keep, queries, positions):
        self.told.append(("prepare", len(slots), keep, positions.tolist()))
        self.chosen = self.choose(slots, keep, queries, positions)
        return not self.slow or len(self.told) > 1

    def kept(self, row, covered, keep):
        return self.chosen

    def step(self, requests, read, write):
        (told,), others = requests, self

        class Watch:
            def reached(self, layer):
                others.told.append(("reached", layer))
                write(told.row, slice(layer, layer + 1), others.chosen[layer : layer + 1])

            def recorded(self, layer):
                others.told.append(("recorded", layer))
                if told.asks and layer == LAYERS - 1:
                    slots = others.views.token_table[told.row, : told.covered].long()
                    others.chosen = others.choose(slots, told.keep, *read(told.row, told.end, slice(None)))

        return Watch()

    def forget(self, row):
        self.told.append(("forget", row))

    def forget_all(self):
        self.told.append(("forget all",))


def others_views(slow=False):
    """Views of a request in row 1 with queries of 50 tokens, whose tokens others choose; what it steps with."""
    views, keep = guided_views(Spade())
    views.elsewhere = Others(views, slow)
    keep(range(100, 150), 1)

    def step(position, asks=True):
        queries = torch.randn(LAYERS, 1, HEADS, DIM, generator=torch.Generator().manual_seed(position)) * 3
        watch = watch_step(views, {1: position + 1}, asks)
        with views.queries.recording((Recorded(1, 0, 1, position),), watch):
            for layer in range(LAYERS):
                views.queries.record(layer, queries[layer])

    return views, step


def copy(views, length):
    """The reason why the request reads full KV at this length; 0 for a copy."""
    return ensure_copy(views, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), length, 0)


def test_there_is_a_copy_once_others_have_chosen_and_none_any_more_when_they_fail():
    views, _ = others_views(slow=True)
    assert FALLBACK_REASONS[copy(views, 150)] == "no-selection" and views.get(1) is None
    assert views.elsewhere.told == [("prepare", 150, 38, [149])], "a quarter of the tokens, by the newest query"
    assert copy(views, 150) == 0
    assert led_to(views) == spade_of(views, range(100, 150), 150, Spade().predictor)
    check_copies(views)
    free = views.allocator.available_size()
    views.elsewhere.prepare = lambda *given: False
    views.queries.put(1, 151, torch.zeros(LAYERS, 1, HEADS, DIM))
    assert copy(views, 151) == NO_SELECTION and views.get(1) is None and views.allocator.available_size() > free


def test_steps_lead_the_copy_to_what_was_chosen_by_the_step_before_layer_by_layer():
    views, step = others_views()
    assert copy(views, 150) == 0
    first = led_to(views)
    views.elsewhere.told.clear()
    step(150)
    assert views.elsewhere.told == [(what, layer) for layer in range(LAYERS) for what in ("reached", "recorded")]
    assert led_to(views) == first, "the first is chosen by what was there before it"
    expected = spade_of(views, range(100, 151), 150, Spade().predictor)
    views.choose_anew(1, 151, 1)
    assert led_to(views) == first, "nothing is chosen between steps in this process"
    step(151, asks=False)
    assert led_to(views) == expected != first
    check_copies(views)
    step(152)
    assert led_to(views) == expected, "the step before asked for nothing"
    assert views.made["spade"] == 4 and views.get(1).covered == 150


def test_others_hear_of_requests_that_go_and_whose_full_kv_moves():
    views, _ = others_views()
    copy(views, 150)
    views.elsewhere.told.clear()
    views.row_moved(1, 100)
    views.release(1)
    views.forget_all()
    assert views.elsewhere.told == [("forget", 1), ("forget", 1), ("forget all",)]


def test_without_others_and_without_copies_nobody_watches_a_step():
    views, _ = others_views()
    assert watch_step(views, {}, True) is None
    views.elsewhere = None
    assert watch_step(views, {1: 151}, True) is None


def test_requests_go_where_most_is_free_and_what_one_takes_is_not_the_nexts():
    free = FreeBlocks([3, 2], 64)
    assert [free.take(tokens) for tokens in (128, 129, 128, 65, 64, 1)] == [True, False, True, False, True, False]
    assert free.blocks == [0, 0] and not FreeBlocks([]).take(0)
    few = FreeBlocks([3, 2], 64, [1, 0])
    assert [few.take(64) for _ in range(2)] == [True, False] and few.blocks == [2, 2], "the other takes no request"
