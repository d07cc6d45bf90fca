"""Copies that hold pointers into full KV: what they lead to, what attention reads by them, when they are chosen anew."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from head_helpers import Given, check_slots_are_conserved, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import attention
from test_compressed_kv import DIM, HEADS, LAYERS, make_views

from sglang_ext.core import FALLBACK_REASONS, RequestState
from sglang_ext.layers.attention.torch_native import RaggedTorchNativeBackend
from sglang_ext.managers.integrity import IntegrityError, check_compressed
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, top_positions, catalogue
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.compressors.attention_scores import VerifyGuided
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery


class GivenAnew(Given):
    """Given scores, of a method that points and chooses in each round."""

    each_round = points = True


class Wrong(Given):
    """Given scores, chosen anew after each step."""

    points, every = True, 1


def pointing_views(scores, page_size=1, budget=0.25):
    """Views of a request in row 1, whose heads are led to the best of ``scores``."""
    compressed_kv = make_views(page_size, budget)
    pointers = Pointers.for_pool(compressed_kv.buffers, page_size)
    compressed_kv.layout = PointerLayout.for_table(pointers, compressed_kv.token_table)
    choose_by(compressed_kv, GivenAnew(scores), pointers)
    return compressed_kv


def choose_by(compressed_kv, compressor, packing=None):
    """Let copies be chosen by ``compressor``."""
    (method,) = compressed_kv.methods
    compressed_kv.methods = (replace(method, compressor=compressor, packing=packing or method.packing),)


def chosen(scores, covered, budget_tokens):
    """Positions that each head keeps, of all layers: int64 [layers, kv_heads, count]."""
    return scores[..., :covered].topk(budget_tokens, dim=-1).indices.sort(dim=-1).values


def test_a_pointer_takes_four_bytes_of_a_heads_keys():
    compressed_kv = make_views()
    assert Pointers.for_pool(compressed_kv.buffers, 1).per_slot == DIM
    half = torch.zeros(5, 2, 128, dtype=torch.bfloat16)
    assert as_pointers(half).shape == (5, 2, 64)
    pointers = Pointers(64, 16)
    assert [pointers.packed_slots(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]
    assert [pointers.held_slots(tokens) for tokens in (0, 1, 64 * 16, 64 * 16 + 1)] == [0, 16, 16, 32]
    assert pointers.share == 1 / 64 and pointers.unit == 16


@given(st.integers(0, 999), st.integers(1, 100), st.integers(1, 5), st.sampled_from([1, 3]), st.sampled_from([1, 16]))
@settings(max_examples=40, deadline=None)
def test_attention_over_pointers_and_the_tail_is_that_over_what_each_head_keeps(seed, covered, count, group, page_size):
    covered = -(-covered // page_size) * page_size
    length, scores = covered + count + seed % 3, scores_of(LAYERS, HEADS, covered, seed)
    compressed_kv = pointing_views(scores, page_size)
    compressed_kv.queries = SimpleNamespace(newest=lambda row: covered, get=lambda row, tokens, window: None)
    full_kv = [part[: len(compressed_kv.token_table[1])].clone() for part in (*compressed_kv.buffers.keys, *compressed_kv.buffers.values)]
    assert compressed_kv.compress(1, length)
    compressed_kv.write_tail(1, length)
    check_compressed(compressed_kv)
    view, backend = compressed_kv.get(1), object.__new__(RaggedTorchNativeBackend)
    backend.layout = compressed_kv.layout
    assert compressed_kv.layout.counts.tolist() == [0, 0, 0, 0, 0, view.own_tokens, 0, 0]
    kept = chosen(scores, covered, view.own_tokens)
    # The draft row beside the request's own, which begins with no pointers.
    rows, lengths = torch.tensor([5, 1]), torch.tensor([view.num_slots + length - covered, length])
    noise, full = torch.Generator().manual_seed(seed), compressed_kv.token_table[1].long()
    for layer in range(LAYERS):
        queries = torch.randn(2 * count, HEADS * group, DIM, generator=noise)
        keys, values = compressed_kv.buffers.keys[layer], compressed_kv.buffers.values[layer]
        shared = queries, torch.empty_like(queries), keys, values, compressed_kv.token_table, rows, lengths
        if count == 1:
            found = backend._run_sdpa_forward_decode(*shared, scaling=0.3, enable_gqa=group > 1, causal=False)
        else:
            counts = torch.tensor([count, count])
            options = {"scaling": 0.3, "enable_gqa": group > 1, "causal": True}
            found = backend._run_sdpa_forward_extend(*shared, lengths - counts, counts, **options)
        for head in range(HEADS):
            places = full[torch.cat([kept[layer, head], torch.arange(covered, length)])]
            k, v = (part[places, head].double()[None] for part in (keys, values))
            mine = slice(head * group, (head + 1) * group)
            assert torch.allclose(found[:count, mine].double(), attention(queries[:count, mine], k, v, 0.3), atol=1e-5)
        whole = [part[full[:length]].transpose(0, 1).double() for part in (keys, values)]
        assert torch.allclose(found[count:].double(), attention(queries[count:], *whole, 0.3), atol=1e-5)
    mine = full[:length]
    for before, now in zip(full_kv, (*compressed_kv.buffers.keys, *compressed_kv.buffers.values)):
        assert torch.equal(before[mine], now[mine]), "full KV stays as it is"


@given(st.lists(st.tuples(st.integers(1, 190), st.booleans()), max_size=8), st.sampled_from([1, 16]))
@settings(max_examples=25, deadline=None)
def test_slots_are_conserved_over_choosing_anew_and_releasing(steps, page_size):
    compressed_kv = pointing_views(scores_of(LAYERS, HEADS, 200, 1), page_size)
    held_slots = compressed_kv.methods[0].packing.held_slots

    def choose(covered, seed):
        choose_by(compressed_kv, GivenAnew(scores_of(LAYERS, HEADS, covered, seed)))

    def held_of(view):
        return held_slots(view.own_tokens)

    check_slots_are_conserved(compressed_kv, steps, page_size, choose, held_of, lambda held: check_compressed(compressed_kv))


def test_pointers_read_no_segments_and_leave_none():
    compressed_kv = pointing_views(scores_of(LAYERS, HEADS, 200, 1))
    assert compressed_kv.compress(1, 200, prefix=SharedPrefix(None, 200))
    assert compressed_kv.get(1).segments == [] and compressed_kv.get(1).own_tokens == 50


def test_pointers_that_lead_to_anothers_token_are_named():
    compressed_kv = pointing_views(scores_of(LAYERS, HEADS, 100, 1))
    assert compressed_kv.compress(1, 100)
    check_compressed(compressed_kv)
    as_pointers(compressed_kv.buffers.keys[1])[compressed_kv.get(1).own[0], 1, 2] = 399
    with pytest.raises(IntegrityError, match=r"row 5 in layer 1 point to slots \[399\]"):
        check_compressed(compressed_kv)


def guided_views(method=VerifyGuided()):
    """Views of a request in row 1, chosen by queries, of which ``keep`` takes those of positions."""
    compressed_kv = pointing_views(torch.empty(0))
    choose_by(compressed_kv, method)
    compressed_kv.rotary = Rotary(1 / 10 ** torch.arange(DIM // 2))
    compressed_kv.queries = QueryWindows(method.window, range(LAYERS), 4)
    compressed_kv.queries.allocate(2, HEADS, DIM, torch.empty(0))

    def keep(positions, seed):
        queries = torch.randn(LAYERS, len(positions), HEADS, DIM, generator=torch.Generator().manual_seed(seed)) * 3
        with compressed_kv.queries.recording((RecordedRows(1, 0, len(positions), positions.start),)):
            for layer in range(LAYERS):
                compressed_kv.queries.record(layer, queries[layer])

    return compressed_kv, keep


def led_to(compressed_kv):
    """Slots to which the pointers of row 1 lead, by layer and head."""
    view = compressed_kv.get(1)
    return [compressed_kv.methods[0].packing.read(keys, view.own, view.own_tokens).tolist() for keys in compressed_kv.buffers.keys]


@pytest.mark.parametrize("each_round", [False, True])
def test_pointers_follow_a_prompt_to_the_slots_that_the_prefix_tree_had_of_it(each_round):
    state, (compressed_kv, keep) = RequestState(rid="r", row=1, seed=0), guided_views(Spade(every=64, each_round=each_round))
    keep(range(149, 150), 1)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 150, 0) == 0
    first, row = led_to(compressed_kv), compressed_kv.token_table[1, :150].long()
    keep(range(150, 152), 2)
    compressed_kv.write_tail(1, 152)
    other = compressed_kv.allocator.alloc(40)
    for part in (*compressed_kv.buffers.keys, *compressed_kv.buffers.values):
        part[other] = part[row[110:150]]
    compressed_kv.token_table[1, 110:150] = other.int()
    compressed_kv.on_row_moved(1, 110)
    if each_round:
        assert compressed_kv.get(1) is None, "the next round makes another one"
        return
    moved = dict(zip(row[110:150].tolist(), other.tolist()))
    assert led_to(compressed_kv) == [[[moved.get(slot, slot) for slot in head] for head in layer] for layer in first] != first
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 152, 0) == 0 and compressed_kv.get(1).covered == 150


def test_each_verification_chooses_anew_and_rejected_drafts_have_no_say():
    found = []
    # They are dropped before a round; the length leaves them out, too.
    for rejected, dropped in ((0, False), (4, True), (4, False)):
        state, (compressed_kv, keep) = RequestState(rid="r", row=1, seed=0), guided_views()
        keep(range(100, 150), 1)
        assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 150, 0) == 0
        first = led_to(compressed_kv)
        keep(range(150, 156), 2)
        keep(range(156, 156 + rejected), 3)
        if dropped:
            compressed_kv.queries.drop_rejected(1, 156)
        assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 156, 0) == 0
        assert compressed_kv.get(1).covered == 156 and led_to(compressed_kv) != first
        newest = compressed_kv.token_table[1, 124:156].tolist()
        assert all(set(newest) <= set(head) for layer in led_to(compressed_kv) for head in layer), "the newest 32"
        found.append(led_to(compressed_kv))
    assert found[0] == found[1] == found[2] and catalogue.method_name(state.compressor) == "verify-guided"
    assert compressed_kv.num_compressions == {"verify-guided": 2}


def spade_of(compressed_kv, positions, covered, predictor):
    """Slots that each head is led to by the queries of ``positions`` alone, by layer and head, as its own scores say."""
    queries, found = compressed_kv.queries.get(1, positions.stop, predictor.window)
    context = ContextKV(compressed_kv.buffers, compressed_kv.token_table[1, :covered].long(), queries, found, compressed_kv.rotary)
    kept = [top_positions(Spade(predictor).scores(context.layer(layer)), compressed_kv.get(1).own_tokens) for layer in range(LAYERS)]
    return [context.slots[of_layer].tolist() for of_layer in kept]


@pytest.mark.parametrize("predictor", [CurrentQuery(), RegressedQuery()], ids=lambda each: each.name)
def test_between_steps_a_choice_follows_the_newest_query_over_the_same_tokens(predictor):
    compressed_kv, keep = guided_views(Spade(predictor))
    keep(range(100, 150), 1)
    state = RequestState(rid="r", row=1, seed=0)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 150, 0) == 0
    assert led_to(compressed_kv) == spade_of(compressed_kv, range(100, 150), 150, predictor)
    own, counts, row = compressed_kv.get(1).own, compressed_kv.layout.counts.tolist(), compressed_kv.token_table[5].clone()
    before = led_to(compressed_kv)
    for position in (150, 151, 152):
        keep(range(position, position + 1), position)
        compressed_kv.reselect(1, position + 1, compressed_kv.method(1).compressor.every)
        check_compressed(compressed_kv)
        assert led_to(compressed_kv) == spade_of(compressed_kv, range(100, position + 1), 150, predictor) != before
        before = led_to(compressed_kv)
    # What a round was planned by stays as it is.
    assert compressed_kv.get(1).covered == 150 and compressed_kv.get(1).own is own
    assert compressed_kv.layout.counts.tolist() == counts and torch.equal(compressed_kv.token_table[5], row)
    # Queries of drafts that were rejected have no say in the next round's.
    compressed_kv.queries.drop_rejected(1, 151)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 151, 0) == 0
    assert led_to(compressed_kv) == spade_of(compressed_kv, range(100, 151), 151, predictor)
    assert compressed_kv.num_compressions == {"spade": 5}


def test_between_steps_a_choice_is_made_after_so_many_of_them():
    for method, expected in ((Spade(every=2), [False, True, False, True]), (Spade(every=5), [False] * 4)):
        compressed_kv, keep = guided_views(method)
        keep(range(100, 150), 1)
        ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), 150, 0)
        changed = []
        for position in range(150, 154):
            keep(range(position, position + 1), position)
            before = led_to(compressed_kv)
            compressed_kv.reselect(1, position + 1, compressed_kv.method(1).compressor.every)
            changed.append(led_to(compressed_kv) != before)
        assert changed == expected


def test_scores_that_cannot_be_used_between_steps_leave_a_choice_and_are_told_once(caplog):
    compressed_kv, keep = guided_views(Spade())
    keep(range(100, 150), 1)
    ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), 150, 0)
    before = led_to(compressed_kv)
    wrong = Wrong(torch.zeros(LAYERS, HEADS, 7))
    choose_by(compressed_kv, wrong)
    for end in (151, 152):
        compressed_kv.reselect(1, end, compressed_kv.method(1).compressor.every)
    assert led_to(compressed_kv) == before and compressed_kv.is_refused(1) and len(caplog.records) == 1


def test_without_new_queries_a_choice_stays_and_what_came_since_is_exact():
    compressed_kv, keep = guided_views()
    keep(range(100, 150), 1)
    state = RequestState(rid="r", row=1, seed=0)
    for length in (150, 154):
        assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, length, 0) == 0
    assert compressed_kv.num_compressions == {"verify-guided": 1} and compressed_kv.get(1).covered == 150


def test_a_choice_that_finds_no_slot_for_more_pointers_is_given_up():
    compressed_kv, keep = guided_views()
    keep(range(100, 150), 1)
    state = RequestState(rid="r", row=1, seed=0)
    ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 150, 0)
    taken = compressed_kv.allocator.alloc(compressed_kv.allocator.available_size())
    keep(range(150, 199), 2)
    reason = ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, 199, 0)
    assert FALLBACK_REASONS[reason] == "no-free-slots" and compressed_kv.get(1) is None
    assert len(taken) + compressed_kv.allocator.available_size() == 200
