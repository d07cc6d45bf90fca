"""Choices beside steps: which step reads which, and that no slot is read or given away while one is written."""

from types import SimpleNamespace

import pytest
import torch
from test_pointer_layout import guided_views, led_to
from test_compressed_kv import DIM, HEADS, LAYERS

from sglang_ext.core import NO_QUERIES, RequestState
from sglang_ext.device import SideStream
from sglang_ext.layers.kernels import select_tokens
from sglang_ext.layers.kernels.select_tokens import kernel_lengths
from sglang_ext.managers.integrity import check_compressed
from sglang_ext.managers.spec_decode.draft import StepRunner
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, FreeBlocks, StreamSelector, compile_lengths
from sglang_ext.mem_cache.compressed.policy import REFRESH_AFTER, ensure_compressed_kv, tokens_until_refresh
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows
from sglang_ext.mem_cache.compressors import top_positions
from sglang_ext.mem_cache.compressors.step_selectors import Spade, attention
from sglang_ext.mem_cache.selection.on_gpu import shares
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery
from sglang_ext.mem_cache.selection.scoring import mark_always


class InPyTorch:
    """Chooses what the kernels do."""

    def __init__(self, compressed_kv):
        self.compressed_kv = compressed_kv

    def choose(self, contexts, read, positions, ahead):
        """As :meth:`GpuSelector.choose`, pointers written."""
        (method,) = self.compressed_kv.methods
        for i, (row, length, count, first) in enumerate(contexts.numbers.tolist()):
            queries = read(slice(i, i + 1), slice(0, LAYERS))
            kept = chosen_by(self.compressed_kv, queries, positions[i : i + 1], row, length, count, ahead)
            held = contexts.targets[first : first + method.packing.held_slots(count)]
            method.packing.write(self.compressed_kv.buffers, kept, self.compressed_kv.token_table[row, :length].long(), held)


def chosen_by(compressed_kv, queries, positions, row, length, count, ahead):
    """Positions that heads keep of a context by the prediction of some queries: int64 [layers, kv_heads, count]."""
    (method,), slots = compressed_kv.methods, compressed_kv.token_table[row, :length].long()
    (predicted,) = method.compressor.predictor.predict(queries, positions, compressed_kv.rotary, ahead)
    scores = [attention(predicted[None, i], keys[slots], compressed_kv.buffers.scaling[i]) for i, keys in enumerate(compressed_kv.buffers.keys)]
    return top_positions(mark_always(torch.stack(scores), *method.compressor.always(None)), count)


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


def world(method, late=False, selector=None):
    """Views of a request in row 1 with a copy of 150 tokens, chosen beside steps; what a step does, and what its queries choose."""
    compressed_kv, keep = guided_views(method)
    compressed_kv.queries = QueryWindows(method.window, range(LAYERS), max(1, method.every))
    compressed_kv.queries.allocate(2, HEADS, DIM, torch.empty(0))
    compressed_kv.async_selector = StreamSelector(compressed_kv.methods[0], compressed_kv.token_table, selector or InPyTorch(compressed_kv), compressed_kv.queries)
    side = compressed_kv.async_selector._side = Late() if late else SideStream(torch.device("cpu"))
    keep(range(150 - method.window, 150), 1)
    assert copy(compressed_kv, 150) == 0

    def step(position, following=None):
        """One step; ``step.side`` is the stream beside it."""
        keep(range(position, position + 1), position)
        compressed_kv.async_selector.on_step_end(compressed_kv, {1: position + 1}, following)

    def expected(end):
        """Slots that are led to by the queries before position ``end``."""
        queries, positions = compressed_kv.queries.get(1, end, method.window)
        asked = 1, compressed_kv.get(1).covered, compressed_kv.get(1).own_tokens, method.every + 1
        kept = chosen_by(compressed_kv, queries.transpose(1, 2)[None], positions[None], *asked)
        return [compressed_kv.token_table[1].long()[of_layer].tolist() for of_layer in kept]

    step.side = side
    return compressed_kv, step, expected


def copy(compressed_kv, length):
    """The reason why the request reads full KV at this length; 0 for a copy."""
    return ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), length, 0)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("predictor", [CurrentQuery(), RegressedQuery()], ids=lambda each: each.name)
def test_a_choice_is_read_when_the_next_begins_however_late_it_is_made(predictor, every, late):
    compressed_kv, step, expected = world(Spade(predictor, every=every, each_round=False), late)
    first, wanted = led_to(compressed_kv), {}
    for position in range(150, 150 + 6 * every):
        step(position)
        end = position + 1
        if (end - 150) % every == 0:
            wanted[end] = expected(end)
        turn = 150 + (end - 150) // every * every - every
        assert led_to(compressed_kv) == (wanted[turn] if turn > 150 else first), "the one before the last: that is being made"
        view = compressed_kv.get(1)
        assert compressed_kv.token_table[5, : view.num_slots].tolist() == view.own[: view.num_slots].tolist()
        check_compressed(compressed_kv)
    assert compressed_kv.num_compressions["spade"] == 6, "when the copy was made, and five times since"
    assert len({str(each) for each in wanted.values()}) == 6 and compressed_kv.get(1).covered == 150


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_round_selects_at_the_interval_that_was_chosen_for_it(every):
    compressed_kv, step, _ = world(Spade(every=1, each_round=False))
    compressed_kv.async_selector.on_round_start(8, every)
    for position in range(150, 158):
        step(position)
    assert compressed_kv.num_compressions["spade"] == 8 // every, "when the copy was made, and at each interval but the first"


def test_what_is_done_before_any_request_is_as_far_ahead_as_steps_ask():
    told = []
    selector = SimpleNamespace(choose=lambda contexts, read, positions, ahead: told.append(ahead), buffers=None, query_heads=1)
    compressed_kv, step, _ = world(Spade(every=3, each_round=False), selector=selector)
    compressed_kv.async_selector.compile_kernels()
    for position in range(150, 153):
        step(position)
    assert told == [4, 4]


def test_of_each_form_of_kernels_one_length_is_met_ahead_and_none_that_cannot_come():
    powers = [1 << power for power in range(10, 16)]
    for longest, expected in (
        (200, [200]), (1024, [1024]), (5000, [1024, 2048, 4096, 5000]), (32768, powers),
        (32769, [*powers, 32769]), (1 << 20, [*powers, 32769]),
    ):  # fmt: skip
        assert kernel_lengths(longest) == tuple(expected)


def test_a_gpu_compiles_ahead_for_contexts_as_long_as_a_row_of_the_table(monkeypatch):
    told = []
    monkeypatch.setattr(select_tokens, "compile_ahead", lambda *given: told.append(given))
    method = SimpleNamespace(compressor=Spade(sinks=5, recent=40))
    table, buffers = SimpleNamespace(is_cuda=True, shape=(3, 700)), SimpleNamespace(keys=["a layer's"])
    compile_lengths(method, table, buffers, 6)
    compile_lengths(method, SimpleNamespace(is_cuda=False), buffers, 6)
    assert told == [("a layer's", 6, (5, 40), 700)]


def test_spare_slots_are_counted_and_given_back_after_what_is_written_to_them():
    compressed_kv, step, _ = world(Spade(each_round=False), late=True)
    told, free = [], compressed_kv.allocator.free
    compressed_kv.allocator.free = lambda slots: (told.append(("free", list(step.side.waiting))), free(slots))
    before, view = compressed_kv.allocator.available_size(), compressed_kv.get(1)
    assert len(view.back_slots) == len(view.own) and compressed_kv.owned_slot_count == 2 * len(view.own) == len(compressed_kv.all_slots().unique())
    step(150)
    assert len(step.side.waiting) == 1
    compressed_kv.release_compressed_kv(1)
    assert told == [("free", [])], "nothing is under way any more"
    assert compressed_kv.allocator.available_size() == before + 2 * len(view.own)
    compressed_kv.forget_all()


def test_a_copy_that_is_made_anew_drops_what_is_under_way():
    compressed_kv, step, _ = world(Spade(), late=True)
    step(150, following=2)
    assert step.side.waiting
    assert copy(compressed_kv, 151) == 0
    assert compressed_kv.get(1).covered == 151 and not step.side.waiting
    made = led_to(compressed_kv)
    step(151, following=0)
    assert led_to(compressed_kv) == made, "it was not of this copy"


def test_within_a_round_that_ends_in_a_verification_nothing_is_chosen_that_no_step_reads():
    compressed_kv, step, _ = world(Spade(every=2))
    launched = []
    launch = step.side.launch
    step.side.launch = lambda work, read: launched.append(position) or launch(work, read)
    for position in range(150, 158):
        step(position, following=157 - position)
    # Of the last one, position 153, steps from 156 on are led: the copy leads to it after 155.
    assert launched == [151, 153] and compressed_kv.num_compressions["spade"] == 3


def test_where_nothing_is_verified_a_copy_grows_when_many_exact_tokens_follow_it():
    compressed_kv, step, _ = world(Spade(every=4, each_round=False))
    state, view = RequestState(rid="r", row=1, seed=0), compressed_kv.get(1)
    assert tokens_until_refresh(compressed_kv, state, 151) == REFRESH_AFTER
    step(150)
    assert copy(compressed_kv, 151) == 0 and compressed_kv.get(1) is view
    view.covered -= REFRESH_AFTER
    assert copy(compressed_kv, 151) == 0 and compressed_kv.get(1).covered == 151


def test_requests_whose_windows_differ_are_chosen_for_apart():
    compressed_kv, step, expected = world(Spade(RegressedQuery(), each_round=False))
    compressed_kv.token_table[2, :150] = compressed_kv.token_table[1, :150]

    def leave_queries(count):
        """Queries of the newest tokens of the request in row 2, and none before."""
        compressed_kv.queries.forget(2)
        with compressed_kv.queries.recording((RecordedRows(2, 0, count, 150 - count),)):
            for layer in range(LAYERS):
                compressed_kv.queries.record(layer, torch.randn(count, HEADS, DIM))

    leave_queries(3)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="s", row=2, seed=0), 150, 0) == NO_QUERIES
    leave_queries(17)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="s", row=2, seed=0), 150, 0) == 0
    leave_queries(3)
    step(150)
    wanted, windows, launch = expected(151), [], step.side.launch
    step.side.launch = lambda work, read: windows.append(tuple(read[-1].shape)) or launch(work, read)
    compressed_kv.async_selector.on_step_end(compressed_kv, {1: 151, 2: 150}, None)
    assert led_to(compressed_kv) == wanted
    assert windows == [(1, 17), (1, 3)]


class InPlace(AsyncSelector):
    """Notes what it is told."""

    in_place = True

    def __init__(self):
        self.told = []

    def compile_kernels(self):
        self.told.append("compile_kernels")

    def on_step_end(self, compressed_kv, ends, following):
        self.told.append("stepped")

    def flush(self, row):
        self.told.append(("settle", row))

    def forget_all(self):
        self.told.append("forget_all")

    def poll(self):
        self.told.append("tend")

    def forget(self, row):
        self.told.append(("forget", row))


def test_what_is_written_in_place_needs_no_spare_slots_and_is_not_made_anew_after_each_round():
    compressed_kv, _, _ = world(Spade(each_round=False))
    compressed_kv.release(1)
    compressed_kv.async_selector, before = InPlace(), compressed_kv.allocator.available_size()
    compressed_kv.queries.insert(1, 150, torch.randn(LAYERS, 1, HEADS, DIM))
    assert copy(compressed_kv, 150) == 0
    view = compressed_kv.get(1)
    assert len(view.back_slots) == 0 and compressed_kv.allocator.available_size() == before - len(view.own) == before - len(compressed_kv.all_slots())
    assert copy(compressed_kv, 200) == 0 and compressed_kv.get(1) is view and view.covered == 150
    view.covered -= REFRESH_AFTER + 1
    assert copy(compressed_kv, 151) == 0 and compressed_kv.get(1).covered == 150 and len(compressed_kv.get(1).back_slots) == 0
    check_compressed(compressed_kv)
    compressed_kv.poll()
    compressed_kv.release(1)
    assert compressed_kv.async_selector.told == [("settle", 1), "tend", ("settle", 1), ("forget", 1)]
    compressed_kv.forget_all()
    assert compressed_kv.async_selector.told[-1] == "forget_all" and compressed_kv.allocator.available_size() == before


def test_shares_are_all_requests_of_some_layers_or_some_of_one():
    for layers, requests, pairs in ((5, 3, 7), (5, 3, 2), (1, 1, 100), (4, 6, 6)):
        found = [*shares(layers, requests, pairs)]
        each = [(l, r) for ls, rs in found for l in range(layers)[ls] for r in range(requests)[rs]]
        assert sorted(each) == [(l, r) for l in range(layers) for r in range(requests)]
        assert all((ls.stop - ls.start) * (rs.stop - rs.start) <= pairs for ls, rs in found)


def test_graphs_of_steps_and_of_verifications_share_a_table_and_one_that_replays_leaves_the_queries_of_its_rows():
    windows, queries = QueryWindows(1, (0,), 2), torch.arange(4.0).view(4, 1, 1)
    windows.allocate(2, 1, 1, queries)
    row = (RecordedRows(1, 2, 3, 7),)
    windows.set_targets(row)
    assert windows.newest(1) is None and not windows.has_step_queries
    with windows.capturing(4, steps=True):
        windows.record(0, queries)
    held = windows.held_bytes
    with windows.capturing(3):
        windows.record(0, queries[:3])
    assert windows.held_bytes == held and windows.has_step_queries
    with pytest.raises(ValueError, match="5 tokens are captured after others of at most 4 tokens.*pass the largest number of tokens first"):
        with windows.capturing(5):
            pass
    windows.set_targets(row)
    with windows.capturing(4):
        # As a replay does.
        windows.record(0, queries)
    assert windows.newest(1) == 8 and windows.get(1, 8, 1)[0].item() == 2 and windows.taken == 1


def test_places_are_read_as_long_as_no_more_than_the_spare_tokens_came_since():
    windows = QueryWindows(2, (0, 1), 3)
    windows.allocate(1, 1, 1, torch.empty(0))

    def keep(position):
        with windows.recording((RecordedRows(1, 0, 1, position),)):
            for layer in range(2):
                windows.record(layer, torch.full((1, 1, 1), 10.0 * layer + position))

    keep(0), keep(1)
    places, positions = windows.newest_places(1, 2, 2)
    assert positions == [0, 1] and windows.newest_places(2, 2, 2) == ([], [])
    for position in (2, 3, 4):
        keep(position)
        assert windows.read(torch.tensor([places]), slice(0, 2)).flatten().tolist() == [0, 1, 10, 11]
        assert windows.read(torch.tensor([places]), slice(1, 2)).shape == (1, 1, 1, 2, 1)
    keep(5)
    assert windows.read(torch.tensor([places]), slice(0, 1)).flatten().tolist() == [5, 1]


@pytest.mark.parametrize(("lossy", "expected"), [(False, [2, 1, 0]), (True, [None] * 3)])
def test_each_step_tells_who_chooses_and_how_many_follow_that_read_the_same_copies(lossy, expected):
    told = []
    beside = SimpleNamespace(on_step_end=lambda compressed_kv, ends, following: told.append((ends, following)))
    compressed_kv = SimpleNamespace(token_table=None, async_selector=beside)
    steps = StepRunner(SimpleNamespace(compressed_kv=compressed_kv, lossy=lossy, model_runner=None))
    for following in (2, 1, 0):
        steps._select_tokens({1: 20}, following, 1)
    assert told == [({1: 20}, following) for following in expected]


@pytest.mark.parametrize(("leaves", "lossy", "room", "expected"), [
    (True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False),
])  # fmt: skip
def test_a_step_over_full_kv_leaves_queries_where_nothing_else_does_before_a_first_copy(leaves, lossy, room, expected):
    queries = SimpleNamespace(has_step_queries=leaves, can_record=lambda key: room)
    steps = StepRunner(SimpleNamespace(compressed_kv=SimpleNamespace(token_table=None), lossy=lossy, model_runner=None, queries=queries))
    assert steps._needs_queries((RecordedRows(1, 0, 1, 9),)) is expected and not steps._needs_queries(())


def test_whoever_asks_is_told_where_processes_have_come_or_gone_though_no_request_does():
    compressed_kv, _, _ = world(Spade(each_round=False))
    told = []
    compressed_kv.async_selector, compressed_kv.on_processes_changed = InPlace(), lambda: told.append(compressed_kv.async_selector.processes)
    compressed_kv.poll()
    assert not told, "nothing has changed"

    class Ended(InPlace):
        def poll(self):
            self.processes = 0, 1

    compressed_kv.async_selector = Ended()
    compressed_kv.poll()
    compressed_kv.poll()
    assert told == [(0, 1)], "once"


def test_requests_go_where_most_is_free_and_what_one_takes_is_not_the_nexts():
    free = FreeBlocks([3, 2], 64, [9, 9])
    assert [free.take(tokens) for tokens in (128, 129, 128, 65, 64, 1)] == [True, False, True, False, True, False]
    assert free.blocks == [0, 0] and not FreeBlocks([], 64, []).take(0)
    few = FreeBlocks([3, 2], 64, [1, 0])
    assert [few.take(64) for _ in range(2)] == [True, False] and few.blocks == [2, 2], "the other takes no request"
