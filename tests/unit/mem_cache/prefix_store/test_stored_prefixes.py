"""What one tree writes to a store, another one reads, exactly; whatever the store does, nothing leaks and nothing is wrong."""

import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from rank_threads import on_ranks
from tiered_helpers import PAGE, Request, TokenTable, World, done, kv_of

from sglang_ext.core import TPRanks
from sglang_ext.device import Mark
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPages, HostPool
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.prefix_cache import stored_prefixes
from sglang_ext.mem_cache.prefix_cache.nodes import below
from sglang_ext.mem_cache.prefix_cache.stored_prefixes import StoredPrefixes
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache
from sglang_ext.mem_cache.prefix_store.backend import StoreError
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat
from sglang_ext.mem_cache.prefix_store.store import PrefixStore
from sglang_ext.platforms.torch_kernels import TorchPagedAllocator

# Tokens of a store page, and 64-bit numbers of a token's key.
UNIT, NUMBERS = 8, 8


class Store:
    """A backend that fails, waits or counts as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.inner, self.fails, self.is_full, self.reads, self.seconds = FileBackend(folder, 1 << 30), False, False, 0, 0.0
        self.error = StoreError("connection refused")
        self.may_read = threading.Event()
        self.may_read.set()

    def _ask(self, name, *args):
        if self.fails:
            raise self.error
        return getattr(self.inner, name)(*args)

    def put(self, name, parts):
        if self.is_full:
            raise StoreError("no space left")
        return self._ask("put", name, parts)

    def count_run(self, names):
        return self._ask("count_run", names)

    def read(self, ranges):
        self.may_read.wait(10)
        time.sleep(self.seconds)
        self.reads += 1
        return self._ask("read", ranges)

    def delete(self, names):
        return self._ask("delete", names)

    def close(self):
        self.inner.close()


class StoreWorld(World):
    """A world whose KV has the shape of a model's, and whose tree has a store."""

    def __init__(self, backend, slots=160, host_pages=60, form="raw", ranks=TPRanks()):
        size = slots + PAGE
        self.kv, values = (torch.zeros(size, 1, NUMBERS, dtype=torch.int64) for _ in "kv")
        self.buffers = KVBuffers((0,), (1.0,), (self.kv.view(torch.float32),), (values.view(torch.float32),))
        self.slots, self.page = slots, PAGE
        self.allocator = TorchPagedAllocator(slots, PAGE, torch.float32, "cpu", None, need_sort=False)
        self.table, self.running, self.backend = TokenTable(), [], backend
        self.cache = TieredRadixCache(CacheInitParams(False, self.table, self.allocator, PAGE))
        self.tier = HostTier(self.buffers, HostPool.create(self.buffers, PAGE, host_pages * PAGE * self.buffers.bytes_per_slot))
        self.cache.use_host(self.tier, ranks=ranks)
        self.store = PrefixStore(backend, "file:a folder")
        shape = ObjectFormat("a model", torch.float32, 1, 1, 2 * NUMBERS, UNIT, form=form)
        self.stored = self.cache.stored = StoredPrefixes(self.cache.host, self.store, shape, ranks)

    def match(self, tokens, req=None):
        """As SGLang does: a request whose embeddings replace tokens matches no tokens."""
        return super().match([] if req is not None and req.positional_embed_overrides is not None else tokens, req)

    def write(self, slots, kv):
        self.kv[slots, 0] = kv[:, None] + torch.arange(NUMBERS)
        self.buffers.values[0].view(torch.int64)[slots, 0] = -self.kv[slots, 0]

    def ask(self, tokens, rid="a request", **fields):
        """What SGLang's scheduler does as a request arrives."""
        match = self.match(tokens[:-1], Request(array("q", tokens), 0, rid=rid, **fields))
        self.cache.prefetch_from_storage(rid, match.best_match_node, tokens[match.best_match_node.end : -1])

    def wait(self, rid="a request", seconds=10.0):
        """What it does until the request may run; how many tokens came from the store."""
        until = time.monotonic() + seconds
        while not self.cache.check_prefetch_progress(rid):
            assert time.monotonic() < until, "the request waits for ever"
            time.sleep(0.001)
        return self.cache.pop_prefetch_loaded_tokens(rid)

    def serve(self, tokens):
        """A request from its arrival to its end, whose prefix is read from the store; how many tokens came from there."""
        self.ask(tokens)
        found = self.wait()
        req = self.start(tokens)
        self.check_kv()
        self.finish(req)
        return found

    def written(self):
        """Wait until all pages are written."""
        for future in self.stored.pending_writes():
            future.result(10)

    def check_kv(self):
        """All KV that can be reached is that of its tokens."""
        for node in below(self.cache.root_node):
            expected = kv_of(self.tokens_to(node))[node.start :]
            expected = expected[:, None] + torch.arange(NUMBERS)
            if node.on_device:
                assert torch.equal(self.kv[node.value, 0], expected)
            if node.host_value is not None:
                node.store.synchronize()
                keys, values = (self.tier.pool.kv[kind, 0, node.host_value].flatten(0, 1).view(torch.int64)[:, 0] for kind in (0, 1))
                assert torch.equal(keys, expected) and torch.equal(values, -expected)

    def close(self):
        self.store.close()
        self.tier.close()


@pytest.fixture
def worlds(tmp_path):
    """Makes worlds over one store, and closes them."""
    made = []

    def make(**options):
        backend = options.pop("backend", None) or Store(tmp_path / "store")
        made.append(StoreWorld(backend, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


PROMPT, OTHER = list(range(100, 141)), list(range(300, 341))


@pytest.mark.parametrize("form", ["raw", "anchored"])
def test_a_second_server_reads_what_a_first_one_computed(worlds, form):
    first, second = worlds(form=form), worlds(form=form)
    assert first.serve(PROMPT) == 0
    first.written()
    assert second.serve(PROMPT) == 40
    assert second.stored.hits == 5 and first.stored.misses == 5
    second.cache.evict(EvictParams(num_tokens=second.slots))
    second.check_owners()
    # SGLang reports it.
    assert SchedulerOutputStreamer._get_storage_backend_type(SimpleNamespace(tree_cache=second.cache)) == "Store"
    # Loads of a page compare its checksum, which the reader set.
    assert second.cache.host.failed_pages == 0 and second.cache.host.loaded_bytes > 0


def test_a_restarted_server_has_what_it_had(worlds, tmp_path):
    first = worlds()
    first.serve(PROMPT)
    first.written()
    first.cache.reset()
    first.allocator.clear()
    assert first.match(PROMPT).best_match_node is first.cache.root_node
    assert first.serve(PROMPT) == 40


def test_an_answer_is_read_as_the_beginning_of_the_next_prompt(worlds):
    first, second = worlds(), worlds()
    req = first.start(PROMPT)
    req.output_ids.extend(range(10))
    first.extend(req, len(PROMPT) + 9)
    first.finish(req)
    first.written()
    assert second.serve([*PROMPT, *range(10), 7, 8]) == 48


@pytest.mark.parametrize("known", [2, 10, 16, 38])
def test_only_the_pages_after_the_match_are_read(worlds, known):
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    second.serve(PROMPT[:known])
    second.backend.reads = 0
    # Whole store pages are read; their first tokens may be in the tree.
    assert second.serve(PROMPT) == 40 - known
    assert second.backend.reads == 5 - known // UNIT


def test_prompts_that_share_a_beginning_share_its_pages(worlds):
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    assert second.serve(PROMPT[:20] + [1, 2, 3, 4, 5, 6]) == 16
    assert second.serve(PROMPT) == 20


@pytest.mark.parametrize("fields", [{"extra_key": "a salt"}, {"positional_embed_overrides": "embeddings"}], ids=str)
def test_prompts_that_token_ids_do_not_name_are_neither_written_nor_read(worlds, fields):
    first, second, third = worlds(), worlds(), worlds()
    first.finish(first.start(PROMPT, **fields))
    first.written()
    assert first.store.counters.written_pages == 0
    assert second.serve(PROMPT) == 0
    second.written()
    # Whether the tree is empty or has a part of the prompt.
    for known in (0, 10):
        if known:
            third.finish(third.start(PROMPT[:known], **fields))
        third.ask(PROMPT, **fields)
        assert third.wait() == 0 and third.backend.reads == 0
    assert third.serve(PROMPT) > 0


@pytest.mark.parametrize("is_known", [False, True], ids=["new tokens", "tokens of the tree"])
def test_kv_of_replaced_embeddings_is_not_taken_for_that_of_its_token_ids(worlds, monkeypatch, is_known):
    first, second = worlds(), worlds()
    if is_known:
        first.finish(first.start(PROMPT[:20]))
        first.cache.evict(EvictParams(num_tokens=first.slots))
    with monkeypatch.context() as patch:
        patch.setattr(first, "write", lambda slots, kv: StoreWorld.write(first, slots, kv + 1))
        replaced = first.start(PROMPT, positional_embed_overrides="embeddings")
    row = first.table.req_to_token[replaced.req_pool_idx, : len(PROMPT)].long()
    assert torch.equal(first.kv[row, 0, 0], kv_of(PROMPT) + 1)
    # A plain prompt with the same token ids is computed, and written.
    first.finish(first.start(PROMPT))
    first.finish(replaced)
    first.written()
    first.check_owners()
    assert second.serve(PROMPT) == 40
    second.check_kv()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:100], lambda data: b"", lambda data: data[:-1] + b"x"])
def test_damaged_pages_are_computed(worlds, tmp_path, damage):
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    (third,) = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name.startswith(hash_of(PROMPT, 3))]
    third.write_bytes(damage(third.read_bytes()))
    assert second.serve(PROMPT) == 16 and second.store.counters.bad_pages >= 1
    second.check_owners()
    # The page is written again.
    second.written()
    assert worlds().serve(PROMPT) == 40


def hash_of(tokens, page):
    """Name of a page, without its namespace."""
    from sglang.srt.mem_cache.utils import get_hash_str

    return get_hash_str(tokens[: page * UNIT], page_size=UNIT)[-1]


@pytest.mark.parametrize("error", [StoreError("connection refused"), RuntimeError("an error of a library")], ids=["known", "unknown"])
def test_a_store_that_fails_costs_nothing_and_is_asked_again_later(worlds, monkeypatch, caplog, error):
    world = worlds()
    world.backend.fails, world.backend.error = True, error
    assert world.serve(PROMPT) == 0 and world.serve(PROMPT[:30] + PROMPT[:11]) == 0
    world.written()
    assert len([each for each in caplog.records if "failed" in each.message]) == 1 and world.store.counters.errors <= 2
    monkeypatch.setattr("sglang_ext.mem_cache.prefix_store.store.RETRY_SECONDS", 0.0)
    world.backend.fails = False
    time.sleep(0.01)
    assert not world.store.can_read
    world.check_owners()


def test_a_store_that_cannot_be_written_is_read(worlds, caplog):
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    second.backend.is_full = True
    assert second.serve(OTHER) == 0
    second.written()
    assert not second.store.can_write and second.store.can_read
    assert second.serve(PROMPT) == 40
    assert second.stored.dropped == 5
    assert len([each for each in caplog.records if "no page is written" in each.message]) == 1
    second.check_owners()


@pytest.mark.parametrize("fault", ["fails", "is_full"])
def test_a_store_that_fails_for_one_rank_keeps_the_trees_of_all_ranks_equal(worlds, tmp_path, monkeypatch, fault):
    made = {rank: Store(tmp_path / str(rank)) for rank in (0, 1)}
    monkeypatch.setattr("sglang_ext.mem_cache.prefix_store.store.RETRY_SECONDS", 1.0)

    def serve(ranks):
        world, backend, states = worlds(backend=made[ranks.rank], ranks=ranks), made[ranks.rank], []

        def ask(prompt, is_faulty=False):
            setattr(backend, fault, is_faulty and ranks.rank == 1)
            loaded = world.serve(prompt)
            world.written()
            states.append((loaded, world.pages.free_pages, world.stored.hits, world.stored.misses))

        ask(PROMPT)
        world.cache.reset()
        world.allocator.clear()
        ask(OTHER, is_faulty=True)
        ask(PROMPT, is_faulty=True)
        time.sleep(1.0)
        ask(OTHER[:20] + PROMPT)
        return states, len(world.stored.pending_writes())

    first, second = on_ranks(2, serve)
    assert first == second


def test_a_request_that_is_aborted_while_pages_arrive_leaves_nothing(worlds):
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    second.backend.may_read.clear()
    second.ask(PROMPT)
    while second.pages.free_pages == second.pages.count:
        assert not second.cache.check_prefetch_progress("a request")
        time.sleep(0.001)
    second.cache.release_aborted_request("a request")
    second.backend.may_read.set()
    assert second.wait() == 0
    second.check_owners()
    second.check_nothing_missing()


def test_a_slow_store_is_given_up_and_what_arrived_is_used(worlds, monkeypatch):
    first, second = worlds(), worlds()
    for prompt in (PROMPT, OTHER):
        first.serve(prompt)
    first.written()
    # Computing takes some milliseconds.
    second.stored.compute.begin("an earlier request")
    time.sleep(0.01)
    second.stored.compute.end("an earlier request", 200)
    second.backend.seconds = 0.2
    before = time.monotonic()
    assert second.serve(PROMPT) < 40
    assert time.monotonic() - before < 0.2
    time.sleep(0.5)
    # Now it is known to be slow.
    assert second.serve(OTHER) == 0 and second.stored.skipped_slow == 1
    second.check_owners()
    # After a while it is tried again.
    second.written()
    second.cache.reset()
    second.allocator.clear()
    second.stored.compute = stored_prefixes.ComputeRate()
    second.stored.compute.begin("a request on a busy machine")
    time.sleep(0.1)
    second.stored.compute.end("a request on a busy machine", 1)
    second.backend.seconds, now = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 31)
    assert second.serve(OTHER) == 40


def test_pages_that_wait_to_be_written_keep_their_content(worlds, tmp_path):
    first = worlds(host_pages=24, slots=60)
    gate = threading.Event()
    put = first.backend.inner.put
    first.backend.inner.put = lambda *args: gate.wait(10) and put(*args)
    done(first, PROMPT[:13])
    # Host memory is needed for others.
    for begin in range(0, 400, 40):
        done(first, list(range(1000 + begin, 1030 + begin)))
    first.check_kv()
    gate.set()
    first.written()
    second = worlds()
    assert second.serve(PROMPT[:13]) == 8
    assert first.stored.dropped > 0


def test_a_page_that_changed_in_host_memory_is_not_written(worlds):
    first, second = worlds(), worlds()
    done(first, PROMPT[:2])
    first.node(PROMPT[:2]).store.synchronize()
    first.tier.pool.flip(int(first.node(PROMPT[:2]).host_value[0]))
    done(first, PROMPT)
    first.written()
    # Its checksums would be those of the wrong numbers.
    assert first.store.counters.written_pages == 4
    assert second.serve(PROMPT) == 0


def test_host_pages_are_not_filled_while_a_transfer_of_their_last_owner_runs(worlds):
    class Event:
        """An event of a GPU, whose copies run after the pages were freed."""

        reached = threading.Event()
        query, synchronize = reached.is_set, reached.wait

    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    second.tier._stored.note(torch.arange(second.pages.count), Mark(Event()))
    kv = second.tier.pool.kv.view(torch.int32)
    before, until = kv.clone(), time.monotonic() + 0.2
    second.ask(PROMPT)
    while time.monotonic() < until:
        second.cache.check_prefetch_progress("a request")
    is_unchanged = torch.equal(kv, before)
    Event.reached.set()
    assert is_unchanged
    assert second.wait() == 40
    second.check_kv()


def test_held_pages_are_free_when_they_are_released():
    pages = HostPages(6)
    mine = pages.allocate(4)
    pages.hold(mine[:2])
    pages.hold(mine[:1])
    pages.free(mine)
    assert pages.free_pages == 4 and pages.allocate(5) is None
    with pytest.raises(ValueError, match="free"):
        pages.hold(mine[:1])
    pages.release(mine[:2])
    assert pages.free_pages == 5
    pages.release(mine[:1])
    assert pages.free_pages == 6 and pages.allocate(6) is not None


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_two_servers_on_one_folder_have_right_kv_whatever_happens(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("store")
    worlds = [StoreWorld(Store(folder), slots=100, host_pages=data.draw(st.sampled_from([20, 40]))) for _ in "ab"]
    try:
        for _ in range(data.draw(st.integers(3, 12))):
            world = data.draw(st.sampled_from(worlds))
            length = data.draw(st.integers(4, 60))
            tokens = data.draw(st.sampled_from([PROMPT + list(range(40)), list(range(80)), PROMPT[:20] + list(range(60))]))[:length]
            action = data.draw(st.sampled_from(["serve", "serve", "serve", "evict", "abort", "reset", "delete"]))
            if action == "serve":
                world.serve(tokens)
            elif action == "evict":
                world.cache.evict(EvictParams(num_tokens=data.draw(st.integers(1, 100))))
            elif action == "abort":
                world.ask(tokens, "aborted")
                for _ in range(data.draw(st.integers(0, 3))):
                    world.cache.check_prefetch_progress("aborted")
                world.cache.release_aborted_request("aborted")
            elif action == "reset":
                world.cache.reset()
                world.allocator.clear()
            else:
                for path in [path for path in folder.rglob("*") if path.is_file()][::2]:
                    path.unlink(missing_ok=True)
            world.check_kv()
        for world in worlds:
            world.written()
            world.serve([1, 2, 3, 4])
            world.check_owners()
    finally:
        for world in worlds:
            world.close()


def test_the_fastest_recent_prefill_counts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stored_prefixes.time, "monotonic", lambda: now[0])
    rate = stored_prefixes.ComputeRate()
    assert rate.seconds(100) is None
    for rid, seconds in (("a", 2.0), ("b", 1.0), ("c", 4.0)):
        rate.begin(rid)
        now[0] += seconds
        rate.end(rid, 100)
    rate.end("unknown", 5)
    assert rate.seconds(300) == pytest.approx(3.0)
