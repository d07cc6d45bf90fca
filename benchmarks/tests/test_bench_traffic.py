"""Requests and answers of a soak: random requests, and the checks of answers."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from bench_helpers import PROMPT
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.soaking.answers import (
    EMPTY_CHUNK,
    LOST_LOGPROB,
    AnswerError,
    DiffersFromStock,
    Sample,
    check,
    check_lossy,
    last_chunk,
    read_samples,
    read_stream,
)
from sglang_ext_bench.soaking.request_options import OPTIONS, Option
from sglang_ext_bench.soaking.traffic import (
    MALFORMED,
    SoakRequest,
    cases,
    draw_request,
    next_turns,
    shared_beginnings,
    short_prompts,
)

GREEDY = Option("greedy", {"temperature": 0})
BY_NAME = {option.name: option for option in OPTIONS}
tokens = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def request(count: int = 4, kind: Any = "plain", option: Option = GREEDY) -> SoakRequest:
    return SoakRequest("r", 0, option, count, kind, stream=False, delay=0.0)


def answer(ids: list[int], finish: str | None = "length", **meta: object) -> dict[str, Any]:
    """An answer of ``/generate``, or a chunk of one."""
    reason = None if finish is None else {"type": finish}
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


def sample(*ids: int, finish: str = "length", logprobs: tuple[float, ...] | None = None) -> Sample:
    return Sample(ids, finish, logprobs)


class TestOptions:
    def test_each_request_option_has_its_own_name(self) -> None:
        asked = [name for option in OPTIONS for name in (*option.sampling, *option.fields)]
        assert len(BY_NAME) == len(OPTIONS) == 34
        assert {
            *("stop", "stop_regex", "stop_token_ids", "logit_bias", "min_new_tokens", "min_p", "n", "regex", "json_schema"),
            *("ebnf", "frequency_penalty", "presence_penalty", "repetition_penalty", "sampling_seed", "top_p", "top_k"),
            *("return_logprob", "top_logprobs_num", "token_ids_logprob", "return_hidden_states"),
        } <= set(asked)
        assert any(option.input_logprobs for option in OPTIONS) and any(option.disallowed for option in OPTIONS)

    def test_no_answer_depends_on_chance(self) -> None:
        assert all(option.sampling["temperature"] == 0 or "sampling_seed" in option.sampling for option in OPTIONS)

    def test_body_has_the_options_fields_in_their_places(self) -> None:
        bodies = {option.name: option.body(PROMPT, 5) for option in OPTIONS}
        assert bodies["logprobs"]["top_logprobs_num"] == 2 and "logprob_start_len" not in bodies["logprobs"]
        assert bodies["input-logprobs"]["logprob_start_len"] == 1
        assert bodies["stop"]["sampling_params"]["stop"]
        assert bodies["json-schema"]["sampling_params"]["ignore_eos"] is False
        assert bodies["min-new-tokens"]["sampling_params"]["min_new_tokens"] == 5, "not above max_new_tokens"
        params = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}
        assert bodies["greedy"] == {"input_ids": [1, 2, 3], "sampling_params": params}

    def test_a_logit_processor_is_sent_with_the_tokens_that_it_takes_out(self) -> None:
        body = BY_NAME["logit-processor"].body(PROMPT, 5)
        assert "callable" in body["custom_logit_processor"] and len(body["sampling_params"]["custom_params"]["token_ids"]) == 3

    def test_options_that_can_end_early(self) -> None:
        ending = {option.name for option in OPTIONS if option.can_end}
        assert {"stop", "stop-regex", "stop-tokens", "to-its-end", "regex", "min-new-tokens", "seeded-stop"} <= ending
        assert not {"greedy", "seeded", "frequency-penalty", "hidden-states"} & ending


class TestPrompts:
    GIVEN = (Prompt("a", tuple(range(90))), Prompt("b", tuple(range(100, 190))))

    def test_a_next_turn_goes_on_where_a_prompt_was_answered(self) -> None:
        turns = next_turns(self.GIVEN, [(7, 8, 9), (5,)])
        assert turns[0].input_ids[:92] == (*range(90), 7, 8) and len(turns[0].input_ids) == 92 + 24
        assert turns[1].input_ids[:91] == (*range(100, 190), 5)

    def test_others_begin_like_a_prompt_or_are_short(self) -> None:
        other, _ = shared_beginnings(self.GIVEN)
        assert other.input_ids == (*range(60), *range(160, 190))
        assert [len(prompt.input_ids) for prompt in short_prompts(self.GIVEN)] == [60, 60]
        assert all(prompt.input_ids for prompt in shared_beginnings([PROMPT]))

    @given(st.integers(1, 5), st.integers(4, 20))
    def test_given_prompts_have_every_option_and_derived_prompts_together_too(self, given_: int, derived: int) -> None:
        asked = cases(given_, derived)
        assert len(set((case.prompt, case.option.name) for case in asked)) == len(asked)
        assert [sum(case.prompt == p for case in asked) for p in range(given_)] == [len(OPTIONS)] * given_
        assert {case.prompt for case in asked} == set(range(given_ + derived))
        assert {case.option.name for case in asked if case.prompt >= given_} == set(BY_NAME)
        assert cases(given_, 0) == asked[: given_ * len(OPTIONS)]


class TestRequests:
    @given(st.integers(), st.integers(1, 9), st.integers(1, 99))
    def test_drawn_requests_can_be_checked(self, seed: int, prompts: int, longest: int) -> None:
        drawn = draw_request(Random(seed), "r", cases(prompts, 0), longest)
        assert 0 <= drawn.prompt < prompts and 0 <= drawn.tokens <= longest
        if drawn.option.samples > 1:
            assert drawn.kind != "abort"
        if drawn.kind == "malformed":
            assert not drawn.stream and drawn.invalid_params in MALFORMED
        else:
            assert not drawn.invalid_params
        assert drawn == draw_request(Random(seed), "r", cases(prompts, 0), longest)

    def test_every_option_is_drawn_and_many_requests_are_streamed(self) -> None:
        chance = Random(0)
        drawn = [draw_request(chance, "r", cases(2, 6), 9) for _ in range(3000)]
        assert {each.option.name for each in drawn} == set(BY_NAME)
        assert {each.prompt for each in drawn} == set(range(8))
        assert 0.25 < sum(each.stream for each in drawn) / 3000 < 0.4
        assert sum(each.tokens == 1 for each in drawn) > 300 and sum(each.tokens == 0 for each in drawn) > 50
        assert len({str(each.invalid_params) for each in drawn}) == 1 + len(MALFORMED)

    def test_malformed_request_leaves_its_option_as_it_was(self) -> None:
        broken = SoakRequest("r", 0, GREEDY, 4, "malformed", stream=False, delay=0.0, invalid_params={"top_p": 7.0})
        assert broken.body([PROMPT])["sampling_params"]["top_p"] == 7.0
        assert "top_p" not in GREEDY.sampling and "top_p" in str(broken)


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

    def test_further_logprobs_are_kept_by_name(self) -> None:
        rows = [[-0.5, 4, None], [-0.25, 5, None]]
        more = {
            "output_top_logprobs": [[[-0.5, 4, None], [-1.5, 6, None]]] * 2,
            "output_token_ids_logprobs": [[[-3.0, 9, None]], [[None, 9, None]]],
            "input_token_logprobs": [[None, 1, None], [-2.0, 2, None]],
        }
        (found,) = read_samples(answer([4, 5], output_token_logprobs=rows, **more))
        assert found.rows == {
            "output_top_logprobs": ((-0.5, -1.5),) * 2,
            "output_token_ids_logprobs": ((-3.0,), (None,)),
            "input_token_logprobs": ((None,), (-2.0,)),
        }

    def test_a_lost_first_logprob_is_an_oddity_of_a_retracted_request_only(self) -> None:
        rows, top = [[-0.25, 5, None]], [[[-0.25, 5, None]]]
        with pytest.raises(AnswerError, match="for the tokens"):
            read_samples(answer([4, 5], output_token_logprobs=rows))
        (found,) = read_samples(answer([4, 5], output_token_logprobs=rows, output_top_logprobs=top, num_retractions=1))
        assert (found.logprobs, found.rows["output_top_logprobs"]) == ((None, -0.25), ((), (-0.25,)))
        assert found.known_deviations == {LOST_LOGPROB}
        (only,) = read_samples(answer([4], output_token_logprobs=[], output_top_logprobs=[], num_retractions=1))
        assert (only.logprobs, only.rows, only.known_deviations) == ((None,), {"output_top_logprobs": ((),)}, {LOST_LOGPROB})
        check(request(1), [only], [Sample((4,), "length", (-0.5,), rows={"output_top_logprobs": ((-0.5, -1.0),)})])

    @pytest.mark.parametrize("payload", ["text", {}, [1], {"meta_info": {"finish_reason": None}}])
    def test_a_malformed_answer_is_refused(self, payload: object) -> None:
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

    def test_the_chunks_of_several_samples_are_separated_by_index(self) -> None:
        chunks = [{**answer([i], None), "index": i} for i in (1, 0)]
        chunks += [{**answer([i, 5]), "index": i} for i in (0, 1)]
        assert [found.ids for found in read_stream(chunks)] == [(0, 5), (1, 5)]
        with pytest.raises(AnswerError, match="without a finish reason"):
            read_stream([])

    def test_a_chunk_without_new_tokens_is_an_oddity_where_a_retraction_came_in_between(self) -> None:
        once, twice = {"num_retractions": 1}, {"num_retractions": 2}
        chunks = [answer([], None, **once), answer([1], None, **once), answer([1], None, **twice), answer([1, 2], **twice)]
        (found,) = read_stream(chunks)
        assert (found.ids, found.known_deviations) == ((1, 2), {EMPTY_CHUNK})
        assert read_stream([chunks[1], chunks[3]])[0].known_deviations == frozenset()
        for wrong, message in (
            ([answer([], None), answer([1])], "nothing new after 0"),
            ([answer([1], None, **once), answer([1], None, **once)], "nothing new after 1"),
            ([answer([1], None), answer([], None, **once)], "nothing new after 1"),
        ):
            with pytest.raises(AnswerError, match=message):
                read_stream(wrong)

    @pytest.mark.parametrize("repeated", [[], [2], [1, 2]])
    def test_end_of_an_aborted_stream_may_bring_nothing(self, repeated: list[int]) -> None:
        last = last_chunk([answer([1, 2], None), answer(repeated, "abort")])
        assert (last["output_ids"], last["meta_info"]["finish_reason"]["type"]) == ([1, 2], "abort")


class TestCheck:
    @given(tokens, st.integers(1, 15))
    def test_the_beginning_of_stocks_answer_with_the_requested_length_is_right(self, ids: list[int], count: int) -> None:
        check(request(count, option=BY_NAME["stop"]), [sample(*ids[:count])], [sample(*ids)])

    @given(tokens, st.data())
    def test_any_changed_token_is_wrong(self, ids: list[int], data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(ids) - 1))
        changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
        with pytest.raises(DiffersFromStock, match=f"token {at}"):
            check(request(len(ids)), [sample(*changed)], [sample(*ids)])

    def test_short_and_long_answers_are_wrong(self) -> None:
        with pytest.raises(AnswerError, match="2 tokens instead of 3"):
            check(request(3), [sample(1, 2)], [sample(1, 2, 3, 4)])
        with pytest.raises(AnswerError, match="4 tokens instead of 3"):
            check(request(3), [sample(1, 2, 3, 4)], [sample(1, 2, 3, 4)])
        with pytest.raises(AnswerError, match="3 tokens instead of 9"):
            check(request(9), [sample(1, 2, 3)], [sample(1, 2)])

    def test_an_answer_that_can_end_early_ends_where_stocks_does(self) -> None:
        stops = BY_NAME["stop"]
        check(request(9, option=stops), [sample(1, 2)], [sample(1, 2)])
        with pytest.raises(DiffersFromStock, match="token 2"):
            check(request(9, option=stops), [sample(1, 2, 3)], [sample(1, 2)])
        with pytest.raises(DiffersFromStock, match="1 tokens instead of 2"):
            check(request(9, option=stops), [sample(1)], [sample(1, 2)])

    def test_an_aborted_answer_may_be_short_but_only_if_the_client_aborted_it(self) -> None:
        aborted = sample(1, finish="abort")
        check(request(3, "abort"), [aborted], [sample(1, 2, 3)])
        with pytest.raises(AnswerError, match="aborted by the server"):
            check(request(3), [aborted], [sample(1, 2, 3)])
        with pytest.raises(AnswerError, match="token 0"):
            check(request(3, "abort"), [sample(2, finish="abort")], [sample(1, 2, 3)])

    def test_an_aborted_answer_of_no_tokens_may_have_the_token_that_sglang_did_not_sample(self) -> None:
        check(request(0, "abort"), [sample(0, finish="abort")], [sample(1, 2, 3)])
        for wrong in (request(0, "abort"), [sample(5, finish="abort")]), (request(1, "abort"), [sample(0, finish="abort")]):
            with pytest.raises(DiffersFromStock):
                check(*wrong, [sample(1, 2, 3)])

    def test_a_request_for_no_token_is_answered_with_none(self) -> None:
        check(request(0), [sample()], [sample(1, 2)])
        check_lossy(request(0), [sample()])
        assert read_stream([answer([])])[0].ids == ()
        # SGLang sends log-probabilities of one token nevertheless.
        told = read_samples(answer([], output_token_logprobs=[[-0.5, 4, None]], output_top_logprobs=[[[-0.5, 4, None]]]))
        check(request(0), told, [Sample((1, 2), "length", (-0.5, -0.25), rows={"output_top_logprobs": ((-0.5,), (-0.25,))})])
        with pytest.raises(AnswerError, match="1 tokens instead of 0"):
            check(request(0), [sample(1)], [sample(1, 2)])

    def test_the_text_of_an_answer_as_long_as_stocks_is_stocks(self) -> None:
        stock = [replace(sample(1, 2), text="a b")]
        check(request(1), [replace(sample(1), text="a ")], stock)
        with pytest.raises(DiffersFromStock, match="the text is 'a', stock's 'a b'"):
            check(request(2), [replace(sample(1, 2), text="a")], stock)

    def test_an_answer_that_reaches_its_length_at_a_stop_token_has_finish_length_and_keeps_that_token_in_its_text(self) -> None:
        stock = [replace(sample(1, 2, finish="stop"), text="a")]
        check(request(2, option=BY_NAME["stop-tokens"]), [replace(sample(1, 2), text="a b")], stock)
        check(request(9, option=BY_NAME["stop-tokens"]), [replace(sample(1, 2, finish="stop"), text="a")], stock)

    @pytest.mark.parametrize(
        ("count", "found", "stocks", "message"),
        [
            (2, "stop", "stop", "the finish reason is 'stop' after 2 of 2 tokens, stock's 'length'"),
            (2, "stop", "length", "the finish reason is 'stop' after 2 of 2 tokens, stock's 'length'"),
            (9, "length", "stop", "the finish reason is 'length' after 2 of 9 tokens, stock's 'stop'"),
        ],
    )
    def test_another_finish_reason_is_wrong(self, count: int, found: str, stocks: str, message: str) -> None:
        with pytest.raises(DiffersFromStock, match=message):
            check(request(count, option=BY_NAME["stop-tokens"]), [sample(1, 2, finish=found)], [sample(1, 2, finish=stocks)])

    @pytest.mark.parametrize(("count", "finish"), [(2, "length"), (9, "stop")])
    def test_with_stocks_finish_reason_another_text_is_wrong(self, count: int, finish: str) -> None:
        stock = [replace(sample(1, 2, finish=finish), text="a")]
        with pytest.raises(DiffersFromStock, match="the text is 'a b', stock's 'a'"):
            check(request(count, option=BY_NAME["stop-tokens"]), [replace(sample(1, 2, finish=finish), text="a b")], stock)

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

    def test_further_logprobs_are_stocks_at_each_position(self) -> None:
        def told(*values: float, prompt: float = -1.0) -> Sample:
            rows = {"output_top_logprobs": tuple((value, None) for value in values), "input_token_logprobs": ((None,), (prompt,))}
            return Sample((1, 2)[: len(values)], "length", (-0.5, -0.25)[: len(values)], rows=rows)

        stock = [told(-0.5, -0.25)]
        check(request(1), [told(-0.501)], stock)
        for wrong, message in (
            (told(-0.9), "output_top_logprobs -0.9 instead of -0.5 at token 0"),
            (told(-0.5, prompt=-2.0), "input_token_logprobs -2 instead of -1 at token 1"),
        ):
            with pytest.raises(DiffersFromStock, match=message):
                check(request(1), [wrong], stock)
        with pytest.raises(AnswerError, match="output_top_logprobs at 0 positions"):
            check(request(1), [sample(1, logprobs=(-0.5,))], stock)

    def test_beside_a_lost_first_logprob_the_others_are_compared(self) -> None:
        stock = [sample(1, 2, logprobs=(-0.5, -0.25))]

        def lost(second: float) -> Sample:
            return Sample((1, 2), "length", (None, second), retractions=1, known_deviations=frozenset([LOST_LOGPROB]))

        check(request(2), [lost(-0.25)], stock)
        with pytest.raises(DiffersFromStock, match="-0.9 instead of -0.25 at token 1"):
            check(request(2), [lost(-0.9)], stock)


class TestCheckForm:
    def test_an_answer_of_another_length_or_none_is_wrong(self) -> None:
        check_lossy(request(2), [sample(1, 7)])
        aborted = sample(1, finish="abort")
        for found, message in (([sample(1)], "1 tokens instead of 2"), ([], "0 samples instead of 1"), ([aborted], "aborted")):
            with pytest.raises(AnswerError, match=message):
                check_lossy(request(2), found)
        check_lossy(request(2, "abort"), [sample(finish="abort")])

    def test_an_answer_that_can_end_early_has_at_least_one_token_and_at_most_the_requested_length(self) -> None:
        stops = BY_NAME["stop"]
        check_lossy(request(9, option=stops), [sample(5)])
        for found in ([sample()], [sample(*range(10))]):
            with pytest.raises(AnswerError, match="tokens of 9"):
                check_lossy(request(9, option=stops), found)

    @pytest.mark.parametrize(
        ("logprobs", "message"),
        [
            (None, "at 0 positions for 2"),
            ((-0.5,), "at 1 positions for 2"),
            ((-0.5, None), "None"),
            ((0.5, -0.1), "0.5"),
            ((float("nan"), -0.1), "nan"),
        ],
    )
    def test_values_that_are_not_log_probabilities_are_wrong(self, logprobs: tuple[float, ...] | None, message: str) -> None:
        asked = request(2, option=BY_NAME["seeded-logprobs"])
        rows = {"output_top_logprobs": ((-3.5, -4.0), (0.0, -9.0)), "output_token_ids_logprobs": ((-5.0, -6.0),) * 2}
        right = Sample((4, 5), "length", (-3.5, 0.0), rows=rows)
        check_lossy(asked, [right])
        with pytest.raises(AnswerError, match=message):
            check_lossy(asked, [replace(right, logprobs=logprobs)])
        with pytest.raises(AnswerError, match="output_top_logprobs at 0 positions"):
            check_lossy(asked, [replace(right, rows={})])
