"""Compressors keep what their papers say, within the interface's contract."""

from pkgutil import iter_modules
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_helpers import random_layer

from sglang_ext.mem_cache import compressors
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import LayerKV, catalogue, kept_count, registry, top_positions
from sglang_ext.mem_cache.compressors.attention_scores import SnapKV, VerifyGuided
from sglang_ext.mem_cache.compressors.catalogue import create, dropping
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.predictors import PREDICTORS, query_predictor


def layer(tokens: int, heads: int = 2, group: int = 3, dim: int = 8, window: int = 4) -> LayerKV:
    return random_layer(tokens, heads, group, dim, window, Rotary(1 / 10 ** torch.arange(dim // 2)))


def test_each_module_of_a_method_is_in_the_catalogue_and_each_method_has_its_name():
    modules = {module.name for module in iter_modules(compressors.__path__)} - {"catalogue", "compressor", "quantizer", "registry"}
    assert {module.__name__.rpartition(".")[2] for module in catalogue.BUILTIN_MODULES} == modules
    assert all(method.name == name for name, method in registry.COMPRESSORS.items())


def test_what_leads_into_full_kv_is_chosen_anew_in_each_round():
    methods = {name: create(name) for name in dropping()}
    each_step = {"quest": 1, "spade": 1}
    assert [name for name, method in methods.items() if method.points] == [*each_step, "verify-guided"]
    assert [name for name, method in methods.items() if method.each_round] == [*each_step, "verify-guided"]
    assert {name: method.every for name, method in methods.items() if method.every} == each_step
    assert {name for name, method in methods.items() if method.synchronous} == {"quest"}


@pytest.mark.parametrize("name", dropping())
@given(tokens=st.integers(8, 80), share=st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_selection_is_sorted_unique_and_in_range(name, tokens, share):
    count = kept_count(tokens, share, 1)
    kept = top_positions(create(name).scores(layer(tokens)), count)
    assert kept.shape == (2, count) and kept.dtype == torch.int64
    assert (kept[:, 1:] > kept[:, :-1]).all()
    assert kept.min() >= 0 and kept.max() < tokens


@pytest.mark.parametrize("name", dropping())
@given(tokens=st.integers(8, 80), window=st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_the_tokens_of_infinite_scores_are_those_that_a_method_names(name, tokens, window):
    method, data = create(name), layer(tokens, window=window)
    named, scores = method.always(SimpleNamespace(queries=data.queries[None])), method.scores(data)
    for start, end in ((0, tokens), (2, tokens - 3), (tokens - 1, tokens)):
        assert scores[:, start:end].isinf().sum(-1).tolist() == [named.among(start, end, tokens)] * 2


def test_sink_recent_keeps_the_first_four_and_the_newest():
    kept = top_positions(create("sink-recent").scores(layer(50)), 10)
    assert kept.tolist() == [[0, 1, 2, 3, 44, 45, 46, 47, 48, 49]] * 2


def test_snapkv_keeps_its_window_and_the_attended_token():
    data = layer(60)
    data.keys[20] *= 4
    data.queries[:] = 8 * data.keys[20].repeat_interleave(3, dim=0)
    kept = top_positions(create("snapkv").scores(data), 12)
    for head in kept.tolist():
        assert set(range(56, 60)) <= set(head) and 20 in head


def test_snapkv_scores_match_a_float64_loop():
    data, method = layer(30), SnapKV(window=4, kernel=3)
    scores = method.scores(data)
    for head in range(2):
        rows = torch.zeros(3, 30, dtype=torch.float64)
        for member in range(3):
            for w, position in enumerate(data.query_positions.tolist()):
                query = data.queries[w, head * 3 + member].double()
                logits = data.keys[: position + 1, head].double() @ query * data.scaling
                rows[member, : position + 1] += logits.softmax(0) / 4
        rows[:, 26:] = 0
        padded = torch.nn.functional.pad(rows, (1, 1))
        expected = sum(padded[:, i : i + 30] for i in range(3)).mean(0) / 3
        assert torch.allclose(scores[head, :26].double(), expected[:26], atol=1e-6)


def test_verify_guided_keeps_the_newest_and_what_verified_queries_attend_to_by_a_float64_loop():
    data, method = layer(40), VerifyGuided(window=4, recent=6)
    # Verified last are tokens before the newest, and not all in a row.
    data.query_positions[:] = torch.tensor([30, 31, 33, 36])
    expected = torch.zeros(2, 40, dtype=torch.float64)
    for head in range(2):
        for member in range(3):
            for w, position in enumerate(data.query_positions.tolist()):
                query = data.queries[w, head * 3 + member].double()
                logits = data.keys[: position + 1, head].double() @ query * data.scaling
                expected[head, : position + 1] += logits.softmax(0) / 12
    scores = method.scores(data)
    assert torch.allclose(scores[:, :34].double(), expected[:, :34], atol=1e-6) and scores[:, 34:].isinf().all()
    attended = expected[:, :34].topk(5, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(top_positions(scores, 11), torch.cat([attended, torch.arange(34, 40).expand(2, -1)], dim=-1))


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_spade_keeps_both_ends_and_what_the_predicted_query_attends_to_by_a_float64_loop(predictor):
    data, method = layer(40, window=5), Spade(query_predictor(predictor), sinks=2, recent=6)
    predicted = method.predictor.predict(data.queries.transpose(0, 1)[None, None], data.query_positions[None], data.rotary)[0, 0]
    expected = torch.zeros(2, 40, dtype=torch.float64)
    for head in range(2):
        for member in range(3):
            logits = data.keys[:, head].double() @ predicted[head * 3 + member].double() * data.scaling
            expected[head] += logits.softmax(0) / 3
    scores = method.scores(data)
    inside = slice(2, 34)
    assert torch.allclose(scores[:, inside].double(), expected[:, inside], atol=1e-6)
    assert scores[:, :2].isinf().all() and scores[:, 34:].isinf().all()
    attended = expected[:, inside].topk(5, dim=-1).indices.sort(dim=-1).values + 2
    ends = torch.tensor([0, 1]).expand(2, -1), torch.arange(34, 40).expand(2, -1)
    assert torch.equal(top_positions(scores, 13), torch.cat([ends[0], attended, ends[1]], dim=-1))


def test_quest_scores_pages_of_16_by_the_bounds_of_their_keys_by_a_loop_over_channels():
    data = layer(90)
    scores = create("quest").scores(data)
    for head in range(2):
        for page in range(0, 90, 16):
            keys, bound = data.keys[page : page + 16, head].double(), 0.0
            for member in range(3):
                query = data.queries[-1, head * 3 + member].double()
                bound += sum(max(float(q * k.min()), float(q * k.max())) for q, k in zip(query, keys.unbind(-1))) / 3
            inner = scores[head, max(4, page) : min(58, page + 16)]
            assert torch.allclose(inner.double(), torch.full_like(inner, bound, dtype=torch.float64), atol=1e-5)


@given(st.integers(2, 300), st.integers(1, 4096), st.sampled_from([1, 16]), st.floats(0.1, 1.0))
def test_a_method_that_keeps_so_many_tokens_keeps_no_more_and_leaves_shorter_contexts_whole(most, tokens, page, share):
    method = CompressionMethod(Spade(most=most), share, PlainSlots(page))
    assert method.num_kept(tokens) == min(kept_count(tokens, share, page), -(-most // page) * page)
    assert method.covered(most) == 0 and method.min_covered > most
    assert CompressionMethod(Spade(), share, PlainSlots(page)).num_kept(tokens) == kept_count(tokens, share, page)


@pytest.mark.parametrize(("recent", "most", "asked", "shortest"), [
    (0, 0, 128, 128), (100, 0, 128, 228), (100, 0, 200, 228), (100, 0, 4096, 4096), (0, 2048, 128, 2049), (0, 2048, 4096, 4096)])  # fmt: skip
def test_a_copy_begins_where_it_is_asked_for_and_leaves_tokens_out(recent, most, asked, shortest):
    placement = SimpleNamespace(recent=recent, sinks=0, unit=1, share=1.0)
    assert CompressionMethod(Spade(most=most), 0.5, placement, sparse_from=asked).min_context == shortest


@given(tokens=st.integers(1, 2000), share=st.floats(0.01, 1.0), page=st.sampled_from([1, 16, 64]))
def test_kept_count_is_whole_pages_within_the_context_and_at_least_the_budget(tokens, share, page):
    tokens *= page
    count = kept_count(tokens, share, page)
    assert count % page == 0 and page <= count <= tokens
    assert count >= tokens * share - 1e-6 and count - tokens * share < page + 1
