"""Full KV that copies hold as codes is given back, made of codes for prompts that begin alike, and nothing leaks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lossy_helpers import HEADS, SINKS, WIDTH, Lossy, assert_near, distinct, kv_of_path, numbers
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_helpers import PAGE

from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, below, path
from sglang_ext.mem_cache.prefix_cache.segments import Segment, Segments, tiling


def test_a_prompts_full_kv_is_given_back_but_for_its_first_and_newest_tokens():
    world = Lossy()
    before = world.allocator.available_size()
    req = world.decoding(distinct(1, 401))
    assert before - world.allocator.available_size() > 400
    world.round(req)
    view, node = world.compressed_kv.get(req.req_pool_idx), req.last_node
    covered = view.covered
    assert [(each.start, each.end, each.is_quantized_only) for each in path(node)] == [
        (0, SINKS, False), (SINKS, covered, True), (covered, 400, False),
    ]  # fmt: skip
    held = world.packing.held_slots(covered - SINKS)
    # Of the odd one SGLang's page holds two.
    assert before - world.allocator.available_size() == held + 2 * SINKS + 402 - covered
    assert not world.table.req_to_token[req.req_pool_idx, SINKS:covered].any(), "the row leads to nobody's slots"
    assert world.codes.tokens == covered - SINKS
    world.check()
    world.finish(req)
    world.check()
    world.empty()


def test_a_prompt_that_begins_so_reads_what_the_codes_mean_shares_them_and_gives_it_back_again():
    world = Lossy()
    first = world.decoding(distinct(1, 401))
    world.round(first)
    world.finish(first)
    slots = world.packing.held_slots(world.cache.nodes.quantized_only.copy().pop().end - SINKS)
    longer = world.decoding(distinct(1, 600))
    row = world.table.req_to_token[longer.req_pool_idx, :400].long()
    assert len(row.unique()) == 400 and world.codes.restored_tokens >= 320
    assert_near(world.lossy.keys[0][row], numbers(kv_of_path(world, longer.last_node))[:400])
    view = world.compressed_kv.get(longer.req_pool_idx)
    assert len(view.segments[0].slots) == slots, "the blocks are the first one's"
    world.check()
    world.round(longer)
    alone = [node for node in path(longer.last_node) if node.is_quantized_only]
    assert sum(len(node.key) for node in alone) > 400
    world.check()
    world.empty()


def test_where_two_prompts_part_within_a_block_what_they_share_of_it_lies_in_full_kv_too():
    world = Lossy()
    first = world.decoding(distinct(1, 401))
    world.round(first)
    parting = distinct(1, 300) + distinct(2, 200)
    assert world.match(parting).best_match_node.end == SINKS + 256
    second = world.decoding(parting)
    world.check()
    ends = [(node.start, node.end, node.value is not None) for node in path(second.last_node)]
    assert ends == [(0, 4, True), (4, 260, True), (260, 300, True), (300, 500, True)]
    assert first.last_node in below(path(second.last_node)[2]), "the first one leads through what both have"
    world.round(first, second)
    assert [node.is_quantized_only for node in path(second.last_node)][:3] == [False, True, False]
    world.check()
    for req in (second, first):
        world.finish(req)
        world.check()
    world.empty()


def test_a_request_that_was_prefilled_with_its_answer_leaves_the_tree_as_it_is_when_its_prompt_ends_within_codes_alone():
    world = Lossy()
    tokens = distinct(1, 501)
    req = world.decoding(tokens)
    world.round(req)
    req.origin_input_ids, req.output_ids = req.origin_input_ids[:300], req.origin_input_ids[300:]
    node = next(each for each in path(req.last_node) if each.start < 300 < each.end)
    assert node.is_quantized_only
    world.finish(req)
    assert node.is_quantized_only and node.end > 300
    world.check()
    world.empty()


def test_generated_tokens_are_given_back_when_a_copy_packs_them_and_freed_once():
    world = Lossy()
    before = world.allocator.available_size()
    req = world.decoding(distinct(1, 300))
    world.round(req)
    req.output_ids.extend(distinct(3, 600))
    assert world.extend(req, 900) and world.compress(req)
    view = world.compressed_kv.get(req.req_pool_idx)
    sinks = world.lossy.keys[0][view.own[:SINKS]].clone()
    world.round(req)
    world.check()
    assert view.covered > 800 and world.codes.own_tokens == view.covered - 300
    assert torch.equal(world.lossy.keys[0][view.own[:SINKS]], sinks)
    assert_near(sinks, numbers(kv_of_path(world, path(req.last_node)[0])))
    world.finish(req, is_insert=False)
    world.check()
    world.cache.evict(EvictParams(num_tokens=world.slots))
    assert world.allocator.available_size() == before


def test_what_is_evicted_goes_in_full_first_and_then_in_codes():
    world = Lossy()
    first = world.decoding(distinct(1, 401))
    world.round(first)
    world.finish(first)
    longer = world.start(distinct(1, 600))
    world.finish(longer)
    both = [node for node in below(world.cache.root_node) if node.replacing_segments]
    assert [node.value is not None for node in both] == [True]
    assert world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted > 0
    while both[0].value is not None:
        world.cache.evict(EvictParams(num_tokens=1))
        world.check()
    assert both[0].is_quantized_only and both[0].replacing_segments
    world.empty()


def test_a_request_with_full_kv_keeps_what_it_reads():
    world = Lossy()
    reading = world.start(distinct(1, 401))
    drafting = world.decoding(distinct(1, 401) + [7])
    world.round(drafting)
    assert all(node.on_device for node in path(reading.last_node))
    world.check()
    world.finish(reading)
    world.round(drafting)
    assert any(node.is_quantized_only for node in path(drafting.last_node))
    world.check()
    world.empty()


def test_without_room_for_all_the_match_ends_before_what_is_codes_alone():
    world = Lossy(slots=1000)
    first = world.decoding(distinct(1, 401))
    world.round(first)
    held = world.start(distinct(2, world.allocator.available_size() - 20))
    match = world.match(distinct(1, 401))
    assert match.host_hit_length > 300
    indices, last = world.bring(match)
    assert len(indices) == last.end == SINKS and world.codes.restored_tokens == 0
    world.finish(held)
    world.check()
    world.empty()


def test_generated_tokens_whose_full_kv_was_freed_are_not_freed_again_when_their_request_ends_without_its_answer():
    world = Lossy()
    req = world.decoding(distinct(1, 401))
    req.output_ids.extend(distinct(90, 200))
    assert world.extend(req, 601) and world.compress(req)
    world.round(req)
    assert world.codes.own_tokens > 100 and not world.table.req_to_token[req.req_pool_idx, 401:500].any()
    world.finish(req, strip=True)
    world.check()
    world.empty()


@pytest.mark.parametrize("name", ["int8", "int4", "kivi", "turboquant", "rotatekv", "hack", "lynx"])
def test_what_is_made_of_blocks_is_what_attention_reads_of_them(name):
    world = Lossy(name=name)
    kv = torch.arange(700)
    slots = torch.arange(700) + PAGE
    world.lossy.keys[0][slots], world.lossy.values[0][slots] = numbers(kv), -numbers(kv)
    packing, kept = world.packing, torch.arange(4, 580).expand(1, HEADS, -1)
    blocks = torch.arange(packing.packed_slots(576)) + 1000
    packing.write(world.lossy, kept, slots, blocks, torch.arange(700, dtype=torch.int32) if packing.stochastic else None)
    targets = torch.arange(2000, 2300)
    packing.restore(world.lossy, blocks, 70, targets)
    for buffer, sign in ((world.lossy.keys[0], 1), (world.lossy.values[0], -1)):
        expected = sign * numbers(kv[74:374])
        error = (buffer[targets] - expected).norm() / expected.norm()
        assert error < (0.02 if name == "int8" else 0.2)


class GivingBack(RuleBasedStateMachine):
    """Random prompts that share beginnings, rounds, renewals, evictions and ends, in pages of two."""

    def __init__(self):
        super().__init__()
        self.world = Lossy(slots=2200)

    def teardown(self):
        self.world.empty()

    @property
    def decoding(self):
        return [req for req in self.world.running if self.world.compressed_kv.get(req.req_pool_idx) is not None]

    @rule(stems=st.lists(st.integers(1, 3), min_size=1, max_size=3), cut=st.integers(0, 120), prefill_only=st.booleans())
    def ask(self, stems, cut, prefill_only):
        tokens = [token for place, stem in enumerate(stems) for token in distinct(10 * place + stem, 180)][: len(stems) * 180 - cut]
        if len(self.world.running) < 4:
            req = self.world.start(tokens) if prefill_only else self.world.decoding(tokens)
            assert req is None or prefill_only or self.world.compressed_kv.get(req.req_pool_idx) is not None

    @rule()
    def round(self):
        self.world.round(*self.decoding)
        for req in self.decoding:
            nodes = path(req.last_node)
            covered = self.world.compressed_kv.get(req.req_pool_idx).covered
            # Its copy is all there is of a prompt's last tokens, in a block with generated ones, and of what was another's and was evicted.
            assert all(node.replacing_segments or node.value is not None or node.end <= covered for node in nodes)

    @precondition(lambda self: self.decoding)
    @rule(pick=st.integers(0, 9), tokens=st.integers(1, 300))
    def renew(self, pick, tokens):
        req = self.decoding[pick % len(self.decoding)]
        if req.length + tokens > WIDTH - 200:
            return
        before = len(req.output_ids)
        req.output_ids.extend(distinct(90, tokens))
        if not self.world.extend(req, req.length + tokens):
            del req.output_ids[before:]
            return
        self.world.compress(req)

    @precondition(lambda self: self.world.running)
    @rule(pick=st.integers(0, 9), is_insert=st.booleans(), strip=st.booleans())
    def finish(self, pick, is_insert, strip):
        self.world.finish(self.world.running[pick % len(self.world.running)], is_insert, strip)

    @rule(tokens=st.integers(1, 1500))
    def evict(self, tokens):
        possible = self.world.cache.evictable_size()
        assert self.world.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted >= min(tokens, possible)

    @rule(stems=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def match(self, stems):
        self.world.match([token for place, stem in enumerate(stems) for token in distinct(10 * place + stem, 170)])

    @invariant()
    def holds(self):
        self.world.check()


def test_a_match_within_the_last_tokens_of_a_prompt_that_a_block_has_with_generated_ones_parts_them_and_finds_none():
    world = Lossy(slots=2200)
    req = world.decoding(distinct(2, 180))
    req.output_ids.extend(distinct(90, 16))
    assert world.extend(req, req.length + 16) and world.compress(req)
    world.round(req)
    bare = [node for node in path(req.last_node) if node.value is None and not node.replacing_segments]
    assert [node.end for node in bare] == [180] and bare[0].start < 170
    match = world.match(distinct(2, 170))
    assert len(match.device_indices) + match.host_hit_length <= bare[0].start
    world.round(req)
    world.check()
    # Who computes them gives them to the tree.
    second = world.start(distinct(2, 180))
    assert all(node.value is not None for node in path(second.last_node) if not node.replacing_segments)
    world.check()
    for each in (req, second):
        world.finish(each)
        world.check()
    world.empty()


def test_where_codes_that_one_of_several_equal_copies_gave_the_tree_are_evicted_a_match_ends_and_who_computes_them_gives_them_anew():
    world = Lossy(slots=2200)
    reqs = [world.decoding(distinct(1, 180)[: 180 - cut]) for cut in (0, 0, 0, 49)]
    world.round(*reqs)
    world.finish(reqs.pop(), is_insert=False)
    world.cache.evict(EvictParams(num_tokens=1))
    world.round(*reqs)
    assert [(node.start, node.end) for node in path(reqs[0].last_node) if node.value is None and not node.replacing_segments] == [(SINKS, 68)]
    match = world.match(distinct(1, 180))
    assert len(match.device_indices) + match.host_hit_length == SINKS
    for _ in range(2):
        second = world.decoding(distinct(1, 180))
        row = world.table.req_to_token[second.req_pool_idx, :180].long()
        assert_near(world.lossy.keys[0][row], numbers(kv_of_path(world, second.last_node))[:180])
        world.round(second, *reqs)
        world.check()
        for each in (second, *reqs):
            world.finish(each)
            world.check()
        reqs.clear()
    world.empty()


TestGivingBack = GivingBack.TestCase
TestGivingBack.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_codes_that_a_prompts_copy_is_going_to_read_are_evicted_last():
    world = Lossy()
    for number in (1, 2):
        first = world.decoding(distinct(number, 401))
        world.round(first)
        world.finish(first)
    prefilled = world.start(distinct(1, 600))
    mine, others = (next(node for node in path(world.node(distinct(n, 388))) if node.replacing_segments) for n in (1, 2))
    kept, gone = mine.replacing_segments, others.replacing_segments
    world.cache.evict(EvictParams(num_tokens=len(gone[0].slots)))
    assert kept[0] in world.cache.segments and not others.replacing_segments
    assert world.compress(prefilled, 399) and world.compressed_kv.get(prefilled.req_pool_idx).segments[0] is kept[0]
    world.check()
    world.empty()


@given(st.integers(1, 40), st.integers(0, 3000), st.sampled_from([1, 16, 64]), st.sampled_from([10, 17, 18]))
def test_segments_are_parted_where_blocks_begin_a_page(blocks, position, page, slots):
    taken = torch.arange(-(-blocks * slots // page) * page)
    segments, told = Segments(None, page), []
    segments.blocks = 64, slots, lambda *parts: told.append(parts)
    whole = Segment(64, 64 + 64 * blocks, taken, tokens=64 * blocks, packed=blocks * slots)
    node, after = TieredNode(0), TieredNode(100)
    node.key, after.key = range(whole.end), range(whole.end - 100)
    segments.add(whole, [node])
    cut = segments.boundary(whole, position)
    assert cut <= max(position, 64) and (cut - 64) % 64 == 0
    if 64 < cut < whole.end:
        segments.split(whole, cut, node)
        (first, rest), = told
        assert rest is whole and (first.start, first.end, rest.start) == (64, cut, cut)
        assert torch.equal(torch.cat([first.slots, rest.slots]), taken) and len(first.slots) % page == 0
        assert first.packed == len(first.slots) == first.tokens // 64 * slots and rest.packed == rest.tokens // 64 * slots
        assert node.replacing_segments == () and segments.unused_tokens == len(taken), "what lies before the first is in neither"
        after.segments = [segment for segment in node.segments if segment.end > 100]
        assert tiling(after) == (first, rest)[-len(after.segments) :]
    else:
        assert cut in (64, whole.end) and not told
