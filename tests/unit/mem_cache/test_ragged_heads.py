"""Copies whose heads keep different numbers of tokens: where what they keep lies, and what attention reads of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from head_helpers import Given, check_slots_are_conserved, context, scores_of, sets
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import attention
from test_compressed_kv import DIM, HEADS, LAYERS, make_views

from sglang_ext.layers.attention.torch_native import RaggedTorchNativeBackend
from sglang_ext.managers.integrity import IntegrityError, check_compressed
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout, RaggedSelection
from sglang_ext.mem_cache.compressors import Part
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix


def uneven_views(scores, page_size=1, budget=0.25):
    """Views of a request in row 1, whose heads keep what has the best of ``scores``."""
    compressed_kv = make_views(page_size, budget, compressor=Given(scores))
    compressed_kv.layout = RaggedHeadLayout.of(compressed_kv.buffers, len(compressed_kv.token_table))
    return compressed_kv


def exact(compressed_kv, row, layer, kept, tail):
    """What each head of a layer shall attend to, from full KV: keys and values, float64 [tokens, dim] each, by head."""
    full = compressed_kv.token_table[row].long()
    places = [[*tokens, *tail] for tokens in sets(kept)[layer * HEADS : (layer + 1) * HEADS]]
    return [
        [kind[layer][full[tokens], head].double() for kind in (compressed_kv.buffers.keys, compressed_kv.buffers.values)]
        for head, tokens in enumerate(places)
    ]


@given(st.integers(0, 999), st.integers(1, 100), st.integers(1, 5), st.sampled_from([1, 3]), st.sampled_from([1, 16]))
@settings(max_examples=40, deadline=None)
def test_attention_over_a_copy_and_its_tail_is_that_over_what_each_head_keeps(seed, covered, count, group, page_size):
    covered = -(-covered // page_size) * page_size
    length = covered + count + seed % 3
    scores = scores_of(LAYERS, HEADS, covered, seed)
    compressed_kv = uneven_views(scores, page_size)
    compressed_kv.queries = SimpleNamespace(
        newest=lambda row: covered, get=lambda row, tokens, count: None, forget=lambda row: None
    )
    assert compressed_kv.compress(1, length)
    compressed_kv.write_tail(1, length)
    view, backend = compressed_kv.get(1), object.__new__(RaggedTorchNativeBackend)
    backend.layout = compressed_kv.layout
    kept = compressed_kv.methods[0].compressor.select_ragged(context(LAYERS, HEADS, covered), Part(0, covered, view.num_slots))
    # The draft row beside the request's own, which has no copy.
    rows, lengths = torch.tensor([5, 1]), torch.tensor([view.num_slots + length - covered, length])
    noise = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        queries = torch.randn(2 * count, HEADS * group, DIM, generator=noise)
        keys, values = compressed_kv.buffers.keys[layer], compressed_kv.buffers.values[layer]
        shared = queries, torch.empty_like(queries), keys, values, compressed_kv.token_table, rows, lengths
        if count == 1:
            found = backend._run_sdpa_forward_decode(*shared, scaling=0.3, enable_gqa=group > 1, causal=False)
        else:
            counts = torch.tensor([count, count])
            found = backend._run_sdpa_forward_extend(
                *shared, lengths - counts, counts, scaling=0.3, enable_gqa=group > 1, causal=True
            )
        for head, (k, v) in enumerate(exact(compressed_kv, 1, layer, kept, range(covered, length))):
            mine = slice(head * group, (head + 1) * group)
            expected = attention(queries[:count, mine], k[None], v[None], 0.3)
            assert torch.allclose(found[:count, mine].double(), expected, atol=1e-5)
        full = compressed_kv.token_table[1, :length].long()
        whole = [kind[full].transpose(0, 1).double() for kind in (keys, values)]
        assert torch.allclose(found[count:].double(), attention(queries[count:], *whole, 0.3), atol=1e-5)


def test_a_layer_that_keeps_nothing_attends_to_what_follows_the_copy():
    scores = torch.stack([torch.zeros(HEADS, 40), torch.ones(HEADS, 40)])
    compressed_kv = uneven_views(scores, budget=0.5)
    assert compressed_kv.compress(1, 40)
    assert compressed_kv.layout.bounds[5].tolist() == [0, 0, 0, 40, 80]
    compressed_kv.write_tail(1, 42)
    backend, queries = object.__new__(RaggedTorchNativeBackend), torch.randn(1, HEADS, DIM)
    backend.layout = compressed_kv.layout
    for layer, tokens in enumerate((range(40, 42), range(42))):
        keys, values = compressed_kv.buffers.keys[layer], compressed_kv.buffers.values[layer]
        row = compressed_kv.token_table, torch.tensor([5]), torch.tensor([22])
        found = backend._run_sdpa_forward_decode(queries, torch.empty_like(queries), keys, values, *row, scaling=0.3)
        seen = compressed_kv.token_table[1, tokens].long()
        expected = attention(queries, *(part[seen].transpose(0, 1).double() for part in (keys, values)), 0.3)
        assert torch.allclose(found.double(), expected, atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 190), st.booleans()), max_size=8), st.sampled_from([1, 16]))
@settings(max_examples=25, deadline=None)
def test_slots_are_conserved_and_all_cells_hold_something_over_growing_renewing_and_releasing(steps, page_size):
    compressed_kv = uneven_views(scores_of(LAYERS, HEADS, 200, 1), page_size)

    def choose(covered, seed):
        compressed_kv.methods = (replace(compressed_kv.methods[0], compressor=Given(scores_of(LAYERS, HEADS, covered, seed))),)

    def check(held):
        check_compressed(compressed_kv)
        assert compressed_kv.layout.compressed_lengths(torch.tensor([1, 5])) == [0, held]

    check_slots_are_conserved(compressed_kv, steps, page_size, choose, lambda view: view.num_slots, check)


def test_a_copy_of_uneven_heads_reads_no_segments_and_leaves_none():
    compressed_kv = uneven_views(scores_of(LAYERS, HEADS, 200, 1))
    assert compressed_kv.compress(1, 200, prefix=SharedPrefix(None, 200))
    assert compressed_kv.get(1).segments == [] and compressed_kv.owned_slot_count == 50


def test_a_copy_whose_bounds_are_not_those_of_its_cells_is_named():
    compressed_kv = uneven_views(scores_of(LAYERS, HEADS, 100, 1))
    assert compressed_kv.compress(1, 100)
    check_compressed(compressed_kv)
    compressed_kv.layout.bounds[5, 1] = 101
    with pytest.raises(IntegrityError, match=r"row 5 .* 25 slots"):
        check_compressed(compressed_kv)


def test_what_is_read_of_cells_is_what_was_written_whatever_the_bounds():
    buffers = make_views().buffers
    cells = RaggedHeadLayout.of(buffers, 2)
    kept = RaggedSelection(torch.arange(12) % 7, torch.tensor([0, 1, 9, 9, 12], dtype=torch.int32))
    sources, targets = torch.arange(100, 107), torch.tensor([3, 250, 7])
    cells.write(1, kept, sources, targets)
    bounds = kept.bounds.tolist()
    for kind in (buffers.keys, buffers.values):
        for head, (first, last) in enumerate(zip(bounds, bounds[1:])):
            expected = kind[head // HEADS][sources[kept.tokens[first:last]], head % HEADS]
            assert torch.equal(cells.read(kind, targets, first, last), expected)
