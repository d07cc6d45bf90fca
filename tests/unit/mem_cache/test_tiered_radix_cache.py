"""The prefix tree keeps KV on the device and on the host, shares it, and loses nothing that it says it has."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from tiered_helpers import PAGE, World, done, kv_of

from sglang_ext.managers.integrity import IntegrityError
from sglang_ext.mem_cache.prefix_cache import tree_integrity
from sglang_ext.mem_cache.prefix_cache.nodes import path

A, B = list(range(1, 9)), [1, 2, 3, 4, 50, 60, 70, 80]


def kv_at(world, indices):
    return world.kv[indices, 0, 0]


def on_host(world, tokens):
    """The node of tokens that lie on the host alone."""
    done(world, tokens)
    node = world.node(tokens)
    world.drop_path(node)
    return node


def corrupt(world, node, page):
    world.tier.pool.kv[0, 0, node.host_value[page], 0] ^= 1


def test_without_a_host_tier_it_is_a_plain_radix_cache():
    world = World(host=False)
    done(world, A)
    match = world.match(B)
    assert len(match.device_indices) == 4 and match.host_hit_length == 0
    assert match.last_device_node is match.last_host_node is match.best_match_node is world.node(A[:4])
    world.check()
    world.cache.evict(EvictParams(num_tokens=4))
    assert world.match(A).host_hit_length == 0 and world.pages.free_pages == world.pages.count
    world.empty()


def test_the_tree_keeps_generated_tokens_that_it_took_at_a_retraction_when_their_request_ends_without_its_answer():
    world = World(host=False)
    req = world.start(A)
    req.origin_input_ids, req.output_ids = req.origin_input_ids[:4], req.origin_input_ids[4:]
    world.finish(req, strip=True)
    world.check()
    assert torch.equal(kv_at(world, world.match(A).device_indices), kv_of(A))
    world.empty()


def test_without_prefixes_the_next_chunk_of_a_prompt_begins_behind_what_is_there():
    world = World(host=False)
    world.cache.disable = True
    req = world.start(A[:4])
    req.origin_input_ids.extend(A[4:])
    world.cache.cache_unfinished_req(req, chunked=True)
    assert torch.equal(kv_at(world, req.prefix_indices), kv_of(A[:4]))
    assert world.extend(req, 7)
    world.cache.cache_unfinished_req(req, chunked=True)
    assert torch.equal(kv_at(world, req.prefix_indices), kv_of(A[:7]))
    world.finish(req)
    assert not world.match(A).host_hit_length and world.allocator.available_size() == world.slots


def test_a_match_names_what_is_on_the_device_and_what_has_to_be_loaded():
    world = World()
    done(world, A)
    upper, lower = world.node(A[:4]), world.node(A)
    assert world.offload(lower) == 4
    match = world.match(A + [9])
    assert torch.equal(kv_at(world, match.device_indices), kv_of(A[:4]))
    assert (match.last_device_node, match.last_host_node, match.best_match_node) == (upper, lower, lower)
    assert match.host_hit_length == 4
    indices, last = world.bring(match)
    assert last is lower and torch.equal(kv_at(world, indices), kv_of(A))
    match = world.match(A)
    assert torch.equal(match.device_indices, indices) and match.host_hit_length == 0 and match.best_match_node is lower
    world.check()
    world.empty()


def test_what_is_on_the_device_below_what_is_not_needs_no_copy():
    world = World()
    done(world, A)
    world.node(A[:4])
    world.offload(world.node(A[:4]))
    lower = world.node(A)
    match = world.match(A)
    assert len(match.device_indices) == 0 and match.last_device_node is world.cache.root_node
    assert match.best_match_node is lower and match.host_hit_length == 8 and lower.host_value is None
    before = lower.value
    indices, last = world.bring(match)
    assert last is lower and torch.equal(kv_at(world, indices), kv_of(A)) and torch.equal(indices[4:], before)
    world.empty()


def test_what_does_not_fit_on_the_device_is_not_brought():
    world = World(slots=16)
    on_host(world, A)
    match = world.match(A)
    held = world.start(list(range(20, 32)))
    indices, last = world.bring(match)
    assert len(indices) == 0 and last is world.cache.root_node
    params = InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota=7)
    world.finish(held)
    assert len(world.cache.init_load_back(params)[0]) == 0, "more than the quota"
    assert len(world.bring(match)[0]) == 8
    world.check()
    world.empty()


def test_loading_evicts_nothing_on_the_way_to_what_is_loaded():
    world = World(slots=12)
    done(world, A)
    upper, lower = world.node(A[:4]), world.node(A)
    world.offload(lower)
    world.start(list(range(20, 28)))
    assert world.allocator.available_size() == 0 and world.cache.host.load_back([lower]) is None
    assert upper.on_device
    world.check()
    world.empty()


def test_kv_of_locked_nodes_leaves_the_device_and_comes_back():
    world = World()
    one, other = world.start(A), world.start(B)
    shared = world.node(A[:4])
    assert world.cache.protected_size() == 12 and world.cache.host.free_device_slots(shared) == 0, "it has no host copy"
    assert world.drop_path(one.last_node) == 8
    assert (world.cache.protected_size(), world.cache.evictable_size()) == (4, 0)
    assert world.allocator.available_size() == 40 - 4
    world.check()
    world.cache.host.load_back([shared]).synchronize()
    assert not shared.on_device and world.cache.host.collect_loads() == 0 and shared.on_device
    assert world.cache.protected_size() == 8
    world.finish(one)
    world.finish(other)
    world.check()
    world.empty()


def test_stale_slots_of_a_finished_request_are_neither_freed_nor_kept():
    world = World()
    one = world.start(A + [9])
    world.drop_path(one.last_node)
    one.output_ids.extend([10, 11])
    assert world.extend(one, 11)
    world.check()
    world.finish(one)
    world.check()
    match = world.match(A + [9, 10])
    assert match.host_hit_length == 10 and len(match.device_indices) == 0
    assert torch.equal(kv_at(world, world.bring(match)[0]), kv_of(A + [9, 10]))
    world.empty()


def test_a_request_that_computed_kv_again_gives_it_to_nodes_on_the_host():
    world = World()
    offloaded = world.start(A)
    lower = world.node(A)
    world.node(A[:4])
    world.drop_path(lower)
    req = world.start(A + [9, 10, 11], load=False)
    row = world.table.req_to_token[req.req_pool_idx, :10].long()
    assert lower.on_device and lower.host_value is not None
    assert torch.equal(row, req.prefix_indices[:10]) and torch.equal(row[4:8], lower.value)
    assert req.cache_protected_len == 10 and len(req.prefix_indices) == 11
    world.finish(offloaded)
    world.check()
    world.empty()


def test_a_load_under_way_gives_way_to_kv_that_was_computed():
    world = World()
    node = on_host(world, A)
    corrupt(world, node, 0)
    load = world.cache.host.load_back([node])
    slots = node.value
    req = world.start(A + [9], load=False)
    assert node.on_device and req.last_node is node and not torch.equal(slots, node.value)
    load.synchronize()
    assert world.cache.host.collect_loads() == 0
    world.check(corrupt={int(node.host_value[0])})
    world.empty()


@pytest.mark.parametrize("how", ["load back", "while locked"])
def test_host_pages_that_changed_are_forgotten_with_what_is_below(how):
    world = World()
    done(world, A)
    done(world, A + [9, 10])
    done(world, B)
    upper, middle, leaf, other = (world.node(t) for t in (A[:4], A, A + [9, 10], B))
    req = world.start(A + [9, 10, 11]) if how == "while locked" else None
    for node in (leaf, other):
        world.drop_path(node)
    corrupt(world, upper, 1)
    match = world.match(A + [9, 10])
    assert match.host_hit_length == 10
    indices, last = world.bring(match)
    assert torch.equal(kv_at(world, indices), kv_of(A[:2])) and last.end == 2
    assert world.cache.host.failed_pages == 1
    match = world.match(A + [9, 10])
    assert len(match.device_indices) + match.host_hit_length == 2
    assert match.best_match_node.end == 2
    assert world.match(B).best_match_node.end == 2
    assert other.dropped and (req is not None) == (not leaf.dropped)
    world.check()
    if req is not None:
        assert upper.is_void and middle.is_void and leaf.is_void
        again = world.start(A + [9, 10, 11])
        assert leaf.on_device and torch.equal(kv_at(world, again.prefix_indices), kv_of(A + [9, 10, 11]))
        world.check()
    world.empty()


def test_nothing_is_reached_through_a_hole():
    world = World()
    done(world, A)
    upper, lower = world.node(A[:4]), world.node(A)
    world.cache.inc_lock_ref(lower)
    world.offload(upper)
    corrupt(world, upper, 0)
    indices, last = world.bring(world.match(A))
    assert len(indices) == 0 and last is world.cache.root_node
    assert upper.is_void and lower.on_device
    match = world.match(A)
    assert len(match.device_indices) == match.host_hit_length == 0
    world.check()
    world.cache.dec_lock_ref(lower)
    assert upper.dropped and lower.dropped
    world.check()
    world.empty()


def test_eviction_keeps_host_copies_and_backs_up_what_others_hang_on():
    world = World()
    done(world, A)
    upper, lower = world.node(A[:4]), world.node(A)
    world.cache.host.back_up(lower).wait()
    assert world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    assert lower.value is None and lower.host_value is not None and upper.host_value is None
    assert world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    assert upper.value is None and upper.host_value is not None
    match = world.match(A)
    assert match.host_hit_length == 8 and torch.equal(kv_at(world, world.bring(match)[0]), kv_of(A))
    world.check()
    world.empty()


def test_without_room_on_the_host_eviction_drops_what_hangs_on_a_node():
    world = World(host_pages=2)
    done(world, A)
    upper, lower = world.node(A[:6]), world.node(A)
    world.offload(lower)
    assert world.cache.host.back_up(upper) is None and not lower.dropped, "nothing is given up for what can never fit"
    assert world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 6
    assert upper.dropped and lower.dropped and world.pages.free_pages == 2
    world.check()
    world.empty()


def test_what_the_device_has_no_room_for_comes_back_from_the_host():
    world = World(slots=20)
    prompts = [[10 * i + j for j in range(8)] for i in range(1, 5)]
    for prompt in prompts:
        done(world, prompt)
    match = world.match(prompts[0])
    assert len(match.device_indices) == 0 and match.host_hit_length == 8
    indices, _ = world.bring(match)
    assert torch.equal(world.kv[indices, 0, 0], kv_of(prompts[0]))
    assert world.cache.host.loaded_bytes == 8 * world.buffers.bytes_per_slot and world.cache.host.bytes > 0
    world.check()
    world.empty()


def test_eviction_takes_the_deepest_of_what_is_equally_old():
    world = World()
    done(world, A)
    upper, middle = world.node(A[:4]), world.node(A)
    done(world, A + [9, 10])
    leaf = world.node(A + [9, 10])
    world.offload(middle)
    assert upper in world.cache.nodes.leaves and leaf in world.cache.nodes.leaves
    assert world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 2
    assert leaf.value is None and upper.on_device
    world.check()
    world.empty()


def test_the_host_forgets_what_was_used_least_recently():
    world = World(host_pages=8)
    first, second = on_host(world, A), on_host(world, [30 + token for token in A])
    world.match(A)
    done(world, [60, 61])
    assert world.cache.host.back_up(world.node([60, 61])) is not None
    assert second.dropped and not first.dropped
    world.cache.inc_lock_ref(first)
    done(world, list(range(70, 80)))
    assert world.cache.host.back_up(world.node(list(range(70, 80)))) is None, "the rest is needed"
    world.cache.dec_lock_ref(first)
    world.check()
    world.empty()


def test_moves_that_make_no_sense_are_refused():
    world = World()
    node = on_host(world, A)
    done(world, B)
    other = world.node(B)
    with pytest.raises(ValueError, match=r"\[4, 8\) of a path are not on the host"):
        world.cache.host.load_back([other])
    world.cache.host.back_up(other)
    with pytest.raises(ValueError, match=r"\[4, 8\) of a path have device slots"):
        world.cache.host.load_back([other])
    lower = world.node(A)
    lower.host_value, kept = None, lower.host_value
    with pytest.raises(ValueError, match="are not on the device; back up what is there"):
        world.cache.host.back_up(lower)
    lower.host_value = kept
    world.cache.nodes.page_size = 4
    with pytest.raises(ValueError, match="host pages of 2 tokens for a prefix tree of 4: pass --page-size 2"):
        world.cache.use_host(world.tier)
    assert node is lower


def test_a_reset_forgets_both_tiers():
    world = World()
    node = on_host(world, A)
    world.cache.host.load_back(path(node))
    world.cache.nodes.attach(node, world.segment(0, 8))
    world.cache.reset()
    world.allocator.clear()
    assert world.pages.free_pages == world.pages.count
    assert world.match(A).best_match_node is world.cache.root_node
    world.check()
    done(world, A)
    world.check()
    world.empty()


def break_size(world, node):
    world.cache.nodes.evictable += 1


def break_slot(world, node):
    node.value[0] = world.allocator.free_pages[0] * PAGE


def break_twice(world, node):
    node.value[:2] = node.value[2:4]


def break_host(world, node):
    world.pages.free(node.host_value)


def break_key(world, node):
    node.key = node.key[:6]


def break_leaf(world, node):
    world.cache.nodes.leaves.clear()


def break_segment(world, node):
    node.segments[0].end = 10


def break_lock(world, node):
    node.lock_ref = -1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_size, "9 evictable are counted, 8 are there"),
        (break_slot, r"\[0, 8\): its slots \[\d+\] are free"),
        (break_twice, r"\[0, 8\): its slots \[\d+, \d+\] are owned twice"),
        (break_host, r"\[0, 8\): host pages \[0, 1, 2, 3\] are free"),
        (break_key, r"\[0, 6\): it has 8 device slots"),
        (break_leaf, r"\[0, 8\): it is not among the leaves that may be evicted"),
        (break_segment, r"\[0, 8\): its segment of tokens \[0, 10\) ends elsewhere"),
        (break_lock, "-1 requests lock it"),
    ],
)
def test_integrity_names_the_node_and_what_is_wrong(damage, message):
    world = World()
    done(world, A)
    node = world.node(A)
    world.cache.host.back_up(node).wait()
    world.cache.nodes.attach(node, world.segment(0, 8))
    world.check()
    damage(world, node)
    with pytest.raises(IntegrityError, match=message):
        world.cache.check_integrity()


def test_an_idle_scheduler_looks_at_what_changed_once(monkeypatch, caplog):
    world = World()
    done(world, A)
    checker, calls = SimpleNamespace(tree_cache=world.cache), []
    check = partial(tree_integrity.check_when_idle, calls.append, checker)
    check()
    world.node(A).value = world.node(A).value.flip(0).clone()[:4]
    check()
    assert len(calls) == 2, "nothing was told to have changed"
    tended = []
    world.cache.compressed_kv = SimpleNamespace(poll=lambda: tended.append(True))
    check()
    assert tended, "processes that choose are looked after, though no request comes"
    world.cache.compressed_kv = None
    world.cache.inc_lock_ref(world.node(A))
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
    with pytest.raises(IntegrityError, match="4 device slots"):
        check()
    world.cache.nodes.changed = True
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "0")
    check()
    assert "4 device slots" in caplog.text


def test_answers_of_copies_alone_do_not_enter_the_tree():
    """In lossy mode the KV of generated tokens is of what copies said, and no prompt's."""
    world = World()
    world.cache.bind(None, inserts_outputs=False)
    req = world.start(A)
    req.output_ids.extend([31, 32, 33, 34])
    assert world.extend(req, len(req.tokens))
    world.finish(req)
    assert world.match([*A, 31, 32, 33, 34]).last_device_node is world.node(A)
    world.check()
    world.empty()


def test_a_prompt_whose_answer_is_one_token_is_kept_where_answers_are_not():
    """SGLang tells the tree of it once, when it ends; of a prompt that it computed in chunks, its beginning before."""
    world = World()
    world.cache.bind(None, inserts_outputs=False)
    prompt = [*A, 11, 12, 13, 14, 15]
    req = world.start(prompt[: len(A)])
    req.origin_input_ids.extend(prompt[len(A) :])
    req.output_ids.append(31)
    assert world.extend(req, len(prompt) + 1)
    world.finish(req)
    assert world.match([*prompt, 31, 32, 33]).last_device_node.end == len(A) + 4
    # One that was prefilled again with what it answered has more in the tree than its prompt.
    req = world.start([*prompt, 31, 32, 33])
    del req.origin_input_ids[len(prompt) :]
    req.output_ids.extend([31, 32, 33, 34])
    assert world.extend(req, len(req.tokens))
    world.finish(req)
    assert world.match([*prompt, 31, 32, 33]).last_device_node.end == len(A) + 8
    world.check()
    world.empty()


def test_who_writes_beside_loads_is_told_of_their_slots_before_and_once_they_are_there():
    world, told = World(), []
    tells = lambda slots: told.append((slots.tolist(), world.kv[slots, 0, 0].tolist()))  # noqa: E731
    world.cache.use_host(world.tier, on_load_start=tells, on_load_done=tells)
    done(world, A)
    node = world.node(A)
    assert world.offload(node) == len(A)
    world.kv.fill_(-1)
    (load := world.cache.host.load_back([node])).synchronize()
    assert len(told) == 1, "rows may not lead there yet"
    world.cache.host.finish(load)
    assert told == [(node.value.tolist(), [-1] * len(A)), (node.value.tolist(), kv_of(A).tolist())]
    world.check()
    world.empty()
