"""How keys of requests get to a cache rank with an arena, in as many steps as there are places for them, and what requests that begin alike
share there."""

import signal
import time

import pytest
import torch
import zmq
from device_rank_helpers import RankWorld, rank_here
from rank_helpers import attach, pool, signalled
from rank_socket import serve
from waiting import until

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, QueryUpload
from sglang_ext.managers.cache_rank.stepwise_client import IntervalTuner

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_keys_go_in_as_many_steps_as_there_are_places_for_them_and_blocks():
    world = RankWorld(places=2, blocks=6).ready()
    world.begin(1, 300, 64)
    world.step()
    assert +world.steps.missed == {"hand-over": 1}
    for _ in range(20):
        # Places come back as the rank takes their keys.
        world.until_places_are_free()
        world.step()
    world.steps.poll()
    assert 1 <= world.steps.missed["hand-over"] < 6 and world.compressed_kv.num_compressions["spade"] > 5
    assert torch.equal(world.led(1), world.chosen(1, world.ends[1] - 1, 300))
    world.begin(2, 150, 40)
    world.step()
    assert world.steps.missed["memory-full"] == 1 and not world.steps.has_request(2)
    world.steps.end()


def test_keys_go_to_a_rank_after_any_step_and_after_questions_of_those_whose_keys_it_has():
    world, said = RankWorld(places=2, every=3).ready(), []
    (link,) = world.links
    send_message = link.send_message
    link.send_message = lambda message: (said[-1].append(message), send_message(message))

    def step():
        said.append([])
        world.step()
        world.until_places_are_free()

    said.append([])
    world.begin(1, 128, 32)
    while not world.steps.taken:
        step()
        world.steps.poll()
    assert (world.ends[1] - 128) % 3 == 0
    world.begin(2, 450, 48)
    said.clear()
    for _ in range(6):
        step()
    told = [[type(message).__name__ for message in each if not isinstance(message, protocol.Lease)] for each in said]
    # Eight blocks through two places, from the turn of both on.
    assert told == [[], [], ["SelectionRequest", "Append"], ["Append"], ["Append"], ["SelectionRequest", "Append", "SelectionRequest"]]
    assert world.sent == 128 + 450 and world.steps.missed["hand-over"] == 1
    world.steps.end()


def test_a_question_that_was_put_before_keys_is_answered_before_they_are_taken():
    arena = ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu")
    rank, socket = rank_here(arena)
    keys, queries = pool(), torch.randn(5, 8, 6, 8)

    def put(lane, *blocks):
        placed = [protocol.StagedTokens(block, 64, 0) for block in blocks]
        pieces = tuple(protocol.KeyPiece(block, 0, 64, block) for block in blocks)
        socket.tell(protocol.Lease(lane, 0, blocks), protocol.Append(pieces, arena.put_keys(placed, keys, torch.arange(64))))

    def ask(lane):
        socket.tell(protocol.SelectionRequest(lane, 0, 5, 1, 64, 8, (63,), number=arena.reserve_number()))
        arena.publish(queries, [QueryUpload([3], lane, arena.word(1))])

    put(0, 0), ask(0), put(1, 1, 2), ask(1)
    said = len(socket.messages)
    serve(rank, 3)
    assert [type(each).__name__ for each in socket.messages[said:]] == ["PlacesFreed", "SelectionReply", "PlacesFreed", "SelectionReply"]
    assert all(each.chosen for each in socket.messages if isinstance(each, protocol.SelectionReply))


@pytest.mark.parametrize("first", [False, True], ids=["while keys go", "as one is asked"])
def test_a_rank_that_ends_while_keys_go_to_it_costs_choices_alone(first):
    world = RankWorld(places=6, every=3, lanes=4).ready()
    (link,) = world.links
    if first:
        world.begin(1, 129, 32)
        for _ in range(4):
            world.step()
    # Their turns are not those of the first.
    world.begin(2, 450, 48), world.begin(3, 450, 48)
    while not all(map(world.steps.has_request, (2, 3))):
        world.step()
    world.until_places_are_free()
    signalled(link.pid, signal.SIGKILL)
    # Threads of a process may end after it.
    until(lambda: link._process.ended is not None and not link._process.socket.poll(0, zmq.POLLOUT))
    world.step()
    assert not link.ready and not link.has_free_place
    world.step(), world.step()
    assert world.steps.missed["ended"] >= 2
    world.until(lambda: world.steps.ready == 1)
    sent = world.sent
    for _ in range(12):
        world.step()
        world.until_places_are_free()
    assert world.sent - sent == 450 + 450 + 129 * first
    world.steps.end()


def test_keys_for_which_a_rank_has_no_room_are_told_when_their_turn_comes():
    world = RankWorld(places=16, blocks=4, every=3).ready()
    world.begin(1, 200, 48)
    for _ in range(4):
        world.step()
    # A copy that stands for more than there are blocks for.
    world.steps.flush(1)
    world.table[1, 200:280] = torch.arange(700, 780)
    world.copies[1].covered, world.ends[1] = 280, 280
    world.step(), world.step()
    assert world.steps.has_request(1) and not +world.steps.missed
    world.step()
    assert not world.steps.has_request(1) and world.steps.missed["memory-full"] == 1
    world.steps.end()


def test_places_that_came_free_since_ranks_were_tended_are_used_and_without_any_nothing_is_launched():
    world, launched = RankWorld(places=2, every=50).ready(), []
    (link,), side = world.links, world.steps._side
    launch = side.launch
    side.launch = lambda *given: (launched.append(1), launch(*given))[1]
    world.begin(1, 450, 48)
    world.ends[1] = 499
    world.step()
    assert world.sent == 128
    # What the rank says nobody hears but steps, of which none is the request's turn.
    while world.sent < 256:
        assert link._process.socket.poll(10_000) and world.ends[1] < 540
        world.step()
    launched.clear()
    while link.place() is not None:
        pass
    link.wait = lambda seconds: None
    world.step()
    assert not launched
    world.steps.end()


def test_requests_that_begin_alike_share_blocks_and_each_is_led_by_its_own_queries():
    world = RankWorld(places=16).ready()
    world.begin(1, 300, 64)
    world.step(), world.step()
    assert world.sent == 300 and world.steps.held_tokens == 320
    # Four whole blocks are the first one's, of the fifth some tokens are.
    world.begin(2, 400, 64, like=1, first=290)
    world.step(), world.step(), world.step()
    assert world.sent == 300 + 400 - 256 and world.steps.held_tokens == 320 + 448 - 256
    for row, begun in ((1, 300), (2, 400)):
        assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, begun))
    # Who filled them goes first.
    world.leave(1)
    assert world.steps.held_tokens == 448
    world.step(), world.step()
    assert torch.equal(world.led(2), world.chosen(2, world.ends[2] - 1, 400))
    world.leave(2)
    world.begin(3, 300, 64, like=1, first=300)
    world.step()
    assert world.sent == 300 + 400 - 256 + 300, "nobody had them any more"
    world.steps.end()


def test_requests_that_begin_alike_at_once_send_what_they_share_once():
    world = RankWorld(places=4).ready()
    for row in (1, 2, 3):
        world.begin(row, 480, 64, *(() if row == 1 else (1, 448)))
    while world.sent < 448 + 3 * 32:
        world.step()
        time.sleep(0.02)
    world.step(), world.step()
    assert world.sent == 448 + 3 * 32 and world.steps.held_tokens == 448 + 3 * 64
    for row in (1, 2, 3):
        assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, 480))
    for row in (2, 1, 3):
        world.leave(row)
    assert world.steps.held_tokens == 0
    world.steps.end()


def test_the_same_tokens_of_another_namespace_or_at_another_place_are_nobody_else_s():
    world = RankWorld(places=16).ready()
    world.namespaces[2] = "an adapter"
    world.begin(1, 300, 64), world.begin(2, 300, 64, like=1, first=300)
    world.begin(3, 300, 64)
    world.prompts[3] = world.prompts[1][64:] + world.prompts[1][:64]
    world.step(), world.step()
    assert world.sent == 900
    world.steps.end()


def test_tokens_name_no_blocks_where_embeddings_take_their_place():
    world = RankWorld(places=16).ready()
    world.begin(1, 300, 64), world.begin(2, 300, 64)
    world.prompts[1] = world.prompts[2] = [1] * 300
    world.namespaces[1] = world.namespaces[2] = None
    world.step(), world.step()
    assert world.sent == 600
    for row in (1, 2):
        assert torch.equal(world.led(row), world.chosen(row, world.ends[row] - 1, 300))
    world.steps.end()


def test_prompts_are_not_named_before_a_rank_has_a_lane():
    world, named = RankWorld(places=16, lanes=1).ready(), []
    world.begin(1, 100, 40), world.begin(2, 200, 40)

    class State:
        namespace = ""

        def __init__(self, row):
            self.row = row

        @property
        def prompt(self):
            named.append(len(world.prompts[self.row]))
            return world.prompts[self.row]

    world.compressed_kv.state_of = State
    for _ in range(4):
        world.step()
    assert named == [100] and world.steps.missed["no-lane"] > 1
    world.steps.end()


def test_ranks_are_asked_as_rarely_as_those_requests_want_whose_keys_they_have():
    world, told = RankWorld(places=2, most=8).ready(), []

    class Noting(IntervalTuner):
        """Notes of how many requests it is told."""

        def record_step(self, requests):
            told.append(requests)
            return super().record_step(requests)

    world.steps.interval_tuner = Noting(1, 8)
    world.begin(1, 100, 40), world.begin(2, 480, 64)

    def handed_over():
        held = {row: request.held for row, request in world.steps._requests.items()}
        return sum(held.get(row) == length for row, length in ((1, 100), (2, 480)))

    expected = []
    while handed_over() < 2:
        expected.append(handed_over())
        world.step()
        time.sleep(0.02)
    world.step()
    assert told == [*expected, 2] and {*told} == {0, 1, 2}
    world.steps.end()
