"""Drafts that n-grams propose and the compressed view checks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.managers.checked_drafts import CheckedDrafts
from sglang_ext.managers.ngram import TokenHistory

VIEWED = 3


class Model:
    """Follows each token by another, whatever came before; remembers what was written where."""

    def __init__(self, following: list[int], slots: torch.Tensor):
        self.following, self.slots = torch.tensor(following), slots
        self.written: dict[int, int] = {}
        self.forwards = 0

    def extend_rows(self, batch, round_, slots):
        return batch.req_pool_indices + 10, torch.full_like(batch.seq_lens, VIEWED)

    def sampling(self, batch, round_, width, logprobs):
        return SimpleNamespace(draw=lambda logits, positions: SimpleNamespace(tokens=logits))

    def forward(self, batch, inputs):
        self.forwards += 1
        self.written.update(zip(inputs.slots.tolist(), inputs.tokens.tolist()))
        begin = inputs.lengths - torch.tensor(inputs.counts) - VIEWED
        assert torch.equal(inputs.lengths_cpu, inputs.lengths)
        width = inputs.counts[0]
        positions = inputs.positions.view(-1, width)
        assert torch.equal(positions[:, 0], batch.seq_lens + begin), "the copy's length and the position go together"
        return SimpleNamespace(next_token_logits=self.following[inputs.tokens])


def draft(contexts, following, drafts, proposals, per_check=1.0):
    """The drafts of requests with these tokens; the model, and who drafted."""
    history = TokenHistory(rows=8, positions=80, device=torch.device("cpu"))
    rows, lengths = [*range(1, len(contexts) + 1)], [len(tokens) - 1 for tokens in contexts]
    for row, tokens in zip(rows, contexts):
        history.begin(row, tokens)
    slots = 1 + torch.arange(len(rows) * (drafts + 1)).view(len(rows), -1)
    model = Model(following, slots)
    batch = SimpleNamespace(req_pool_indices=torch.tensor(rows), seq_lens=torch.tensor(lengths))
    round_ = SimpleNamespace(drafts=drafts, lengths=lengths, viewed=[VIEWED] * len(rows))
    checked = CheckedDrafts(model, history, proposals, None)
    checked.per_check = per_check
    bonus = torch.tensor([tokens[-1] for tokens in contexts])
    return checked.draft(batch, round_, bonus, slots), model, checked


def chain(token, following, count):
    """What the model gives one by one."""
    tokens = []
    for _ in range(count):
        token = following[token]
        tokens.append(token)
    return tokens


contexts_ = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=20), min_size=1, max_size=3)


@settings(deadline=None)
@given(contexts_, st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(1, 9), st.integers(1, 4), st.sampled_from([1.0, 2.5]))
def test_drafts_are_those_that_the_view_gives_one_by_one(contexts, following, drafts, proposals, per_check):
    found, model, checked = draft(contexts, following, drafts, min(proposals, drafts), per_check)
    assert model.forwards == checked.checks(drafts)
    for context, tokens, offered, slots in zip(contexts, found.tokens.tolist(), found.offered.tolist(), model.slots):
        expected = chain(context[-1], following, drafts)
        assert 1 <= offered <= drafts and tokens[:offered] == expected[:offered]
        # The view's KV is that of the drafts, whatever else was proposed and written in between.
        inputs = [context[-1], *expected]
        assert [model.written[slot] for slot in slots.tolist()[:offered]] == inputs[:offered]
    assert per_check > 1 or all(offered == drafts for offered in found.offered.tolist())


def test_what_came_before_is_drafted_in_fewer_forwards():
    following = [1, 2, 3, 4, 0]
    found, model, checked = draft([[0, 1, 2, 3, 4, 0, 1]], following, 8, 3, per_check=4.0)
    assert model.forwards == 2 and found.offered.tolist() == [8]
    assert found.tokens.tolist() == [[2, 3, 4, 0, 1, 2, 3, 4]]
    assert found.forwards.tolist() == [2]


def test_the_number_of_forwards_follows_what_they_gave():
    _, _, checked = draft([[0, 1]], [0] * 5, 1, 1)
    assert checked.checks(16) == 16
    for _ in range(60):
        checked.observe(tokens=32, checks=8)
    assert checked.per_check == pytest.approx(4, abs=0.1) and checked.checks(16) in (4, 5)
    checked.observe(tokens=0, checks=0)
    assert checked.checks(1) == 1
