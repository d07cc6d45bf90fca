"""What n-grams of a context propose."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.managers.ngram import LONGEST_MATCH, TokenHistory, propose

SENTENCE = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]


def naive(tokens: list[int], count: int) -> list[int]:
    """The same by hand: the latest of the longest matches, and what follows it, again and again."""
    newest = len(tokens) - 1
    best, place = -1, 0
    for end in range(newest):
        match = 0
        while match < LONGEST_MATCH and end >= match and tokens[end - match] == tokens[newest - match]:
            match += 1
        if match >= best:
            best, place = match, end
    follow = tokens[place + 1 : newest + 1] or tokens
    return [follow[i % len(follow)] for i in range(count)]


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), min_size=1, max_size=4), st.integers(1, 6))
def test_proposed_is_what_followed_the_latest_of_the_longest_matches(contexts, count):
    width = max(map(len, contexts)) + 3
    # Beyond a request's newest token lies what must not be looked at.
    known = torch.tensor([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in contexts])
    newest = torch.tensor([len(tokens) - 1 for tokens in contexts])
    assert propose(known, newest, count).tolist() == [naive(tokens, count) for tokens in contexts]


def test_a_repeated_phrase_goes_on_as_before():
    known = torch.tensor([SENTENCE])
    assert propose(known, torch.tensor([len(SENTENCE) - 1]), 4).tolist() == [[8, 9, 1, 2]]


def test_a_short_period_repeats():
    assert propose(torch.tensor([[4, 1, 2, 1, 2]]), torch.tensor([4]), 5).tolist() == [[1, 2, 1, 2, 1]]


def test_a_history_keeps_each_request_apart_and_forgets_what_a_row_held_before():
    history = TokenHistory(rows=4, positions=32, device=torch.device("cpu"))
    history.begin(1, [3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    history.begin(1, SENTENCE[:9])
    history.begin(3, [1, 2])
    rows = torch.tensor([1, 3])
    history.put(rows, torch.tensor([[9, 10], [2, 3]]), torch.tensor([[7, 8], [1, 2]]))
    assert history.at(rows, torch.tensor([[8, 9, 10], [1, 2, 3]])).tolist() == [[6, 7, 8], [2, 1, 2]]
    proposed = history.propose(rows, torch.tensor([9, 3]), 2, longest=20)
    assert proposed.tolist() == [[8, 9], [1, 2]]
