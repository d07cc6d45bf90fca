"""Packed copies: slots are counted, shared, renewed and freed as those of other copies are, and rows say where blocks end."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from packed_helpers import attention, meant
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_compressed_kv import Allocator, Tree
from tiered_helpers import PAGE, ROWS, World, done

from sglang_ext.layers.attention.torch_native import RaggedTorchNativeBackend
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, QuantizedLayout
from sglang_ext.mem_cache.compressed.layouts.block_layout import as_bytes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows, record_queries
from sglang_ext.mem_cache.compressors.catalogue import method
from sglang_ext.mem_cache.compressors.attention_scores import SnapKV
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix

TOKENS, HEADS, DIM = 700, 2, 64
# First tokens of a context that are not packed, in pages of one or two.
SINKS = 4


class Room(Allocator):
    """The slots after those of the requests' full KV."""

    def __init__(self, page_size):
        super().__init__(page_size)
        self.free_slots = list(range(TOKENS + 4, TOKENS + 404))


def views_of(name, page_size=1, budget=1.0, compressor=None):
    """Views of one request in row 1, with a pool of one layer; ``compressor`` in the place of the one that ``name`` names."""
    noise, chosen = torch.Generator().manual_seed(0), method(name)
    keys, values = (torch.randn(TOKENS + 404, HEADS, DIM, generator=noise) for _ in "kv")
    buffers, allocator = KVBuffers((0,), (0.125,), (keys,), (values,)), Room(page_size)
    table = torch.zeros(8, TOKENS + 300, dtype=torch.int32)
    table[1, :TOKENS] = torch.randperm(TOKENS, generator=noise) + 4
    rows = QuantizedLayout.for_table(Packing.for_pool(chosen.quantizer, buffers, page_size), table)
    windows = QueryWindows(chosen.compressor.window, range(1), 4)
    windows.allocate(2, HEADS, DIM, keys)
    return CompressedKVCache(
        methods=(CompressionMethod(compressor or chosen.compressor, budget, rows.layout),), token_table=table, rows=4, buffers=buffers,
        allocator=allocator, tree_cache=Tree(allocator), queries=windows, layout=rows,
    )


@pytest.mark.parametrize("name", ["int8", "kivi", "turboquant", "hack"])
def test_the_draft_row_leads_to_blocks_then_to_a_copy_of_the_first_tokens_and_then_to_the_full_kvs_recent_ones(name):
    compressed_kv, length = views_of(name), 500
    assert compressed_kv.compress(1, length)
    view, packing = compressed_kv.get(1), compressed_kv.methods[0].packing
    blocks = (length - packing.recent - SINKS) // 64
    covered = SINKS + 64 * blocks
    assert (view.covered, view.num_packed_slots, view.num_slots) == (covered, blocks * packing.block_slots, view.num_packed_slots + SINKS)
    assert compressed_kv.held_bytes() == view.num_slots * 2 * HEADS * DIM * 4 < 0.3 * covered * 2 * HEADS * DIM * 4
    assert compressed_kv.layout.counts.tolist() == [0] * 5 + [view.num_packed_slots] + [0] * 2
    compressed_kv.write_tail(1, length)
    row = compressed_kv.token_table[5, : view.num_slots + length - covered].long()
    assert torch.equal(row[view.num_slots :], compressed_kv.token_table[1, covered:length].long())
    full = compressed_kv.token_table[1, SINKS:covered].long()
    copied, first = row[view.num_packed_slots : view.num_slots], compressed_kv.token_table[1, :SINKS].long()
    assert not set(copied.tolist()) & set(compressed_kv.token_table[1, :length].tolist()), "they are there when full KV is not"
    assert all(torch.equal(kind[0][copied], kind[0][first]) for kind in (compressed_kv.buffers.keys, compressed_kv.buffers.values))
    levels, rotations = packing.levels(full.device), packing.rotations(full.device)
    for kind, (buffer, layout) in enumerate(((compressed_kv.buffers.keys[0], packing.keys), (compressed_kv.buffers.values[0], packing.values))):
        back = meant(packing.read(buffer, layout, row[: view.num_packed_slots]), levels[kind], rotations[kind])
        error = (back - buffer[full].transpose(0, 1)).norm() / back.norm()
        assert error < 0.15


@given(
    st.lists(st.tuples(st.integers(10, 700), st.booleans()), max_size=8),
    st.sampled_from([1, 16, 64]),
    st.sampled_from(["kivi", "int4", "snapkv+int8", "hack"]),
)
@settings(max_examples=25, deadline=None)
def test_slots_are_conserved_over_growing_renewing_and_releasing(steps, page_size, name):
    compressed_kv = views_of(name, page_size, budget=0.5 if "+" in name else 1.0)
    before = compressed_kv.allocator.available_size()
    for tokens, release in steps:
        compressed_kv.compress(1, tokens)
        held = compressed_kv.owned_slot_count
        assert held % page_size == 0 and compressed_kv.allocator.available_size() == before - held
        if (view := compressed_kv.get(1)) is not None:
            packing, blocks = compressed_kv.methods[0].packing, view.own_tokens // 64
            assert view.sinks == packing.sinks == max(SINKS, page_size) and view.own_tokens % 64 == 0
            assert (view.covered - view.sinks) % packing.unit == 0 and view.own_packed == blocks * packing.block_slots
            assert view.own_packed <= held - view.sinks < view.own_packed + page_size
        if release:
            compressed_kv.release(1)
    compressed_kv.release(1)
    assert compressed_kv.allocator.available_size() == before and compressed_kv.owned_slot_count == 0


def test_a_copys_share_of_the_full_kv_counts_codes_and_parameters():
    assert views_of("kivi").share == 10 / 64 and views_of("int8").share == 17 / 64
    assert views_of("snapkv+int8", budget=0.5).share == 17 / 128


def test_contexts_of_less_than_a_block_and_what_stays_exact_get_no_copy():
    compressed_kv = views_of("kivi")
    assert not compressed_kv.compress(1, 195) and compressed_kv.get(1) is None
    assert compressed_kv.compress(1, 196) and compressed_kv.get(1).covered == 68 and compressed_kv.methods[0].min_covered == 68


def test_a_longer_context_adds_blocks_behind_those_that_are_packed():
    compressed_kv = views_of("kivi")
    compressed_kv.compress(1, 320)
    packing, (early, first) = compressed_kv.methods[0].packing, compressed_kv.get(1).slots.tensor_split([compressed_kv.get(1).num_packed_slots])
    before = as_bytes(compressed_kv.buffers.keys[0])[early]
    # If they were packed anew, they would change.
    compressed_kv.buffers.keys[0][compressed_kv.token_table[1, :132].long()] = 0
    compressed_kv.compress(1, 520)
    view = compressed_kv.get(1)
    assert view.covered == 388 and torch.equal(view.slots[: len(early)], early) and torch.equal(view.slots[view.num_packed_slots :], first)
    assert torch.equal(as_bytes(compressed_kv.buffers.keys[0])[early], before)
    back = meant(packing.read(compressed_kv.buffers.keys[0], packing.keys, view.slots[len(early) : view.num_packed_slots]), None, None)
    full = compressed_kv.buffers.keys[0][compressed_kv.token_table[1, 132:388].long()].transpose(0, 1)
    assert (back - full).norm() / full.norm() < 0.15
    assert compressed_kv.compress(1, 520) and torch.equal(compressed_kv.get(1).slots, view.slots)


def test_selected_tokens_are_packed_for_each_head():
    compressed_kv = views_of("sink-recent+int8", budget=0.25)
    assert compressed_kv.compress(1, 512)
    view, packing = compressed_kv.get(1), compressed_kv.methods[0].packing
    assert view.own_tokens == 128 and view.num_packed_slots == 2 * packing.block_slots
    # Of the tokens after the first ones, which are there already.
    kept = range(452 - 128, 452)
    assert view.covered == 452
    back = meant(packing.read(compressed_kv.buffers.keys[0], packing.keys, view.slots[: view.num_packed_slots]), None, None)
    original = compressed_kv.buffers.keys[0][compressed_kv.token_table[1, kept].long()].transpose(0, 1).double()
    assert (back - original).abs().max() < 0.03


def test_what_is_packed_is_chosen_by_the_newest_queries_though_their_tokens_stay_exact():
    seen = []

    class Spy(SnapKV):
        def select(self, context, parts):
            seen.append(context.query_positions.tolist())
            return super().select(context, parts)

    compressed_kv = views_of("snapkv+kivi", budget=0.5, compressor=Spy())
    with compressed_kv.queries.recording((RecordedRows(1, 0, 32, 468),)):
        layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM)
        record_queries(lambda *args: None, None, torch.randn(32, HEADS * DIM), None, None, layer, None)
    assert compressed_kv.compress(1, 500) and compressed_kv.get(1).covered == 324
    assert seen == [list(range(468, 500))]


def test_one_decode_reads_rows_with_and_without_blocks():
    compressed_kv, length = views_of("kivi"), 400
    compressed_kv.compress(1, length)
    compressed_kv.write_tail(1, length)
    view, backend = compressed_kv.get(1), object.__new__(RaggedTorchNativeBackend)
    backend.layout = compressed_kv.layout
    keys, values = compressed_kv.buffers.keys[0], compressed_kv.buffers.values[0]
    rows, lengths = torch.tensor([1, 5]), torch.tensor([length, view.num_slots + length - view.covered])
    queries = torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(1))
    table = compressed_kv.token_table
    found = backend._run_sdpa_forward_decode(
        queries, torch.empty_like(queries), keys, values, table, rows, lengths, scaling=0.125, enable_gqa=True
    )
    full = table[1, :length].long()
    exact = [part[full].transpose(0, 1).double() for part in (keys, values)]
    assert torch.allclose(found[:1].double(), attention(queries[:1], *exact, 0.125), atol=1e-5)
    drafted = []
    packing = compressed_kv.methods[0].packing
    for layout, buffer, whole in ((packing.keys, keys, exact[0]), (packing.values, values, exact[1])):
        far = meant(packing.read(buffer, layout, view.slots[: view.num_packed_slots]), None, None)
        drafted.append(torch.cat([far, whole[:, :SINKS], whole[:, view.covered :]], 1))
    assert torch.allclose(found[1:].double(), attention(queries[1:], *drafted, 0.125), atol=1e-5)
    assert not torch.allclose(found[0], found[1])


@pytest.fixture
def world():
    """A prefix tree whose requests' copies are packed."""
    made = World(slots=1400)
    made.table.req_to_token = torch.zeros(2 * ROWS, 400, dtype=torch.int32)
    noise = torch.Generator().manual_seed(0)
    buffers = KVBuffers((0,), (1.0,), *((torch.randn(1402, HEADS, DIM, generator=noise),) for _ in "kv"))
    packing = Packing.for_pool(method("int4").quantizer, buffers, PAGE)
    made.cache.bind(CompressedKVCache(
        methods=(CompressionMethod(method("int4").compressor, 1.0, packing),), token_table=made.table.req_to_token, rows=ROWS,
        buffers=buffers, allocator=made.allocator, tree_cache=made.cache, queries=QueryWindows(0, (0,), 0),
        layout=QuantizedLayout.for_table(packing, made.table.req_to_token), min_shared=64,
    ))
    return made


def test_requests_with_one_beginning_read_its_blocks_once(world):
    common = list(range(1, 151))
    done(world, common)
    compressed_kv, cache = world.cache.compressed_kv, world.cache
    slots = compressed_kv.methods[0].packing.held_slots
    requests = []
    for number in range(3):
        tokens = [*common, *range(200 + 90 * number, 290 + 90 * number)]
        matched = len(world.match(tokens[:-1]).device_indices)
        req = world.start(tokens)
        assert compressed_kv.compress(req.req_pool_idx, len(tokens), 0, SharedPrefix(req.last_node, matched))
        requests.append(req)
    assert matched == 150 and [(s.start, s.end, s.tokens) for s in cache.segments] == [(4, 132, 128)]
    assert cache.segments.held_tokens == slots(128) and compressed_kv.owned_slot_count == 3 * (SINKS + slots(64))
    for req in requests:
        view = compressed_kv.get(req.req_pool_idx)
        packing = compressed_kv.methods[0].packing
        assert (view.covered, view.shared_len, view.num_packed_slots) == (196, 132, packing.packed_slots(192))
        row = world.table.req_to_token[ROWS + req.req_pool_idx, : view.num_slots].long()
        back = meant(packing.read(compressed_kv.buffers.keys[0], packing.keys, row[: view.num_packed_slots]), None, None)
        full = world.table.req_to_token[req.req_pool_idx, SINKS:196].long()
        assert (back - compressed_kv.buffers.keys[0][full].transpose(0, 1)).abs().max() < 0.3
    world.check()
    for req in requests:
        world.finish(req)
    assert cache.segments.held_tokens == 0 and cache.segments.unused_tokens == slots(128)
    cache.evict(EvictParams(num_tokens=10_000))
    assert not list(cache.segments)
    world.check()
    world.empty()


def test_a_copy_of_shared_blocks_alone_has_the_first_tokens_for_itself(world):
    common = list(range(1, 151))
    done(world, common)
    req = world.start([*common, 900, 901])
    compressed_kv = world.cache.compressed_kv
    assert compressed_kv.compress(req.req_pool_idx, 152, 0, SharedPrefix(req.last_node, 150))
    view = compressed_kv.get(req.req_pool_idx)
    assert (view.covered, view.shared_len, view.own_tokens) == (132, 132, 0) and len(view.own) == SINKS
    assert view.num_slots == view.num_packed_slots + SINKS and torch.equal(view.slots[view.num_packed_slots :], view.own)
    first = world.table.req_to_token[req.req_pool_idx, :SINKS].long()
    assert torch.equal(compressed_kv.buffers.keys[0][view.own], compressed_kv.buffers.keys[0][first])
    world.check()
    world.empty()
