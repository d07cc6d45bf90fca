"""Baseline selectors: their scores by a loop in float64, and the methods that a server loads by their names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_helpers import HEADS, attention_by_loop, random_layer, seen

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue, kept_count, top_positions
from sglang_ext.mem_cache.selection.scoring import top_tokens
from sglang_ext_bench.baselines import SELECTORS, served_method
from sglang_ext_bench.baselines.scorings import BASELINES, RecentScoring
from sglang_ext_bench.baselines.tova import Tova, TovaScoring
from sglang_ext_bench.baselines.true_query import TrueQuery, TrueQueryScoring

METHODS = (Tova, TrueQuery)


@pytest.mark.parametrize("kind", HEADS)
@given(seed=st.integers(0, 99), requests=st.integers(1, 3), layers=st.integers(1, 2))
def test_scores_are_the_mean_attention_of_a_kv_head_or_of_all_heads(kind, seed, requests, layers):
    heads, kv_heads = HEADS[kind]
    lengths = torch.randint(1, 41, (requests,), generator=torch.Generator().manual_seed(seed))
    given = seen(seed, requests, layers, (heads, kv_heads), lengths=lengths)
    true, tova = (scoring.scores(given) for scoring in (TrueQueryScoring(), TovaScoring()))
    group = heads // kv_heads
    for request, length in enumerate(lengths.tolist()):
        for each in range(layers):
            of_heads = []
            for head in range(kv_heads):
                keys, mine = given.keys[request, each, head, :length], given.queries[request, each, head * group : (head + 1) * group, -1]
                of_heads.append(sum(attention_by_loop(query, keys, 0.3) for query in mine) / group)
                torch.testing.assert_close(true[request, each, head, :length].double(), of_heads[-1], atol=1e-5, rtol=0)
            expected = (sum(of_heads) / kv_heads).expand(kv_heads, -1)
            torch.testing.assert_close(tova[request, each, :, :length].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scoring", BASELINES, ids=lambda each: each.name)
def test_scorings_have_the_frame_of_predictions_and_select_within_a_context(scoring):
    lengths = torch.tensor([40, 23])
    scores = scoring.scores(given := seen(lengths=lengths))
    assert scores.shape == given.keys.shape[:-1] and scores.dtype == torch.float32
    chosen = given.select(scores, 9, 1, 2)
    for request, length in enumerate(lengths.tolist()):
        for head in chosen[request].flatten(0, 1).tolist():
            assert head == sorted({*head}) and {0, length - 2, length - 1} <= {*head} and head[-1] < length


def test_recent_selects_the_newest_and_quest_and_true_queries_wait_for_the_steps_own():
    assert top_tokens(RecentScoring().scores(seen()), 3, 0, 0)[0, 0, 0].tolist() == [37, 38, 39]
    assert {each.name for each in BASELINES if each.synchronous} == {"true", "quest"}


@pytest.mark.parametrize("method", METHODS)
@given(tokens=st.integers(8, 80), share=st.floats(0.05, 1.0), window=st.integers(0, 8))
def test_methods_keep_the_ends_and_select_sorted_tokens_within_the_context(method, tokens, share, window):
    scores = method().scores(random_layer(tokens, window=window))
    assert scores[:, :4].isinf().all() and scores[:, -32:].isinf().all() and not scores[:, 4 : max(4, tokens - 32)].isinf().any()
    kept = top_positions(scores, count := kept_count(tokens, share, 1))
    assert kept.shape == (2, count) and (kept[:, 1:] > kept[:, :-1]).all() and 0 <= kept.min() and kept.max() < tokens


def test_methods_score_by_the_newest_attention_of_a_kv_head_or_of_all():
    data = random_layer(60)
    attended = [
        torch.stack([attention_by_loop(data.queries[-1, head * 3 + member], data.keys[:, head], data.scaling) for member in range(3)]).mean(0)
        for head in range(2)
    ]
    inside = slice(4, 28)
    for method, expected in ((TrueQuery(), attended), (Tova(), [sum(attended) / 2] * 2)):
        assert torch.allclose(method.scores(data)[:, inside].double(), torch.stack(expected)[:, inside], atol=1e-6)


@pytest.mark.usefixtures("own_methods")
def test_servers_load_them_by_module_and_class_and_benchmarks_take_the_short_names():
    for value, method in zip(SELECTORS.values(), METHODS, strict=True):
        assert catalogue.parse(value) == (method.__name__, None) and catalogue.points(value)
        assert type(catalogue.method(value).compressor) is method
    assert served_method("tova") == SELECTORS["tova"] and served_method("snapkv+kivi") == "snapkv+kivi"


@pytest.mark.parametrize("name", SELECTORS)
def test_servers_do_not_know_the_short_names(name):
    with pytest.raises(OptionError, match=f"--kv-compressor is {name!r}; allowed: "):
        catalogue.parse(name)
