"""Layers that choose what they read by the step's own query."""

from types import SimpleNamespace

import pytest
import torch
from test_pointer_layout import guided_views, led_to
from test_compressed_kv import DIM, HEADS, LAYERS

from sglang_ext.core import RequestState
from sglang_ext.managers.integrity import check_compressed
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv
from sglang_ext.mem_cache.compressed.queries import RecordedRows
from sglang_ext.mem_cache.compressed.policy import observe_step
from sglang_ext.mem_cache.compressors import ContextKV, top_positions
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext_bench.baselines.tova import Tova
from sglang_ext_bench.baselines.true_query import TrueQuery


def views_with_copy(method):
    """Views with a copy of a request of 150 tokens in row 1, and what a step at a position does."""
    compressed_kv, keep = guided_views(method)
    keep(range(100, 150), 1)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), 150, 0) == 0

    def step(position):
        queries = torch.randn(LAYERS, 1, HEADS, DIM, generator=torch.Generator().manual_seed(position)) * 3
        seen = []
        with compressed_kv.queries.recording((RecordedRows(1, 0, 1, position),), observe_step(compressed_kv, {1: position + 1}, None)):
            for layer in range(LAYERS):
                compressed_kv.queries.record(layer, queries[layer])
                seen.append(led_to(compressed_kv)[layer])
        return seen

    return compressed_kv, step


def by_own(compressed_kv, method, position):
    """Slots that each head is led to by the query of ``position``, by layer and head, as the method's own scores say."""
    queries, found = compressed_kv.queries.get(1, position + 1, 1)
    context = ContextKV(compressed_kv.buffers, compressed_kv.token_table[1, :150].long(), queries, found, compressed_kv.rotary)
    kept = [top_positions(method.scores(context.layer(layer)), compressed_kv.get(1).own_tokens) for layer in range(LAYERS)]
    return [context.slots[of_layer].tolist() for of_layer in kept]


@pytest.mark.parametrize("method", [TrueQuery(), Quest()], ids=lambda each: type(each).__name__)
def test_a_layer_attends_to_what_its_own_query_chose_in_the_same_step(method):
    compressed_kv, step = views_with_copy(method)
    newest = compressed_kv.token_table[1, 150 - compressed_kv.get(1).own_tokens : 150].tolist()
    assert led_to(compressed_kv) == [[newest] * len(layer) for layer in led_to(compressed_kv)], "nothing is chosen before the first step"
    for position in (150, 151, 152):
        seen = step(position)
        assert seen == by_own(compressed_kv, method, position)
        check_compressed(compressed_kv)
        compressed_kv.reselect(1, position + 1, compressed_kv.method(1).compressor.every)
        assert led_to(compressed_kv) == seen, "nothing is chosen between steps"
    assert compressed_kv.get(1).covered == 150 and compressed_kv.num_compressions == {method.name: 4}


def test_with_every_a_layer_chooses_in_the_first_step_and_after_so_many():
    compressed_kv, step = views_with_copy(TrueQuery(every=3))
    assert len({tuple(head) for layer in led_to(compressed_kv) for head in layer}) > 1, "until then by the newest query before"
    before, changed = led_to(compressed_kv), []
    for position in range(150, 157):
        seen = step(position)
        changed.append(seen != before)
        before = seen
    assert changed == [True, False, False, True, False, False, True]


def test_others_are_told_of_no_layer():
    compressed_kv, _ = views_with_copy(Tova())
    assert observe_step(compressed_kv, {1: 151}, None) is None and observe_step(compressed_kv, {}, None) is None
