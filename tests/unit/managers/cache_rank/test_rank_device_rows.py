"""Cache ranks with an arena that have full KV, on a CPU in the place of GPUs: copies hold the rows that their records say, whatever comes
late, is given back, or is lost."""

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from argument_helpers import arguments
from device_rank_helpers import RankWorld
from rank_helpers import ROTARY, attach, pool, signalled

from sglang_ext.core import OptionError
from sglang_ext.managers.cache_rank.protocol import ExchangeLayout
from sglang_ext.managers.cache_rank.feature import (
    LEAST_FRESH,
    build_attach,
    check_capacity,
    check_value_layout,
    fit_shape,
    rank_capacity_bytes,
    rank_values,
)
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.row_exchange import missing_mask, top_mask
from sglang_ext.mem_cache.compressors.step_selectors import Spade

pytestmark = pytest.mark.usefixtures("forked_ranks")

MOST = 256
# Rounds of the test of random requests.
ROUNDS = 150


@pytest.fixture(scope="module", params=[False, True], ids=["", "apart"])
def shared(request):
    """A world whose rank several tests ask, one after another, ahead of questions or not; answers bring all rows."""
    world = RankWorld(places=16, fresh=MOST, apart=request.param).ready()
    yield world
    world.steps.end()


@pytest.fixture
def world(shared):
    """The same without requests."""
    for row in list(shared.copies):
        shared.leave(row)
    for there, here in zip((*shared.buffers.keys, *shared.buffers.values), (*shared.on_host.keys, *shared.on_host.values)):
        there.copy_(here)
    shared.steps.missed.clear()
    shared.steps.max_wait_seconds, shared.next_slot = 20.0, 800
    return shared


def test_each_step_holds_the_rows_that_the_queries_of_the_one_before_the_last_choose(world):
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    first, rows = world.positions(1), world.steps.rows
    world.step()
    assert torch.equal(world.positions(1), first), "nothing was asked before"
    for _ in range(5):
        world.step()
        for row, length in ((1, 300), (2, 150)):
            assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, length))
    world.steps.poll()
    assert world.compressed_kv.num_compressions["spade"] >= 10 and not +world.steps.missed
    told = {name: value for name, value, *_ in rank_values(world.steps, None)}
    assert told["selection_rows"] == world.steps.rows > rows
    assert world.steps.num_held_tokens(1) == 300 and world.steps.has_request(2) and not world.steps.has_request(3)
    assert world.steps.free_blocks().blocks == [32 - 5 - 3] and world.steps.free_blocks().requests == [2]


def test_of_more_rows_than_an_answer_has_room_for_those_of_the_highest_scores_come():
    world = RankWorld(places=16, fresh=5).ready()
    world.begin(1, 300, 64)
    world.step()
    for _ in range(6):
        before = world.positions(1)
        world.step()
        scores = world.scores(1, world.ends[1] - 1, 300)
        wanted = scores.topk(64).indices.sort(-1).values
        coming = top_mask(missing_mask(wanted, before), scores.gather(-1, wanted).view(torch.int32), 5)
        assert coming.sum(-1).max() == 5
        now = world.positions(1)
        assert torch.equal(missing_mask(now, before).sum(-1), coming.sum(-1))
        for layer, head in ((0, 0), (4, 1), (2, 1)):
            came, held = {*wanted[layer, head][coming[layer, head]].tolist()}, {*now[layer, head].tolist()}
            assert came <= held <= came | {*before[layer, head].tolist()}
    world.steps.poll()
    assert world.steps.rows <= 6 * 5 * 10
    world.steps.end()


def test_full_kv_goes_and_the_copy_goes_on_to_hold_what_is_chosen_among_all_tokens(world):
    world.begin(1, 200, 48)
    world.step()
    assert not world.steps.is_lost(1) and world.steps.num_held_tokens(1) == 200
    world.give_back(1)
    for _ in range(3):
        world.step()
        assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 200))
    world.ends[1] = 290
    before, sent = world.positions(1), world.sent
    assert world.renew(1, 60)
    after = world.positions(1)
    assert world.sent == sent + 90 and world.steps.num_held_tokens(1) == 290
    newest = torch.arange(290 - 32, 290)
    assert torch.equal(after[..., -32:], newest.expand(5, 2, -1)), "the newest tokens are among what it holds"
    assert (missing_mask(before, after).sum(-1) == 32 - 12).all(), "they take the places of those that were the newest, and those that came"
    world.give_back(1)
    world.step()
    assert torch.equal(world.positions(1), after), "what was asked before is of another context"
    for _ in range(3):
        world.step()
        assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 290))
    assert not +world.steps.missed


def busy_seconds(pid):
    """That a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_rank_that_was_sent_what_is_new_of_a_request_that_then_ends_does_not_look_for_it_for_ever(world):
    world.begin(1, 200, 48)
    world.step()
    world.give_back(1)
    world.ends[1] = 290
    assert world.renew(1, 60)
    world.leave(1)
    marks = [busy_seconds(world.links[0].pid)]

    def is_idle():
        time.sleep(0.5)
        marks.append(busy_seconds(world.links[0].pid))
        return marks[-1] - marks[-2] < 0.1

    world.until(is_idle)


def test_where_a_rank_has_no_room_for_what_is_new_the_copy_stands_for_what_it_stood_for():
    world = RankWorld(places=16, fresh=MOST, blocks=4).ready()
    world.begin(1, 240, 48)
    world.step()
    world.give_back(1)
    world.ends[1] = 330
    assert not world.renew(1, 60) and world.steps.missed["memory-full"] == 1 and world.steps.num_held_tokens(1) == 240
    for _ in range(3):
        world.step()
    assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 240))
    world.begin(2, 150, 40)
    world.step()
    assert world.steps.missed["memory-full"] == 2 and not world.steps.has_request(2) and world.steps.num_held_tokens(2) == 0
    assert torch.equal(world.steps._records[2].positions[0, 0], torch.arange(110, 150).int()), "it has its full KV here, and a copy of that"
    world.steps.end()


def test_a_request_whose_only_full_kv_went_with_its_rank_is_lost_and_others_are_handed_over_again():
    world = RankWorld(patience=0.2, places=16, fresh=MOST).ready()
    world.begin(1, 200, 48), world.begin(2, 150, 40)
    world.step(), world.step()
    world.steps.on_slots_freed(1, is_remote_only=True)
    signalled(world.links[0].pid, signal.SIGKILL)
    world.step()
    kept = [world.positions(row) for row in (1, 2)]
    world.until(lambda: world.steps.ready == 0)
    world.step()
    assert world.steps.is_lost(1) and not world.steps.is_lost(2) and world.steps.num_held_tokens(1) == world.steps.num_held_tokens(2) == 0
    assert not world.steps.extend(1, world.table[1, :200].long())
    world.until(lambda: world.steps.ready == 1)
    world.steps.max_wait_seconds = 20.0
    world.step(), world.step()
    assert all(torch.equal(world.positions(row), before) for row, before in zip((1,), kept))
    assert torch.equal(world.led(2), world.chosen(2, world.ends[2] - 1, 150)) and world.steps.num_held_tokens(2) == 150
    assert world.steps.is_lost(1)
    world.leave(1)
    assert not world.steps.is_lost(1)
    world.steps.end()


def test_a_rank_that_was_late_goes_on_from_what_the_copy_holds():
    world = RankWorld(patience=0.0, places=16, fresh=9).ready()
    world.begin(1, 200, 48)
    world.step()
    signalled(world.links[0].pid, signal.SIGSTOP)
    for _ in range(5):
        world.step()
        world.positions(1)
    os.kill(world.links[0].pid, signal.SIGCONT)
    for pause in (0.0, 0.001, 0.01, 0.03) * 8:
        # Some of these are there in time, and some are not.
        world.step()
        world.positions(1)
        time.sleep(pause)
    world.steps.poll()
    assert world.steps.missed["late"] > 3
    world.steps.max_wait_seconds = 20.0
    for _ in range(3):
        world.step()
    before = world.positions(1)
    world.step()
    scores = world.scores(1, world.ends[1] - 1, 200)
    wanted = scores.topk(48).indices.sort(-1).values
    coming = top_mask(missing_mask(wanted, before), scores.gather(-1, wanted).view(torch.int32), 9)
    assert torch.equal(missing_mask(world.positions(1), before).sum(-1), coming.sum(-1))
    world.steps.end()


def test_requests_come_grow_and_go_at_random_and_hold_what_their_records_say(world):
    """What changes is by the newest choice alone."""
    chance, taken, begun, free = random.Random(7), 0, {}, [1, 2, 3, 4, 5]
    for _ in range(ROUNDS):
        if free and chance.random() < 0.4:
            row = free.pop()
            begun[row] = length = chance.randrange(80, 400)
            world.next_slot = 800 + 200 * row
            like = chance.choice([None, *world.copies])
            first = 0 if like is None else chance.randrange(min(length, len(world.prompts[like])))
            world.begin(row, length, chance.randrange(40, 60), like, first)
        for row in [row for row in world.copies if chance.random() < 0.08 or world.ends[row] > 480]:
            world.leave(row)
            free.append(row)
        for row in [row for row in world.copies if chance.random() < 0.1 and world.steps.has_request(row)]:
            world.next_slot = 800 + 200 * row + len(world.copies[row].own)
            # A copy grows with its request: of no newer token there is no row to add.
            grown = min(chance.randrange(2), world.ends[row] - world.copies[row].covered)
            world.renew(row, len(world.copies[row].own) + grown)
        rows = [row for row in world.copies if chance.random() < 0.9]
        before = {row: world.positions(row) for row in rows}
        if rows:
            world.step(rows)
        for row in rows:
            found = world.positions(row)
            if not torch.equal(found, before[row]):
                taken += 1
                assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, begun[row]))
    for row in list(world.copies):
        world.leave(row)
    world.until(lambda: world.steps.held_tokens == 0)
    assert taken > 5 and world.steps.processes[1] == 1 and not world.steps.missed["wrong"] and not world.steps._records


def test_what_ranks_on_gpus_have_no_room_for_or_cannot_send_is_refused_with_a_remedy(monkeypatch):
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: (1 + 39 * gpu) << 30)
    assert rank_capacity_bytes(0, 1) == int(0.9 * (79 << 30)) - (2 << 30) and rank_capacity_bytes(1, 1) == (20 << 30) - (2 << 30)
    check_capacity(SimpleNamespace(kv_sparse_from=256), 320, [1])
    with pytest.raises(OptionError, match="on GPU 1, 2 have room for full KV of 319 tokens, .* has 320 .*, pass --kv-cache-rank-gb, or"):
        check_capacity(SimpleNamespace(kv_sparse_from=256), 319, [1, 2])
    keys, values = (torch.zeros(4, 2, dim) for dim in (8, 4))
    check_value_layout(KVBuffers((0,), (1.0,), (keys,), (keys,)))
    with pytest.raises(OptionError, match=r"keys are \(2, 8\) of torch.float32 and its values \(2, 4\) .*: pass --kv-cache-ranks 0, or"):
        check_value_layout(KVBuffers((0,), (1.0,), (keys,), (values,)))


def test_ranks_on_gpus_hold_what_the_pool_has_copies_of_but_no_more_than_they_have_room_for():
    args = arguments(kv_compressor="spade", kv_mode="lossy", kv_cache_ranks=2, device="cuda")
    args.get_model_config = lambda: SimpleNamespace(context_len=600)
    method, given = CompressionMethod(Spade(), 0.25, PlainSlots(1)), (pool(), 6, ROTARY, 10)
    found = build_attach(args, method, *given, room=1 << 30)
    # 1,024 slots are 6 copies of 150 tokens, and of 600 tokens in 10 blocks; half of it at each of two ranks.
    assert found.shape.rows and found.shape.most == 150 and found.blocks == 6 * 10 // 2 + 10
    # Keys and values, and keys once more by which is chosen: codes of 8 bits with a scale and a zero point.
    for bits, scored in ((None, 8 + 2 * 2), (16, 0)):
        args.kv_score_bits, token = bits, 5 * 2 * (8 * 4 * 2 + scored)
        assert build_attach(args, method, *given, room=12 * 64 * token + 5).blocks == 12
    assert build_attach(args, method, *given, room=-1).blocks == 1, "which is refused then"


def test_an_arena_has_lanes_for_all_and_of_rows_as_many_as_they_leave_room_for():
    shape = attach(lanes=64, rows=True, fresh=1).shape
    whole = fit_shape(shape, 1 << 30)
    assert (whole.lanes, whole.fresh) == (64, MOST) and ExchangeLayout(whole).size <= 1 << 30
    some = fit_shape(shape, 12 << 20)
    assert some.lanes == 64 and MOST // LEAST_FRESH < some.fresh < MOST and ExchangeLayout(some).size <= 12 << 20
    few = fit_shape(shape, 3 << 20)
    assert 1 <= few.lanes < 64 and few.fresh == MOST // LEAST_FRESH
