"""A cache rank with an arena in another process, on a CPU in the place of GPUs: what steps are led to, and what becomes of them without."""

import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from device_rank_helpers import RankWorld, rank_here
from rank_helpers import attach, pool, signalled
from rank_socket import serve
from waiting import tries, until

from sglang_ext.managers.cache_rank import protocol, selection_server, stepwise_client
from sglang_ext.managers.cache_rank.protocol import CHOSEN, DONE
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, QueryUpload
from sglang_ext.managers.cache_rank.feature import rank_values
from sglang_ext.managers.cache_rank.stepwise_client import IntervalTuner
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery

pytestmark = pytest.mark.usefixtures("forked_ranks")

# Rounds of the test of random requests.
ROUNDS = 150


@pytest.fixture(scope="module", params=[False, True], ids=["", "apart"])
def shared(request):
    """A world whose rank several tests ask, one after another; it is told of questions once they are put, or before, and waits."""
    world = RankWorld(places=16, apart=request.param).ready()
    yield world
    world.steps.end()


class Slow(IntervalTuner):
    """Of a rank that takes a second for each request."""

    def record_replies(self, seconds, together):
        super().record_replies(1.0, 1)


def test_a_rank_that_steps_outrun_is_asked_as_often_as_it_keeps_up_and_what_it_chose_is_read():
    world = RankWorld(places=16, most=8).ready()
    world.steps.interval_tuner = Slow(1, 8)
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    for _ in range(60):
        world.step()
        world.steps.poll()
    made = world.compressed_kv.num_compressions["spade"]
    assert (world.steps.interval_tuner.every, +world.steps.missed) == (8, {}) and 8 <= made < 60, made
    assert [value for name, value, *_ in rank_values(world.steps, None) if name == "selection_steps"] == [8]
    while (world.ends[1] - 300) % 8:
        world.step()
    for _ in range(16):
        world.step()
    world.every = 8
    assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 8, 300)), "by the queries of the turn before"
    world.steps.end()


def test_copies_of_contexts_of_all_lengths_are_compiled_for_before_any_request(world, monkeypatch):
    told = []
    monkeypatch.setattr(stepwise_client, "compile_lengths", lambda method, table, buffers, heads: told.append((method, table, heads)))
    world.steps.compile_kernels()
    assert told == [(world.method, world.table, world.queries.pool.shape[2])]


def test_questions_that_are_answered_together_cost_once_however_many_they_are(world):
    (link,), costs, tuner = world.links, [], world.steps.interval_tuner
    world.steps.interval_tuner = SimpleNamespace(record_replies=lambda *cost: costs.append(cost))

    def answered(count, seconds, chosen=True):
        return [protocol.SelectionReply(1, lane, 0, 5, 9, chosen, seconds, 0.0, count) for lane in range(count)]

    world.until(lambda: not link.replies)
    costs.clear()
    link.replies += [*answered(4, 20.0), *answered(4, 0.5), *answered(2, 0.0, chosen=False), *answered(1, 0.25)]
    world.steps.poll()
    world.steps.interval_tuner = tuner
    assert costs == [(20.0, 4), (0.5, 4), (0.25, 1)]


class Behind:
    """In the place of a second stream: what was put for it is read no earlier than somebody waits for it."""

    def __init__(self, arena):
        # As each call is made, it is fixed what it announces. Otherwise an earlier one would announce a question that is not written yet.
        self._publish, self._left = arena._publish, []
        arena._publish = lambda *given: self._left.append(given)

    def launch(self, work, read):
        work()
        return self

    def wait(self, done):
        if done is not None:
            while self._left:
                self._publish(*self._left.pop(0))


def test_a_second_stream_that_is_behind_reads_queries_before_they_are_written_over():
    world = RankWorld(places=16, most=8).ready()
    world.begin(1, 300, 64)
    world.steps.interval_tuner.every = world.every = 8
    world.steps._side = Behind(world.arenas[0])
    for _ in range(16):
        world.step()
    assert world.queries.extra_queries < 8 and torch.equal(world.led(1), world.chosen(1, 308, 300))
    world.steps.end()


@pytest.fixture
def world(shared):
    """The same without requests."""
    forget_all(shared)
    shared.steps.missed.clear()
    return shared


def forget_all(world):
    """End all requests."""
    for row in list(world.copies):
        world.leave(row)
    world.next_slot = 800


def end(world):
    """End its ranks."""
    world.steps.end()


def test_each_step_reads_what_the_queries_of_the_one_before_the_last_choose(world):
    world.begin(1, 300, 64), world.begin(2, 150, 48)
    first = world.led(1)
    world.step()
    assert torch.equal(world.led(1), first), "nothing was asked before"
    for _ in range(6):
        world.step()
        for row, length in ((1, 300), (2, 150)):
            assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, length))
    world.steps.poll()
    assert world.compressed_kv.num_compressions["spade"] == world.steps.taken >= 12 and not +world.steps.missed
    told = {name: value for name, value, *_ in rank_values(world.steps, None)}
    assert told["cache_ranks_ready"] == told["cache_rank_starts"] == 1 and told["cache_rank_tokens"] == 8 * 64
    assert told["choosing_seconds"] > 0 and told["selection_wait_seconds"] > 0 and told["selection_rows"] == 0
    assert world.steps.held_tokens == 5 * 64 + 3 * 64


def test_a_copy_that_stands_for_more_tokens_has_their_keys_sent_and_drops_what_was_asked(world):
    world.begin(1, 200, 48)
    world.step(), world.step()
    sent, before = world.sent, world.led(1)
    world.steps.flush(1)
    view = world.copies[1]
    world.table[1, 200:280] = torch.arange(700, 780)
    view.covered, world.ends[1] = 280, 280
    world.step()
    assert torch.equal(world.led(1), before), "the answer is of another context"
    assert world.sent == sent + 80
    world.step()
    assert torch.equal(world.led(1), world.chosen(1, 281, 280))


def test_what_the_last_step_of_a_round_asked_is_taken_in_the_next_round_from_which_drafts_were_rejected(world):
    world.begin(1, 200, 48)
    for following in (2, 1, 0):
        world.step(following=following)
    assert world.steps._launched is None, "verification writes over queries"
    assert torch.equal(world.led(1), world.chosen(1, 202, 200))
    asked = world.chosen(1, 203, 200)
    world.queries.drop_rejected(1, 201)
    world.ends[1] = 201
    world.step(following=2)
    assert torch.equal(world.led(1), asked)
    world.step(following=1)
    assert torch.equal(world.led(1), world.chosen(1, 202, 200))


@pytest.mark.parametrize(("every", "length"), [(8, 3), (3, 8), (5, 1), (2, 2)])
def test_rounds_of_any_length_ask_from_their_first_step_on_and_as_rarely_as_ranks_keep_up(every, length):
    world = RankWorld(places=16, most=8).ready()
    world.steps.interval_tuner.every = world.every = every
    world.begin(1, 300, 64)
    turns, asked, sequence = [], [], 0
    for number in range(24):
        before = world.led(1)
        world.step(following=length - 1 - number % length)
        if number and world.newest_request.sequence > sequence:
            if asked:
                assert torch.equal(world.led(1), asked[-1]), "what the turn before asked"
        elif number:
            assert torch.equal(world.led(1), before)
        if world.newest_request.sequence > sequence:
            sequence += 1
            turns.append(number)
            asked.append(world.chosen(1, world.ends[1], 300))
        if number % length == length - 1:
            # Of a round of several drafts the last one is rejected.
            world.ends[1] -= length > 1
            world.queries.drop_rejected(1, world.ends[1])
    assert turns == list(range(0, 24, every))
    world.steps.poll()
    assert not +world.steps.missed
    world.steps.end()


def test_requests_that_end_leave_lanes_and_blocks_and_more_than_fit_are_told(world):
    for row in range(1, 6):
        world.begin(row, 150, 40)
    world.step()
    assert +world.steps.missed == {"no-lane": 1} and world.steps.held_tokens == 4 * 192
    world.begin(6, 500, 40)
    for row in (1, 2):
        world.leave(row)
    world.step()
    assert world.steps.held_tokens == 3 * 192 + 512 and world.steps.has_request(5)
    world.begin(7, 490, 40)
    world.step()
    assert world.steps.missed["no-lane"] == 2
    forget_all(world)
    world.until(lambda: world.steps.held_tokens == 0)


def test_what_an_older_process_answers_or_what_leads_elsewhere_is_not_taken(world):
    world.begin(1, 200, 48)
    world.step()
    (arena,) = world.arenas
    lane, number = world.newest_request.lane, world.newest_request.sequence + 1
    old = arena.word(number) - (1 << protocol.NUMBER_BITS)
    arena.heads[lane, CHOSEN + number % 2] = old
    world.step()
    assert torch.equal(world.led(1), world.chosen(1, 201, 200))


def test_an_arena_to_which_more_was_written_than_32_bits_count_goes_on():
    world = RankWorld(places=16).ready()
    world.begin(1, 200, 48)
    world.step()
    world.arenas[0].number = (1 << 32) - 3
    for _ in range(6):
        world.step()
        assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 200))
    world.steps.poll()
    assert world.arenas[0].number > 1 << 32 and not +world.steps.missed and world.steps.processes[1] == 1
    world.steps.end()


def test_a_question_whose_place_is_taken_is_not_put_and_costs_no_wait():
    arena = ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu")
    arena.begin(1)
    queries = torch.randn(5, 8, 6, 8)
    for number, opened in ((1, True), (2, True), (3, False)):
        arena.publish(queries, [QueryUpload([number], 0, arena.word(number))])
        assert (int(arena.heads[0, number % 2]) == arena.word(number)) is opened
    assert torch.equal(arena.queries[0, 1, :, 0], queries[:, 1])
    arena.heads[0, DONE] = arena.word(1)
    arena.publish(queries, [QueryUpload([3], 0, arena.word(3))])
    assert torch.equal(arena.queries[0, 1, :, 0], queries[:, 3])


@pytest.mark.parametrize(("predictor", "every"), [(RegressedQuery(), 1), (CurrentQuery(), 3)], ids=["regressed", "every third"])
def test_other_methods(predictor, every):
    world = RankWorld(predictor=predictor, every=every, places=16).ready()
    world.begin(1, 200, 48)
    for number in range(1, 7 * every + 1):
        world.step()
        if number >= 2 * every:
            turn = number // every * every - every
            assert world.overlap(1, 200 + turn, 200) == 1.0, number
    world.steps.poll()
    assert not +world.steps.missed
    end(world)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rank_that_holds_few_bits_chooses_by_what_they_mean(bits):
    world = RankWorld(places=16, bits=bits).ready()
    exact = world.on_host
    world.score_in_bits(bits)
    world.begin(1, 300, 64)
    for number in range(1, 6):
        world.step()
        if number >= 3:
            assert world.overlap(1, 300 + number - 1, 300) == 1.0, number
    world.on_host = exact
    assert bits == 8 or world.overlap(1, 304, 300) < 1.0, "few bits choose otherwise"
    end(world)


def test_keys_that_come_with_a_question_are_part_of_what_it_takes(monkeypatch):
    arena = ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu")
    rank, socket = rank_here(arena)
    store = rank._store
    pull = store.pull
    monkeypatch.setattr(store, "pull", lambda *given: (time.sleep(1.0), pull(*given)))
    keys = pool()
    for sequence, (keys_come, least, most) in enumerate(((True, 1.0, 10), (False, 0, 1.0)), 1):
        if keys_come:
            pieces = (protocol.KeyPiece(0, 0, 64, 0),)
            number = arena.put_keys([protocol.StagedTokens(0, 64, 0)], keys, torch.arange(64))
            socket.tell(protocol.Lease(0, 0, (0,)), protocol.Append(pieces, number))
        socket.tell(protocol.SelectionRequest(0, 0, 5, sequence, 64, 8, (63,), number=arena.reserve_number()))
        arena.publish(torch.randn(5, 8, 6, 8), [QueryUpload([3], 0, arena.word(sequence))])
        serve(rank)
        assert socket.messages[-1].chosen and least <= socket.messages[-1].seconds < most


def test_a_choice_that_was_launched_ahead_costs_what_it_takes_from_when_the_question_is_put():
    arena = ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu")
    rank, socket = rank_here(arena, apart=True)
    socket.tell(protocol.Lease(0, 0, (0,)))
    serve(rank)
    put_at = []

    def put(sequence):
        put_at.append(time.monotonic())
        arena.publish(torch.randn(5, 8, 6, 8), [QueryUpload([3], 0, arena.word(sequence))])

    # The rank waits for the question in its first turn, at most AHEAD_SECONDS.
    for sequence in tries(20, "a question was put while the rank waited for it"):
        socket.tell(protocol.SelectionRequest(0, 0, 5, sequence + 1, 64, 8, (63,), number=arena.reserve_number()))
        timer = threading.Timer(selection_server.AHEAD_SECONDS / 2, put, (sequence + 1,))
        begun = time.monotonic()
        timer.start()
        serve(rank)
        ahead = time.monotonic()
        timer.join()
        until(lambda: serve(rank) or socket.messages[-1].sequence == sequence + 1)
        reply = socket.messages[-1]
        assert reply.chosen
        if reply.at <= ahead:
            break
    assert put_at[-1] - begun >= selection_server.AHEAD_SECONDS / 2
    assert 0 < reply.seconds <= reply.at - put_at[-1], "not from when it was told of it"


def test_a_rank_that_is_killed_costs_choices_and_another_takes_its_place():
    world = RankWorld(patience=0.3, places=16).ready()
    world.begin(1, 200, 48)
    world.step(), world.step()
    signalled(world.links[0].pid, signal.SIGKILL)
    world.step()
    kept = world.led(1)
    for _ in range(5):
        world.step()
    assert torch.equal(world.led(1), kept)
    world.steps.poll()
    assert world.steps.waited < 1.5, "a wait for each place"
    world.step()
    assert world.steps.missed["ended"] >= 1 and world.steps.missed.total() >= 4 and world.steps.ready == 0
    world.until(lambda: world.steps.ready == 1)
    assert world.steps.processes[1] == 2 and world.links[0].epoch == 2
    world.steps.max_wait_seconds = 20.0
    world.step(), world.step()
    assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 200))
    end(world)


def test_a_rank_that_is_stopped_is_waited_for_twice_and_ended_after_its_silence():
    world = RankWorld(patience=0.3, silence=2.0, places=16).ready()
    world.begin(1, 200, 48)
    world.step(), world.step()
    os.kill(world.links[0].pid, signal.SIGSTOP)
    kept = world.led(1)
    for _ in range(8):
        world.step()
    world.steps.poll()
    assert 0.25 < world.steps.waited < 1.5, "one wait for each place, and none for what found no place"
    assert world.steps.missed["late"] >= 6
    assert torch.equal(world.led(1), kept) or world.compressed_kv.num_compressions["spade"]
    world.until(lambda: world.steps.ready == 0, 10)
    world.step()
    assert world.steps.missed["silent"] == 1
    end(world)


def test_a_late_rank_catches_up_after_questions_that_found_no_place():
    world = RankWorld(patience=0.0, places=16).ready()
    world.begin(1, 200, 48)
    world.step(), world.step()
    os.kill(world.links[0].pid, signal.SIGSTOP)
    for _ in range(6):
        world.step()
    os.kill(world.links[0].pid, signal.SIGCONT)
    (arena,), request = world.arenas, world.newest_request
    world.until(lambda: int(arena.heads[request.lane, DONE]) >= arena.word(request.sequence), 20)
    world.steps.max_wait_seconds = 20.0
    world.step(), world.step()
    assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 200))
    end(world)


def test_two_ranks_share_requests():
    world = RankWorld(count=2, places=16).ready()
    for row in (1, 2, 3, 4):
        world.begin(row, 150 + row, 40)
    for _ in range(3):
        world.step()
    assert set(world.newest_requests) == set(world.links)
    for row in (1, 2, 3, 4):
        assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, 150 + row))
    end(world)


def test_requests_come_grow_and_go_at_random_and_each_is_led_by_its_own_questions(world):
    """What a copy leads to is what it led to before, or what the queries of the last turn choose."""
    chance, taken, begun, free = random.Random(5), 0, {}, [1, 2, 3, 4, 5]
    for _ in range(ROUNDS):
        if free and chance.random() < 0.4:
            row = free.pop()
            begun[row] = length = chance.randrange(60, 450)
            world.next_slot = 800 + 12 * row
            like = chance.choice([None, *world.copies])
            first = 0 if like is None else chance.randrange(min(length, len(world.prompts[like])))
            world.begin(row, length, chance.randrange(40, 60), like, first)
        for row in [row for row in world.copies if chance.random() < 0.1 or world.ends[row] > 490]:
            world.leave(row), free.append(row)
        rows = [row for row in world.copies if chance.random() < 0.9]
        before = {row: world.led(row) for row in rows}
        if rows:
            world.step(rows)
        for row in rows:
            led = world.led(row)
            if not torch.equal(led, before[row]):
                taken += 1
                assert torch.equal(led, world.chosen(row, world.ends[row] - 1, begun[row]))
    forget_all(world)
    world.until(lambda: world.steps.held_tokens == 0)
    assert taken > 5 and world.steps.processes[1] == 1 and not world.steps.missed["wrong"]
