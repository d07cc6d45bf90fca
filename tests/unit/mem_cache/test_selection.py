"""Which tokens are read in the next step: predicted queries, scores by them and by pages, the best of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_helpers import DIM, HEADS, ROTARY, attention_by_loop, noise, seen, turned

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.selection.predictors import PREDICTORS, CurrentQuery, RegressedQuery, query_predictor
from sglang_ext.mem_cache.selection.scoring import top_tokens
from sglang_ext_bench.baselines.scorings import PredictedScoring, QuestScoring, overlap

SCORINGS = (*(PredictedScoring(kind()) for kind in PREDICTORS.values()), QuestScoring())


def regressed_by_loop(queries, longest, ridge):
    """Algorithm 1, window by window, of queries [count, dim] without rotary embedding, in float64."""
    queries, found = queries.double(), []
    *before, newest = queries
    before = before[-longest:]
    mean = sum(float(each @ each) for each in before) / len(before) if before else 0.0
    for k in range(1, len(before) + 1):
        chosen = torch.stack(before[-k:])
        weights = torch.linalg.solve(chosen @ chosen.T + ridge * mean * torch.eye(k, dtype=torch.float64), chosen @ newest)
        weights = weights.softmax(dim=0)
        found.append(sum(weight * each for weight, each in zip(weights, [*before[-k:], newest][1:])))
    return sum(found) / len(found) if found else newest


@given(st.integers(0, 999), st.integers(1, 24), st.integers(0, 5000), st.integers(1, 3))
def test_the_next_query_is_predicted_without_rotary_embedding_and_turned_to_the_next_position(seed, window, end, step):
    # Positions may be missing.
    positions = (torch.arange(window) * step + end)[None]
    queries = noise(seed, 1, 1, 2, window, DIM)
    plain = [[turned(queries[0, 0, head, i], -int(positions[0, i])) for i in range(window)] for head in range(2)]
    current = CurrentQuery().predict(queries, positions, ROTARY)
    regressed = RegressedQuery().predict(queries, positions, ROTARY)
    for head in range(2):
        after = int(positions[0, -1]) + 1
        torch.testing.assert_close(current[0, 0, head].double(), turned(plain[head][-1], after), atol=2e-3, rtol=0)
        expected = turned(regressed_by_loop(torch.stack(plain[head]), 16, 1e-2), after)
        torch.testing.assert_close(regressed[0, 0, head].double(), expected, atol=2e-3, rtol=0)


def test_without_rotary_embedding_queries_are_joined_as_they_are():
    queries, positions = noise(0, 1, 1, 1, 9, DIM), torch.arange(9)[None]
    assert torch.equal(CurrentQuery().predict(queries, positions, None)[0, 0, 0], queries[0, 0, 0, -1])
    expected = regressed_by_loop(queries[0, 0, 0], 16, 1e-2)
    torch.testing.assert_close(RegressedQuery().predict(queries, positions, None)[0, 0, 0].double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_query_that_does_not_change_but_for_its_position_is_predicted_as_it_will_be(name):
    query = noise(3, DIM)
    queries = torch.stack([turned(query, position) for position in range(100, 120)])[None, None, None].float()
    found = query_predictor(name).predict(queries, torch.arange(100, 120)[None], ROTARY)
    torch.testing.assert_close(found[0, 0, 0].double(), turned(query, 120), atol=1e-3, rtol=0)


def test_a_regressed_query_counts_the_newest_most_where_each_follows_from_the_one_before():
    # A walk of small steps: its newest place is the best guess, and weights of the moved window end with it.
    walk = noise(1, 1, 1, 1, 17, 64).cumsum(dim=-2)
    weights = RegressedQuery().weights(walk)[0, 0, 0]
    assert weights.sum().item() == pytest.approx(1, abs=1e-5) and int(weights.argmax()) == 15


@given(st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e3]))
def test_larger_queries_are_predicted_as_much_larger_and_zeros_as_zeros(seed, factor):
    queries, positions = noise(seed, 1, 2, 2, 17, DIM), torch.arange(17)[None]
    found, scaled = (RegressedQuery().predict(given, positions, ROTARY) for given in (queries, queries * factor))
    torch.testing.assert_close(found * factor, scaled, rtol=1e-3, atol=1e-3 * factor)
    assert not RegressedQuery().predict(queries * 0, positions, ROTARY).any()


def test_unknown_predictors_are_refused():
    with pytest.raises(OptionError, match=r"--kv-select-by is 'mean'; allowed: current, regressed. Pass one of these"):
        query_predictor("mean")


@pytest.mark.parametrize("kind", HEADS)
@given(seed=st.integers(0, 99), requests=st.integers(1, 3), layers=st.integers(1, 2))
def test_scores_are_the_mean_attention_of_the_query_heads_of_a_kv_head(kind, seed, requests, layers):
    heads, kv_heads = HEADS[kind]
    lengths = torch.randint(1, 41, (requests,), generator=torch.Generator().manual_seed(seed))
    given = seen(seed, requests, layers, (heads, kv_heads), lengths=lengths)
    found = PredictedScoring(CurrentQuery()).scores(given)
    group = heads // kv_heads
    for request, length in enumerate(lengths.tolist()):
        for layer in range(layers):
            for head in range(kv_heads):
                keys, mine = given.keys[request, layer, head, :length], given.queries[request, layer, head * group : (head + 1) * group, -1]
                predicted = sum(attention_by_loop(turned(query, 1), keys, 0.3) for query in mine) / group
                torch.testing.assert_close(found[request, layer, head, :length].double(), predicted, atol=1e-4, rtol=0)


@given(st.integers(0, 99), st.integers(1, 40))
def test_quest_scores_a_page_by_the_most_that_its_bounds_allow(seed, length):
    given = seen(seed, 1, 1, (6, 2), lengths=torch.tensor([length]))
    found = QuestScoring(page=16).scores(given)[0, 0]
    for head in range(2):
        queries = given.queries[0, 0, head * 3 : head * 3 + 3, -1].double()
        for start in range(0, length, 16):
            page = given.keys[0, 0, head, start : min(length, start + 16)].double()
            most = torch.maximum(queries * page.amin(dim=0), queries * page.amax(dim=0)).sum(dim=-1).mean()
            inside = found[head, start : min(length, start + 16)].double()
            torch.testing.assert_close(inside, most.expand_as(inside), atol=1e-4, rtol=0)
            assert bool((queries @ page.T).mean(dim=0).max() <= most + 1e-6), "a bound"


@pytest.mark.parametrize("scoring", SCORINGS, ids=lambda each: each.name)
def test_every_scoring_answers_in_the_same_frame_and_chooses_no_place_beyond_a_context(scoring):
    lengths = torch.tensor([40, 23])
    scores = scoring.scores(given := seen(lengths=lengths))
    assert scores.shape == given.keys.shape[:-1] and scores.dtype == torch.float32
    chosen = given.select(scores, 9, 1, 2)
    assert chosen.shape == (2, 2, 2, 9)
    for request, length in enumerate(lengths.tolist()):
        for head in chosen[request].flatten(0, 1).tolist():
            assert head == sorted({*head}) and {0, length - 2, length - 1} <= {*head} and head[-1] < length
    whole = seen()
    assert torch.allclose(scoring.scores(whole)[0], scores[0], atol=1e-6), "a context that fills the keys needs no length"


@given(st.integers(0, 99), st.integers(1, 30), st.integers(0, 5), st.integers(0, 40))
def test_the_best_are_chosen_beside_sinks_and_the_newest(seed, count, sinks, newest):
    scores = noise(seed, 1, 1, 1, 30)
    always = {*range(min(sinks, 30)), *range(max(0, 30 - newest), 30)}
    rest = sorted((place for place in range(30) if place not in always), key=lambda place: -float(scores[0, 0, 0, place]))
    found = top_tokens(scores, count, sinks, newest)[0, 0, 0].tolist()
    if count >= len(always):
        assert found == sorted([*always, *rest[: count - len(always)]])
    else:
        assert {*found} <= always and len({*found}) == count


def test_more_tokens_than_a_context_has_cannot_be_selected():
    with pytest.raises(ValueError, match=r"41 tokens are to be selected; allowed: 1 to the 40 of the context. Select fewer"):
        top_tokens(noise(0, 1, 1, 1, 40), 41, 0, 0)
    with pytest.raises(ValueError, match=r"0 tokens are to be selected"):
        top_tokens(noise(0, 1, 1, 1, 40), 0, 0, 0)


def test_query_heads_that_kv_heads_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"5 query heads; allowed: a multiple of the 2 KV heads"):
        QuestScoring().scores(seen(heads=(5, 2)))


@given(st.integers(0, 99), st.integers(1, 20))
def test_overlap_is_the_share_of_a_set_that_is_in_the_other(seed, count):
    draw = torch.Generator().manual_seed(seed)
    sets = [torch.stack([torch.randperm(40, generator=draw)[:count].sort().values for _ in range(3)]) for _ in range(2)]
    found = overlap(*sets, 40).tolist()
    assert found == pytest.approx([len({*a.tolist()} & {*b.tolist()}) / count for a, b in zip(*sets)])
    assert overlap(sets[0], sets[0], 40).tolist() == [1, 1, 1] and not math.isnan(found[0])
