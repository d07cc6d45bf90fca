"""Prompts are admitted as they fit while they begin and as what stays of them fits: what they were promised is always there."""

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lossy_helpers import SINKS, Lossy, distinct, numbers
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from tiered_helpers import PAGE, Request, kv_of

from sglang_ext.hooks.lossy_admission import HEADROOM, admit_chunk, admit_prompt
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix

# Slots that SGLang keeps ahead of a request, tokens of a round, and what SGLang expects of the tokens that an answer lacks.
RESERVE, STEPS, RATIO = 10, 4, 0.7


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch):
    monkeypatch.setattr("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", lambda server_args: RESERVE // 2)
    for name in ("is_dsa_prefill_cp_in_seq_split", "is_prefill_context_parallel_enabled"):
        monkeypatch.setattr(schedule_policy, name, lambda: False)


@dataclass(eq=False)
class Asked(Request):
    """What SGLang's scheduler reads and writes of a request, too."""

    answer: int = 16
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    retracted_stain: bool = False
    best_match_node: object = None
    extend_range: SimpleNamespace | None = None
    kv: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(kv_allocated_len=0))

    @property
    def sampling_params(self):
        return SimpleNamespace(max_new_tokens=self.answer, ignore_eos=True)

    @property
    def full_untruncated_fill_ids(self):
        return self.tokens

    @property
    def kv_committed_len(self):
        return self.length

    @property
    def decoding(self):
        return self.length >= len(self.origin_input_ids)

    def finished(self):
        return len(self.output_ids) >= self.answer

    def needs_host_load_back(self):
        return self.host_hit_length > 0

    def set_extend_range(self, start, end):
        self.extend_range = SimpleNamespace(start=start, end=end, length=end - start)


class Reserving(Lossy):
    """Requests have slots ahead of them."""

    def own_tokens(self):
        return sum(req.kv.kv_allocated_len - req.cache_protected_len for req in self.running)


class Scheduler:
    """SGLang's, with its own prefill adder, over a tree in mode lossy: chunks of prompts first, then rounds."""

    def __init__(self, slots, chunk, name="int8", on_codes=False, ratio=RATIO):
        self.world, self.chunk, self.on_codes = Reserving(slots=slots, name=name, on_codes=on_codes, chunk=chunk), chunk, on_codes
        self.ratio = ratio
        self.waiting, self.running, self.chunked, self.most, self.alone = [], [], None, 0, 0

    def ask(self, tokens, answer):
        self.waiting.append(Asked(array("q", tokens), None, answer=answer))

    def step(self):
        """Prefill, or a round where nothing is admitted."""
        world = self.world
        adder = PrefillAdder(PAGE, world.cache, world.allocator, SimpleNamespace(reqs=self.running), self.ratio, 1 << 20, self.chunk)
        if self.chunked is not None:
            self._insert(self.chunked, chunked=True)
            self.chunked = admit_chunk(PrefillAdder.add_chunked_req, adder, self.chunked)
            going_on = adder.can_run_list[0]
            rest = len(going_on.tokens) - going_on.extend_range.start
            assert going_on.extend_range.length == min(self.chunk, rest), "chunks do not shrink"
        for req in list(self.waiting):
            self._match(req)
            found = admit_prompt(PrefillAdder.add_one_req, adder, req, self.chunked is not None, None)
            if req in adder.can_run_list:
                self.waiting.remove(req)
            if found is not AddReqResult.CONTINUE:
                break
        self.chunked = adder.new_chunked_req or self.chunked
        if adder.can_run_list:
            self.alone = not self.running and len(adder.can_run_list) == 1
            for req in adder.can_run_list:
                self._prefill(req)
        elif self.running:
            self._round()
        self.most = max(self.most, len(self.running))
        world.check_owners()

    def _match(self, req):
        match = self.world.match(req.tokens[: len(req.tokens) - 1])
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.host_hit_length, req.best_match_node = match.host_hit_length, match.best_match_node
        req.cache_protected_len = len(req.prefix_indices)

    def _prefill(self, req):
        world = self.world
        if req.req_pool_idx is None:
            req.req_pool_idx, req.length = world.table.free.pop(), len(req.prefix_indices)
            world.table.req_to_token[req.req_pool_idx, : req.length] = req.prefix_indices.int()
            req.matched = req.length
            world.running.append(req)
        known = req.length
        assert world.extend(req, req.extend_range.end), "a prompt that was admitted has room for its chunk"
        world.codes.begin_prompts([(req, req.matched, known)])
        self._check_reads(req, known)
        req.kv.kv_allocated_len = -(-req.length // PAGE) * PAGE
        if req.decoding:
            self._insert(req)
            self.running.append(req)

    def _check_reads(self, req, known):
        """What a prompt attends to is there: codes of its own tokens, and full KV of those after them."""
        world = self.world
        if not self.on_codes:
            return
        blocks, row = world.codes.block_slots(req.req_pool_idx), world.table.req_to_token[req.req_pool_idx, : req.length].long()
        expected = numbers(kv_of(req.tokens[: req.length]))
        end = SINKS + len(blocks) // world.packing.block_slots * world.packing.block_tokens
        assert end <= max(known, SINKS)
        found = world.lossy.keys[0][row].clone()
        if len(blocks):
            made = world.packing.dequantize(world.packing.read(world.lossy.keys[0], world.packing.keys, blocks), world.packing.keys, None)
            found[SINKS:end] = made.transpose(0, 1)
        assert (found - expected).abs().max() < 0.15, "a number of 4 bits is off by a fifteenth at most, twice where it was packed twice"

    def _insert(self, req, chunked=False):
        self.world.cache.cache_unfinished_req(req, chunked)
        assert len(req.prefix_indices) == req.length

    def _round(self):
        world = self.world
        for req in self.running:
            self._reserve(req)
        world.round(*[req for req in self.running if self.view_of(req) is not None])
        for req in self.running:
            view, headroom = self.view_of(req), 2 * (STEPS + 1) * len(self.running)
            if view is None and req.length >= world.compressed_kv.methods[0].min_context:
                prefix = SharedPrefix(req.last_node, req.matched) if req.matched else None
                made = world.compressed_kv.compress(req.req_pool_idx, req.length, headroom, prefix)
                assert made or self.alone, "a copy fits beside full KV"
            elif view is not None and world.compressed_kv.max_covered(req.req_pool_idx, req.length) >= view.refresh_after:
                assert world.compressed_kv.compress(req.req_pool_idx, req.length, headroom), "a copy takes up new blocks"
        for req in list(self.running):
            steps = min(STEPS, req.answer - len(req.output_ids))
            req.output_ids.extend(distinct(77, steps))
            # The last token's KV is never computed.
            begin, req.length = req.length, min(req.length + steps, output_end(req))
            new = world.table.req_to_token[req.req_pool_idx, begin : req.length].long()
            world.write(new, kv_of(req.tokens[: req.length])[begin:])
            if req.finished():
                self.running.remove(req)
                req.length = req.kv.kv_allocated_len
                world.finish(req, is_insert=False)

    def _reserve(self, req):
        """Slots ahead of a request, as its round begins."""
        begin, end = req.kv.kv_allocated_len, min(output_end(req), req.length + RESERVE)
        if end > begin:
            slots = self.world.allocate(end - begin)
            assert slots is not None, "a round has its slots"
            req.kv.kv_allocated_len = begin + len(slots)
            self.world.table.req_to_token[req.req_pool_idx, begin : begin + len(slots)] = slots.int()

    def view_of(self, req):
        return self.world.compressed_kv.get(req.req_pool_idx)


# Of each prompt: which beginning and how much of it, which end and how much of it; and the tokens of its answer.
ASKED = st.tuples(st.integers(1, 3), st.integers(80, 400), st.integers(1, 3), st.integers(0, 200), st.integers(4, 300))


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(ASKED, min_size=1, max_size=6), pages=st.integers(550, 1300), chunk=st.sampled_from([64, 150, 1000]),
    name=st.sampled_from(["int8", "int4", "kivi"]), on_codes=st.booleans(),
)
# Pairs of requests share the exact tokens after their compressed KV. They are freed once.
@example(
    prompts=[(1, 350, 2, 81, 300), (2, 287, 3, 79, 288), (1, 350, 2, 81, 300), (2, 287, 3, 79, 288), (3, 316, 3, 34, 128), (1, 155, 3, 44, 250)],
    pages=550, chunk=64, name="kivi", on_codes=False,
)
# The fourth prompt diverges from the second within a block. The fifth waits, and ends within a block of the first.
@example(
    prompts=[(1, 350, 2, 81, 300), (2, 287, 3, 79, 288), (1, 350, 2, 81, 300), (2, 80, 3, 79, 288), (1, 80, 1, 0, 4)],
    pages=550, chunk=64, name="int8", on_codes=False,
)
def test_who_is_admitted_has_its_slots_and_all_are_served(prompts, pages, chunk, name, on_codes):
    # Prompts attend to codes of all whole blocks; kivi leaves the newest as they are. All answers go to their end, and all of their tokens
    # are expected: where more come than were expected, SGLang retracts.
    scheduler = Scheduler(pages * PAGE, chunk, name, on_codes and name != "kivi", ratio=1.0)
    for stem, tokens, other, more, answer in prompts:
        scheduler.ask(distinct(stem, tokens) + distinct(10 + other, more), answer)
    for _ in range(1000):
        if not (scheduler.waiting or scheduler.running or scheduler.chunked):
            break
        scheduler.step()
    assert not scheduler.waiting and not scheduler.running
    scheduler.world.empty()


# Blocks that prompts find in the tree, which nobody reads yet, so that SGLang counts them as evictable; beginnings that several share,
# whose full KV goes once, and not within a block where they part; copies of all at once that take up new blocks.
TIGHT = [
    (554, 1000, "kivi", False, "3 296 3 171 142, 2 380 2 129 300, 1 325 1 190 270, 3 168 2 140 195, 2 340 1 199 300, 2 269 2 187 270"),
    (627, 150, "int4", True, "1 81 1 123 129, 1 149 1 191 300, 3 159 1 85 129, 3 106 2 12 129, 2 118 1 141 142, 2 285 1 11 270"),
]


@pytest.mark.parametrize("pages, chunk, name, on_codes, prompts", TIGHT)
def test_what_others_share_and_read_is_room_for_nobody_else(pages, chunk, name, on_codes, prompts):
    scheduler = Scheduler(pages * PAGE, chunk, name, on_codes, ratio=1.0)
    for prompt in prompts.split(", "):
        stem, tokens, other, more, answer = map(int, prompt.split())
        scheduler.ask(distinct(stem, tokens) + distinct(10 + other, more), answer)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    scheduler.world.empty()


@pytest.mark.parametrize("chunk", [64, 150, 1000])
def test_a_prompt_that_is_computed_in_chunks_keeps_no_more_full_kv_than_one_in_one(chunk):
    scheduler = Scheduler(2000, chunk)
    scheduler.ask(distinct(1, 500), 200)
    while not scheduler.world.codes.tokens:
        scheduler.step()
    (req,) = scheduler.running
    view = scheduler.view_of(req)
    kept = scheduler.world.cache.total_size()
    assert kept == 500 - view.covered + SINKS and scheduler.world.codes.tokens == view.covered - SINKS
    while len(req.output_ids) < 140:
        scheduler.step()
    view = scheduler.view_of(req)
    assert view.covered > 500 and scheduler.world.cache.total_size() == SINKS, "the prompt's last tokens are in a block with the answer's"
    again = scheduler.world.match(distinct(1, 500))
    assert again.best_match_node.end == (500 - SINKS) // 64 * 64 + SINKS


def test_as_many_run_as_fit_packed_beside_one_that_begins():
    contexts, tokens, answer = 6, 800, 40
    slots = contexts * (tokens + answer)
    scheduler = Scheduler(slots, 300, "int4")
    for number in range(60):
        scheduler.ask(distinct(number, tokens), answer)
    while scheduler.waiting:
        scheduler.step()
    packing = scheduler.world.packing
    # Sinks twice, what fills no block, the answer, and what is kept ahead of each in the round in which copies are made.
    each = packing.held_slots(tokens // 64 * 64) + 2 * SINKS + tokens % 64 + answer + RESERVE + HEADROOM + PAGE
    beside = (slots - tokens - packing.held_slots(tokens)) // each
    assert 2.5 * contexts <= beside - 2 <= scheduler.most


@pytest.mark.parametrize("chunk", [64, 200])
def test_prompts_on_codes_keep_full_kv_of_two_chunks_at_once(chunk):
    scheduler = Scheduler(3000, chunk, "int4", on_codes=True)
    scheduler.ask(distinct(1, 900), 8)
    world = scheduler.world
    while scheduler.waiting or scheduler.chunked:
        scheduler.step()
        (req,) = world.running
        view, full = world.compressed_kv.get(req.req_pool_idx), world.cache.total_size() + world.own_tokens()
        assert full <= 2 * chunk + world.compressed_kv.methods[0].unit + SINKS + PAGE
        assert world.codes.tokens == (0 if view is None else view.covered - SINKS)
    assert view.covered > 900 - 2 * chunk
    # What it began with is read as it lies there, and gets no slots.
    scheduler.ask(distinct(1, 700) + distinct(2, 60), 8)
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    assert world.codes.restored_tokens == 0
    world.check_owners()
    world.empty()


def test_prompts_on_codes_begin_where_those_that_need_all_their_full_kv_wait():
    """Three run, and of a fourth two chunks fit, not the whole prompt."""
    most = []
    for on_codes in (False, True):
        scheduler = Scheduler(2000, 100, "int4", on_codes)
        for number in range(12):
            scheduler.ask(distinct(number, 1000), 4 * STEPS)
        while scheduler.waiting or scheduler.running or scheduler.chunked:
            scheduler.step()
        most.append(scheduler.most)
        scheduler.world.empty()
    assert most[1] >= most[0] + 2, most
