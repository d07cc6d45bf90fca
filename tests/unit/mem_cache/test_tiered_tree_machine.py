"""Whatever is asked of the prefix tree, in whatever order, its KV is that of its tokens and nothing leaks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_helpers import PAGE, World, kv_of

from sglang_ext.mem_cache.prefix_cache.nodes import below, path

# Few tokens, so that prefixes are shared and nodes are split.
TOKENS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14)
PICK = st.integers(0, 1000)
DEVICE, LOADING, HOST = frozenset({"device"}), frozenset({"loading"}), frozenset({"host"})


class TieredTree(RuleBasedStateMachine):
    """Random requests, evictions, moves and damage, checked against which page should lie where.

    Attributes:
        model: tiers of each page, by the tokens from the root to its end.
        corrupt: host pages that were damaged, with the store that had filled them.
        segments: one entry for each use that was not released.
    """

    def __init__(self):
        super().__init__()
        self.world = World(slots=44, host_pages=14)
        self.model, self.corrupt, self.segments = {}, set(), []

    def teardown(self):
        for req in list(self.world.running):
            self.world.finish(req)
        for segment in self.segments:
            self.world.cache.segments.release(segment)
        self.settle_all()
        self.world.check(self.live_corrupt())
        self.world.check_nothing_missing()
        self.world.tier.close()

    def nodes(self, wanted=lambda node: True):
        return [node for node in below(self.world.cache.root_node) if wanted(node)]

    def settle_all(self):
        for load in {node.load for node in self.nodes() if node.load is not None}:
            load.synchronize()
        if self.world.cache.host.collect_loads():
            self.forget_lost()

    def live_corrupt(self):
        """Corrupt pages that still hold what they were damaged in."""
        self.corrupt = {(node, page) for node, page in self.corrupt if self.holder(page) is not None}
        return {page for _, page in self.corrupt}

    def holder(self, page):
        stores = [node.store for node in self.nodes(lambda n: n.host_value is not None) if page in node.host_value.tolist()]
        return stores[0] if stores and any(store is stores[0] and number == page for store, number in self.corrupt) else None

    def forget_lost(self):
        """Requests that lead through lost KV would be recomputed: what their rows say counts no more."""
        for req in self.world.running:
            for node in path(req.last_node):
                if not node.on_device:
                    req.stale |= set(range(node.start, node.end))

    def expect(self, changed=(), added=frozenset(), evicting=True):
        """Compare with the model: pages of the paths ``changed`` may have gained ``added``, all may have moved by eviction.

        The last page of a path may be both: evicted to the host while its request is prefilled, then computed anew.
        """
        actual = self.world.tiers()
        pages = {tuple(tokens[:end]) for tokens in changed for end in range(PAGE, len(tokens) + 1, PAGE)}
        for page, held in actual.items():
            before = self.model.get(page, frozenset())
            if before & LOADING and not held & LOADING:
                before = before - LOADING | DEVICE
            if page in pages:
                assert held <= before | added | (HOST if evicting else frozenset()), (page, before, held)
            else:
                assert held == before or evicting and held <= before | HOST, (page, before, held)
        assert evicting or set(self.model) <= set(actual)
        locked = {tuple(self.world.tokens_to(req.last_node)) for req in self.world.running if req.last_node.parent}
        assert all(tokens in actual for tokens in locked), "nobody evicts what requests lead through"
        self.model = actual

    @rule(tokens=TOKENS, load=st.booleans(), answered=st.integers(0, 6))
    def begin(self, tokens, load, answered):
        """``answered``: of the tokens, those that were generated before the request was retracted."""
        if len(self.world.running) >= 4:
            return
        req = self.world.start(tokens, load)
        if req is not None:
            assert len(req.prefix_indices) == len(tokens) and req.last_node.end == len(tokens) // PAGE * PAGE
            assert all(node.on_device for node in path(req.last_node)), "its row leads to slots of the tree"
            prompt = max(1, len(tokens) - answered)
            req.origin_input_ids, req.output_ids = req.origin_input_ids[:prompt], req.origin_input_ids[prompt:]
        self.forget_lost()
        self.expect([tokens], added=DEVICE)

    @precondition(lambda self: self.world.running)
    @rule(pick=PICK, output=st.lists(st.sampled_from([1, 2]), max_size=5), is_insert=st.booleans(), strip=st.booleans())
    def finish(self, pick, output, is_insert, strip):
        req = self.world.running[pick % len(self.world.running)]
        before, known = req.length, len(req.output_ids)
        req.output_ids.extend(output)
        if not self.world.extend(req, before + len(output)):
            del req.output_ids[known:]
        tokens = req.tokens.tolist()
        self.world.finish(req, is_insert, strip)
        self.expect([tokens], added=DEVICE)

    @rule(tokens=TOKENS)
    def ask(self, tokens):
        world, match = self.world, self.world.match(tokens)
        world.cache.inc_lock_ref(match.last_device_node)
        indices, last = world.bring(match)
        world.cache.dec_lock_ref(match.last_device_node)
        self.forget_lost()
        assert len(indices) == last.end and len(indices.unique()) == len(indices)
        assert world.kv[indices, 0, 0].equal(kv_of(tokens[: len(indices)]))
        self.expect([tokens], added=DEVICE)

    @rule(tokens=st.integers(1, 30))
    def evict(self, tokens):
        possible = self.world.cache.evictable_size()
        evicted = self.world.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted
        assert evicted >= min(tokens, possible) and self.world.cache.evictable_size() <= possible - evicted
        self.expect()

    @precondition(lambda self: self.nodes(lambda node: node.on_device))
    @rule(pick=PICK, wait=st.booleans())
    def back_up(self, pick, wait):
        nodes = self.nodes(lambda node: node.on_device)
        node = nodes[pick % len(nodes)]
        store = self.world.cache.host.back_up(node)
        if store is None:
            assert self.world.pages.free_pages < len(node.key) // PAGE and not self.world.cache.nodes.host_leaves
        elif wait:
            store.wait()
        self.expect([self.world.tokens_to(node)] if store is not None else [], added=HOST)

    @precondition(lambda self: self.nodes(lambda node: node.on_device))
    @rule(pick=PICK, whole_path=st.booleans())
    def drop(self, pick, whole_path):
        nodes = self.nodes(lambda node: node.on_device)
        deepest = nodes[pick % len(nodes)]
        tokens = self.world.tokens_to(deepest)
        for node in path(deepest) if whole_path else [deepest]:
            # The host may have forgotten the first for the sake of the next.
            if node.on_device and not node.dropped and (store := self.world.cache.host.back_up(node)) is not None:
                store.wait()
                assert self.world.cache.host.free_device_slots(node) == len(node.key) and self.world.cache.host.free_device_slots(node) == 0
                assert node.value is None and node.host_value is not None
        self.forget_lost()
        self.expect([tokens], added=HOST)

    @precondition(lambda self: self.nodes(lambda node: node.value is None and node.host_value is not None))
    @rule(pick=PICK, settle=st.booleans())
    def load_back(self, pick, settle):
        nodes = self.nodes(lambda node: node.value is None and node.host_value is not None)
        deepest = nodes[pick % len(nodes)]
        tokens = self.world.tokens_to(deepest)
        load = self.world.cache.host.load_back([node for node in path(deepest) if node in nodes])
        if load is not None and settle:
            self.settle_all()
        self.expect([tokens], added=LOADING | DEVICE)

    @rule()
    def settle(self):
        self.settle_all()
        assert not self.nodes(lambda node: node.load is not None)
        self.expect()

    @precondition(lambda self: self.nodes(lambda node: node.host_value is not None))
    @rule(pick=PICK)
    def damage(self, pick):
        nodes = self.nodes(lambda node: node.host_value is not None)
        node = nodes[pick % len(nodes)]
        node.store.wait()
        if node.load is not None:
            node.load.synchronize()
        page = int(node.host_value[pick % len(node.host_value)])
        if (node.store, page) not in self.corrupt:
            self.world.tier.pool.kv[0, 0, page, 0] ^= 1
            self.corrupt.add((node.store, page))

    @precondition(lambda self: self.nodes() and self.world.allocator.available_size() >= PAGE)
    @rule(pick=PICK, pages=st.integers(1, 4), gap=st.sampled_from([0, 0, 0, PAGE]), use=st.booleans())
    def attach(self, pick, pages, gap, use):
        nodes, cache = self.nodes(), self.world.cache
        node = nodes[pick % len(nodes)]
        start = sum(segment.end - segment.start for segment in cache.nodes.segments_to(node, node.end)) + gap
        end = min(start + pages * PAGE, node.end)
        if start < end:
            segment = self.world.segment(start, end)
            cache.nodes.attach(node, segment)
            if use:
                cache.segments.use(segment)
                self.segments.append(segment)
            assert gap or cache.nodes.segments_to(node, end)[-1] is segment
        self.expect(evicting=False)

    @precondition(lambda self: self.world.cache.segments.unused)
    @rule(pick=PICK)
    def use(self, pick):
        unused = self.world.cache.segments.unused
        node = unused[pick % len(unused)].node
        found = self.world.cache.nodes.segments_to(node, node.end)
        ends = [0, *(segment.end for segment in found)]
        assert [segment.start for segment in found] == ends[:-1] and ends[-1] <= node.end
        for segment in found:
            self.world.cache.segments.use(segment)
        self.segments += found

    @precondition(lambda self: self.segments)
    @rule(pick=PICK)
    def release(self, pick):
        self.world.cache.segments.release(self.segments.pop(pick % len(self.segments)))

    @invariant()
    def holds(self):
        self.world.check(self.live_corrupt())


TestTieredTree = TieredTree.TestCase
TestTieredTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
