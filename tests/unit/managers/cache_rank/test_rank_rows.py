"""Copies of rows that a cache rank exchanges: after any pattern of late and missed answers a slot holds what the record says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_helpers import DIM, HEADS, LAYERS, Ranks, attach, chosen_here, pool, queries, row_of, scripted

from sglang_ext.managers.cache_rank import cpu_client as choosing
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.remote_selector import StepRequest

pytestmark = pytest.mark.usefixtures("forked_ranks")

SLOTS, RECENT = torch.arange(100, 700), 32
ROUNDS = ("goes on", "renews", "finds no slots")
COPY = torch.arange(800, 900)


def keep_of(covered):
    """Tokens that heads keep: a quarter."""
    return max(RECENT + 4, covered // 4)


class Copied:
    """A request in row 1 with a copy of rows, in steps.

    Attributes:
        covered: tokens that its copy stands for.
        end: of the request.
        took: sequences that were taken, by pack.
    """

    def __init__(self, choices, covered=200):
        self.choices, self.buffers, self.covered, self.end, self.keep = choices, choices.buffers, covered, covered, keep_of(covered)
        places = torch.arange(len(SLOTS))[:, None].expand(-1, DIM)
        for is_value, part in enumerate((self.buffers.keys, self.buffers.values)):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    part[layer][SLOTS, head] = row_of(is_value, layer, head, 0) + places

    def prepare(self):
        covered = self.end
        return self.choices.request_selection(1, SLOTS[:covered], keep_of(covered), queries(1, covered), torch.tensor([covered - 1]))

    def renew(self, renewed=True):
        """A round begins: the copy comes to stand for all tokens, where the rank has them."""
        if self.prepare():
            self.covered, self.keep = self.end, keep_of(self.end)
            moved = self.choices.plan_row_copies(1, self.covered, self.keep, renewed)
            self.buffers.move_rows(moved, SLOTS, COPY)

    def write(self, row, layers, arrived):
        self.buffers.of_layers(layers).put_rows(arrived, COPY)

    def step(self, between=lambda: None, asks=True):
        self.end += 1
        told = StepRequest(1, self.covered, self.keep, self.end, asks)
        watch = self.choices.step([told], lambda row, end, layers: (queries(1, end)[layers], torch.tensor([end - 1])), self.write)
        for layer in range(LAYERS):
            between()
            watch.on_layer_start(layer)
            watch.on_queries_recorded(layer)

    @property
    def held(self):
        return torch.cat([each.held for each in self.choices._requests[1].packs])

    def check(self):
        """Each slot holds the row of the token that the record says, and the newest tokens are among them."""
        held = self.held
        assert held.shape == (LAYERS, HEADS, self.keep) and held.min() >= 0 and held.max() < self.covered
        assert all(len(each.unique()) == self.keep for each in held.flatten(0, 1))
        assert (held >= self.covered - 8).sum(-1).min() == 8
        for is_value, part in enumerate((self.buffers.keys, self.buffers.values)):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    found = part[layer][COPY[: self.keep], head, 0]
                    expected = held[layer, head].float() + float(row_of(is_value, layer, head, 0)[0])
                    assert torch.equal(found, expected)


def of_seed(seed, ask):
    """What a rank might choose: some tokens, the first and the newest."""
    noise = torch.rand(ask.count, HEADS, ask.covered, generator=torch.Generator().manual_seed(seed))
    noise[..., -min(RECENT, ask.keep) :] = 2
    return noise.topk(ask.keep).indices.sort(-1).values


def begun(pack=2, **given_):
    """A request whose copy was made once."""
    choices, rank = scripted(attach(blocks=64, rows=True, places=64, most=160, **given_), pack)
    copied = Copied(choices)
    assert not copied.prepare()
    for ask in rank.asks():
        rank.answer(ask, of_seed(0, ask))
    copied.renew(renewed=False)
    copied.check()
    return copied, rank


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(choosing, "WAIT_SECONDS", 0.0)


def test_an_answer_in_time_makes_the_copy_hold_exactly_what_was_chosen():
    copied, rank = begun()
    seen = len(rank.asks())
    for step in range(3):
        for ask in rank.asks()[seen - 3 * (step == 0) :]:
            rank.answer(ask, of_seed(10 + step, ask))
        seen = len(rank.asks())
        copied.step()
        copied.check()
        expected = [of_seed(10 + step, ask) for ask in rank.asks()[seen - 3 : seen]]
        assert torch.equal(copied.held.sort(-1).values, torch.cat(expected))
    assert copied.choices.rows > 0 < copied.choices.taken and not copied.choices.missed["late"]


def test_what_a_copy_holds_is_not_sent_again():
    copied, rank = begun()
    ask = rank.asks()[-1]
    rank.answer(ask, of_seed(0, ask))
    layers = slice(ask.first, ask.first + ask.count)
    assert not rank.memory.get_fresh(ask.lane, ask.sequence, layers, ask.keep).any(), "the same choice again"


@given(st.lists(st.tuples(st.sampled_from(["now", "late", "never", "between"]), st.sampled_from(ROUNDS), st.integers(0, 9)), max_size=24))
@settings(max_examples=30, deadline=None)
def test_after_any_pattern_of_answers_slots_hold_the_rows_of_the_record(pattern):
    copied, rank = begun()
    open_ = [ask for ask in rank.asks()[3:]]
    seen = len(rank.asks())
    for when, round_, seed in pattern:
        if when == "now":
            for ask in open_:
                rank.answer(ask, of_seed(seed, ask))
            open_ = []

        def between():
            if when == "between" and open_:
                ask = open_.pop(0)
                rank.answer(ask, of_seed(seed, ask))

        copied.step(between)
        copied.check()
        new = rank.asks()[seen:]
        seen += len(new)
        open_ += new
        assert len({(ask.first) for ask in open_}) == len(open_), "one question of a pack is open"
        if when == "late":
            for ask in open_[: 1 + seed % 3]:
                rank.answer(ask, of_seed(seed, ask))
            open_ = open_[1 + seed % 3 :]
        if round_ != "goes on":
            # A copy for which the pool has no slots was prepared, too.
            copied.renew() if round_ == "renews" else copied.prepare()
            copied.check()
            new = rank.asks()[seen:]
            seen += len(new)
            open_ += new
    assert not copied.choices.missed["wrong"]


def test_where_full_kv_is_given_back_nobody_finds_blocks_by_its_slots_and_what_grows_is_sent():
    copied, rank = begun()
    choices = copied.choices
    assert choices.num_held_tokens(1) == 200
    choices.on_slots_freed(1, is_remote_only=True)
    for _ in range(80):
        copied.step()
    rank.answer(rank.asks()[-1])
    slots = torch.cat([torch.zeros(200, dtype=torch.int64), SLOTS[200:280]])
    assert choices.request_selection(1, slots, keep_of(280), queries(1, 280), torch.tensor([279])) and choices.num_held_tokens(1) == 280
    appended = rank.pieces()[4:]
    assert [(message.offset, message.tokens) for message in appended] == [(8, 56), (0, 24)]
    values = rank.memory.values[appended[0].place]
    for layer in range(LAYERS):
        assert torch.equal(values[layer, :56], choices.buffers.values[layer][SLOTS[200:256]])
    before = choices.held_tokens
    choices.request_selection(2, SLOTS[:128], keep_of(128), queries(1, 1), torch.tensor([127]))
    assert choices.held_tokens == before + 2 * BLOCK, "others' slots may be the same, and hold other tokens"


def test_a_request_whose_only_kv_went_with_its_rank_is_lost_and_not_handed_over_again():
    copied, rank = begun()
    copied.choices.on_slots_freed(1, is_remote_only=True)
    assert not copied.choices.is_lost(1)
    rank.ended = -9
    copied.choices.links[0].poll()
    assert copied.choices.is_lost(1) and copied.choices.num_held_tokens(1) == 0
    assert not copied.prepare() and copied.choices.is_lost(1)
    copied.step()
    copied.check()
    copied.choices.forget(1)
    assert not copied.choices.is_lost(1)


def test_an_answer_that_was_heard_goes_with_its_process_before_it_is_taken():
    copied, rank = begun()
    copied.choices.on_slots_freed(1, is_remote_only=True)
    for ask in rank.asks()[3:]:
        rank.answer(ask, of_seed(1, ask))
    copied.choices.poll()
    rank.ended, held = -9, copied.held
    copied.choices.links[0].poll()
    copied.step()
    copied.check()
    assert torch.equal(copied.held, held)


def test_an_answer_about_more_tokens_than_the_copy_came_to_stand_for_is_left():
    copied, rank = begun()
    for ask in rank.asks()[3:]:
        rank.answer(ask, of_seed(1, ask))
    copied.step(asks=False)
    copied.end, seen = copied.end + 13, len(rank.asks())
    assert copied.prepare(), "asked for, but the pool has no slots for the copy, which stays what it is"
    for ask in rank.asks()[seen:]:
        rank.answer(ask, of_seed(2, ask))
    held = copied.held
    copied.step()
    copied.check()
    assert torch.equal(copied.held, held)
    for ask in rank.asks()[seen + 3 :]:
        rank.answer(ask, of_seed(3, ask))
    copied.step()
    copied.check()
    assert not torch.equal(copied.held, held), "what was asked for the copy as it is was taken"


def test_a_full_rank_leaves_the_copy_what_it_is():
    copied, rank = begun(lanes=1)
    other, _ = scripted(attach(blocks=4, rows=True, places=64, most=160), 2)
    full = Copied(other)
    other.request_selection(1, SLOTS[:200], keep_of(200), queries(1, 1), torch.tensor([199]))
    assert other.has_request(1) and not other.has_request(2)
    assert not other.free_blocks().take(1), "no block is free"
    assert not copied.choices.free_blocks().take(1), "its one lane is taken"
    full.end = 300
    assert not full.prepare() and other.missed["memory-full"] == 1


def test_a_process_sends_the_rows_that_a_copy_lacks():
    ranks = Ranks(pool(3), attach(rows=True, bits=8), pack=5).ready()
    choices, slots, keep = ranks.choices, torch.arange(50, 350), 64
    try:
        first = queries(1, 5)
        ranks.until(lambda: choices.request_selection(1, slots, keep, first, torch.tensor([299])))
        choices.plan_row_copies(1, 300, keep, False)
        (pack,) = choices._requests[1].packs
        ranks.until(lambda: (choices._process_replies(), not pack.asked)[1])
        lane, sequence = choices._requests[1].lease.lane, pack.sequence
        arrived = pack.arrived(ranks.choices.links[0].memory, lane, 300, keep)
        exact = chosen_here(ranks.buffers, slots, keep, first, torch.tensor([299]))
        assert (arrived.exchange.held.sort(-1).values == exact).float().mean() > 0.9 and sequence > 1
        assert arrived.exchange.held.shape == (LAYERS, HEADS, keep)
        asked = queries(1, 77)
        choices._requests[1].lease.sequence += 1
        choices._ask(choices._requests[1], pack, 300, keep, asked, torch.tensor([300]))
        ranks.until(lambda: (choices._process_replies(), not pack.asked)[1])
        arrived = pack.arrived(ranks.choices.links[0].memory, lane, 300, keep)
        found = arrived.exchange
        assert 0 < len(found.positions) < LAYERS * HEADS * keep and arrived.keys.shape == (len(found.positions), DIM)
        for part, rows in ((ranks.buffers.keys, arrived.keys), (ranks.buffers.values, arrived.values)):
            expected = torch.stack([part[layer] for layer in range(LAYERS)])[found.layers, slots[found.positions], found.heads]
            assert torch.equal(rows, expected), "exact, though keys are scored by their codes"
    finally:
        choices.end()
