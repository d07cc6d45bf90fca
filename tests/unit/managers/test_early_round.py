"""The first round of a request that drafted while it waited: its drafts are verified, and what they do not match is not output."""

from types import SimpleNamespace

import pytest
import torch
from test_decode_loop import DRAFTS, LONGEST, PROMPT, correct, make, rounds, truth

from sglang_ext.core import EarlyDrafts


def true_tokens(committed, count):
    tokens = list(committed)
    while len(tokens) < len(committed) + count:
        tokens.append(truth(tokens))
    return tokens[len(committed) :]


def early_round(count, right, away=None):
    """Rounds of two requests. The first has ``count`` early drafts, of which ``right`` are those of full KV."""
    toy, states, reqs = make(2, away)
    toy.worker.compressed_kv.buffers = SimpleNamespace(keys=(torch.zeros(20000, 1, 1),), values=(torch.zeros(20000, 1, 1),))
    committed = toy.committed[states[0].row]
    drafts = true_tokens(committed, count - 1)
    # No token of full KV.
    drafts[right:] = [97] * (count - 1 - right)
    kv = [torch.full((count - 1, 1, 1), 5.0)] * 2
    states[0].early_drafts = EarlyDrafts(0, torch.tensor([committed[-1], *drafts]), kv)
    slots = toy.steps.table[states[0].row, PROMPT : PROMPT + count - 1].long()
    return toy, states, rounds(toy, states, reqs, 4), toy.worker.compressed_kv.buffers, slots


@pytest.mark.parametrize("away", [None, ()])
@pytest.mark.parametrize("right", [0, 3, 5])
def test_the_first_round_verifies_early_drafts(right, away):
    toy, states, seen, buffers, slots = early_round(6, right, away)
    correct(toy)
    offered, accepted = next((offered, accepted) for row, offered, accepted in seen if row == states[0].row)
    assert offered == 5 + DRAFTS and (accepted == right or right == 5 and accepted >= 5)
    assert states[0].early_drafts is None and not states[0].is_early
    # The steps of the round read the drafts' KV.
    assert all((buffer[slots] == 5).all() for buffer in (*buffers.keys, *buffers.values))


def test_of_more_drafts_than_a_verification_takes_the_first_are_verified():
    toy, states, seen, *_ = early_round(LONGEST + 1, LONGEST)
    correct(toy)
    assert max(offered for row, offered, _ in seen if row == states[0].row) == LONGEST
