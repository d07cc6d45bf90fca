"""Grammars over drafts: masks as if the drafts were output, and no trace of them afterwards."""

from types import SimpleNamespace

import pytest
import torch
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from sglang.srt.constrained.base_grammar_backend import GrammarRow
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_ext.managers.spec_decode.grammar import MAX_WALKED_DRAFTS, GrammarWalk, can_walk
from sglang_ext.managers.spec_decode.request_states import UnprocessedTokens

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


def walked(one, drafts):
    """Of the rows of a verification: the walk, and allowed tokens of each that may be an answer."""
    walk = GrammarWalk(one, list(drafts))
    rows = [row for i in range(len(drafts) + 3) if (row := walk.row(i)) is not None]
    return walk, filled(rows)[: walk.num_masked_rows]


@given(text=words, data=st.data())
def test_masks_after_drafts_are_those_after_output(text, data):
    start = data.draw(st.integers(0, len(text)))
    one = grammar(text[:start])
    expected = [mask_of(grammar(text[:end])) for end in range(start, len(text) + 1)]
    walk, masks = walked(one, text[start:])
    assert masks == expected and walk.num_masked_rows == len(text) - start + 1
    assert mask_of(one) == expected[0], "the grammar stands at the output again"


@given(st.lists(st.sampled_from([*b"abcdx", END]), max_size=12), words, st.data())
def test_whatever_is_drafted_each_row_that_counts_is_masked_as_after_output(drafts, text, data):
    start = text[: data.draw(st.integers(0, len(text)))]
    one = grammar(start)
    walk, masks = walked(one, drafts)
    at = grammar(start)
    for index, mask in enumerate(masks):
        assert mask == mask_of(at)
        if index + 1 < walk.num_masked_rows:
            assert drafts[index] in mask
            at.accept_token(drafts[index])
    last = walk.num_masked_rows - 1
    ended = last < len(drafts) and drafts[last] in masks[last]
    assert last == len(drafts) or drafts[last] not in masks[last] or drafts[last] == END, "a draft that is refused, or the end"
    assert not ended or drafts[last] == END
    assert mask_of(one) == mask_of(grammar(start)) and not one.is_terminated()


@given(text=words, data=st.data())
def test_masks_after_tokens_that_are_not_in_the_output_yet_are_those_after_output(text, data):
    start = data.draw(st.integers(0, len(text)))
    middle = data.draw(st.integers(start, len(text)))
    one = grammar(text[:start])
    walk = GrammarWalk(one, list(text[middle:]), list(text[start:middle]))
    rows = [walk.row(i) for i in range(len(text) - middle + 1)]
    assert filled(rows) == [mask_of(grammar(text[:end])) for end in range(middle, len(text) + 1)]
    assert mask_of(one) == mask_of(grammar(text[:start])), "the grammar stands at the output again"


def test_an_end_that_is_not_in_the_output_yet_lets_ends_follow_with_ignore_eos_as_in_stock():
    one = grammar(b"abab")
    walk = GrammarWalk(one, [END, END], [ord("x"), END])
    rows = filled([walk.row(0), walk.row(1), walk.row(2)])
    assert rows[0] == {END} and walk.num_masked_rows == 1
    assert not one.is_terminated() and mask_of(one) == mask_of(grammar(b"abab"))


def test_rows_after_an_xgrammar_that_ended_unknown_to_its_output_stay_open():
    one = xgrammar_at(b"abab")
    walk = GrammarWalk(one, [ord("a")], [ord("x"), 256])
    mask = torch.full((2, 9), -1, dtype=torch.int32)
    walk.fill_mask(mask, {0: 0, 1: 1})
    assert mask.eq(-1).all() and walk.num_masked_rows == 1 and not one.is_terminated()


@pytest.mark.parametrize("made", [grammar, xgrammar_at])
def test_a_refused_token_between_the_output_and_the_drafts_leaves_all_rows_open_until_sglang_aborts_the_request(made):
    # A sampler that has no token to choose from gives token 0.
    mask, walk = torch.full((2, 9), -1, dtype=torch.int32), GrammarWalk(made(b"ab"), [ord("c")], [ord("a"), 0])
    walk.fill_mask(mask, {0: 0, 1: 1})
    assert mask.eq(-1).all() and walk.num_masked_rows == 1


def test_the_newest_forward_tells_what_an_output_lacks():
    copied = []
    reqs = [
        SimpleNamespace(grammar=object() if i == 1 else None, origin_input_ids=[1] * 5, output_ids=[7] * i) for i in range(3)
    ]
    batch = SimpleNamespace(reqs=reqs)
    done = SimpleNamespace(synchronize=lambda: copied.append(1))
    answers = SimpleNamespace(
        positions=[1, 2], copy_done=done, accept_lens=torch.tensor([2, 1]), speculative_num_draft_tokens=3,
        next_token_ids=torch.tensor([10, 11, 12, 20, 21, 22]),
    )
    tokens = UnprocessedTokens.from_result(batch, answers)
    # Five of the prompt and one of the output are known to SGLang, two came now; the KV of the newest is not there.
    assert tokens.tokens_of(reqs[1], 7) == [10, 11] and tokens.tokens_of(reqs[2], 7) == [20]
    assert tokens.tokens_of(reqs[1], 5) == [] and len(copied) == 2, "nothing is waited for where the output has all"
    first = SimpleNamespace(copy_done=done, accept_lens=None, next_token_ids=torch.tensor([30, 31, 32]))
    assert UnprocessedTokens.from_result(batch, first).tokens_of(reqs[1], 6) == [31]
    assert UnprocessedTokens.from_result(SimpleNamespace(reqs=[reqs[0]]), answers).reqs == (), "no grammar has to know"


def test_only_grammars_that_are_taken_back_may_lag_behind():
    assert can_walk(None) and can_walk(grammar()) and not can_walk(SimpleNamespace(grammar=grammar()))


def test_no_token_follows_the_end_of_a_grammar():
    walk, masks = walked(grammar(b"abab"), [ord("x"), END, 5])
    assert walk.num_masked_rows == 2 and masks[1] == {END}
    assert walk.row(3) is not None and walk.row(4) is None


def test_a_row_after_the_end_of_an_xgrammar_stays_open():
    one = xgrammar_at(b"abab")
    walk = GrammarWalk(one, [ord("x"), 256])
    rows = [walk.row(n) for n in range(3)]
    mask = torch.full((3, 9), -1, dtype=torch.int32)  # SGLang's would be pinned, for a GPU
    rows[0].fill_vocab_mask_batched([GrammarRow(i, row) for i, row in enumerate(rows)], mask)
    bits = [{i for i in range(257) if row[i // 32] >> (i % 32) & 1} for row in mask.tolist()]
    assert bits == [{ord("a"), ord("c"), ord("x"), 256}, {256}, set(range(257))]
    assert walk.num_masked_rows == 2 and not one.is_terminated()
    assert can_walk(one)


def test_walks_of_several_requests_share_a_mask():
    first, second = GrammarWalk(grammar(b"ab"), list(b"cd")), GrammarWalk(grammar(), [])
    rows = [first.row(0), second.row(0), first.row(1), first.row(2)]
    assert filled(rows) == [mask_of(grammar(text)) for text in (b"ab", b"", b"abc", b"abcd")]
    assert (first.num_masked_rows, second.num_masked_rows) == (3, 1)


def test_a_walk_is_no_longer_than_what_can_be_taken_back():
    walk = GrammarWalk(grammar(), [ord("a")] * 300)
    assert walk.row(MAX_WALKED_DRAFTS) is not None and walk.row(MAX_WALKED_DRAFTS + 1) is None


def test_llguidance_can_roll_back():
    assert can_walk(grammar())
