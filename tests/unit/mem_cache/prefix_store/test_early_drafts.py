"""A waiting request drafts on anchors from the store, in slots that nobody else reads, and nothing of it is left but its drafts."""

import threading
import time
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams
from test_stored_prefixes import NUMBERS, PROMPT, UNIT, Store, StoreWorld, hash_of
from tiered_helpers import PAGE, ROWS, kv_of

from sglang_ext.layers.forward import AttentionOverrides
from sglang_ext.managers.spec_decode.early_drafts import EARLY_ROWS, AnchorDrafter
from sglang_ext.managers.spec_decode.request_states import RequestStates
from sglang_ext.mem_cache.prefix_cache.nodes import below
from sglang_ext.mem_cache.prefix_store.objects import StoredPage, read_page

VOCABULARY, MAX_PENDING = 64, 6
# Drafts of a request that has enough time. The first is one of the token that the prefill samples.
DRAFTS = 1 + MAX_PENDING - 2
RID = "a request"


class LateResiduals(Store):
    """A store whose residuals are read when the test wants. ``offsets`` of all reads are kept."""

    def __init__(self, folder):
        super().__init__(folder)
        self.offsets, self.may_read_residuals = [], threading.Event()

    def read(self, ranges):
        self.offsets += [each.offset for each in ranges]
        if any(each.offset for each in ranges):
            self.may_read_residuals.wait(10)
        return super().read(ranges)


def following(token, position):
    """The token that the model gives after ``token``."""
    return (7 * token + position) % VOCABULARY


class Model:
    """Stands for SGLang's model runner. ``read`` has the slots of the first tokens that each forward attended to, and its input tokens."""

    device, attn_backend, decode_cuda_graph_runner = "cpu", None, None

    def __init__(self, world):
        self.world, self.seen = world, []
        self.server_args = SimpleNamespace(enable_lora=False)
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY)

    def forward(self, batch):
        row, length = int(batch.req_pool_indices[0]), int(batch.seq_lens[0])
        slots = self.world.table.req_to_token[row, :length].long()
        assert slots[-len(batch.input_ids) :].tolist() == batch.out_cache_loc.tolist() and len(slots.unique()) == length
        self.seen.append((batch.input_ids.tolist(), self.world.buffers.keys[0][slots].clone()))
        self.world.buffers.keys[0][batch.out_cache_loc] = batch.positions[:, None, None].float()
        logits = torch.zeros(len(batch.input_ids), VOCABULARY)
        for row_logits, token, position in zip(logits, batch.input_ids.tolist(), batch.positions.tolist()):
            row_logits[following(token, position)] = 1
        return SimpleNamespace(logits_output=LogitsProcessorOutput(next_token_logits=logits))

    def sample(self, output, batch):
        return output.next_token_logits.argmax(1)


def numbers_of(kv):
    """Finite keys of tokens: float32 [tokens, 2 * NUMBERS]. Their anchors are not exact. Far from 0, residuals are short, so no page is raw."""
    return (kv[:, None] * torch.arange(1, 2 * NUMBERS + 1) % 1013).float() / 100 + 1100


class CodedWorld(StoreWorld):
    """A world whose pages have anchors that are not exact."""

    def __init__(self, backend, **options):
        super().__init__(backend, form="anchored", **options)

    def write(self, slots, kv):
        self.buffers.keys[0][slots, 0] = numbers_of(kv)
        self.buffers.values[0][slots, 0] = -numbers_of(kv)

    def check_kv(self):
        for node in below(self.cache.root_node):
            expected = numbers_of(kv_of(self.tokens_to(node))[node.start :])
            if node.on_device:
                assert torch.equal(self.buffers.keys[0][node.value, 0], expected)
            if node.host_value is not None:
                node.store.synchronize()
                keys, values = (self.tier.pool.kv[kind, 0, node.host_value].flatten(0, 1)[:, 0] for kind in (0, 1))
                assert torch.equal(keys, expected) and torch.equal(values, -expected)


class EarlyWorld(CodedWorld):
    """A world whose waiting requests draft."""

    def __init__(self, backend, **options):
        super().__init__(backend, **options)
        self.table.device, self.table.free = "cpu", list(range(1, ROWS - EARLY_ROWS))
        self.model = Model(self)
        self.requests = RequestStates(SimpleNamespace(enable_deterministic_inference=False, random_seed=1), ())
        worker = SimpleNamespace(
            model_runner=self.model,
            compressed_kv=SimpleNamespace(token_table=self.table.req_to_token, buffers=self.buffers),
            requests=self.requests,
            attentions=AttentionOverrides(),
            req_to_token_pool=self.table,
            server_args=SimpleNamespace(speculative_algorithm="NONE"),
        )
        self.drafter = self.stored.drafter = AnchorDrafter(worker, self.cache, MAX_PENDING)

    def arrive(self, tokens, **params):
        """What SGLang's scheduler does as a request arrives."""
        req = Req(RID, "", array("q", tokens), SamplingParams(**{"temperature": 0, "max_new_tokens": 32, **params}))
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens[:-1])), req=req))
        self.cache.prefetch_from_storage(RID, match.best_match_node, tokens[match.best_match_node.end : -1])
        return req

    def ask(self, tokens):
        """A request that does not draft: its answer has one token."""
        self.arrive(tokens, max_new_tokens=1)

    def pass_until(self, condition):
        """Passes of the scheduler in which the request waits, until ``condition``."""
        until = time.monotonic() + 10
        while not condition():
            assert not self.cache.check_prefetch_progress(RID) and time.monotonic() < until
            time.sleep(0.001)

    @property
    def all_drafted(self):
        return sum(len(tokens) == 1 for tokens, _ in self.model.seen) >= DRAFTS - 1

    def check_nothing_held(self):
        assert self.drafter.held_slots == 0
        self.check_kv()
        self.check_owners()


@pytest.fixture
def early(tmp_path, monkeypatch):
    """A world whose store has PROMPT."""
    execution = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False), features=SimpleNamespace(enable_custom_logit_processor=False)
    )
    monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: execution)
    monkeypatch.setattr(sampling_batch_info, "get_server_args", SimpleNamespace)
    monkeypatch.setattr(schedule_batch, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    first = CodedWorld(Store(tmp_path / "store"))
    first.serve(PROMPT)
    first.written()
    first.close()
    made = []

    def make(**options):
        made.append(EarlyWorld(LateResiduals(tmp_path / "store"), **options))
        return made[-1]

    yield make
    for world in made:
        world.backend.may_read_residuals.set()
        world.close()


def anchors(world, page):
    """Keys of a page's anchors: float32 [UNIT, 1, 2 * NUMBERS]."""
    stored = StoredPage(world.stored.form, bytes.fromhex(hash_of(PROMPT, page + 1)), page * UNIT)
    kv = torch.empty(2, UNIT, 1, 2 * NUMBERS)
    read_page(world.backend.inner, stored, kv, exact=False)
    return kv[0]


def expected_drafts(prompt):
    drafts = [following(prompt[-1], len(prompt) - 1)]
    while len(drafts) < DRAFTS:
        drafts.append(following(drafts[-1], len(prompt) + len(drafts) - 1))
    return drafts


def test_a_request_drafts_on_the_anchors_of_all_pages_while_residuals_are_read(early):
    world = early()
    prompt = [*PROMPT[:40], 3, 4, 5]
    world.arrive(prompt)
    world.pass_until(lambda: world.all_drafted)
    assert not world.cache.check_prefetch_progress(RID)
    (tokens, keys), *others = world.model.seen
    assert tokens == prompt[40:] and [tokens for tokens, _ in others] == [[token] for token in expected_drafts(prompt)[:-1]]
    assert torch.equal(keys[:40], torch.cat([anchors(world, page) for page in range(5)]))
    assert world.drafter.requests == 1 and world.drafter.seconds > 0
    assert world.allocator.available_size() + world.cache.evictable_size() == world.slots
    # All anchors are read before any residual is.
    assert world.backend.offsets[:5] == [0] * 5 and all(world.backend.offsets[5:])
    world.backend.may_read_residuals.set()
    assert world.wait() == 40
    drafts = world.requests.early_drafts[RID]
    assert drafts.tokens.tolist() == expected_drafts(prompt)
    assert drafts.kv[0][:, 0, 0].tolist() == [43 + i for i in range(DRAFTS - 1)]
    world.check_nothing_held()


def test_a_prefix_that_the_tree_has_is_read_from_there(early):
    world = early()
    world.backend.may_read_residuals.set()
    world.serve(PROMPT[:17])
    world.backend.may_read_residuals.clear()
    node = world.node(PROMPT[:16])
    world.arrive(PROMPT)
    world.pass_until(lambda: world.all_drafted)
    _, keys = world.model.seen[0]
    assert torch.equal(keys[:16], world.buffers.keys[0][node.value]) and torch.equal(keys[16:24], anchors(world, 2))
    assert node.lock_ref == 1
    world.backend.may_read_residuals.set()
    assert world.wait() == 24 and node.lock_ref == 0
    world.check_nothing_held()


def test_no_rank_drafts_where_one_lacks_anchors_and_all_restore_their_pages(early):
    world = early()
    world.backend.may_read_residuals.set()

    def gather(state):
        lacks_anchors = isinstance(state, tuple) and len(state) == 4
        return [state, (state[0], False, False, True) if lacks_anchors else state]

    world.stored._ranks = SimpleNamespace(gather=gather, agree=lambda value: value)
    world.arrive(PROMPT)
    assert world.wait() == 40 and world.drafter.requests == 0
    world.check_nothing_held()


def test_damaged_residuals_are_computed_and_the_drafts_stay(early, tmp_path):
    (third,) = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name.startswith(hash_of(PROMPT, 3))]
    content = third.read_bytes()
    third.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    world = early()
    world.arrive(PROMPT)
    world.pass_until(lambda: world.all_drafted)
    world.backend.may_read_residuals.set()
    assert world.wait() == 16 and world.requests.early_drafts[RID].tokens.tolist() == expected_drafts(PROMPT)
    world.check_nothing_held()


def test_without_the_anchors_of_a_page_a_request_does_not_draft(early, tmp_path):
    (third,) = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name.startswith(hash_of(PROMPT, 3))]
    third.write_bytes(third.read_bytes()[:100])
    world = early()
    world.backend.may_read_residuals.set()
    world.arrive(PROMPT)
    assert world.wait() == 16 and not world.model.seen and world.store.counters.bad_pages == 1
    world.check_nothing_held()


def test_a_request_that_is_aborted_leaves_nothing(early):
    world = early()
    world.arrive(PROMPT)
    world.pass_until(lambda: world.all_drafted)
    world.cache.release_aborted_request(RID)
    world.check_nothing_held()
    world.check_nothing_missing()
    # Nor one that was aborted once its pages were there.
    world.backend.may_read_residuals.set()
    world.arrive(PROMPT)
    world.wait()
    world.cache.release_aborted_request(RID)
    assert not world.requests.early_drafts
    world.check_nothing_held()


def test_drafts_end_where_others_need_their_slots(early):
    world = early(slots=60)
    world.arrive(PROMPT)
    world.pass_until(lambda: world.all_drafted)
    other = world.start(list(range(400, 440)))
    assert other is not None and world.drafter.held_slots == 0
    world.backend.may_read_residuals.set()
    assert world.wait() == 40 and not world.requests.early_drafts
    world.finish(other)
    world.check_nothing_held()


def test_a_full_batch_is_not_taken_for_a_slow_store(early):
    world = early()
    world.backend.may_read_residuals.set()
    world.stored.compute.begin("an earlier request")
    time.sleep(0.25)
    world.stored.compute.end("an earlier request", 10)
    world.arrive(PROMPT)
    world.pass_until(lambda: world.pages.free_pages < world.pages.count)
    # The scheduler asks for no waiting request, so that nothing releases the anchors.
    time.sleep(1.5)
    assert world.wait() == 40
    world.check_nothing_held()


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"min_p": 0.1}, {"max_new_tokens": 1}])
def test_requests_whose_drafts_would_be_wrong_or_useless_do_not_draft(early, params):
    world = early()
    world.backend.may_read_residuals.set()
    world.arrive(PROMPT, **params)
    assert world.wait() == 40 and not world.model.seen
    world.check_nothing_held()


def test_at_most_so_many_requests_draft_at_once(early):
    world = early()
    for number in range(EARLY_ROWS + 1):
        req = Req(f"{number}", "", array("q", PROMPT), SamplingParams(temperature=0, max_new_tokens=32))
        match = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", PROMPT[:-1])), req=req))
        world.cache.prefetch_from_storage(f"{number}", match.best_match_node, PROMPT[:-1])
    until = time.monotonic() + 10
    while world.drafter.requests < 3 and time.monotonic() < until:
        for number in range(EARLY_ROWS + 1):
            world.cache.check_prefetch_progress(f"{number}")
        time.sleep(0.001)
    # The pool of 160 slots has room for three of them.
    assert world.drafter.requests == 3 and world.drafter.held_slots == 3 * (len(PROMPT) + DRAFTS + (len(PROMPT) + DRAFTS) % PAGE)
    for number in range(EARLY_ROWS + 1):
        world.cache.release_aborted_request(f"{number}")
    world.check_nothing_held()
