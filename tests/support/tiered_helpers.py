"""A tiered prefix cache on a CPU whose KV says which tokens it is of, and requests that use it as SGLang's scheduler does."""

from array import array
from dataclasses import dataclass, field

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.prefix_cache.nodes import below, path
from sglang_ext.mem_cache.prefix_cache.segments import Segment
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache
from sglang_ext.platforms.torch_kernels import TorchPagedAllocator

PAGE, ROWS, WIDTH = 2, 24, 128


def kv_of(tokens):
    """What the KV of each of ``tokens`` is: it depends on all tokens before, too; int64 [tokens]."""
    value, values = 17, []
    for token in tokens:
        value = (value * 31 + token + 1) % (1 << 40)
        values.append(value)
    return torch.tensor(values, dtype=torch.int64)


def release(cache, req, is_insert, kv_len):
    """What SGLang's ``release_kv_cache`` does: the cache takes ``kv_len`` tokens, and what it leaves is freed as the row has it."""
    cache.cache_finished_req(req, is_insert, kv_len_to_handle=kv_len)
    start, end = -(-kv_len // cache.page_size) * cache.page_size, req.kv.kv_allocated_len
    if start < end:
        slots = cache.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
        cache.token_to_kv_pool_allocator.free_segment(slots, start_pos=start)


class TokenTable:
    """Slots of all requests' tokens."""

    def __init__(self):
        self.req_to_token = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.free = list(range(1, ROWS))

    def write(self, where, values):
        self.req_to_token[where] = values.to(torch.int32)


@dataclass(eq=False)
class Request:
    """The fields of SGLang's request that the cache reads and writes."""

    origin_input_ids: array
    req_pool_idx: int
    output_ids: array = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    positional_embed_overrides: object = None
    cache_protected_len: int = 0
    last_node: object = None
    prefix_indices: torch.Tensor | None = None
    # Of the test: tokens whose KV has slots, ranges whose row is stale, segments in use.
    length: int = 0
    stale: set = field(default_factory=set)
    segments: list = field(default_factory=list)
    rid: object = field(default_factory=object)
    kv: ReqKvInfo = field(default_factory=lambda: ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0))

    @property
    def tokens(self):
        return self.origin_input_ids + self.output_ids

    def get_fill_ids(self):
        return self.tokens[: self.length]


class World:
    """A cache with its pools; ``host``: what is evicted stays there."""

    def __init__(self, slots=40, host_pages=12, host=True):
        size = slots + PAGE
        self.kv = torch.zeros(size, 1, 1, dtype=torch.int64)
        values = torch.zeros_like(self.kv)
        self.buffers = KVBuffers((0,), (1.0,), (self.kv,), (values,))
        self.slots = slots
        self.page, self.allocator = PAGE, TorchPagedAllocator(slots, PAGE, torch.float32, "cpu", None, need_sort=False)
        self.table = TokenTable()
        self.cache = TieredRadixCache(CacheInitParams(False, self.table, self.allocator, PAGE))
        self.tier = HostTier(
            self.buffers, HostPool.create(self.buffers, PAGE, host_pages * PAGE * self.buffers.bytes_per_slot)
        )
        if host:
            self.cache.use_host(self.tier)
        self.running = []

    @property
    def pages(self):
        return self.tier.pool.pages

    def match(self, tokens, req=None):
        key = RadixKey(array("q", tokens), None if req is None else req.extra_key)
        return self.cache.match_prefix(MatchPrefixParams(key=key, req=req))

    def node(self, tokens):
        """The node that a path of ``tokens``, all in the tree, ends in."""
        nodes = self.cache.nodes.walk(RadixKey(array("q", tokens)))
        assert nodes and nodes[-1].end == len(tokens)
        return nodes[-1]

    def bring(self, match):
        """What SGLang does with a host hit: slots of the whole prefix, and its last node."""
        new, last = match.device_indices[:0], match.last_device_node
        if match.host_hit_length:
            new, last = self.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
        return torch.cat([match.device_indices, new]), last

    def allocate(self, tokens):
        pages = -(-tokens // self.page) * self.page
        evict_from_tree_cache(self.cache, pages)
        return self.allocator.alloc(pages)

    def start(self, tokens, load=True, **fields):
        """Prefill a request with ``fields``; ``load``: with what the host has. None when the pool is full."""
        req = Request(array("q", tokens), self.table.free.pop(), **fields)
        match = self.match(tokens[: len(tokens) - 1], req)
        self.cache.inc_lock_ref(match.last_device_node)
        prefix, last = self.bring(match) if load else (match.device_indices, match.last_device_node)
        self.cache.inc_lock_ref(last)
        self.cache.dec_lock_ref(match.last_device_node)
        req.cache_protected_len, req.last_node = len(prefix), last
        self.table.req_to_token[req.req_pool_idx, : len(prefix)] = prefix.int()
        req.length = req.kv.kv_allocated_len = len(prefix)
        self.running.append(req)
        if not self.extend(req, len(tokens)):
            self.finish(req, is_insert=False)
            return None
        self.cache.cache_unfinished_req(req)
        return req

    def extend(self, req, length):
        """Compute the KV of a request's tokens up to ``length``; False when the pool is full."""
        covered = -(-req.length // self.page) * self.page
        if length > covered:
            slots = self.allocate(length - covered)
            if slots is None:
                return False
            self.table.req_to_token[req.req_pool_idx, covered : covered + len(slots)] = slots.int()
        new = self.table.req_to_token[req.req_pool_idx, req.length : length].long()
        self.write(new, kv_of(req.tokens[:length])[req.length :])
        req.length = req.kv.kv_allocated_len = length
        return True

    def write(self, slots, kv):
        self.kv[slots, 0, 0] = kv
        self.buffers.values[0][slots, 0, 0] = -kv

    def finish(self, req, is_insert=True, strip=False):
        """End a request; ``strip``: as with ``--strip-thinking-cache``, without its answer."""
        row = self.table.req_to_token[req.req_pool_idx]
        release(self.cache, req, is_insert, min(req.length, len(req.origin_input_ids)) if strip else req.length)
        row.zero_()
        for segment in req.segments:
            self.cache.segments.release(segment)
        self.running.remove(req)
        self.table.free.append(req.req_pool_idx)

    def segment(self, start, end, kept=PAGE):
        return Segment(start, end, self.allocator.alloc(kept))

    def offload(self, node):
        """Back up a node and drop its device slots; how many."""
        self.cache.host.back_up(node).wait()
        return self.cache.host.free_device_slots(node)

    def drop_path(self, node):
        """Back up and drop the device slots of a whole path; how many."""
        for part in path(node):
            if part.value is not None:
                self.cache.host.back_up(part).wait()
        dropped = 0
        for part in path(node):
            freed = self.cache.host.free_device_slots(part)
            dropped += freed
            for req in self.running:
                if freed and part in path(req.last_node):
                    req.stale |= set(range(part.start, part.end))
        return dropped

    def tiers(self):
        """Which tiers hold each page, by the tokens from the root to its end."""
        found = {}
        for node in below(self.cache.root_node):
            tokens = self.tokens_to(node)
            there = {"device": node.on_device, "loading": node.load is not None, "host": node.host_value is not None}
            held = frozenset(name for name in there if there[name])
            for end in range(node.start + self.page, node.end + 1, self.page):
                found[tuple(tokens[:end])] = held
        return found

    def tokens_to(self, node):
        return [token for part in path(node) for token in part.key.raw_token_ids()]

    def own_tokens(self):
        """Slots that running requests own beside the tree."""
        return sum(-(-req.length // self.page) * self.page - req.cache_protected_len for req in self.running)

    def check_owners(self):
        """Each slot and each host page is somebody's, or free."""
        cache = self.cache
        cache.check_integrity()
        sizes = cache.evictable_size(), cache.protected_size(), cache.session_held_tokens(), self.own_tokens()
        assert self.allocator.available_size() + sum(sizes) == self.slots, sizes
        on_host = sum(len(node.host_value) for node in below(cache.root_node) if node.host_value is not None)
        assert self.pages.free_pages + on_host == self.pages.count

    def check(self, corrupt=frozenset()):
        """Nothing leaks, and all KV that can be reached is that of its tokens; ``corrupt``: host pages that are not."""
        self.check_owners()
        for node in below(self.cache.root_node):
            expected = kv_of(self.tokens_to(node))[node.start :]
            if node.on_device:
                assert torch.equal(self.kv[node.value, 0, 0], expected), (node.start, node.end)
            if node.host_value is not None:
                node.store.synchronize()
                good = torch.tensor([page not in corrupt for page in node.host_value.tolist()])
                stored = self.tier.pool.kv[0, 0, node.host_value].view(-1, self.page)
                assert torch.equal(stored[good], expected.view(-1, self.page)[good])
        free = set((self.allocator.free_pages[:, None] * self.page + torch.arange(self.page)).flatten().tolist())
        for req in self.running:
            row = self.table.req_to_token[req.req_pool_idx, : req.length].long()
            live = torch.tensor([i for i in range(req.length) if i not in req.stale], dtype=torch.int64)
            assert torch.equal(self.kv[row[live], 0, 0], kv_of(req.tokens[: req.length])[live])
            assert not set(row[live].tolist()) & free

    def empty(self):
        """End all requests and evict everything; then nothing may be missing."""
        for req in list(self.running):
            self.finish(req)
        self.check_nothing_missing()

    def check_nothing_missing(self):
        self.cache.evict(EvictParams(num_tokens=self.slots))
        assert self.allocator.available_size() == self.slots
        assert self.cache.evictable_size() == self.cache.protected_size() == self.cache.session_held_tokens() == 0
        if self.cache.host is not None:
            self.pages.free(self.cache.host.allocate(self.pages.count))
        assert not self.cache.root_node.children
        self.cache.check_integrity()


def done(world, tokens):
    """A finished request of these tokens."""
    world.finish(world.start(tokens))
