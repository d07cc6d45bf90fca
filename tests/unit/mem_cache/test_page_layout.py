"""Pages that attention chooses on a GPU: what bounds them follows the keys, and what the host leaves to it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pointer_layout import choose_by, led_to
from test_compressed_kv import DIM, HEADS, LAYERS, make_views
from test_slot_codes import forward, pool

from sglang_ext.core import IntegrityError, RequestState
from sglang_ext.managers.integrity import check_compressed
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes, compute_extremes
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv, max_unrefreshed_tail, refresh_position, rows_to_record
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows, set_key_write_callback
from sglang_ext.mem_cache.compressed.policy import observe_step
from sglang_ext.mem_cache.compressors.step_selectors import Quest

PAGE = 16


def test_extremes_are_of_each_channel_of_each_page():
    keys = torch.arange(2 * PAGE * 3.0).view(2 * PAGE, 1, 3)
    keys[5, 0, 1], keys[20, 0, 2] = -7.0, 500.0
    assert compute_extremes(keys, PAGE)[:, 0].tolist() == [[[0, -7, 2], [45, 46, 47]], [[48, 49, 50], [93, 94, 500]]]


@given(st.lists(st.lists(st.integers(0, 79), max_size=9), max_size=6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_after_each_forward_pages_that_it_wrote_have_the_extremes_of_the_keys_that_are_in_them(writes, seed):
    keys = pool(3, 80, 2, 8, seed)
    extremes = PageExtremes(keys, (4, 5, 7), PAGE)
    assert extremes.nbytes == sum(each.nbytes for each in keys) // 8
    extremes.write(torch.arange(80))
    set_key_write_callback(extremes.on_keys_written)
    try:
        for turn, slots in enumerate(writes):
            for layer_id, buffer, new in zip((4, 5, 7), keys, pool(3, 80, 2, 8, seed + turn + 1)):
                buffer[slots] = 3 * new[slots]
                before = extremes.held.clone()
                forward(slots, (layer_id,))
                assert layer_id == 7 or torch.equal(extremes.held, before), "the last layer writes yet"
            assert all(torch.equal(held, compute_extremes(buffer, PAGE)) for held, buffer in zip(extremes.held, keys))
    finally:
        set_key_write_callback(None)


def paged_views(every=1, each_round=False, most=0):
    """Views of a request in row 1, whose copies attention chooses."""
    compressed_kv, method = make_views(PAGE, 0.25), Quest(every=every, each_round=each_round, most=most, in_attention=True)
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    compressed_kv.token_table[1, : 12 * PAGE] = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    pointers = Pointers.for_pool(compressed_kv.buffers, PAGE)
    compressed_kv.layout = PagePointerLayout.of_pool(pointers, compressed_kv.token_table, PageExtremes(compressed_kv.buffers.keys, range(LAYERS), PAGE), method)
    compressed_kv.layout.extremes.write(torch.arange(len(compressed_kv.buffers.keys[0]) // PAGE * PAGE))
    choose_by(compressed_kv, method, pointers)
    compressed_kv.queries = QueryWindows(method.window, range(LAYERS), 4)
    compressed_kv.queries.allocate(2, HEADS, DIM, torch.empty(0))
    return compressed_kv


def state():
    return RequestState(rid="r", row=1, seed=0)


def ensure(compressed_kv, length):
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state(), length, 0) == 0


@pytest.mark.parametrize("every", [1, 3])
def test_a_copy_leads_to_the_newest_tokens_until_attention_chooses_among_its_whole_pages(every):
    compressed_kv = paged_views(every)
    ensure(compressed_kv, 190)
    view = compressed_kv.get(1)
    # Of 11 pages a quarter, rounded up, in whole pages of slots.
    assert (view.covered, view.own_tokens, len(view.own) % PAGE) == (176, 48, 0)
    newest = compressed_kv.token_table[1, 128:176].tolist()
    assert led_to(compressed_kv) == [[newest] * HEADS] * LAYERS
    assert compressed_kv.layout.counts.tolist() == [0] * 5 + [48, 0, 0] and compressed_kv.layout.pages.tolist() == [0] * 5 + [11, 0, 0]
    assert compressed_kv.layout.selected_at.shape == (LAYERS, 8 if every > 1 else 0, HEADS)
    assert every == 1 or compressed_kv.layout.selected_at[:, 5].unique().tolist() == [-every], "the next step chooses"
    check_compressed(compressed_kv)
    compressed_kv.release(1)
    assert compressed_kv.allocator.available_size() == 200


@pytest.mark.parametrize("every", [1, 4])
def test_the_host_watches_no_layer_and_counts_choices(every):
    compressed_kv = paged_views(every)
    ensure(compressed_kv, 190)
    for end in range(191, 199):
        assert observe_step(compressed_kv, {1: end}, None) is None
        compressed_kv.reselect(1, end, 1)
    assert compressed_kv.num_compressions == {"quest": 1 + 8 // every}
    assert compressed_kv.queries.held_bytes == 0 and rows_to_record(compressed_kv, [state()], [RecordedRows(1, 0, 1, 190)]) == (), "no queries are kept"


def test_with_every_choices_are_counted_from_the_first_step_over_a_copy_on_as_attention_makes_them():
    compressed_kv = paged_views(every=4)
    ensure(compressed_kv, 190)

    def chosen(end):
        before = compressed_kv.num_compressions["quest"]
        observe_step(compressed_kv, {1: end}, None)
        return compressed_kv.num_compressions["quest"] - before

    # Fourteen tokens follow the copy before its first step.
    assert [chosen(end) for end in range(191, 200)] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert [chosen(end) for end in range(198, 204)] == [0, 0, 0, 0, 0, 1], "drafts that were rejected are stepped again"
    compressed_kv.layout.on_filled(5, compressed_kv.get(1))
    assert [chosen(end) for end in range(204, 209)] == [1, 0, 0, 0, 1], "as a copy that is made anew"


def test_where_nothing_is_verified_a_copy_grows_when_many_tokens_follow_it_and_after_each_verification_else():
    for each_round in (False, True):
        compressed_kv = paged_views(each_round=each_round)
        ensure(compressed_kv, 160)
        view, chooser = compressed_kv.get(1), compressed_kv.methods[0].compressor
        assert refresh_position(view, chooser) == 160 + (1 if each_round else max_unrefreshed_tail(view.num_slots))
        ensure(compressed_kv, 190)
        assert compressed_kv.get(1).covered == (176 if each_round else 160)
        assert compressed_kv.layout.pages[5] == compressed_kv.get(1).covered // PAGE and compressed_kv.get(1).own_tokens == compressed_kv.layout.counts[5]


def test_pointers_leave_slots_that_the_prefix_tree_has_exchanged_and_are_chosen_again():
    compressed_kv = paged_views(every=3)
    ensure(compressed_kv, 160)
    compressed_kv.write_tail(1, 163)
    compressed_kv.layout.selected_at[:, 5] = 2
    other = compressed_kv.allocator.alloc(64)
    other = other[int(-other[0] % PAGE) :][:48]
    compressed_kv.token_table[1, 112:160] = other.int()
    with pytest.raises(IntegrityError, match="belong to no token of its request"):
        check_compressed(compressed_kv)
    compressed_kv.on_row_moved(1, 112)
    kept = compressed_kv.get(1).own_tokens
    newest = compressed_kv.token_table[1, 160 - kept : 160].tolist()
    assert compressed_kv.get(1).covered == 160 and led_to(compressed_kv) == [[newest] * HEADS] * LAYERS
    assert compressed_kv.layout.selected_at[:, 5].unique().tolist() == [-3]
    check_compressed(compressed_kv)


def test_what_is_no_whole_page_or_has_the_extremes_of_other_keys_is_named():
    compressed_kv = paged_views()
    ensure(compressed_kv, 176)
    check_compressed(compressed_kv)
    row = compressed_kv.token_table[1]
    compressed_kv.buffers.keys[1][int(row[40])] += 9.0
    page = int(row[40]) // PAGE
    with pytest.raises(IntegrityError, match=rf"extremes of pages \[{page}\] .* draft row 5 in layer 1 do not match the keys"):
        check_compressed(compressed_kv)
    compressed_kv.layout.extremes.write(row[40:41].long())
    check_compressed(compressed_kv)
    cells, own = as_pointers(compressed_kv.buffers.keys[0]), compressed_kv.get(1).own
    cells[own[0], 1, :2] = cells[own[0], 1, :2].flip(0)
    with pytest.raises(IntegrityError, match="pointers of draft row 5 in layer 0 point to slots that are not whole pages of 16"):
        check_compressed(compressed_kv)
    cells[own[0], 1, :2] = cells[own[0], 1, :2].flip(0)
    compressed_kv.layout.pages[5] = 9
    with pytest.raises(IntegrityError, match="among 9 pages for draft row 5, which covers 176 tokens"):
        check_compressed(compressed_kv)
    compressed_kv.layout.pages[5] = 11
    row[16:18] = row[16:18].flip(0)
    with pytest.raises(IntegrityError, match="draft row 5 covers slots that are not whole pages"):
        check_compressed(compressed_kv)


def test_so_many_tokens_are_kept_as_fill_pages():
    compressed_kv = paged_views(most=40)
    ensure(compressed_kv, 190)
    assert compressed_kv.get(1).own_tokens == 48 == compressed_kv.layout.counts[5]
    assert replace(Quest(), in_attention=True).window == 0 and Quest().window == 1
