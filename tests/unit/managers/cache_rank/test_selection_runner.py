"""For which batches of selection requests a cache rank on a GPU captures graphs, and when it frees them."""

from types import SimpleNamespace

import pytest
import torch
from device_rank_helpers import rank_here
from rank_helpers import ROTARY, attach
from rank_socket import serve

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.protocol import DONE
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, QueryUpload
from sglang_ext.managers.cache_rank.key_store import KeyStore
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import SelectionRequest
from sglang_ext.managers.cache_rank.selection_runner import MOST_GRAPHS, RECORDED_AFTER, UNUSED, BatchInputs, SelectionRunner
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.predictors import CurrentQuery


class Recording(SelectionRunner):
    """Notes for what it would record, and launches nothing."""

    def __init__(self):
        shape = SimpleNamespace(most=64, entry=lambda lane, first: lane)
        memory, store = SimpleNamespace(shape=shape), SimpleNamespace(slots=lambda lane, tokens: torch.arange(tokens))
        rotary = SimpleNamespace(cached_rotations=lambda: ())
        super().__init__(memory, store, None, rotary, torch.device("cpu"), True)
        self.recorded: list[int] = []
        self.made: dict[int, BatchInputs] = {}

    def _record_graph(self, inputs):
        self.recorded.append(inputs.form.count)
        return lambda: None

    def ask(self, count):
        """So many questions at once, which will be asked again; whether a graph answers them."""
        asks = [SelectionRequest(lane, 0, 1, 1, 100, 8, (99,)) for lane in range(count)]
        inputs, _ = self.prepare(asks, [1] * count, again=True)
        # Inputs that were made.
        self.made[id(inputs)] = inputs
        return count in self.recorded


@pytest.mark.parametrize("forms", [1, 5, MOST_GRAPHS])
def test_each_form_that_comes_again_is_recorded_once_however_many_come_in_turn(forms):
    rank = Recording()
    for turn in range(RECORDED_AFTER + 4):
        answered = [rank.ask(count) for count in range(1, forms + 1)]
        assert all(answered) == (turn >= RECORDED_AFTER)
    assert sorted(rank.recorded) == list(range(1, forms + 1))
    assert len(rank.made) <= forms * (RECORDED_AFTER + 1)


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


class NoRoom(MappedExchangeBuffer):
    """Has no memory left for as many selections as it is told."""

    refusals = 0

    def push_chosen(self, asked, there, chosen):
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("none left")
        super().push_chosen(asked, there, chosen)


def test_a_rank_gives_up_what_it_recorded_where_other_questions_have_no_room_beside_it():
    told, cpu = attach(), torch.device("cpu")
    arena, store = ExchangeBuffer(told.shape, cpu, "cpu"), KeyStore(told, cpu)
    memory = NoRoom(told.shape, cpu, b"", arena.begin(1))
    store.lease(protocol.Lease(0, 0, (0, 1, 2, 3)))
    runner = SelectionRunner(memory, store, Spade(CurrentQuery()), ROTARY, cpu, False)

    def launch(sequence):
        arena.publish(torch.randn(5, 8, 6, 8), [QueryUpload([3], 0, arena.word(sequence))])
        _, launched = runner.prepare([SelectionRequest(0, 0, 5, sequence, 200, 8, (63,))], [arena.word(sequence)])
        launched()
        return int(arena.heads[0, DONE]) == arena.word(sequence)

    for _ in range(RECORDED_AFTER + 1):
        recorded, _ = runner.prepare([SelectionRequest(0, 0, 5, 9, 64, 8, (63,))], [arena.word(9)], again=True)
    assert recorded.replay and recorded.read is not None
    assert launch(1) and recorded.replay, "there is room for both"
    memory.refusals = 1
    assert launch(2) and recorded.replay is recorded.read is None
    memory.refusals = 1
    with pytest.raises(torch.OutOfMemoryError):
        launch(3)


def test_where_tokens_lie_is_looked_up_anew_once_blocks_of_their_lane_are_others():
    rank, socket = rank_here(ExchangeBuffer(attach().shape, torch.device("cpu"), "cpu"), apart=True)
    asks, table = [[protocol.SelectionRequest(0, 0, 5, 1, 64, 8, (63,), ahead=ahead)] for ahead in (1, 2)], torch.arange(64)
    for block in (3, 5):
        socket.tell(protocol.Lease(0, 0, (block,)))
        serve(rank)
        # Of all forms that are known, and of others.
        for again in (True, False):
            for ask in asks:
                found = rank._answering.prepare(ask, [0], again)[0].table[0, :64]
                assert torch.equal(found, (block * protocol.BLOCK + table).int()), (block, again)
