"""Prompts that attend to codes: full KV goes chunk by chunk, and a beginning that is codes alone is kept for whoever reads it."""

from array import array

import torch
from lossy_helpers import SINKS, Lossy, distinct
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from tiered_helpers import Request

from sglang_ext.mem_cache.prefix_cache.nodes import path

BLOCK = 64


def admitted(world, tokens):
    """A request that SGLang admits, with its row and what is cached of it; ``begun`` tokens of those were in the tree."""
    match = world.match(tokens[:-1])
    req = Request(array("q", tokens), None)
    world.cache.inc_lock_ref(match.last_device_node)
    new, last = match.device_indices[:0], match.last_device_node
    if match.host_hit_length:
        new, last = world.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
    world.cache.dec_lock_ref(match.last_device_node)
    req.prefix_indices, req.last_node = torch.cat([match.device_indices, new]), last
    req.cache_protected_len = req.length = req.begun = len(req.prefix_indices)
    world.cache.inc_lock_ref(last)
    world.codes.on_admitted(req)
    req.req_pool_idx = world.table.free.pop()
    world.table.req_to_token[req.req_pool_idx, : req.length] = req.prefix_indices.int()
    world.running.append(req)
    return req


def compute(world, req, end):
    """The prompt's tokens up to ``end``; the tree takes them over."""
    known = req.length
    assert world.extend(req, end)
    world.codes.begin_prompts([(req, req.begun, known)])
    world.cache.cache_unfinished_req(req, chunked=end < len(req.tokens))


def computed(world, tokens, chunk=260):
    req = admitted(world, tokens)
    while req.length < len(tokens):
        compute(world, req, min(len(tokens), req.length + chunk))
    return req


def decode(world, req):
    """Its first round."""
    assert world.compress(req, req.begun)
    world.round(req)


def leave_codes(world, tokens):
    """A prompt was computed and answered: its beginning is codes alone in the tree."""
    req = computed(world, tokens)
    decode(world, req)
    world.finish(req, is_insert=False)


def test_a_chunks_full_kv_goes_as_the_next_one_begins():
    world = Lossy(on_codes=True)
    req = admitted(world, distinct(1, 900))
    for end in (200, 400, 600, 900):
        before = (req.length - SINKS) // BLOCK * BLOCK
        compute(world, req, end)
        assert world.codes.tokens == max(0, before)
        assert len(world.codes.block_slots(req.req_pool_idx)) == world.packing.packed_slots(max(0, before))
        world.check()
    copy = world.compressed_kv.get(req.req_pool_idx)
    decode(world, req)
    assert world.compressed_kv.get(req.req_pool_idx).covered == SINKS + (900 - SINKS) // BLOCK * BLOCK > copy.covered
    assert world.compressed_kv.get(req.req_pool_idx).refresh_after > 900, "as a copy that is made of a whole prompt"
    assert not world.codes.computed
    world.check()
    world.empty()


def test_a_prompt_that_begins_so_reads_the_codes_where_they_lie():
    world = Lossy(on_codes=True)
    leave_codes(world, distinct(1, 600))
    free, slots = world.allocator.available_size(), [segment.slots for segment in world.cache.segments]
    second = admitted(world, distinct(1, 394) + distinct(2, 206))
    assert second.begun == SINKS + (394 - SINKS) // BLOCK * BLOCK
    compute(world, second, 600)
    read = world.codes.block_slots(second.req_pool_idx)
    assert torch.equal(read, torch.cat(slots)[: len(read)]) and len(read) == world.packing.packed_slots(second.begun - SINKS)
    # Its own tokens, and its sinks once more.
    assert free - world.allocator.available_size() == 600 - second.begun + SINKS
    assert world.codes.restored_tokens == 0
    world.check_owners()
    decode(world, second)
    world.check()
    world.empty()


def test_a_copy_that_leaves_newest_tokens_exact_takes_no_place_of_codes_that_reach_farther():
    world = Lossy(name="kivi", on_codes=True)
    leave_codes(world, distinct(1, 400))
    recent = world.packing.recent
    second = admitted(world, distinct(1, 330) + distinct(2, 300))
    assert second.begun == SINKS + 5 * BLOCK and SINKS + 4 * BLOCK > second.begun - recent
    compute(world, second, 400)
    assert len(world.codes.block_slots(second.req_pool_idx)) == world.packing.packed_slots(4 * BLOCK)
    compute(world, second, 630)
    assert len(world.codes.block_slots(second.req_pool_idx)) == world.packing.packed_slots((400 - recent - SINKS) // BLOCK * BLOCK)
    decode(world, second)
    world.check_owners()
    world.empty()


def test_codes_of_an_admitted_prompts_beginning_are_not_evicted_also_where_others_part_them():
    world = Lossy(on_codes=True)
    leave_codes(world, distinct(1, 600))
    reading = admitted(world, distinct(1, 560) + distinct(2, 60))
    prefix = world.cache.nodes.segments_to(reading.last_node, reading.last_node.end, "int8", SINKS)
    expected = torch.cat([segment.slots[: segment.packed] for segment in prefix])
    assert world.match(distinct(1, 140) + distinct(3, 60)).best_match_node.end == SINKS + 2 * BLOCK
    world.cache.evict(EvictParams(num_tokens=world.slots))
    world.check_owners()
    compute(world, reading, 600)
    world.codes.computed.clear()
    found = world.codes.block_slots(reading.req_pool_idx)
    assert torch.equal(found, expected[: len(found)]) and len(found) == world.packing.packed_slots(reading.begun - SINKS)
    world.finish(reading, is_insert=False)
    world.check_owners()
    world.empty()


def test_who_lacks_full_kv_and_gets_no_copy_reads_the_codes_and_is_computed_again():
    world = Lossy(slots=1200, on_codes=True)
    leave_codes(world, distinct(1, 600))
    reading = admitted(world, distinct(1, 600) + distinct(2, 30))
    world.cache.evict(EvictParams(num_tokens=world.slots))
    others = world.allocate(world.allocator.available_size() - 60)
    assert world.extend(reading, len(reading.tokens))
    more = world.allocate(world.allocator.available_size())
    world.codes.begin_prompts([(reading, reading.begun, reading.begun)])
    row = reading.req_pool_idx
    assert world.compressed_kv.get(row) is None and world.codes.is_lost(row)
    assert len(world.codes.block_slots(row)) == world.packing.packed_slots(reading.begun - SINKS)
    world.allocator.free(torch.cat([others, *([more] if more is not None else [])]))
    world.finish(reading, is_insert=False)
    assert not world.codes.is_lost(row)
    world.empty()


def test_who_decodes_on_full_kv_computes_anew_what_is_codes_alone():
    world = Lossy(on_codes=True)
    leave_codes(world, distinct(1, 600))
    world.codes.method_of = lambda req: None
    full = admitted(world, distinct(1, 300))
    assert full.begun == SINKS and world.match(distinct(1, 300)).best_match_node.end == 260
    compute(world, full, 300)
    row = world.table.req_to_token[full.req_pool_idx, :300].long()
    assert len(row.unique()) == 300 and not len(world.codes.block_slots(full.req_pool_idx))
    assert all(node.value is not None for node in path(full.last_node))
    world.check()
    world.finish(full)
    assert world.codes.restored_tokens == 0
    world.check()
    world.empty()
