"""Grammars over drafts: masks as if the drafts were output, and no trace of them afterwards."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from sglang.srt.constrained.base_grammar_backend import GrammarRow
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_ext.core import RequestState, Step
from sglang_ext.managers.grammar import GrammarAfter, advanced, can_roll_back, ends_after
from sglang_ext.managers.results import accept

BYTES = LLTokenizer("byte")
END = BYTES.eos_token
REGEX = "(ab|cd){2,3}x?"


def grammar(output=b""):
    """A real grammar at some output; tokens are bytes."""
    made = GuidanceGrammar(BYTES, LLMatcher.grammar_from_regex(REGEX))
    for token in output:
        made.accept_token(token)
    return made


def mask_of(one):
    """Allowed tokens now."""
    mask = one.allocate_vocab_mask(BYTES.vocab_size, 1, "cpu")
    one.fill_vocab_mask(mask, 0)
    bits = mask[0].view(torch.uint8).numpy()
    return {i for i in range(BYTES.vocab_size) if bits[i // 8] >> (i % 8) & 1}


def xgrammar_at(output=b""):
    """The same grammar in xgrammar; its end token is 256."""
    vocabulary = [bytes([i]) for i in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(REGEX)
    made = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), 257, compiled, None)
    for token in output:
        made.accept_token(token)
    return made


def filled(rows):
    """Allowed tokens of each row that SGLang would mask with these stand-ins."""
    mask = rows[0].allocate_vocab_mask(BYTES.vocab_size, len(rows), "cpu")
    rows[0].fill_vocab_mask_batched([GrammarRow(i, row) for i, row in enumerate(rows)], mask)
    bits = mask.view(torch.uint8).numpy()
    return [{i for i in range(BYTES.vocab_size) if row[i // 8] >> (i % 8) & 1} for row in bits]


words = st.lists(st.sampled_from([b"ab", b"cd"]), min_size=2, max_size=3).map(b"".join)


@given(text=words, data=st.data())
def test_masks_after_drafts_are_those_after_output(text, data):
    start = data.draw(st.integers(0, len(text)))
    one = grammar(text[:start])
    rows = [GrammarAfter(one, tuple(text[start:end])) for end in range(start, len(text) + 1)]
    expected = [mask_of(grammar(text[:end])) for end in range(start, len(text) + 1)]
    assert filled(rows) == expected
    assert mask_of(one) == expected[0], "the grammar stands at the output again"


def test_the_end_token_ends_the_grammar_and_can_be_taken_back():
    one = grammar(b"ababx")
    assert not ends_after(one, [])
    assert ends_after(one, [END])
    assert not one.is_terminated() and END in mask_of(one)


def test_a_row_after_the_end_of_an_xgrammar_stays_open():
    one = xgrammar_at(b"abab")
    drafts = [ord("x"), 256]
    rows = [GrammarAfter(one, tuple(drafts[:n])) for n in range(3)]
    mask = torch.full((3, 9), -1, dtype=torch.int32)  # SGLang's would be pinned, for a GPU
    rows[0].fill_vocab_mask_batched([GrammarRow(i, row) for i, row in enumerate(rows)], mask)
    bits = [{i for i in range(257) if row[i // 32] >> (i % 32) & 1} for row in mask.tolist()]
    assert bits == [{ord("a"), ord("c"), ord("x"), 256}, {256}, set(range(257))]
    assert ends_after(one, drafts) and not one.is_terminated()
    assert can_roll_back(one)


def test_drafts_that_break_the_grammar_close_the_round_and_their_output_is_refused():
    one = grammar(b"ab")
    rows = [GrammarAfter(one, ()), GrammarAfter(one, tuple(b"cx"))]
    assert ends_after(one, list(b"cx"))
    filled(rows)  # does not raise: the request is aborted, not the server
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        one.accept_token(ord("c"))


def test_an_error_inside_takes_the_drafts_back():
    one = grammar()
    with pytest.raises(RuntimeError), advanced(one, b"ab"):
        raise RuntimeError
    assert mask_of(one) == set(b"ac")


def test_llguidance_can_roll_back():
    assert can_roll_back(grammar())


def step(tokens, emits, closed=False):
    drafts = list(tokens[1:]) if emits else []
    state = RequestState(rid="r", row=1, seed=0, bonus=tokens[0], drafts=drafts, closed=closed)
    return Step(state=state, tokens=list(tokens), position=9, row=1, length=10, emits=emits)


def test_a_draft_that_ends_the_grammar_closes_its_round():
    one = step([ord("x")], emits=False)
    accept(one, 0, [END], grammar(b"ababx"))
    assert one.state.drafts == [END] and one.state.closed


@pytest.mark.parametrize(
    ("answers", "expected"),
    [([ord("x"), END, 5], [ord("x"), END]), ([ord("x"), 4, 5], [ord("x"), 4]), ([3, 4, 5], [3])],
)
def test_no_token_follows_the_end_of_a_grammar(answers, expected):
    one = step([ord("b"), ord("x"), END], emits=True, closed=True)
    assert accept(one, 0, answers, SimpleNamespace()).tokens == expected
    assert one.state.bonus == expected[-1] and not one.state.closed
