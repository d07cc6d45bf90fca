"""A whole soak against fake servers."""

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from bench_helpers import PROMPT

from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.soaking import disaggregated, external_server, sending, soak, tool_calls
from sglang_ext_bench.soaking.answers import LOGPROB_FIELDS, LOST_LOGPROB, AnswerError, Sample
from sglang_ext_bench.soaking.disaggregated import DisaggregatedServers
from sglang_ext_bench.soaking.request_options import OPTIONS
from sglang_ext_bench.soaking.tally import Tally
from sglang_ext_bench.soaking.traffic import MALFORMED, SoakRequest, cases


pytestmark = pytest.mark.usefixtures("checked_here")


class FakeServer:
    """Answers 1, 2, 3 and so on. ``break_answer`` may change an answer of the tested server."""

    made: list["FakeServer"] = []
    retractions, leaked = 0, 0
    group: int | None = None

    def __init__(self, model: str, flags: tuple[str, ...], log: Path, **options: Any) -> None:
        self.flags, self.env = flags, options.get("env")
        self.made.append(self)

    def check(self) -> None:
        """The server is healthy."""

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None: ...

    def describe_log(self) -> str:
        return "log"

    def flush_cache(self) -> None: ...

    def request(self, path: str) -> dict[str, Any]:
        if path == "v1/loads":
            return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.leaked}]}
        assert path == "server_info"
        return {"disable_overlap_schedule": soak.PLAIN_LOOP in self.flags}

    def post_quietly(self, path: str, body: Mapping[str, Any]) -> None: ...

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == tool_calls.PATH:
            return {"choices": [{"message": {"content": "fine"}, "finish_reason": "length"}]}
        params = body["sampling_params"]
        if any(params.get(name) == value for each in MALFORMED for name, value in each.items()):
            raise HTTPError("url", 400, "malformed", Message(), None)
        answers = [self.answer(body, params["max_new_tokens"]) for _ in range(params.get("n", 1))]
        return answers if "n" in params else answers[0]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if path == tool_calls.PATH:
            yield {"choices": [{"delta": {"content": "fine"}, "finish_reason": "length"}]}
            return
        count = body["sampling_params"]["max_new_tokens"]
        for index in range(body["sampling_params"].get("n", 1)):
            for end in range(min(1, count), count + 1):
                chunk = {**self.answer(body, end), "index": index}
                if end < count:
                    chunk["meta_info"]["finish_reason"] = None
                yield chunk

    def answer(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        ids = list(range(1, count + 1))
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if self.env is not None:
            meta |= {"num_retractions": self.retractions, "kv_drafts": 2, "kv_accepted": 1}
            self.break_answer(ids)
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            for asked, told in LOGPROB_FIELDS.items():
                if body.get(asked):
                    meta[told] = [[[-0.5, token, None]] for token in ids]
        return {"output_ids": ids, "meta_info": meta}

    def break_answer(self, ids: list[int]) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, char_tokenizer: None) -> type[FakeServer]:
    monkeypatch.setattr(soak, "ServerProcess", FakeServer)
    monkeypatch.setattr(soak, "load_prompts", lambda path, tokenizer: (PROMPT,))
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(FakeServer, "made", [])
    return FakeServer


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command for a moment. Return its exit code and totals."""
    path = folder / "totals.json"
    common = ("--model", "m", "--prompts", "p", "--minutes", "0.005", "--workers", "2")
    code = main(["soak", *common, "--output-len", "5", "--logs", str(folder), "--json", str(path), *words])
    return code, json.loads(path.read_text())


class TestRun:
    def test_right_answers_pass_and_are_counted(self, server: type[FakeServer], tmp_path: Path) -> None:
        code, totals = run(tmp_path, "--minutes", "5", "--requests", "60")
        assert (code, totals["problems"], totals["retractions"]) == (0, [], 0)
        assert totals["outcomes"]["answered"] > 0 and totals["outcomes"]["refused"] > 0
        assert totals["streamed"] > 0 and totals["drafts"] == 2 * totals["accepted"] > 0
        outcomes = sum(row.get(name, 0) for row in totals["options"].values() for name in totals["outcomes"])
        assert outcomes == sum(totals["outcomes"].values()) and len(totals["requests"]) == len(OPTIONS)

    def test_strict_checks_reach_the_verified_server_only(
        self, server: type[FakeServer], tmp_path: Path
    ) -> None:
        run(tmp_path, "--pool-tokens", "4500")
        stock, verified = server.made
        assert stock.env is None and verified.env == soak.STRICT_CHECKS
        assert "4500" in verified.flags and "4500" not in stock.flags

    def test_wrong_answer_ends_the_run(
        self, server: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeServer, "break_answer", lambda self, ids: ids and ids.__setitem__(-1, 0))
        code, totals = run(tmp_path, "--minutes", "5")
        assert code == 1
        assert any("differs from stock at token" in problem for problem in totals["problems"])

    def test_tokens_that_an_idle_server_still_holds_fail_the_run(
        self, server: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeServer, "leaked", 7)
        monkeypatch.setattr(external_server, "IDLE_SECONDS", 0.0)
        code, totals = run(tmp_path)
        assert code == 1 and "still holds 7 used tokens" in totals["problems"][0]

    def test_the_requested_number_of_requests_is_sent(self, server: type[FakeServer], tmp_path: Path) -> None:
        code, totals = run(tmp_path, "--minutes", "5", "--requests", "40")
        assert (code, sum(totals["outcomes"].values()), len(server.made)) == (0, 40, 2)

    def test_request_options_may_be_left_out(self, server: type[FakeServer], tmp_path: Path) -> None:
        totals = run(tmp_path, "--leave-out", "greedy,tools")[1]
        assert len(totals["requests"]) == len(OPTIONS) - 2 and not {"greedy", "tools"} & totals["options"].keys()

    def test_with_url_and_stock_url_no_server_is_started(
        self, server: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def of(url: str, timeout: float) -> FakeServer:
            return FakeServer(url, (), tmp_path, env={} if url == "http://tested" else None)

        monkeypatch.setattr(soak, "ExternalServer", of)
        monkeypatch.setattr(soak, "supported_options", lambda options, servers: options[:3])
        monkeypatch.setattr(FakeServer, "break_answer", lambda self, ids: ids and ids.__setitem__(-1, 0))
        code, totals = run(tmp_path, "--minutes", "5", "--url", "http://tested", "--stock-url", "http://stock")
        assert code == 1 and "differs from stock" in totals["problems"][0], "the tested server is compared with the stock one"
        assert (totals["flags"], len(totals["requests"])) == ({}, 3)
        assert not any("--kv-mode" in each.flags for each in server.made), "none is started"

    def test_a_lossy_server_is_not_compared_with_stock(
        self, server: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeServer, "break_answer", lambda self, ids: ids and ids.__setitem__(0, 0))
        code, totals = run(tmp_path, "--mode", "lossy", "--kv", "--kv-compressor hack --kv-bits 2")
        (lossy,) = server.made
        assert (code, totals["mode"]) == (0, "lossy") and totals["outcomes"]["answered"] > 0
        assert lossy.env == soak.STRICT_CHECKS and lossy.flags[lossy.flags.index("--kv-mode") + 1] == "lossy"

    def test_a_lossy_answer_that_is_too_short_ends_the_run(
        self, server: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeServer, "break_answer", lambda self, ids: ids and ids.pop())
        code, totals = run(tmp_path, "--minutes", "5", "--mode", "lossy", "--kv", "--kv-compressor hack")
        assert code == 1 and any("tokens" in problem for problem in totals["problems"])

    def test_two_lossy_servers_are_refused(self, server: type[FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["soak", "--model", "m", "--prompts", "p", "--mode", "lossy", "--apart"]) != 0
        assert "--apart with --mode lossy" in capsys.readouterr().err and not server.made

    def test_each_reference_finds_an_idle_server(self, server: type[FakeServer]) -> None:
        class Busy(FakeServer):
            idle = False

            def flush_cache(self) -> None:
                self.idle = True

            def post(self, path: str, body: dict[str, Any]) -> Any:
                assert self.idle
                self.idle = False
                return super().post(path, body)

        answers = soak.reference_answers(Busy("m", (), Path("log")), (PROMPT,), 4)  # type: ignore[arg-type]
        prompts, answers = answers
        assert len(prompts) == 4 and answers.keys() == {(case.prompt, case.option.name) for case in cases(1, 3)}

    def test_reference_that_stock_refuses_is_named(self, server: type[FakeServer]) -> None:
        class Refusing(FakeServer):
            def post(self, path: str, body: dict[str, Any]) -> Any:
                raise ConnectionError("gone")

        with pytest.raises(CommandError, match="stock, greedy, p: ConnectionError: gone; .* pass --leave-out greedy"):
            soak.reference_answers(Refusing("m", (), Path("log")), (PROMPT,), 4)  # type: ignore[arg-type]


class TestLoop:
    @pytest.mark.parametrize(
        ("more", "overlapped"),
        [
            ((), True),
            (("--disable-overlap",), False),
            (("--disable-overlap", "--kv", "--kv-budget 0.25"), False),
            (("--kv", "--kv-budget 0.5"), True),
        ],
    )
    def test_both_servers_run_the_same(
        self, server: type[FakeServer], tmp_path: Path, more: tuple[str, ...], overlapped: bool
    ) -> None:
        code, totals = run(tmp_path, *more)
        stock, verified = server.made
        assert (code, totals["overlapped"]) == (0, overlapped)
        assert (soak.PLAIN_LOOP not in stock.flags) == (soak.PLAIN_LOOP not in verified.flags) == overlapped

    def test_a_server_that_runs_the_other_one_is_refused(self, server: type[FakeServer]) -> None:
        with pytest.raises(CommandError, match="runs SGLang's plain loop instead of the overlapped one"):
            soak.check_loop(FakeServer("m", (soak.PLAIN_LOOP,), Path("log")), True)  # type: ignore[arg-type]

    def test_flags_of_both_reach_both(self, server: type[FakeServer], tmp_path: Path) -> None:
        run(tmp_path, "--server-arg=--attention-backend triton")
        assert all(each.flags[-1] == "triton" or "triton" in each.flags for each in server.made)


class TestKnownDeviations:
    """Deviations that stock has in its overlapped loop pass. Others do not."""

    def sent(self, option: str, answered: Sample, overlapped: bool = True) -> Tally:
        """The tally after ``answered`` is the answer to a request that stock answers with tokens 1 and 2."""
        asked = next(each for each in OPTIONS if each.name == option)
        request = SoakRequest("r", 0, asked, 2, "plain", stream=False, delay=0.0)
        references = {(0, option): (Sample((1, 2), "length", (-0.5, -0.5)),)}
        fake: Any = FakeServer("m", (), Path("log"))
        given = soak.Soak(fake, [PROMPT], (), references, overlapped, Tally())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sending, "request_answer", lambda *_: (answered,))
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


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_an_aborted_request_is_used_again_unless_it_was_streamed(
    server: type[FakeServer], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    drawn: list[str] = []

    def draw(chance: object, rid: str, *_: object) -> SoakRequest:
        drawn.append(rid)
        if len(drawn) == 4:
            tally.fail("enough")
        return SoakRequest(rid, 0, OPTIONS[0], 4, "abort" if len(drawn) == 2 else "plain", stream=stream, delay=9.0)

    def ask(_: object, request: SoakRequest, __: object) -> tuple[Sample, ...]:
        return (Sample((1,), "abort") if request.kind == "abort" else Sample((1, 2, 3, 4), "length"),)

    monkeypatch.setattr(sending, "draw_request", draw)
    monkeypatch.setattr(sending, "request_answer", ask)
    tally = Tally()
    references = {(0, "greedy"): (Sample((1, 2, 3, 4), "length"),)}
    given = soak.Soak(FakeServer("m", (), Path("log")), [PROMPT], (), references, True, tally)  # type: ignore[arg-type]
    sending.run_traffic(given, argparse.Namespace(minutes=5, requests=0, workers=1, seed=0, output_len=4))
    first, second, third, fourth = drawn
    assert (second == third) != stream and len({first, second, fourth}) == 3
    assert tally.problems == ["enough"]


class TestForcedRetraction:
    def test_variables_of_the_verified_server(self) -> None:
        added = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
        assert soak.server_environment(7) == soak.STRICT_CHECKS | added

    def test_less_than_one_step_is_refused_before_a_server_starts(self, server: type[FakeServer]) -> None:
        assert main(["soak", "--model", "m", "--prompts", "p", "--force-retraction", "0"]) == 2
        assert server.made == []

    @pytest.mark.parametrize(("retractions", "code"), [(0, 1), (1, 0)])
    def test_run_fails_if_none_happened(
        self,
        server: type[FakeServer],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        retractions: int,
        code: int,
    ) -> None:
        monkeypatch.setattr(FakeServer, "retractions", retractions)
        found, totals = run(tmp_path, "--force-retraction", "3")
        assert (found, bool(totals["retractions"])) == (code, bool(retractions))
        assert any("no request was retracted" in problem for problem in totals["problems"]) == bool(code)


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
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], kind: Any, told: str, aborted: bool
) -> None:
    def ask(*_: object) -> tuple[Sample, ...]:
        raise error(told)

    monkeypatch.setattr(sending, "request_answer", ask)
    given = soak.Soak(FakeServer("m", (), Path("log")), [PROMPT], (), {(0, "greedy"): (Sample((1,), "length"),)}, True, Tally())  # type: ignore[arg-type]
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


class FakePart(FakeServer):
    """One server of a pair. It records its requests. A prefill server calls ``prefill_says`` before it answers."""

    asked: list[tuple[str, str, Mapping[str, Any]]] = []
    flushed: list[str] = []
    memory = 100

    @property
    def role(self) -> str:
        return self.flags[self.flags.index("--disaggregation-mode") + 1]

    @property
    def group(self) -> int:
        return self.memory

    def stop(self) -> None: ...

    def flush_cache(self) -> None:
        self.flushed.append(self.role)

    def post_quietly(self, path: str, body: Mapping[str, Any]) -> None:
        self.asked.append((self.role, path, body))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append((self.role, path, body))
        if self.role == "prefill":
            self.prefill_says(body)
        return super().post(path, body)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append((self.role, path, body))
        yield from super().stream(path, body)

    def prefill_says(self, body: Mapping[str, Any]) -> None: ...


@pytest.fixture
def part(server: type[FakeServer], monkeypatch: pytest.MonkeyPatch) -> type[FakePart]:
    monkeypatch.setattr(disaggregated, "ServerProcess", FakePart)
    monkeypatch.setattr(disaggregated, "resident_bytes", lambda group: group * 10**6)
    monkeypatch.setattr(FakePart, "asked", [])
    monkeypatch.setattr(FakePart, "flushed", [])
    return FakePart


def refused(code: int, told: str) -> HTTPError:
    return HTTPError("url", code, "refused", Message(), BytesIO(json.dumps({"error": {"message": told}}).encode()))


class TestApart:
    def pair(self, problems: list[str]) -> DisaggregatedServers:
        return DisaggregatedServers("m", disaggregated.disaggregated_flags((), (), 0.2), Path(), {"prefill": {}, "decode": {}}, 2, problems.append)

    def test_all_requests_go_to_both_under_one_room_and_totals_say_so(self, part: type[FakePart], tmp_path: Path) -> None:
        code, totals = run(tmp_path, "--apart")
        assert (code, totals["problems"]) == (0, [])
        rooms = {role: {b["bootstrap_room"] for r, p, b in part.asked if (r, p) == (role, "generate")} for role in disaggregated.ROLES}
        assert rooms["prefill"] == rooms["decode"] and len(rooms["decode"]) > 1
        assert totals["outcomes"]["answered"] > 0 and totals["outcomes"]["refused"] > 0
        # All requests of the traffic, and the last one after it.
        assert sum(totals["apart"]["prefill"].values()) == sum(totals["outcomes"].values()) + 1
        assert totals["apart"]["prefill"]["answered"] == totals["outcomes"]["answered"] + totals["outcomes"]["aborted"] + 1
        assert part.flushed == [*disaggregated.ROLES] * 2
        assert [each["name"] for each in totals["requests"]] == [option.name for option in disaggregated.disaggregated_options()]

    def test_of_one_server_totals_say_that_too(self, server: type[FakeServer], tmp_path: Path) -> None:
        assert run(tmp_path)[1]["apart"] is None

    def test_the_link_is_the_prefill_servers_and_pool_and_retraction_the_decode_servers(
        self, part: type[FakePart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(part, "retractions", 1)
        run(tmp_path, "--apart", "--link-gbps", "0.5", "--pool-tokens", "4500", "--force-retraction", "3")
        _, prefill, decode = part.made
        assert "4500" in decode.flags and "4500" not in prefill.flags
        assert prefill.flags[prefill.flags.index("--kv-link-gbps") + 1] == "0.5" and "--kv-link-gbps" not in decode.flags
        assert all(each.env["SGLANG_HOST_IP"] == "127.0.0.1" and soak.STRICT_CHECKS.items() <= each.env.items() for each in (prefill, decode))
        assert "SGLANG_TEST_RETRACT" in decode.env and "SGLANG_TEST_RETRACT" not in prefill.env

    def test_options_that_two_servers_do_not_support_are_left_out(self, part: type[FakePart], tmp_path: Path) -> None:
        left_out = {"two-samples", "three-samples", "two-samples-logprobs", "three-samples-regex", "input-logprobs"}
        left_out |= {"tools", "tools-streamed", "tools-auto"}
        assert {option.name for option in OPTIONS} - {option.name for option in disaggregated.disaggregated_options()} == left_out
        assert not run(tmp_path, "--apart")[1]["options"].keys() & left_out
        # Requests for log-probabilities are sent without this field.
        assert not any("token_ids_logprob" in body for _, path, body in part.asked)
        assert any("top_logprobs_num" in option.fields for option in disaggregated.disaggregated_options())

    @pytest.mark.parametrize("role", disaggregated.ROLES)
    def test_tokens_that_one_of_them_still_holds_are_a_leak(
        self, part: type[FakePart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
    ) -> None:
        monkeypatch.setattr(external_server, "IDLE_SECONDS", 0.0)
        monkeypatch.setattr(part, "leaked", property(lambda each: 7 * (each.role == role)))
        code, totals = run(tmp_path, "--apart")
        assert code == 1 and totals["problems"] == [f"the {role} server: 0 s after the last answer the server still holds 7 used tokens"]

    def test_an_abort_goes_to_both(self, part: type[FakePart]) -> None:
        with self.pair([]) as pair:
            pair.post_quietly("abort_request", {"rid": "r"})
        assert sorted(part.asked, key=str) == [(role, "abort_request", {"rid": "r"}) for role in sorted(disaggregated.ROLES)]

    def test_the_decode_servers_error_is_raised_and_the_prefill_servers_counted(self, part: type[FakePart]) -> None:
        problems: list[str] = []
        with self.pair(problems) as pair, pytest.raises(HTTPError) as raised:
            pair.post("generate", {"rid": "r", "sampling_params": {"max_new_tokens": 1, **MALFORMED[0]}})
        assert raised.value.code == 400 and not problems
        assert list(pair.as_json()["prefill"]) == ["HTTP 400: "]

    def test_messages_of_the_prefill_server_are_counted_without_ids(self, part: type[FakePart], monkeypatch: pytest.MonkeyPatch) -> None:
        def says(_: FakePart, body: Mapping[str, Any]) -> None:
            raise refused(500, f"room {body['bootstrap_room']} of {body['rid']}: the decode side ended it")

        monkeypatch.setattr(part, "prefill_says", says)
        with self.pair([]) as pair:
            for rid in ("one", "two"):
                assert pair.post("generate", {"rid": rid, "sampling_params": {"max_new_tokens": 1}})["output_ids"] == [1]
        assert pair.as_json()["prefill"] == {"HTTP 500: room ROOM of RID: the decode side ended it": 2}
        assert "2 times HTTP 500" in pair.table()

    @pytest.mark.parametrize("gone", [True, False])
    def test_a_prefill_server_that_is_gone_or_does_not_end_is_a_problem(
        self, part: type[FakePart], monkeypatch: pytest.MonkeyPatch, gone: bool
    ) -> None:
        free = threading.Event()

        def says(_: FakePart, body: Mapping[str, Any]) -> None:
            if gone:
                raise ConnectionError("no route")
            free.wait(10)

        monkeypatch.setattr(part, "prefill_says", says)
        monkeypatch.setattr(disaggregated, "PREFILL_SECONDS", 5.0 if gone else 0.01)
        problems: list[str] = []
        with self.pair(problems) as pair:
            pair.post("generate", {"rid": "r", "sampling_params": {"max_new_tokens": 1}})
            free.set()
        told = "ConnectionError: no route" if gone else "did not end within 0.01 s after the decode server"
        assert problems == [f"r at the prefill server: {told}"]

    @pytest.mark.parametrize(("end", "grew"), [(114, False), (116, True)])
    def test_memory_that_grew_since_servers_were_warm_is_a_problem(
        self, part: type[FakePart], monkeypatch: pytest.MonkeyPatch, end: int, grew: bool
    ) -> None:
        monkeypatch.setattr(disaggregated, "WARM_SECONDS", 0.0)
        problems: list[str] = []
        with self.pair(problems) as pair:
            while len(pair.as_json()["resident_mb"]["warm"]) < 2:
                time.sleep(0.01)
            monkeypatch.setattr(part, "memory", end)
            pair.check_memory()
        assert problems == [f"the {role} server's memory grew from 100 to 116 MB" for role in disaggregated.ROLES if grew]
        assert f"{end} MB resident (100 after 0 s, +{end - 100}.0%)" in pair.table()

    def test_a_run_too_short_to_compare_memory_says_so(self, part: type[FakePart]) -> None:
        with self.pair([]) as pair:
            pair.check_memory()
        assert "not measured before" in pair.table()


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([], ""),
        ([{"error": {"message": "no room"}}], "no room"),
        ([{"meta_info": {"finish_reason": {"type": "abort", "message": "given up"}}}], "given up"),
        ([{"meta_info": {"finish_reason": None}}, {"meta_info": {"finish_reason": {"type": "length"}}}], disaggregated.ANSWERED),
        ([{"meta_info": {"finish_reason": None}}], ""),
    ],
)
def test_the_last_chunk_of_a_stream_is_the_outcome_at_the_prefill_server(chunks: list[dict[str, Any]], told: str) -> None:
    class Streaming:
        def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
            yield from chunks

    assert disaggregated.prefill_outcome(Streaming(), "generate", {"stream": True}) == told  # type: ignore[arg-type]


def test_memory_is_that_of_a_process_group() -> None:
    assert disaggregated.resident_bytes(os.getpgid(0)) > 10**6 and disaggregated.resident_bytes(None) == 0
