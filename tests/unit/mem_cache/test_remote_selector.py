"""Copies whose tokens others choose: when there is one, what it leads to, and what the others are told of a step."""

from collections import Counter
from types import SimpleNamespace

import torch
from test_pointer_layout import guided_views, led_to, spade_of
from test_views import DIM, HEADS, LAYERS

from sglang_ext.core import FALLBACK_REASONS, NO_SELECTION, RequestState
from sglang_ext.managers.integrity import check_compressed
from sglang_ext.mem_cache.compressed.remote_selector import RemoteSelector, FreeBlocks, observe_step
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv
from sglang_ext.mem_cache.compressed.queries import RecordedRows
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.spade import Spade


class Others(RemoteSelector):
    """Chooses in this process, as another would; nothing before the second question where it is ``slow``.

    Attributes:
        compressed_kv: whose tokens it chooses.
        told: what it heard, in order.
    """

    def __init__(self, compressed_kv, slow=False):
        self.compressed_kv, self.slow, self.told, self.missed = compressed_kv, slow, [], Counter()

    def choose(self, slots, keep, queries, positions):
        context = ContextKV(self.compressed_kv.buffers, slots, queries, positions, self.compressed_kv.rotary)
        return Spade().select(context, [Part(0, len(slots), keep)])[0]

    def request_selection(self, row, slots, keep, queries, positions):
        self.told.append(("prepare", len(slots), keep, positions.tolist()))
        self.chosen = self.choose(slots, keep, queries, positions)
        return not self.slow or len(self.told) > 1

    def last_selection(self, row, covered, keep):
        return self.chosen

    def step(self, requests, read, write):
        (told,), others = requests, self

        class Watch:
            def on_layer_start(self, layer):
                others.told.append(("reached", layer))
                write(told.row, slice(layer, layer + 1), others.chosen[layer : layer + 1])

            def on_queries_recorded(self, layer):
                others.told.append(("recorded", layer))
                if told.starts_selection and layer == LAYERS - 1:
                    slots = others.compressed_kv.token_table[told.row, : told.covered].long()
                    others.chosen = others.choose(slots, told.keep, *read(told.row, told.end, slice(None)))

        return Watch()

    def forget(self, row):
        self.told.append(("forget", row))

    def forget_all(self):
        self.told.append(("forget all",))


def others_views(slow=False):
    """Views of a request in row 1 with queries of 50 tokens, whose tokens others choose; what it steps with."""
    compressed_kv, keep = guided_views(Spade())
    compressed_kv.remote_selector = Others(compressed_kv, slow)
    keep(range(100, 150), 1)

    def step(position, asks=True):
        queries = torch.randn(LAYERS, 1, HEADS, DIM, generator=torch.Generator().manual_seed(position)) * 3
        watch = observe_step(compressed_kv, {1: position + 1}, asks)
        with compressed_kv.queries.recording((RecordedRows(1, 0, 1, position),), watch):
            for layer in range(LAYERS):
                compressed_kv.queries.record(layer, queries[layer])

    return compressed_kv, step


def copy(compressed_kv, length):
    """The reason why the request reads full KV at this length; 0 for a copy."""
    return ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), length, 0)


def test_there_is_a_copy_once_others_have_chosen_and_none_any_more_when_they_fail():
    compressed_kv, _ = others_views(slow=True)
    assert FALLBACK_REASONS[copy(compressed_kv, 150)] == "no-selection" and compressed_kv.get(1) is None
    assert compressed_kv.remote_selector.told == [("prepare", 150, 38, [149])], "a quarter of the tokens, by the newest query"
    assert copy(compressed_kv, 150) == 0
    assert led_to(compressed_kv) == spade_of(compressed_kv, range(100, 150), 150, Spade().predictor)
    check_compressed(compressed_kv)
    free = compressed_kv.allocator.available_size()
    compressed_kv.remote_selector.request_selection = lambda *given: False
    compressed_kv.queries.insert(1, 151, torch.zeros(LAYERS, 1, HEADS, DIM))
    assert copy(compressed_kv, 151) == NO_SELECTION and compressed_kv.get(1) is None and compressed_kv.allocator.available_size() > free


def test_steps_lead_the_copy_to_what_was_chosen_by_the_step_before_layer_by_layer():
    compressed_kv, step = others_views()
    assert copy(compressed_kv, 150) == 0
    first = led_to(compressed_kv)
    compressed_kv.remote_selector.told.clear()
    step(150)
    assert compressed_kv.remote_selector.told == [(what, layer) for layer in range(LAYERS) for what in ("reached", "recorded")]
    assert led_to(compressed_kv) == first, "the first is chosen by what was there before it"
    expected = spade_of(compressed_kv, range(100, 151), 150, Spade().predictor)
    compressed_kv.reselect(1, 151, 1)
    assert led_to(compressed_kv) == first, "nothing is chosen between steps in this process"
    step(151, asks=False)
    assert led_to(compressed_kv) == expected != first
    check_compressed(compressed_kv)
    step(152)
    assert led_to(compressed_kv) == expected, "the step before asked for nothing"
    assert compressed_kv.num_compressions["spade"] == 4 and compressed_kv.get(1).covered == 150


def test_others_hear_of_requests_that_go_and_whose_full_kv_moves():
    compressed_kv, _ = others_views()
    copy(compressed_kv, 150)
    compressed_kv.remote_selector.told.clear()
    compressed_kv.on_row_moved(1, 100)
    compressed_kv.release(1)
    compressed_kv.forget_all()
    assert compressed_kv.remote_selector.told == [("forget", 1), ("forget", 1), ("forget all",)]


def test_without_others_and_without_copies_nobody_watches_a_step():
    compressed_kv, _ = others_views()
    assert observe_step(compressed_kv, {}, True) is None
    compressed_kv.remote_selector = None
    assert observe_step(compressed_kv, {1: 151}, True) is None


def test_requests_go_where_most_is_free_and_what_one_takes_is_not_the_nexts():
    free = FreeBlocks([3, 2], 64)
    assert [free.take(tokens) for tokens in (128, 129, 128, 65, 64, 1)] == [True, False, True, False, True, False]
    assert free.blocks == [0, 0] and not FreeBlocks([]).take(0)
    few = FreeBlocks([3, 2], 64, [1, 0])
    assert [few.take(64) for _ in range(2)] == [True, False] and few.blocks == [2, 2], "the other takes no request"
