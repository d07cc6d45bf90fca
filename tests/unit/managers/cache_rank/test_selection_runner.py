"""For which batches of selection requests a cache rank on a GPU captures graphs, and when it frees them."""

from types import SimpleNamespace

import pytest
import torch
from device_rank_helpers import rank_here
from rank_helpers import attach
from rank_socket import serve

from sglang_ext.managers.cache_rank import protocol, selection_runner
from sglang_ext.managers.cache_rank.protocol import DONE
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, QueryUpload
from sglang_ext.managers.cache_rank.protocol import SelectionRequest
from sglang_ext.managers.cache_rank.selection_runner import MOST_GRAPHS, RECORDED_AFTER, UNUSED, SelectionRunner


class Recording(SelectionRunner):
    """Notes for what it would record, and launches nothing."""

    def __init__(self):
        shape = SimpleNamespace(most=64, entry=lambda lane, first: lane)
        memory, store = SimpleNamespace(shape=shape), SimpleNamespace(slots=lambda lane, tokens: torch.arange(tokens))
        rotary = SimpleNamespace(cached_rotations=lambda: ())
        super().__init__(memory, store, None, rotary, torch.device("cpu"), True)
        self.recorded: list[int] = []

    def _record_graph(self, inputs):
        self.recorded.append(inputs.form.count)
        return lambda: None

    def ask(self, count):
        """So many questions at once, which will be asked again; whether a graph answers them."""
        asks = [SelectionRequest(lane, 0, 1, 1, 100, 8, (99,)) for lane in range(count)]
        self.prepare(asks, [1] * count, again=True)
        return count in self.recorded


@pytest.fixture
def made(monkeypatch):
    """Forms whose inputs were made."""
    found, of = [], selection_runner.BatchInputs.build
    monkeypatch.setattr(selection_runner.BatchInputs, "build", lambda form, device: found.append(form.count) or of(form, device))
    return found


@pytest.mark.parametrize("forms", [1, 5, MOST_GRAPHS])
def test_each_form_that_comes_again_is_recorded_once_however_many_come_in_turn(forms, made):
    rank = Recording()
    for turn in range(RECORDED_AFTER + 4):
        answered = [rank.ask(count) for count in range(1, forms + 1)]
        assert all(answered) == (turn >= RECORDED_AFTER)
    assert sorted(rank.recorded) == list(range(1, forms + 1))
    assert len(made) <= forms * (RECORDED_AFTER + 1)


def test_more_forms_than_graphs_are_kept_do_not_drive_each_other_out():
    rank = Recording()
    for _ in range(RECORDED_AFTER + 4):
        for count in range(1, MOST_GRAPHS + 5):
            rank.ask(count)
    assert sorted(rank.recorded) == list(range(1, MOST_GRAPHS + 1))
    # The one that was not used for longest makes room, once it was not used for long.
    for _ in range(UNUSED):
        rank.ask(2)
    assert rank.ask(MOST_GRAPHS + 1) and len(rank.recorded) == MOST_GRAPHS + 1
    assert rank.ask(2) and rank.recorded.count(2) == 1, "what is used stays"


def refuse(*given):
    """No memory is left."""
    raise torch.OutOfMemoryError("none left")


def test_a_rank_gives_up_what_it_recorded_where_other_questions_have_no_room_beside_it(monkeypatch):
    arena = ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu")
    rank, socket = rank_here(arena, apart=True)
    graphs, launched, refused = rank._answering, rank._answering._answer, []
    socket.tell(protocol.Lease(0, 0, (0, 1, 2, 3)))
    serve(rank)

    def ask(sequence, covered):
        socket.tell(protocol.SelectionRequest(0, 0, 5, sequence, covered, 8, (63,), number=arena.reserve_number()))
        arena.publish(torch.randn(5, 8, 6, 8), [QueryUpload([3], 0, arena.word(sequence))])
        serve(rank)
        return socket.messages[-1].chosen

    prepared = [protocol.SelectionRequest(0, 0, 5, 9, 64, 8, (63,))], [arena.word(9)]
    for _ in range(RECORDED_AFTER + 1):
        graphs.prepare(*prepared, again=True)
    assert any(known.replay and known.read for known in graphs._known.values())

    def answer(inputs, beside=False):
        if any(known.replay for known in graphs._known.values()):
            refused.append(inputs.form)
            raise torch.OutOfMemoryError("none left")
        launched(inputs, beside)

    monkeypatch.setattr(graphs, "_answer", answer)
    assert ask(1, 200) and len(refused) == 1 and int(arena.heads[0, DONE]) == arena.word(1)
    for _ in range(RECORDED_AFTER + 1):
        graphs.prepare(*prepared, again=True)
    assert not graphs._records and ask(2, 200)
    monkeypatch.setattr(graphs, "_known", {})
    monkeypatch.setattr(graphs, "_answer", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        ask(3, 200)


def test_where_tokens_lie_is_looked_up_anew_once_blocks_of_their_lane_are_others():
    rank, socket = rank_here(ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu"), apart=True)
    asks, table = [[protocol.SelectionRequest(0, 0, 5, 1, 64, 8, (63,), ahead=ahead)] for ahead in (1, 2)], torch.arange(64)
    for block in (3, 5):
        socket.tell(protocol.Lease(0, 0, (block,)))
        serve(rank)
        # Of all forms that are known, and of others.
        for again in (True, False):
            for ask in asks:
                found = rank._answering.prepare(ask, [0], again).inputs.table[0, :64]
                assert torch.equal(found, (block * protocol.BLOCK + table).int()), (block, again)
