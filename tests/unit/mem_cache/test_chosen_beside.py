"""Choices beside steps: which step reads which, and that no slot is read or given away while one is written."""

from types import SimpleNamespace

import pytest
import torch
from test_slot_pointers import guided_views, led_to
from test_views import DIM, HEADS, LAYERS

from sglang_ext.core import RequestState
from sglang_ext.device import SideStream
from sglang_ext.layers.kernels import choose_tokens
from sglang_ext.layers.kernels.choose_tokens import lengths_apart
from sglang_ext.managers.integrity import check_copies
from sglang_ext.managers.spec_decode.steps import Steps
from sglang_ext.mem_cache.compressed.chosen_beside import BesideSteps, ChosenBeside, compile_lengths
from sglang_ext.mem_cache.compressed.due_copies import RENEW_AFTER, ensure_copy, until_due
from sglang_ext.mem_cache.compressed.query_window import QueryWindows, Recorded
from sglang_ext.mem_cache.compressors import best
from sglang_ext.mem_cache.compressors.spade import Spade, attention
from sglang_ext.mem_cache.selection.on_gpu import shares
from sglang_ext.mem_cache.selection.predictors import Current, Regressed
from sglang_ext.mem_cache.selection.top_tokens import mark_always


class InPyTorch:
    """Chooses what the kernels do."""

    def __init__(self, views):
        self.views = views

    def choose(self, contexts, read, positions, ahead):
        """As :meth:`GpuChoice.choose`, pointers written."""
        (method,) = self.views.methods
        for i, (row, length, count, first) in enumerate(contexts.numbers.tolist()):
            queries = read(slice(i, i + 1), slice(0, LAYERS))
            kept = chosen_by(self.views, queries, positions[i : i + 1], row, length, count, ahead)
            held = contexts.targets[first : first + method.packing.held_slots(count)]
            method.packing.write(self.views.buffers, kept, self.views.token_table[row, :length].long(), held)


def chosen_by(views, queries, positions, row, length, count, ahead):
    """Positions that heads keep of a context by the prediction of some queries: int64 [layers, kv_heads, count]."""
    (method,), slots = views.methods, views.token_table[row, :length].long()
    (predicted,) = method.compressor.predictor.predict(queries, positions, views.rotary, ahead)
    scores = [attention(predicted[None, i], keys[slots], views.buffers.scaling[i]) for i, keys in enumerate(views.buffers.keys)]
    return best(mark_always(torch.stack(scores), *method.compressor.always(None)), count)


class Late(SideStream):
    """Does its work not before somebody waits for it, or at its end."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.waiting = []

    def launch(self, work, read):
        """In the order in which it was launched."""
        self.waiting.append(work)
        return work

    def wait(self, done):
        """What was launched before is done, too."""
        while done in self.waiting:
            self.waiting.pop(0)()


def world(method, late=False):
    """Views of a request in row 1 with a copy of 150 tokens, chosen beside steps; what a step does, and what its queries choose."""
    views, keep = guided_views(method)
    views.queries = QueryWindows(method.window, range(LAYERS), max(1, method.every))
    views.queries.allocate(2, HEADS, DIM, torch.empty(0))
    views.beside = ChosenBeside(views.methods[0], views.token_table, InPyTorch(views), views.queries)
    if late:
        views.beside._side = Late()
    keep(range(150 - method.window, 150), 1)
    assert copy(views, 150) == 0

    def step(position, following=None):
        keep(range(position, position + 1), position)
        views.beside.stepped(views, {1: position + 1}, following)

    def expected(end):
        """Slots that are led to by the queries before position ``end``."""
        queries, positions = views.queries.get(1, end, method.window)
        asked = 1, views.get(1).covered, views.get(1).own_tokens, method.every + 1
        kept = chosen_by(views, queries.transpose(1, 2)[None], positions[None], *asked)
        return [views.token_table[1].long()[of_layer].tolist() for of_layer in kept]

    return views, step, expected


def copy(views, length):
    """The reason why the request reads full KV at this length; 0 for a copy."""
    return ensure_copy(views, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), length, 0)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("predictor", [Current(), Regressed()], ids=lambda each: each.name)
def test_a_choice_is_read_when_the_next_begins_however_late_it_is_made(predictor, every, late):
    views, step, expected = world(Spade(predictor, every, each_round=False), late)
    first, wanted = led_to(views), {}
    for position in range(150, 150 + 6 * every):
        step(position)
        end = position + 1
        if (end - 150) % every == 0:
            wanted[end] = expected(end)
        turn = 150 + (end - 150) // every * every - every
        assert led_to(views) == (wanted[turn] if turn > 150 else first), "the one before the last: that is being made"
        view = views.get(1)
        assert views.token_table[5, : view.kept].tolist() == view.own[: view.kept].tolist()
        check_copies(views)
    assert views.made["spade"] == 6, "when the copy was made, and five times since"
    assert len({str(each) for each in wanted.values()}) == 6 and views.get(1).covered == 150


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_round_selects_at_the_interval_that_was_chosen_for_it(every):
    views, step, _ = world(Spade(every=1, each_round=False))
    views.beside.begun(8, every)
    for position in range(150, 158):
        step(position)
    assert views.made["spade"] == 8 // every, "when the copy was made, and at each interval but the first"


def test_what_is_done_before_any_request_is_as_far_ahead_as_steps_ask():
    views, step, _ = world(Spade(every=3, each_round=False))
    told = []
    views.beside._choice = SimpleNamespace(choose=lambda contexts, read, positions, ahead: told.append(ahead), buffers=None, query_heads=1)
    views.beside.compile_kernels()
    for position in range(150, 153):
        step(position)
    assert told == [4, 4]


def test_of_each_form_of_kernels_one_length_is_met_ahead_and_none_that_cannot_come():
    powers = [1 << power for power in range(10, 16)]
    for longest, expected in (
        (200, [200]), (1024, [1024]), (5000, [1024, 2048, 4096, 5000]), (32768, powers),
        (32769, [*powers, 32769]), (1 << 20, [*powers, 32769]),
    ):  # fmt: skip
        assert lengths_apart(longest) == tuple(expected)


def test_a_gpu_compiles_ahead_for_contexts_as_long_as_a_row_of_the_table(monkeypatch):
    told = []
    monkeypatch.setattr(choose_tokens, "compile_ahead", lambda *given: told.append(given))
    method = SimpleNamespace(compressor=Spade(sinks=5, recent=40))
    table, buffers = SimpleNamespace(is_cuda=True, shape=(3, 700)), SimpleNamespace(keys=["a layer's"])
    compile_lengths(method, table, buffers, 6)
    compile_lengths(method, SimpleNamespace(is_cuda=False), buffers, 6)
    assert told == [("a layer's", 6, (5, 40), 700)]


def test_spare_slots_are_counted_and_given_back_after_what_is_written_to_them():
    views, step, _ = world(Spade(each_round=False), late=True)
    told, free = [], views.allocator.free
    views.allocator.free = lambda slots: (told.append(("free", list(views.beside._side.waiting))), free(slots))
    before, view = views.allocator.available_size(), views.get(1)
    assert len(view.spare) == len(view.own) and views.held_tokens == 2 * len(view.own) == len(views.all_slots().unique())
    step(150)
    assert len(views.beside._side.waiting) == 1
    views.release_copy(1)
    assert told == [("free", [])], "nothing is under way any more"
    assert views.allocator.available_size() == before + 2 * len(view.own)
    views.forget_all()


def test_a_copy_that_is_made_anew_drops_what_is_under_way():
    views, step, _ = world(Spade(), late=True)
    step(150, following=2)
    assert views.beside._side.waiting
    assert copy(views, 151) == 0
    assert views.get(1).covered == 151 and not views.beside._side.waiting
    made = led_to(views)
    step(151, following=0)
    assert led_to(views) == made, "it was not of this copy"


def test_within_a_round_that_ends_in_a_verification_nothing_is_chosen_that_no_step_reads():
    views, step, _ = world(Spade(every=2))
    launched = []
    launch = views.beside._side.launch
    views.beside._side.launch = lambda work, read: launched.append(position) or launch(work, read)
    for position in range(150, 158):
        step(position, following=157 - position)
    # Of the last one, position 153, steps from 156 on are led: the copy leads to it after 155.
    assert launched == [151, 153] and views.made["spade"] == 3


def test_where_nothing_is_verified_a_copy_grows_when_many_exact_tokens_follow_it():
    views, step, _ = world(Spade(every=4, each_round=False))
    state, view = RequestState(rid="r", row=1, seed=0), views.get(1)
    assert until_due(views, state, 151) == RENEW_AFTER
    step(150)
    assert copy(views, 151) == 0 and views.get(1) is view
    view.covered -= RENEW_AFTER
    assert copy(views, 151) == 0 and views.get(1).covered == 151


def test_requests_whose_windows_differ_are_chosen_for_apart():
    views, step, expected = world(Spade(Regressed(), each_round=False))
    views.token_table[2, :100] = views.token_table[1, 50:150]
    queries = torch.randn(3, HEADS, DIM)
    with views.queries.recording((Recorded(2, 0, 3, 97),)):
        for layer in range(LAYERS):
            views.queries.record(layer, queries)
    assert ensure_copy(views, SimpleNamespace(last_node=None), RequestState(rid="s", row=2, seed=0), 100, 0) != 0, "too few queries"
    views._views[2] = views._views[1].__class__(views._slots_for(torch.empty(0).long(), 10, 0), 100, own_tokens=20, own_packed=5)
    views.get(2).own, views.get(2).spare = views.get(2).own[:5], views.get(2).own[5:]
    step(150)
    wanted, windows, launch = expected(151), [], views.beside._side.launch
    views.beside._side.launch = lambda work, read: windows.append(tuple(read[-1].shape)) or launch(work, read)
    views.beside.stepped(views, {1: 151, 2: 100}, None)
    assert led_to(views) == wanted and set(views.beside._under_way) == {1, 2}
    assert windows == [(1, 17), (1, 3)]


class InPlace(BesideSteps):
    """Notes what it is told."""

    in_place = True

    def __init__(self):
        self.told = []

    def compile_kernels(self):
        self.told.append("compile_kernels")

    def stepped(self, views, ends, following):
        self.told.append("stepped")

    def settle(self, row):
        self.told.append(("settle", row))

    def settle_all(self):
        self.told.append("settle_all")

    def tend(self):
        self.told.append("tend")

    def forget(self, row):
        self.told.append(("forget", row))


def test_what_is_written_in_place_needs_no_spare_slots_and_is_not_made_anew_after_each_round():
    views, _, _ = world(Spade(each_round=False))
    views.release(1)
    views.beside, before = InPlace(), views.allocator.available_size()
    views.queries.put(1, 150, torch.randn(LAYERS, 1, HEADS, DIM))
    assert copy(views, 150) == 0
    view = views.get(1)
    assert len(view.spare) == 0 and views.allocator.available_size() == before - len(view.own) == before - len(views.all_slots())
    assert copy(views, 200) == 0 and views.get(1) is view and view.covered == 150
    view.covered -= RENEW_AFTER + 1
    assert copy(views, 151) == 0 and views.get(1).covered == 150 and len(views.get(1).spare) == 0
    check_copies(views)
    views.tend()
    views.release(1)
    assert views.beside.told == [("settle", 1), "tend", ("settle", 1), ("forget", 1)]
    views.forget_all()
    assert views.beside.told[-1] == "settle_all" and views.allocator.available_size() == before


def test_shares_are_all_requests_of_some_layers_or_some_of_one():
    for layers, requests, pairs in ((5, 3, 7), (5, 3, 2), (1, 1, 100), (4, 6, 6)):
        found = [*shares(layers, requests, pairs)]
        each = [(l, r) for ls, rs in found for l in range(layers)[ls] for r in range(requests)[rs]]
        assert sorted(each) == [(l, r) for l in range(layers) for r in range(requests)]
        assert all((ls.stop - ls.start) * (rs.stop - rs.start) <= pairs for ls, rs in found)


def test_graphs_of_steps_and_of_verifications_share_a_table_and_only_steps_that_leave_queries_are_aimed():
    windows, queries = QueryWindows(1, (0,), 2), torch.arange(4.0).view(4, 1, 1)
    windows.allocate(2, 1, 1, queries)
    row = (Recorded(1, 2, 3, 7),)
    windows.aim_step(row)
    assert windows.newest(1) is None and not windows.left_by_steps
    with windows.capturing(4, steps=True):
        windows.record(0, queries)
    table = windows._targets
    with windows.capturing(3):
        windows.record(0, queries[:3])
    assert windows._targets is table and windows.left_by_steps
    with pytest.raises(ValueError, match="5 tokens are captured after others of at most 4.*pass the most of all at first"):
        with windows.capturing(5):
            pass
    windows.aim_step(row)
    assert windows.newest(1) == 8 and table[2] > 0 and table.count_nonzero() == 1


def test_places_are_read_as_long_as_no_more_than_the_spare_tokens_came_since():
    windows = QueryWindows(2, (0, 1), 3)
    windows.allocate(1, 1, 1, torch.empty(0))

    def keep(position):
        with windows.recording((Recorded(1, 0, 1, position),)):
            for layer in range(2):
                windows.record(layer, torch.full((1, 1, 1), 10.0 * layer + position))

    keep(0), keep(1)
    places, positions = windows.newest_places(1, 2, 2)
    assert positions == [0, 1] and windows.newest_places(2, 2, 2) == ([], [])
    for position in (2, 3, 4):
        keep(position)
        assert windows.at(torch.tensor([places]), slice(0, 2)).flatten().tolist() == [0, 1, 10, 11]
        assert windows.at(torch.tensor([places]), slice(1, 2)).shape == (1, 1, 1, 2, 1)
    keep(5)
    assert windows.at(torch.tensor([places]), slice(0, 1)).flatten().tolist() == [5, 1]


@pytest.mark.parametrize(("lossy", "expected"), [(False, [2, 1, 0]), (True, [None] * 3)])
def test_each_step_tells_who_chooses_and_how_many_follow_that_read_the_same_copies(lossy, expected):
    told = []
    beside = SimpleNamespace(stepped=lambda views, ends, following: told.append((ends, following)))
    views = SimpleNamespace(token_table=None, beside=beside)
    steps = Steps(SimpleNamespace(views=views, lossy=lossy, model_runner=None))
    for following in (2, 1, 0):
        steps._choose({1: 20}, following, 1)
    assert told == [({1: 20}, following) for following in expected]


@pytest.mark.parametrize(("leaves", "lossy", "room", "expected"), [
    (True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False),
])  # fmt: skip
def test_a_step_over_full_kv_leaves_queries_where_nothing_else_does_before_a_first_copy(leaves, lossy, room, expected):
    queries = SimpleNamespace(left_by_steps=leaves, open_to=lambda key: room)
    steps = Steps(SimpleNamespace(views=SimpleNamespace(token_table=None), lossy=lossy, model_runner=None, queries=queries))
    assert steps._needs_queries((Recorded(1, 0, 1, 9),)) is expected and not steps._needs_queries(())


def test_whoever_asks_is_told_where_processes_have_come_or_gone_though_no_request_does():
    views, _, _ = world(Spade(each_round=False))
    told = []
    views.beside, views.tended = InPlace(), lambda: told.append(views.beside.processes)
    views.tend()
    assert not told, "nothing has changed"

    class Ended(InPlace):
        def tend(self):
            self.processes = 0, 1

    views.beside = Ended()
    views.tend()
    views.tend()
    assert told == [(0, 1)], "once"
