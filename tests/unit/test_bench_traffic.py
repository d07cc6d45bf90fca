"""Requests and answers of a soak: what is drawn, and which answers are refused."""

from random import Random
from typing import Any

import pytest
from bench_helpers import PROMPT
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.bench.answers import AnswerError, Sample, check, last_chunk, read_samples
from sglang_ext.bench.traffic import OPTIONS, Option, Request, draw_request

GREEDY = Option("greedy", {"temperature": 0})
tokens = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def request(count: int = 4, kind: Any = "plain") -> Request:
    return Request("r", 0, GREEDY, count, kind, stream=False, delay=0.0)


def answer(ids: list[int], finish: str | None = "length", **meta: object) -> dict[str, Any]:
    """An answer of ``/generate``, or a chunk of one."""
    reason = None if finish is None else {"type": finish}
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


def sample(*ids: int, finish: str = "length", logprobs: tuple[float, ...] | None = None) -> Sample:
    return Sample(ids, finish, logprobs)


class TestRequests:
    def test_options_cover_each_way_of_asking_once(self) -> None:
        names = [option.name for option in OPTIONS]
        assert len(set(names)) == len(names)
        assert {"greedy", "stop", "seeded", "two-samples", "regex", "json-schema", "logprobs"} <= set(names)

    def test_body_has_the_options_fields_in_their_places(self) -> None:
        bodies = {option.name: option.body(PROMPT, 5) for option in OPTIONS}
        assert bodies["logprobs"]["top_logprobs_num"] == 2
        assert bodies["stop"]["sampling_params"]["stop"]
        assert bodies["json-schema"]["sampling_params"]["ignore_eos"] is False
        params = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}
        assert bodies["greedy"] == {"input_ids": [1, 2, 3], "sampling_params": params}

    @given(st.integers(), st.integers(1, 9), st.integers(1, 99))
    def test_drawn_requests_can_be_checked(self, seed: int, prompts: int, longest: int) -> None:
        drawn = draw_request(Random(seed), "r", prompts, longest)
        assert 0 <= drawn.prompt < prompts and 1 <= drawn.tokens <= longest
        if drawn.option.samples > 1:
            assert drawn.kind != "abort" and not drawn.stream
        if drawn.kind == "malformed":
            assert not drawn.stream
        assert drawn == draw_request(Random(seed), "r", prompts, longest)

    def test_every_option_is_drawn_and_many_requests_are_streamed(self) -> None:
        chance = Random(0)
        drawn = [draw_request(chance, "r", 2, 9) for _ in range(1000)]
        assert {each.option.name for each in drawn} == {option.name for option in OPTIONS}
        assert 0.15 < sum(each.stream for each in drawn) / 1000 < 0.35

    def test_malformed_request_leaves_its_option_as_it_was(self) -> None:
        assert request(kind="malformed").body([PROMPT])["sampling_params"]["top_p"] == 7.0
        assert "top_p" not in GREEDY.sampling


class TestReadSamples:
    def test_one_answer_and_a_list_of_them(self) -> None:
        one = answer([1], num_retractions=2, kv_drafts=3, kv_accepted=1, kv_fallback="grammar")
        expected = Sample((1,), "length", None, 2, 3, 1, "grammar")
        assert read_samples(one) == (expected,)
        assert read_samples([one, one]) == (expected, expected)

    def test_logprobs_must_belong_to_the_tokens(self) -> None:
        rows, top = [[-0.5, 4, None], [-0.25, 5, None]], [[], []]
        good = answer([4, 5], output_token_logprobs=rows, output_top_logprobs=top)
        assert read_samples(good)[0].logprobs == (-0.5, -0.25)
        with pytest.raises(AnswerError, match="for the tokens"):
            read_samples(answer([4, 6], output_token_logprobs=rows))
        with pytest.raises(AnswerError, match="1 positions for 2 tokens"):
            read_samples(answer([4, 5], output_token_logprobs=rows, output_top_logprobs=[[]]))

    @pytest.mark.parametrize("payload", ["text", {}, [1], {"meta_info": {"finish_reason": None}}])
    def test_what_is_no_answer_is_refused(self, payload: object) -> None:
        with pytest.raises(AnswerError, match="malformed answer"):
            read_samples(payload)


class TestStream:
    @given(tokens, st.sets(st.integers(1, 11)))
    def test_chunks_that_grow_give_the_last_one(self, ids: list[int], cuts: set[int]) -> None:
        ends = sorted(cut for cut in cuts if cut < len(ids))
        chunks = [answer(ids[:end], None) for end in ends] + [answer(ids)]
        assert last_chunk(chunks) == chunks[-1]

    @given(tokens, st.integers(0, 12))
    def test_any_repeated_chunk_is_refused(self, ids: list[int], at: int) -> None:
        chunks = [answer(ids[: end + 1], None) for end in range(len(ids))]
        chunks.insert(min(at, len(ids) - 1), chunks[min(at, len(ids) - 1)])
        with pytest.raises(AnswerError, match="nothing new"):
            last_chunk(chunks)

    @pytest.mark.parametrize(
        ("chunks", "message"),
        [
            ([answer([], None)], "chunk 1 of the stream brings nothing new after 0"),
            ([answer([1], None), answer([1])], "chunk 2 of the stream brings nothing new"),
            ([answer([1], None), answer([2, 3])], "changes tokens"),
            ([answer([1], None)], "without a finish reason"),
            ([], "without a finish reason"),
            ([{"error": {"message": "full"}}], "is an error.*full"),
            ([{"output_ids": [1]}], "malformed"),
        ],
    )
    def test_broken_stream_is_refused(self, chunks: list[dict[str, Any]], message: str) -> None:
        with pytest.raises(AnswerError, match=message):
            last_chunk(chunks)

    @pytest.mark.parametrize("repeated", [[], [2], [1, 2]])
    def test_end_of_an_aborted_stream_may_bring_nothing(self, repeated: list[int]) -> None:
        last = last_chunk([answer([1, 2], None), answer(repeated, "abort")])
        assert (last["output_ids"], last["meta_info"]["finish_reason"]["type"]) == ([1, 2], "abort")


class TestCheck:
    @given(tokens, st.integers(1, 15))
    def test_beginning_of_stocks_answer_as_long_as_asked_for_is_right(self, ids: list[int], count: int) -> None:
        check(request(count), [sample(*ids[:count])], [sample(*ids)])

    @given(tokens, st.data())
    def test_any_changed_token_is_wrong(self, ids: list[int], data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(ids) - 1))
        changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
        with pytest.raises(AnswerError, match=f"token {at}"):
            check(request(len(ids)), [sample(*changed)], [sample(*ids)])

    def test_short_and_long_answers_are_wrong(self) -> None:
        with pytest.raises(AnswerError, match="2 tokens instead of 3"):
            check(request(3), [sample(1, 2)], [sample(1, 2, 3, 4)])
        with pytest.raises(AnswerError, match="4 tokens instead of 3"):
            check(request(3), [sample(1, 2, 3, 4)], [sample(1, 2, 3, 4)])
        with pytest.raises(AnswerError, match="token 2"):
            check(request(9), [sample(1, 2, 3)], [sample(1, 2)])

    def test_aborted_answer_may_be_short_but_only_if_it_was_taken_back(self) -> None:
        aborted = sample(1, finish="abort")
        check(request(3, "abort"), [aborted], [sample(1, 2, 3)])
        with pytest.raises(AnswerError, match="aborted by the server"):
            check(request(3), [aborted], [sample(1, 2, 3)])
        with pytest.raises(AnswerError, match="token 0"):
            check(request(3, "abort"), [sample(2, finish="abort")], [sample(1, 2, 3)])

    def test_each_sample_counts(self) -> None:
        pair = [sample(1), sample(2)]
        check(request(1), pair, pair)
        with pytest.raises(AnswerError, match="1 samples instead of 2"):
            check(request(1), pair[:1], pair)
        with pytest.raises(AnswerError, match="token 0"):
            check(request(1), pair[::-1], pair)

    @pytest.mark.parametrize(("found", "message"), [(None, "no log-prob"), ((-0.7,), "-0.7 instead of -0.5")])
    def test_logprobs_are_stocks(self, found: tuple[float, ...] | None, message: str) -> None:
        stock = [sample(1, 2, logprobs=(-0.5, -0.25))]
        check(request(1), [sample(1, logprobs=(-0.501,))], stock)
        with pytest.raises(AnswerError, match=message):
            check(request(1), [sample(1, logprobs=found)], stock)
