"""Packs of layers that are asked for within a step, as on a CPU: what becomes of answers in time, late, twice, of another epoch, and none."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from device_rank_helpers import RankWorld, scripted_world
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_helpers import DIM, GROUP, HEADS, LAYERS, ScriptedRank, attach, newest_of, signalled, state_of

from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, QueryUpload
from sglang_ext.managers.cache_rank.protocol import NUMBER_BITS, Append
from sglang_ext.mem_cache.selection.predictors import RegressedQuery
from sglang_ext_bench.timelines import PackEvent, read_events

COVERED, KEEP, MOST = 300, 64, 256


def asked(pack=5, **flags):
    """A request that has stepped once, and what its rank was asked."""
    world, rank = scripted_world(pack, **flags)
    world.begin(1, COVERED, KEEP)
    world.step()
    return world, rank


def some_of(seed, ask):
    """Positions of each head, of which the last 32 are the newest tokens."""
    noise = torch.rand(ask.count, HEADS, ask.covered, generator=torch.Generator().manual_seed(seed))
    noise[..., -32:] = 2
    return noise.topk(ask.keep, dim=-1).indices.sort(dim=-1).values


def selected(world, seed, asks):
    """Slots that :func:`some_of` selects for these questions, one for each pack."""
    return world.context(1)[torch.cat([some_of(seed, ask) for ask in asks])]


def test_packs_are_asked_for_as_the_step_goes_on_and_answers_in_time_are_read_by_the_next():
    world, rank = asked(pack=2)
    first, asks = world.led(1), rank.asks()
    assert [(ask.first, ask.count, ask.covered, ask.keep, ask.positions) for ask in asks] == [
        (0, 1, COVERED, KEEP, (300,)), (1, 2, COVERED, KEEP, (300,)), (3, 2, COVERED, KEEP, (300,))
    ]  # fmt: skip
    for layer, ask in ((0, asks[0]), (2, asks[1]), (4, asks[2])):
        entry = torch.tensor([[rank.shape.entry(0, ask.first), world.arenas[0].word(1), KEEP]])
        queries = rank.memory.pull_queries(entry, 1, ask.count)
        assert torch.equal(queries[0, layer - ask.first, 0], world.query(1, COVERED)[layer])
    for ask in asks:
        rank.answer(ask, some_of(1, ask))
    world.step()
    assert torch.equal(world.led(1), selected(world, 1, asks)) and not torch.equal(first, world.led(1))
    assert world.steps.taken == world.compressed_kv.num_compressions["spade"] == 1 and not +world.steps.missed
    assert [ask.positions for ask in rank.asks()[3:]] == [(301,)] * 3


def test_what_is_late_costs_one_wait_a_step_and_the_last_choice_is_kept():
    world, rank = asked(pack=2)
    world.steps.max_wait_seconds, first, begun = 0.05, world.led(1), time.monotonic()
    world.step()
    assert 0.04 < time.monotonic() - begun < 1.0 and world.steps.waited > 0.04
    assert +world.steps.missed == {"late": 1} and torch.equal(world.led(1), first)
    assert len(rank.asks()) == 3, "no pack is asked for again before it was answered"


def test_a_late_answer_is_taken_by_the_step_that_finds_it():
    world, rank = asked()
    (late,) = rank.asks()
    world.step()
    rank.answer(late, some_of(2, late))
    world.step()
    assert torch.equal(world.led(1), selected(world, 2, [late])) and world.steps.missed["late"] == 1
    assert [ask.positions for ask in rank.asks()] == [(300,), (302,)]


def test_an_answer_that_comes_while_the_layers_of_its_pack_run_is_read_by_the_next_step():
    world, rank = asked()
    (ask,) = rank.asks()
    watch = world.steps.observe_step(world.compressed_kv, {1: world.ends[1] + 1}, None)
    watch.on_layer_start(0)
    rank.answer(ask, some_of(3, ask))
    watch.on_queries_recorded(LAYERS - 1)
    assert torch.equal(world.led(1), selected(world, 3, [ask])) and len(rank.asks()) == 2


def test_an_answer_that_comes_twice_or_says_that_nothing_was_chosen_is_no_other():
    world, rank = asked()
    (ask,) = rank.asks()
    rank.answer(ask, some_of(3, ask))
    rank.answer(ask, some_of(3, ask))
    world.step()
    expected = selected(world, 3, [ask])
    assert torch.equal(world.led(1), expected) and world.steps.taken == 1
    rank.answer(rank.asks()[-1], some_of(4, ask), chosen=False)
    world.step()
    assert torch.equal(world.led(1), expected) and len(rank.asks()) == 3 and not +world.steps.missed


def test_an_answer_written_under_another_epoch_or_beyond_the_context_is_none():
    world, rank = asked()
    first, (ask,) = world.led(1), rank.asks()
    rank.answer(ask, some_of(3, ask), epoch=rank.epoch + 1)
    world.step()
    assert torch.equal(world.led(1), first) and +world.steps.missed == {"wrong": 1}
    ask = rank.asks()[-1]
    rank.answer(ask, newest_of(ask) + 1)
    world.step()
    assert torch.equal(world.led(1), first) and +world.steps.missed == {"wrong": 2}


def test_an_answer_of_another_process_is_not_heard():
    world, rank = asked()
    first, (ask,) = world.led(1), rank.asks()
    rank.epoch += 1
    rank.answer(ask, some_of(3, ask))
    world.step()
    assert torch.equal(world.led(1), first) and world.steps.missed["late"] == 1


def test_answers_to_a_lanes_former_request_are_not_taken_for_the_next_ones():
    world, rank = asked()
    (old,) = rank.asks()
    world.leave(1)
    world.begin(1, 280, 40)
    world.step()
    first, new = world.led(1), rank.asks()[-1]
    assert new.lane == old.lane and new.sequence == old.sequence + 1
    rank.answer(old, some_of(1, old))
    world.step()
    assert torch.equal(world.led(1), first) and world.steps.missed["late"] == 1
    rank.answer(new, some_of(2, new))
    world.step()
    assert torch.equal(world.led(1), selected(world, 2, [new]))


def test_an_answer_about_another_context_is_left():
    world, rank = asked()
    first, (ask,) = world.led(1), rank.asks()
    world.steps.flush(1)
    world.table[1, COVERED : COVERED + 20] = torch.arange(700, 720)
    world.copies[1].covered, world.ends[1] = COVERED + 20, COVERED + 20
    rank.answer(ask, some_of(1, ask))
    world.step()
    assert torch.equal(world.led(1), first) and not +world.steps.missed
    assert rank.asks()[-1].covered == COVERED + 20
    pieces = [piece for message in rank.told if isinstance(message, Append) for piece in message.pieces]
    assert sum(piece.tokens for piece in pieces) == COVERED + 20, "keys travel once"


def test_a_request_is_read_whole_where_no_rank_can_take_it():
    world = RankWorld(pack=2, places=16, lanes=1, blocks=5, start_process=ScriptedRank)
    assert world.steps.must_read_full_kv(1, 300) and +world.steps.missed == {"starting": 1}
    world.steps.poll()
    rank = ScriptedRank.made[-1]
    world.until(lambda: (rank.hear(), world.steps.ready)[1])
    assert not world.steps.must_read_full_kv(1, 300) and world.steps.must_read_full_kv(1, 321)
    assert world.steps.missed["memory-full"] == 1
    world.begin(1, 300, KEEP)
    world.step()
    assert not world.steps.must_read_full_kv(1, 340), "it is there"
    assert world.steps.must_read_full_kv(2, 64) and world.steps.missed["no-lane"] == 1
    rank.ended = -9
    world.steps.poll()
    assert world.steps.processes == (0, 1)
    assert world.steps.must_read_full_kv(1, 300) and world.steps.missed["ended"] == 1


def test_requests_that_no_rank_takes_cost_choices_alone():
    world, rank = scripted_world(lanes=1, blocks=6)
    world.begin(1, 300, KEEP), world.begin(2, 100, 40)
    world.step()
    assert +world.steps.missed == {"no-lane": 1} and len(rank.asks()) == 1
    world.leave(1)
    world.begin(3, 450, KEEP)
    world.step([3])
    assert world.steps.missed["memory-full"] == 1 and not world.steps.has_request(3) and world.steps.held_tokens == 0


def test_nothing_waits_for_a_rank_that_is_gone_and_the_next_has_the_keys_anew():
    world, rank = asked()
    world.steps.max_wait_seconds, first = 5.0, world.led(1)
    rank.ended = -9
    world.links[0].poll()
    world.step()
    assert world.steps.waited < 2.0 and torch.equal(world.led(1), first) and world.steps.missed["ended"] == 1
    world.until(lambda: ScriptedRank.made[-1] is not rank and (ScriptedRank.made[-1].hear(), world.steps.ready)[1])
    another = ScriptedRank.made[-1]
    assert another.epoch == rank.epoch + 1 and world.steps.processes[1] == 2 and world.steps.held_tokens == 0
    world.step()
    (ask,) = another.asks()
    another.answer(ask, some_of(1, ask))
    world.step()
    assert torch.equal(world.led(1), selected(world, 1, [ask])) and world.steps.held_tokens == 320


def test_a_timeline_tells_of_each_pack_when_it_was_reached_asked_chosen_and_written(tmp_path):
    world, rank = asked(timeline=tmp_path / "times")
    rank.answer(*rank.asks())
    world.step()
    world.step()
    events = list(read_events(tmp_path / "times", PackEvent))
    assert [event.kind for event in events] == ["reached", "asked", "chosen", "reached", "written", "asked", "reached", "missed"]
    assert {(event.first, event.count) for event in events} == {(0, LAYERS)}
    _, asked_, chosen, _, written = events[:5]
    assert asked_.bytes == LAYERS * HEADS * GROUP * DIM * 4 and chosen.bytes == LAYERS * HEADS * KEEP * 4 and chosen.seconds == 0.01
    assert written.bytes == LAYERS * HEADS * KEEP * 2 * DIM * 4, "K and V that positions lead to"
    assert {(event.lane, event.sequence) for event in (asked_, chosen, written)} == {(0, 1)}


PATTERN = st.tuples(st.sampled_from(["now", "late", "never", "between"]), st.sampled_from(["goes on", "renews"]), st.integers(0, 9))


@given(st.lists(PATTERN, max_size=24))
@settings(max_examples=25, deadline=None)
def test_after_any_pattern_of_answers_slots_hold_the_rows_of_the_record(pattern):
    world, rank = scripted_world(pack=2, fresh=MOST, blocks=64)
    world.begin(1, 200, 48)
    world.step()
    open_, full_kv = rank.asks(), (world.table[1], world.on_host)
    seen = len(open_)
    for when, round_, seed in pattern:
        count = {"now": len(open_), "late": 1 + seed % 3, "between": min(1, len(open_)), "never": 0}[when]
        for ask in open_[:count]:
            rank.answer(ask, some_of(seed, ask), full_kv=full_kv)
        open_ = open_[count:]
        world.step()
        world.positions(1)
        open_ += rank.asks()[seen:]
        seen = len(rank.asks())
        assert len({ask.first for ask in open_}) == len(open_), "one question of a pack is open"
        if round_ == "renews":
            world.renew(1, len(world.copies[1].own) + 1)
            world.positions(1)
    assert not world.steps.missed["wrong"]
    world.steps.end()


def test_rows_that_a_copy_holds_are_not_sent_again_and_all_others_are():
    world, rank = scripted_world(pack=2, fresh=MOST)
    world.begin(1, 200, 48)
    world.step()
    full_kv = world.table[1], world.on_host
    for round_ in range(3):
        asks, before = rank.asks()[-3:], world.steps.rows
        for ask in asks:
            rank.answer(ask, some_of(min(round_, 1), ask), full_kv=full_kv)
        world.step()
        assert torch.equal(world.positions(1), torch.cat([some_of(min(round_, 1), ask) for ask in asks]))
        assert (world.steps.rows > before) == (round_ < 2)
    assert world.steps.taken == 3 and not +world.steps.missed


@pytest.fixture
def start():
    """Starts real ranks; their processes end with the test."""
    made = []

    def world(**given):
        made.append(RankWorld(**{"pack": 2, "places": 16, **given}))
        return made[-1].ready()

    yield world
    for each in made:
        each.steps.end()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"predictor": RegressedQuery()},
        {"count": 2, "pack": 1},
        {"fresh": MOST, "pack": 3},
        {"fresh": MOST, "predictor": RegressedQuery()},
    ],
    ids=str,
)
def test_each_step_reads_what_the_queries_of_the_one_before_choose(start, given):
    world = start(**given)
    rows = {1: 300, 2: 150, 3: 220}
    for row, length in rows.items():
        world.begin(row, length, 48)
    world.step()
    for _ in range(6):
        world.step()
        for row, length in rows.items():
            assert world.overlap(row, world.ends[row] - 1, length) == 1.0
    assert world.steps.taken == world.compressed_kv.num_compressions["spade"] == 18 and not +world.steps.missed
    assert (world.steps.rows > 0) == ("fresh" in given)
    if given.get("count") == 2:
        assert set(world.newest_requests) == set(world.links)


@pytest.mark.parametrize(("bits", "most"), [(8, 1.1), (4, 1.0)])
def test_a_rank_that_holds_few_bits_chooses_by_what_they_mean(start, bits, most):
    world = start(bits=bits)
    exact = world.on_host
    world.score_in_bits(bits)
    world.begin(1, 300, 64)
    for number in range(4):
        world.step()
        assert not number or world.overlap(1, 300 + number, 300) == 1.0
    world.on_host = exact
    assert world.overlap(1, 303, 300) < most, "it would be no codes that chose"


def test_choices_are_asked_for_as_often_as_the_flag_says(start):
    world = start(every=3)
    world.begin(1, 300, 64)
    for _ in range(13):
        world.step(following=4)
    assert world.steps.taken == 4 and not +world.steps.missed


def test_a_rank_that_steps_outrun_is_asked_as_often_as_it_answers():
    world, rank = asked()
    for number in range(1, 13):
        world.step()
        assert len(rank.asks()) == 1 + (number - 1) // 3
        if number % 3 == 0:
            rank.answer(rank.asks()[-1], some_of(number, rank.asks()[-1]))
    world.step()
    assert [ask.positions for ask in rank.asks()] == [(300,), (304,), (307,), (310,), (313,)]
    assert torch.equal(world.led(1), selected(world, 12, [rank.asks()[3]]))
    assert world.steps.taken == 4 and world.steps.missed["late"] == 9


def test_a_rank_that_is_killed_costs_choices_until_another_has_the_keys(start):
    world = start(patience=0.3)
    world.begin(1, 300, 64)
    world.step(), world.step()
    killed = world.links[0].pid
    signalled(killed, signal.SIGKILL)
    world.step()
    world.until(lambda: not world.steps.ready, 10)
    world.step()
    assert world.steps.missed["ended"] >= 1 and world.steps.must_read_full_kv(1, 300)
    world.until(lambda: world.steps.ready)
    world.steps.max_wait_seconds = 20.0
    world.step(), world.step()
    assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 300))
    assert world.steps.processes[1] == 2 and world.links[0].pid != killed and state_of(killed) == "Z"


def test_a_rank_that_is_stopped_costs_one_wait_a_step_and_is_ended_once_it_is_silent(start):
    world = start(patience=0.05, silence=1.0)
    world.begin(1, 300, 64)
    world.step(), world.step()
    stopped, before = world.links[0].pid, world.steps.waited
    signalled(stopped, signal.SIGSTOP)
    for _ in range(5):
        world.step()
    assert world.steps.missed["late"] >= 4 and world.steps.waited - before < 1.0
    world.until(lambda: state_of(stopped) == "Z")
    world.step()
    assert world.steps.missed["silent"] + world.steps.missed["starting"] >= 1


def test_a_rank_ends_with_its_parent_and_when_it_is_told_to(start):
    world = start()
    pid = world.links[0].pid
    os.kill(pid, signal.SIGTERM)
    world.until(lambda: not world.steps.ready, 10)
    assert state_of(pid) == "Z"
    program = (
        "import os, device_rank_helpers as helpers; world = helpers.RankWorld(pack=2).ready(); "
        "print(world.links[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    # Helpers are found where pytest lets this process find them.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    orphan, end = int(done.stdout), time.monotonic() + 10
    while state_of(orphan) != "Z":
        assert time.monotonic() < end, "it outlives its parent"
        time.sleep(0.05)


def test_memory_has_no_name_is_taken_as_it_is_written_and_packs_have_words_of_their_own():
    shape = attach(packs=LAYERS, rows=True, fresh=MOST, lanes=64).shape
    exchange = ExchangeBuffer(shape, torch.device("cpu"), "cpu")
    descriptor = exchange.begin(3)
    try:
        state = os.fstat(descriptor)
        assert state.st_nlink == 0 and state.st_size > 10 << 20 and state.st_blocks * 512 < 1 << 20 and not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
    assert exchange.heads.shape[0] == 64 * LAYERS and {shape.entry(lane, first) for lane in (0, 63) for first in (0, 4)} == {0, 4, 315, 319}
    exchange.publish(torch.randn(LAYERS, 1, HEADS * GROUP, DIM), [QueryUpload([0], shape.entry(7, 2), exchange.word(1))])
    assert int(exchange.heads[shape.entry(7, 2), 1]) == (3 << NUMBER_BITS) + 1
    assert (exchange.heads[shape.entry(7, 3)] == 3 << NUMBER_BITS).all(), "no request of the next pack"
