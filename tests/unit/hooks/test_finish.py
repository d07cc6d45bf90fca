"""Tokens that are accepted together end an output where they would one by one."""

from array import array
from types import SimpleNamespace

from hypothesis import example, given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.hooks.rounds import check_finish_at_last_token, count_tokens_to_finish

LETTERS = "abcd"
END = LETTERS.index("d")
TOKENIZER = SimpleNamespace(
    decode=lambda ids: "".join(LETTERS[i] for i in ids),
    encode=lambda text, add_special_tokens: list(text),
    eos_token_id=END,
    additional_stop_token_ids=None,
)


def make_request(**params):
    """A request that has put out nothing, with what SGLang reads when it looks for an end."""
    req = Req.__new__(Req)
    req.sampling_params = SamplingParams(**params)
    req.sampling_params.normalize(TOKENIZER)
    req.tokenizer, req.eos_token_ids, req.vocab_size = TOKENIZER, {END}, len(LETTERS)
    req.output_ids, req.decoded_text, req.grammar = array("q"), "", None
    req.to_finish = req.finished_reason = req.finished_len = None
    return req


def answer(req):
    reason = req.finished_reason.to_json() if req.finished() else None
    return list(req.output_ids_through_stop), reason


def one_by_one(tokens, params):
    """SGLang without speculation."""
    req = make_request(**params)
    for token in tokens:
        if not req.finished():
            req.output_ids.append(token)
            Req.update_finish_state(req)
    return answer(req)


def together(tokens, sizes, params):
    """The same tokens, ``sizes`` of them at a time."""
    req, sizes, rest = make_request(**params), list(sizes), list(tokens)
    while rest and not req.finished():
        count = min(sizes.pop() if sizes else len(rest), len(rest))
        kept = count_tokens_to_finish(req, rest[:count])
        req.output_ids.extend(rest[:kept])
        check_finish_at_last_token(Req.update_finish_state, req, kept)
        assert kept == count or req.finished(), "what is cut off followed an end"
        rest = rest[count:]
    return answer(req)


stops = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 8), "ignore_eos": st.booleans()},
    optional={
        "stop": st.lists(st.text("abc", min_size=1, max_size=2), max_size=2),
        "stop_regex": st.sampled_from(["a[bc]", "cc"]),
        "stop_token_ids": st.just([1]),
    },
)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.lists(st.integers(1, 5), max_size=10), stops)
@example([0, 1, 2], [3], {"max_new_tokens": 3, "stop": ["b"]})
@example([0, 3, 2], [3], {"max_new_tokens": 3})
@example([0, 3, 2], [3], {"max_new_tokens": 8, "stop": ["c"]})
@example([0, 1, 2], [3], {"max_new_tokens": 8, "stop": ["c", "a"]})
def test_the_first_end_counts(tokens, sizes, params):
    params = {"stop": None, **params}
    assert together(tokens, sizes, params) == one_by_one(tokens, params)


def test_an_abort_keeps_the_tokens_that_came_with_it():
    req = make_request(max_new_tokens=8)
    req.output_ids.extend([0, 1, 2])
    req.to_finish = FINISH_ABORT("gone")
    check_finish_at_last_token(Req.update_finish_state, req, 3)
    assert answer(req)[0] == [0, 1, 2] and isinstance(req.finished_reason, FINISH_ABORT)


def test_an_abort_does_not_hide_an_end():
    req = make_request(max_new_tokens=8, stop=["b"])
    req.to_finish = FINISH_ABORT("gone")
    assert (kept := count_tokens_to_finish(req, [0, 1, 2])) == 2
    req.output_ids.extend([0, 1])
    check_finish_at_last_token(Req.update_finish_state, req, kept)
    assert answer(req) == one_by_one([0, 1, 2], {"max_new_tokens": 8, "stop": ["b"]})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.integers(0, 4), stops)
def test_tokens_after_an_end_are_left_out_and_the_request_is_as_it_was(tokens, before, params):
    params = {"stop": None, **params}
    req = make_request(**params)
    for token in tokens[:before]:
        req.output_ids.append(token)
        Req.update_finish_state(req)
        if req.finished():
            return
    rest = tokens[before:]
    count = count_tokens_to_finish(req, rest)
    assert list(req.output_ids) == tokens[:before]
    assert req.finished_reason is req.finished_len is req.to_finish is None
    answered, _ = one_by_one(tokens, params)
    assert tokens[:before] + rest[:count] == answered


def test_an_abort_that_waits_goes_on_waiting_while_the_end_is_looked_for():
    req = make_request(max_new_tokens=8, stop=["b"])
    req.to_finish = FINISH_ABORT("gone")
    assert count_tokens_to_finish(req, [0, 1, 2]) == 2
    assert isinstance(req.to_finish, FINISH_ABORT) and not req.finished()
