"""What becomes of a cache rank's answers: in time, late, twice, of another epoch, none; and what a copy keeps then."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_helpers import DIM, GROUP, HEADS, LAYERS, ScriptedRank, attach, newest_of, queries, scripted

from sglang_ext.managers.cache_rank import cpu_client as choosing
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.managers.cache_rank.timeline import PackTimeline, read
from sglang_ext.mem_cache.compressed.remote_selector import StepRequest, extend_selection, count_trailing_run

SLOTS, KEEP = torch.arange(100, 400), 64
NEWEST = torch.tensor([299])


def prepare(choices, tokens=300, row=1, keep=KEEP):
    """Prepare a request whose tokens lie in slots from 100 on."""
    return choices.request_selection(row, SLOTS[:tokens], keep, queries(1, tokens), torch.tensor([tokens - 1]))


def handed_over(pack=5):
    """A request for which the rank has chosen once; the questions that it was asked."""
    choices, rank = scripted(pack=pack)
    assert not prepare(choices)
    asked = rank.asks()
    for ask in asked:
        rank.answer(ask)
    # Comes with the next look.
    assert prepare(choices)
    return choices, rank


def test_ranks_tell_how_many_run_and_were_started():
    choices, rank = handed_over()
    assert choices.processes == (1, 1)
    rank.ended = -9
    choices.poll()
    assert choices.processes == (0, 1)


class Steps:
    """Steps of the request, and what its copy was led to."""

    def __init__(self, choices, covered=300, keep=KEEP):
        self.choices, self.covered, self.keep, self.end, self.written = choices, covered, keep, covered, []

    def begin(self, asks=True):
        self.end += 1
        told = StepRequest(1, self.covered, self.keep, self.end, asks)
        return self.choices.step([told], lambda row, end, layers: (queries(1, end)[layers], torch.tensor([end - 1])), self.write)

    def write(self, row, layers, kept):
        self.written.append((layers.start, kept))

    def run(self, between=lambda: None, asks=True):
        """All layers of a step; ``between`` before each."""
        watch = self.begin(asks)
        for layer in range(LAYERS):
            between()
            watch.on_layer_start(layer)
            watch.on_queries_recorded(layer)
        return self


def last_chosen(seed, covered=300, keep=KEEP):
    """Positions of each head, of which the last 32 are the newest tokens."""
    noise = torch.rand(LAYERS, HEADS, covered - 32, generator=torch.Generator().manual_seed(seed))
    old = noise.topk(keep - 32, dim=-1).indices.sort(dim=-1).values
    return torch.cat([old, torch.arange(covered - 32, covered).expand(LAYERS, HEADS, -1)], dim=-1)


def test_a_request_is_read_whole_until_something_was_chosen_for_it():
    choices, rank = scripted(pack=2)
    assert not prepare(choices)
    told = rank.hear()
    assert [type(message).__name__ for message in told[-4:]] == ["Append"] + ["SelectionRequest"] * 3
    assert [(ask.first, ask.count, ask.covered, ask.keep) for ask in rank.asks()] == [(0, 1, 300, 64), (1, 2, 300, 64), (3, 2, 300, 64)]
    assert not prepare(choices) and choices.missed == {"hand-over": 2}
    for ask in rank.asks()[:3]:
        rank.answer(ask)
    assert prepare(choices) and choices.last_selection(1, 300, KEEP).shape == (LAYERS, HEADS, KEEP)
    assert choices.missed == {"hand-over": 2}


def test_keys_travel_once_and_each_is_where_the_message_says():
    choices, rank = handed_over()
    before = len(rank.hear())
    prepare(choices, 300)
    assert not rank.pieces(before)
    assert len(SLOTS) == 300
    appended = rank.pieces()
    assert [(message.offset, message.tokens) for message in appended] == [(0, 64)] * 4 + [(0, 44)]
    keys = rank.memory.keys[appended[-1].place]
    for layer, buffer in enumerate(choices.buffers.keys):
        assert torch.equal(keys[layer, :44], buffer[SLOTS[256:300]])


def test_answers_in_time_lead_the_copy_and_are_asked_for_by_packs_as_the_step_goes_on():
    choices, rank = handed_over(pack=2)
    choices.last_selection(1, 300, KEEP)
    for ask in rank.asks()[-3:]:
        rank.answer(ask, last_chosen(1)[ask.first : ask.first + ask.count])
    steps = Steps(choices).run()
    assert [start for start, _ in steps.written] == [0, 1, 3] and not choices.missed["late"]
    assert torch.equal(torch.cat([kept for _, kept in steps.written]), last_chosen(1))
    asked = rank.asks()[-3:]
    assert [(ask.first, ask.positions, ask.covered) for ask in asked] == [(0, (300,), 300), (1, (300,), 300), (3, (300,), 300)]
    assert torch.equal(rank.memory.get_queries(0, asked[0].sequence, slice(0, LAYERS), 1), queries(1, 301))


def test_what_is_late_costs_one_wait_a_step_and_the_last_choice_is_kept(monkeypatch):
    monkeypatch.setattr(choosing, "WAIT_SECONDS", 0.05)
    choices, _ = handed_over(pack=2)
    begun = time.monotonic()
    steps = Steps(choices).run()
    assert 0.04 < time.monotonic() - begun < 1.0
    assert choices.missed == {"hand-over": 1, "late": 1}
    assert [start for start, _ in steps.written] == [0, 1, 3], "what was chosen at the hand-over, which no copy had"
    steps.written.clear()
    Steps(choices).run()
    assert steps.written == [] and choices.missed["late"] == 2


def test_a_late_answer_is_taken_by_the_step_that_finds_it():
    choices, rank = handed_over()
    choices.last_selection(1, 300, KEEP)
    late = rank.asks()[-1]
    steps = Steps(choices).run()
    rank.answer(late, last_chosen(2))
    steps.run()
    assert torch.equal(steps.written[-1][1], last_chosen(2)) and len(steps.written) == 1
    assert choices.missed["late"] == 2, "it is not what the step would have been chosen by"


def test_no_more_than_two_questions_of_a_pack_are_open_so_that_no_place_is_written_while_it_is_read():
    choices, rank = handed_over()
    for _ in range(4):
        Steps(choices).run()
    open_ = rank.asks()[1:]
    assert len(open_) == 2 and {ask.sequence % 2 for ask in open_} == {0, 1}
    rank.answer(open_[0])
    for _ in range(3):
        Steps(choices).run()
    assert rank.asks()[-1].sequence % 2 == open_[0].sequence % 2 and len(rank.asks()) == 4


def test_an_answer_that_comes_twice_counts_once():
    choices, rank = handed_over()
    choices.last_selection(1, 300, KEEP)
    ask = rank.asks()[-1]
    rank.answer(ask, last_chosen(3))
    rank.answer(ask, last_chosen(4))
    steps = Steps(choices).run()
    assert len(steps.written) == 1
    rank.answer(ask, last_chosen(5))
    prepare(choices)
    assert not torch.equal(choices.last_selection(1, 300, KEEP), last_chosen(5))


def test_an_answer_of_another_epoch_is_none():
    choices, rank = handed_over()
    choices.last_selection(1, 300, KEEP)
    rank.answer(rank.asks()[-1], last_chosen(3), epoch=rank.epoch + 1)
    steps = Steps(choices).run()
    assert steps.written == [] and choices.missed["late"] == 1
    # Told under this epoch, written under another.
    rank.say(protocol.SelectionReply(rank.epoch, 0, 0, LAYERS, rank.asks()[1].sequence, True, 0.0))
    steps.run()
    assert steps.written == [] and choices.missed["wrong"] == 1


def test_positions_beyond_the_context_never_reach_a_copy():
    choices, rank = handed_over()
    choices.last_selection(1, 300, KEEP)
    ask = rank.asks()[-1]
    rank.answer(ask, newest_of(ask) + 1)
    steps = Steps(choices).run()
    assert steps.written == [] and choices.missed["wrong"] == 1


def test_answers_to_a_lanes_former_request_are_not_taken_for_the_next_ones():
    choices, rank = handed_over()
    old = rank.asks()[-1]
    choices.forget(1)
    assert not prepare(choices, row=2)
    new = rank.asks()[-1]
    assert new.lane == old.lane and new.sequence > old.sequence
    rank.answer(old)
    assert not prepare(choices, row=2)


def test_requests_that_begin_alike_share_full_blocks_and_what_nobody_reads_is_free():
    choices, rank = scripted(attach(blocks=9, lanes=3))
    prepare(choices, 300, row=1)
    prepare(choices, 200, row=2)
    assert choices.held_tokens == 6 * BLOCK, "three of four blocks are shared"
    leased = [message for message in rank.hear() if isinstance(message, protocol.Lease) and message.blocks]
    assert leased[1].blocks[:3] == leased[0].blocks[:3]
    choices.forget(1)
    assert choices.held_tokens == 4 * BLOCK
    prepare(choices, 300, row=3)
    assert choices.held_tokens == 6 * BLOCK, "those that the second reads still"
    choices.forget(2)
    choices.forget(3)
    assert choices.held_tokens == 0


def test_a_block_whose_readers_are_gone_is_nobodys_prefix():
    choices, rank = handed_over()
    choices.forget(1)
    # The pool may have given the slots to others.
    assert not prepare(choices, row=2)
    assert len(rank.pieces()) == 10


def test_where_memory_is_full_a_request_is_read_whole_and_nothing_is_sent():
    choices, rank = scripted(attach(blocks=6, lanes=1))
    prepare(choices, 300, row=1)
    assert not prepare(choices, 300, row=2) and choices.missed["no-lane"] == 1
    choices.forget(1)
    before = len(rank.hear())
    assert not choices.request_selection(3, torch.arange(500), KEEP, queries(1, 1), torch.tensor([499]))
    assert choices.missed["memory-full"] == 1 and choices.held_tokens == 0
    assert not rank.pieces(before)
    prepare(choices, 300, row=4)
    assert choices.held_tokens == 5 * BLOCK, "its lane was given back"


def test_keys_wait_for_places_over_rounds():
    choices, rank = scripted(attach(places=2))
    told = [prepare(choices) for _ in range(2)]
    assert told == [False, False] and not [message for message in rank.told if isinstance(message, protocol.SelectionRequest)]
    for _ in range(3):
        rank.hear()
        prepare(choices)
    assert rank.asks()


@given(
    st.integers(40, 200), st.integers(0, 80), st.integers(32, 40), st.integers(0, 80), st.integers(0, 9)
)
def test_what_is_carried_has_the_newest_tokens_and_most_of_what_was_chosen(before, new, keep, more, seed):
    keep = min(keep, before)
    kept = last_chosen(seed, before, keep) if keep > 32 else torch.arange(before - keep, before).expand(LAYERS, HEADS, -1)
    wanted, covered = keep + min(more, new), before + new
    found = extend_selection(kept, before, covered, wanted)
    assert found.shape == (LAYERS, HEADS, wanted)
    assert (found.diff(dim=-1) > 0).all() and 0 <= found.min() and found.max() < covered
    newest = torch.arange(covered - min(new, wanted), covered).expand(LAYERS, HEADS, -1)
    assert torch.equal(found[..., wanted - newest.shape[-1] :], newest)
    if new <= 32:
        scored = keep - count_trailing_run(kept)
        assert torch.equal(found[..., :scored], kept[..., :scored]), "what was chosen by scores stays"


def test_nothing_waits_for_a_rank_that_is_gone(monkeypatch):
    monkeypatch.setattr(choosing, "WAIT_SECONDS", 5.0)
    choices, rank = handed_over()
    choices.last_selection(1, 300, KEEP)
    rank.ended = -9
    choices.links[0].poll()
    steps = Steps(choices).run()
    assert choices.waited < 2.0 and steps.written == [] and choices.missed["ended"] == 1
    assert not prepare(choices) and choices.missed["ended"] == 2, "read whole from the next round on"
    choices.forget(1)
    choices.forget_all()
    assert choices.held_tokens == 0


@pytest.mark.parametrize("count", [1, GROUP])
def test_a_rank_that_ended_is_started_again_and_has_the_keys_anew(count, monkeypatch):
    monkeypatch.setattr("sglang_ext.managers.cache_rank.rank_link.RESTART_SECONDS", 0.0)
    choices, rank = handed_over()
    rank.ended = -9
    for _ in range(20):
        # As an idle scheduler does, and one that serves short requests.
        choices.poll()
        if ScriptedRank.made[-1] is not rank:
            ScriptedRank.made[-1].hear()
    another = ScriptedRank.made[-1]
    assert another.epoch == rank.epoch + 1 and choices.starts == 2
    assert choices.ready and choices.held_tokens == 0, "what the process before had is nowhere"
    for _ in range(count):
        assert not prepare(choices)
    for ask in another.asks():
        another.answer(ask)
    assert prepare(choices)
    assert len(another.pieces()) == 5


def test_a_timeline_tells_of_each_pack_when_it_was_reached_asked_chosen_and_written(tmp_path):
    choices, rank = scripted(timeline=PackTimeline(tmp_path / "times"))
    assert not prepare(choices)
    rank.answer(*rank.asks())
    assert prepare(choices)
    choices.last_selection(1, 300, KEEP)
    steps = Steps(choices)
    steps.run()
    rank.answer(rank.asks()[-1])
    steps.run()
    events = list(read(tmp_path / "times"))
    kinds = [event.kind for event in events]
    assert kinds[:2] == ["asked", "chosen"] and kinds.count("reached") == 2 and "written" in kinds
    assert {(event.first, event.count) for event in events} == {(0, LAYERS)}
    asked, chosen, written = (next(event for event in events if event.kind == kind) for kind in ("asked", "chosen", "written"))
    assert asked.bytes == LAYERS * HEADS * GROUP * DIM * 4 and chosen.bytes == LAYERS * HEADS * KEEP * 4 and chosen.seconds == 0.01
    assert written.bytes == LAYERS * HEADS * KEEP * 2 * DIM * 4, "K and V that positions lead to"
