"""Full KV that lies at cache ranks alone: slots go back, prompts stay for others until they are needed, and nothing leaks."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_helpers import PAGE, ROWS, WIDTH, World, kv_of

from sglang_ext.hooks.lossy_admission import admit_prompt
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, FreeBlocks
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import ExchangedRowLayout, PlainSlots
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.row_exchange import plan_refresh
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import lost_requests
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV

TAIL = 10


class Holder(AsyncSelector):
    """A rank that has what it was given, whose copies are made of full KV here, and renewed without it.

    Attributes:
        held: positions by place, and tokens that the copy stood for, by row.
        alone: rows whose full KV it has alone.
        free: tokens for which it has room.
        gone: whether its process is.
        full: whether it takes nothing more.
    """

    sends_rows, in_place = True, True

    def __init__(self):
        self.held, self.alone, self.gone, self.free, self.full, self.settled = {}, set(), False, 1000, False, []

    def compile_kernels(self):
        raise AssertionError("there are none")

    def on_step_end(self, compressed_kv, ends, following):
        raise AssertionError("no step is run here")

    def on_compressed(self, row, covered, kept):
        assert row not in self.alone
        self.held[row] = kept.int(), covered

    def extend(self, row, slots):
        assert row in self.alone
        return not self.gone and not self.full

    def plan_refresh(self, row, covered, keep):
        held, before = self.held[row]
        held, coming = plan_refresh(held, before, covered, keep, 4)
        self.held[row] = held, covered
        return coming

    def num_held_tokens(self, row):
        return 0 if self.gone or row not in self.held else self.held[row][1]

    def on_slots_freed(self, row, is_remote_only):
        if is_remote_only:
            self.alone.add(row)

    def is_lost(self, row):
        return self.gone and row in self.alone

    def free_blocks(self):
        return FreeBlocks([self.free], 1, [99])

    def flush(self, row):
        self.settled.append(row)

    def forget_all(self):
        pass

    def forget(self, row):
        self.held.pop(row, None)
        self.alone.discard(row)


class Handed(World):
    """A world in mode lossy with a cache rank."""

    def __init__(self, slots=120):
        super().__init__(slots=slots, host=False)
        self.table.req_to_token = torch.zeros(2 * ROWS, WIDTH, dtype=torch.int32)
        method = CompressionMethod(Spade(each_round=False), 0.25, PlainSlots(PAGE), "spade", sparse_from=8)
        self.holder = Holder()
        self.compressed_kv = CompressedKVCache(
            methods=(method,), token_table=self.table.req_to_token, rows=ROWS, buffers=self.buffers, allocator=self.allocator,
            tree_cache=self.cache, queries=QueryWindows(0, (0,), 0), layout=ExchangedRowLayout(),
            async_selector=self.holder,
        )  # fmt: skip
        self.held = RemoteOnlyKV(self.cache.nodes, self.compressed_kv, self.holder, lambda req: method, TAIL)
        self.cache.bind(self.compressed_kv, inserts_outputs=False, freed_full_kv=self.held)

    def renew(self, req):
        """As rounds do: a copy is made, or made anew where that can be."""
        if self.compressed_kv.can_lack_full_kv(req.req_pool_idx) and not self.holder.extend(req.req_pool_idx, None):
            return False
        return self.compressed_kv.compress(req.req_pool_idx, req.length)

    def check(self):
        self.check_owners()
        for row, view in self.compressed_kv.items():
            req = next(each for each in self.running if each.req_pool_idx == row)
            expected = kv_of(req.tokens[: req.length])[self.holder.held[row][0].flatten()]
            assert torch.equal(self.kv[view.own, 0, 0], expected)
            self.compressed_kv.write_tail(row, req.length)
            tail = self.table.req_to_token[ROWS + row, view.num_slots : view.num_slots + req.length - view.covered].long()
            assert torch.equal(self.kv[tail, 0, 0], kv_of(req.tokens[: req.length])[view.covered :])


def test_a_prompts_slots_can_be_others_while_its_request_runs():
    world = Handed()
    req = world.start(range(100, 161))
    assert world.renew(req)
    free = world.allocator.available_size()
    assert world.cache.evictable_size() == 0
    world.held.free_full_kv([req], {})
    world.check()
    assert world.cache.evictable_size() == 60 and world.allocator.available_size() == free
    assert not world.table.req_to_token[req.req_pool_idx, :60].any() and world.held.tokens == 60 and world.held.own_tokens == 0
    assert world.held.full_kv_start(req.req_pool_idx, 60) == 60 and world.holder.alone == {req.req_pool_idx}
    assert world.match(list(range(100, 161))).device_indices.numel() == 60, "an ordinary prefix of the tree"
    others = [world.start(range(begin, begin + 41)) for begin in (300, 400)]
    world.check()
    assert all(others) and world.match(list(range(100, 161))).device_indices.numel() == 0
    world.finish(req)
    assert world.match(list(range(100, 161))).device_indices.numel() == 0, "a row that leads nowhere enters no tree"
    world.check()
    world.empty()


def test_generated_tokens_go_in_the_round_after_a_copy_stands_for_them():
    world = Handed()
    req = world.start(range(100, 141))
    world.renew(req)
    world.held.free_full_kv([req], {})
    free, row = world.allocator.available_size(), req.req_pool_idx
    req.output_ids.extend(range(20))
    world.extend(req, 61)
    kept = world.compressed_kv.get(row).num_slots
    assert world.renew(req) and world.compressed_kv.get(row).covered == 60 and world.held.own_tokens == 0
    world.held.free_full_kv([req], {})
    assert world.held.own_tokens == 20 and not world.table.req_to_token[row, :60].any()
    assert world.allocator.available_size() == free - (world.compressed_kv.get(row).num_slots - kept)
    world.check()
    world.finish(req, strip=True)
    world.check()
    world.check_nothing_missing()


def test_what_the_rank_lacks_stays():
    world = Handed()
    req = world.start(range(100, 141))
    world.renew(req)
    world.holder.held[req.req_pool_idx] = world.holder.held[req.req_pool_idx][0], 38
    world.held.free_full_kv([req], {})
    assert world.held.tokens == 0 and not world.held.can_lack_full_kv(req.req_pool_idx) and world.cache.evictable_size() == 0
    world.holder.gone = True
    world.held.free_full_kv([req], {})
    assert world.held.tokens == 0 and lost_requests(SimpleNamespace(tree_cache=world.cache, reqs=[req])) == []
    world.finish(req)
    assert world.match(list(range(100, 141))).device_indices.numel() == 40
    world.empty()


def test_who_has_no_full_kv_anywhere_is_lost_and_keeps_its_copy_until_then():
    world = Handed()
    first, second = world.start(range(100, 141)), world.start(range(100, 130))
    for req in (first, second):
        world.renew(req)
    world.held.free_full_kv([first], {})
    assert world.compressed_kv.largest_releasable_row() == second.req_pool_idx, "the other cannot do without its copy"
    world.holder.gone = True
    assert lost_requests(SimpleNamespace(tree_cache=world.cache, reqs=[first, second])) == [0]
    world.check()
    world.finish(first, is_insert=False)
    world.check()
    world.empty()


def test_a_request_is_admitted_by_its_copy_and_its_tail_where_a_rank_has_room():
    world = Handed()
    waiting = SimpleNamespace(
        origin_input_ids=range(200), output_ids=[], req_pool_idx=None, cache_protected_len=0, last_node=world.cache.root_node
    )
    (slot_demand,) = world.held.slot_demands([(waiting, 16)], 1.0)
    assert (slot_demand.compressed_slots, slot_demand.own_slots_freed, slot_demand.growth) == (50, 200, 4 + TAIL)
    world.holder.free = 199
    (slot_demand,) = world.held.slot_demands([(waiting, 16)], 1.0)
    assert (slot_demand.compressed_slots, slot_demand.own_slots_freed, slot_demand.growth) == (0, 0, 16)
    req = world.start(range(100, 141))
    world.renew(req)
    assert sum(world.held.slot_demands([(req, 4)], 1.0)[0].path_slots_freed.values()) == 40, "all of its path, which lies in the prefix tree"
    world.held.free_full_kv([req], {})
    (slot_demand,) = world.held.slot_demands([(req, 4)], 1.0)
    assert not slot_demand.path_slots_freed and (slot_demand.compressed_slots, slot_demand.own_slots_freed, slot_demand.growth) == (0, 0, 4 + 2)


@dataclass
class Waiting:
    """What SGLang's scheduler knows of a prompt of 200 tokens that waits, whose answer has up to ``more``."""

    last_node: object
    more: int
    origin_input_ids: range = range(200)
    output_ids: tuple = ()
    req_pool_idx: None = None
    cache_protected_len: int = 0
    host_hit_length: int = 0
    prefix_indices: tuple = ()

    @property
    def full_untruncated_fill_ids(self):
        return self.origin_input_ids

    @property
    def extend_range(self):
        return SimpleNamespace(start=0)

    @property
    def sampling_params(self):
        return SimpleNamespace(max_new_tokens=self.more)


def test_prompts_that_fit_at_a_rank_one_by_one_are_not_counted_there_together(monkeypatch):
    monkeypatch.setattr(allocation_sizing, "get_alloc_len_per_decode", lambda args: 0)
    world, more = Handed(), 1000
    first, second = (Waiting(world.cache.root_node, more) for _ in range(2))
    adder = SimpleNamespace(
        tree_cache=world.cache, can_run_list=[first], running_batch=None, page_size=PAGE, new_token_ratio=1.0, rem_total_token_offset=0
    )
    taken = []
    for free in (400, 399, 199):
        world.holder.free = free
        found = admit_prompt(lambda adder, *_: adder.rem_total_token_offset, adder, second, False, None)
        taken.append(found)
    # One that goes there has a copy of a quarter, which grows, and a tail; it gives back its full KV. One that stays keeps that.
    goes, stays = 50 + 250 + TAIL - 200, more
    assert taken[1] - taken[0] == taken[2] - taken[1] == stays - goes


def test_a_copy_is_made_of_full_kv_and_renewed_without_it_once_its_rank_has_what_is_new():
    world = Handed()
    req = world.start(range(100, 141))
    row = req.req_pool_idx
    assert world.renew(req) and world.renew(req), "of full KV, which is here"
    world.check()
    world.held.free_full_kv([req], {})
    assert world.compressed_kv.can_lack_full_kv(row) and world.compressed_kv.is_usable_without_refresh(row) and world.holder.alone == {row}
    assert not world.table.req_to_token[row, :40].any()
    req.output_ids.extend(range(20))
    world.extend(req, 61)
    world.holder.full = True
    assert not world.renew(req) and world.compressed_kv.get(row).covered == 40
    world.held.free_full_kv([req], {})
    world.check()
    world.holder.full = False
    held = world.holder.held[row][0].clone()
    assert world.renew(req) and world.compressed_kv.get(row).covered == 60 and row in world.holder.settled
    now = world.holder.held[row][0]
    assert now.shape[-1] > held.shape[-1] and {*range(56, 60)} <= {*now.flatten().tolist()}
    world.check()
    world.held.free_full_kv([req], {})
    assert world.held.own_tokens == 20 and not world.table.req_to_token[row, :60].any()
    world.check()
    world.finish(req, is_insert=False)
    assert not world.holder.held and not world.holder.alone
    world.check_nothing_missing()


class Rounds(RuleBasedStateMachine):
    """Requests with few beginnings come, decode, give back and end, in a small pool."""

    def __init__(self):
        super().__init__()
        self.world = Handed(90)

    def one(self, seed):
        return self.world.running[seed % len(self.world.running)]

    @precondition(lambda self: len(self.world.running) < 5)
    @rule(begin=st.integers(0, 2), shared=st.integers(0, 20), length=st.integers(10, 40))
    def comes(self, begin, shared, length):
        shared = min(shared, length)
        tokens = [*range(100 * begin, 100 * begin + shared), *range(1000 + 7 * begin, 1000 + 7 * begin + length - shared)]
        req = self.world.start(tokens)
        if req is not None:
            self.world.renew(req)

    @precondition(lambda self: self.world.running)
    @rule(seed=st.integers(0, 9), more=st.integers(1, 9))
    def decodes(self, seed, more):
        req = self.one(seed)
        if req.length + more < WIDTH - 40:
            req.output_ids.extend(range(more))
            if not self.world.extend(req, req.length + more):
                del req.output_ids[-more:]

    @precondition(lambda self: self.world.running)
    @rule(seed=st.integers(0, 9))
    def renews(self, seed):
        self.world.renew(self.one(seed))

    @rule()
    def begins_a_round(self):
        self.world.held.free_full_kv(self.world.running, {})

    @precondition(lambda self: self.world.running)
    @rule(seed=st.integers(0, 9), is_insert=st.booleans(), strip=st.booleans())
    def ends(self, seed, is_insert, strip):
        self.world.finish(self.one(seed), is_insert, strip)

    @rule(tokens=st.integers(1, 20))
    def evicts(self, tokens):
        self.world.cache.evict(EvictParams(num_tokens=tokens))

    @invariant()
    def nothing_leaks(self):
        self.world.check()

    def teardown(self):
        self.world.empty()


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
