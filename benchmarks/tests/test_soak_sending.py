"""The traffic of a soak: judged answers, ids that are used again, aborted requests, and the counters."""

import argparse
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.error import HTTPError

import pytest
from bench_helpers import PROMPT

from sglang_ext_bench.soaking import sending, soak
from sglang_ext_bench.soaking.answers import LOST_LOGPROB, AnswerError, Sample
from sglang_ext_bench.soaking.request_options import OPTIONS
from sglang_ext_bench.soaking.tally import Tally
from sglang_ext_bench.soaking.traffic import SoakCase, SoakRequest, draw_request


class Answering:
    """A server that gives one answer to all requests."""

    def __init__(self, answer: Sample) -> None:
        self.given = answer

    def post(self, path: str, body: dict[str, Any]) -> Any:
        # The log-probability of the first token may be lost.
        scored = [(score, token) for score, token in zip(self.given.logprobs or (), self.given.ids) if score is not None]
        meta: dict[str, Any] = {"finish_reason": {"type": self.given.finish}, "num_retractions": self.given.retractions}
        if scored:
            meta["output_token_logprobs"] = [[*each, None] for each in scored]
        return {"output_ids": list(self.given.ids), "meta_info": meta}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield self.post(path, body)

    def post_quietly(self, path: str, body: dict[str, Any]) -> None: ...


class TestKnownDeviations:
    """Deviations that stock has in its overlapped loop pass. Others do not."""

    def sent(self, option: str, answered: Sample, overlapped: bool = True) -> Tally:
        """The tally after ``answered`` is the answer to a request that stock answers with tokens 1 and 2."""
        asked = next(each for each in OPTIONS if each.name == option)
        request = SoakRequest("r", 0, asked, 2, "plain", stream=False, delay=0.0)
        references = {(0, option): (Sample((1, 2), "length", (-0.5, -0.5)),)}
        given = soak.Soak(Answering(answered), [PROMPT], (), references, overlapped, Tally())
        sending.send(given, request)
        return given.tally

    @pytest.mark.parametrize("option", ["frequency-penalty", "greedy", "min-new-tokens"])
    def test_other_tokens_fail(self, option: str) -> None:
        tally = self.sent(option, Sample((1, 3), "length"))
        assert tally.problems and not tally.known_deviations
        assert tally.as_json()["outcomes"] == {"answered": 0, "aborted": 0, "refused": 0, "wrong": 1}

    def test_another_length_fails(self) -> None:
        assert self.sent("frequency-penalty", Sample((1,), "length")).problems

    @pytest.mark.parametrize("overlapped", [True, False])
    def test_a_lost_first_logprob_passes_in_the_overlapped_loop(self, overlapped: bool) -> None:
        lost = Sample((1, 2), "length", (None, -0.5), retractions=1, known_deviations=frozenset([LOST_LOGPROB]))
        tally = self.sent("logprobs", lost, overlapped)
        assert (not tally.problems) == overlapped == (tally.known_deviations[LOST_LOGPROB] == 1)


class Replaying(Answering):
    """Answers the drawn requests in their order: those to be aborted are, and malformed ones are refused. Collects the ids."""

    def __init__(self, drawn: list[SoakRequest]) -> None:
        super().__init__(Sample((), "length"))
        self.drawn = drawn
        self.rids: list[str] = []

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = self.drawn[len(self.rids)]
        self.rids.append(body["rid"])
        if request.kind == "malformed":
            raise HTTPError("url", 400, "malformed", None, None)  # type: ignore[arg-type]
        is_aborted = request.kind == "abort"
        self.given = Sample((), "abort") if is_aborted else Sample((1, 2, 3, 4)[: request.tokens], "length")
        return super().post(path, body)


def test_the_id_of_an_aborted_request_is_used_again_unless_it_was_streamed() -> None:
    greedy, count = (SoakCase(0, OPTIONS[0]),), 200
    random = Random(0)
    drawn = [draw_request(random, "", greedy, 4) for _ in range(count)]
    server, tally = Replaying(drawn), Tally()
    given = soak.Soak(server, [PROMPT], greedy, {(0, "greedy"): (Sample((1, 2, 3, 4), "length"),)}, True, tally)
    sending.run_traffic(given, argparse.Namespace(minutes=5, requests=count, workers=1, seed=0, output_len=4))
    assert not tally.problems and len(server.rids) == count
    reused = [first == second for first, second in zip(server.rids, server.rids[1:])]
    assert reused == [each.kind == "abort" and not each.stream for each in drawn[:-1]]
    assert {each.stream for each in drawn if each.kind == "abort"} == {True, False}
    assert len(set(server.rids)) == count - sum(reused)


@pytest.mark.parametrize("error", [AnswerError, OSError])
@pytest.mark.parametrize(
    ("kind", "told", "aborted"),
    [
        ("abort", sending.ABORTED_BY_CLIENT, True),
        ("abort", "out of memory", False),
        ("plain", sending.ABORTED_BY_CLIENT, False),
    ],
)
def test_an_abort_before_a_request_began_is_an_error_and_passes(
    error: type[Exception], kind: Any, told: str, aborted: bool
) -> None:
    class Refusing(Answering):
        def post(self, path: str, body: dict[str, Any]) -> Any:
            raise error(told)

    answered = Sample((1,), "length")
    given = soak.Soak(Refusing(answered), [PROMPT], (), {(0, "greedy"): (answered,)}, True, Tally())
    sending.send(given, SoakRequest("r", 0, OPTIONS[0], 4, kind, stream=False, delay=9.0))
    assert given.tally.as_json()["outcomes"] == {"answered": 0, "aborted": int(aborted), "refused": 0, "wrong": int(not aborted)}


def test_progress_and_table_show_outcomes_by_option_and_retractions() -> None:
    tally = Tally(retractions=3)
    assert tally.progress() == "no answer yet, 3 retractions"
    greedy, seeded = (SoakRequest("r", 0, option, 1, "plain", stream=True, delay=0) for option in (OPTIONS[0], OPTIONS[12]))
    tally.add("answered", greedy, [Sample((1,), "length", retractions=1)])
    tally.add("answered", seeded)
    tally.fail("wrong", seeded)
    tally.count_known_deviations(greedy, [LOST_LOGPROB])
    assert tally.progress() == "2 answered, 1 wrong, 4 retractions"
    table = {line.split()[0]: line.split()[1:] for line in tally.table().splitlines()[1:]}
    assert table["greedy"] == ["1", "0", "0", "0", "1", "1", "1"]
    assert table["seeded"] == ["1", "0", "0", "1", "1", "0", "0"]
    assert table["all"] == ["2", "0", "0", "1", "2", "1", "1"]
