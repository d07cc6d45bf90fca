"""Whole runs of a soak against servers that answer at once."""

from pathlib import Path
from typing import Any

import pytest
from bench_helpers import PROMPT
from launched import Launches
from soak_helpers import SoakServer, WrongLast, run

from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.soaking import soak
from sglang_ext_bench.soaking.request_options import OPTIONS
from sglang_ext_bench.soaking.traffic import cases

pytestmark = pytest.mark.usefixtures("checked_here", "quick_sleep")


@pytest.fixture
def server(launches: Launches, char_tokenizer: None) -> Launches:
    launches.make = SoakServer
    return launches


class TestRun:
    def test_right_answers_pass_and_are_counted(self, server: Launches, tmp_path: Path) -> None:
        code, totals = run(tmp_path, "--minutes", "5", "--requests", "60")
        assert (code, totals["problems"], totals["retractions"]) == (0, [], 0)
        assert totals["outcomes"]["answered"] > 0 and totals["outcomes"]["refused"] > 0
        assert totals["streamed"] > 0 and totals["drafts"] == 2 * totals["accepted"] > 0
        outcomes = sum(row.get(name, 0) for row in totals["options"].values() for name in totals["outcomes"])
        assert outcomes == sum(totals["outcomes"].values()) and len(totals["requests"]) == len(OPTIONS)

    def test_strict_checks_reach_the_verified_server_only(
        self, server: Launches, tmp_path: Path
    ) -> None:
        run(tmp_path, "--pool-tokens", "4500")
        stock, verified = server.made
        assert stock.env == {} and verified.env == soak.STRICT_CHECKS
        assert "4500" in verified.flags and "4500" not in stock.flags

    def test_wrong_answer_ends_the_run(
        self, server: Launches, tmp_path: Path
    ) -> None:
        server.make = WrongLast
        code, totals = run(tmp_path, "--minutes", "5")
        assert code == 1
        assert any("differs from stock at token" in problem for problem in totals["problems"])

    def test_tokens_that_an_idle_server_still_holds_fail_the_run(
        self, server: Launches, tmp_path: Path
    ) -> None:
        class Leaking(SoakServer):
            leaked = 7

        server.make = Leaking
        code, totals = run(tmp_path)
        assert code == 1 and "still holds 7 used tokens" in totals["problems"][0]

    def test_the_requested_number_of_requests_is_sent(self, server: Launches, tmp_path: Path) -> None:
        code, totals = run(tmp_path, "--minutes", "5", "--requests", "40")
        assert (code, sum(totals["outcomes"].values()), len(server.made)) == (0, 40, 2)

    def test_request_options_may_be_left_out(self, server: Launches, tmp_path: Path) -> None:
        totals = run(tmp_path, "--leave-out", "greedy,tools")[1]
        assert len(totals["requests"]) == len(OPTIONS) - 2 and not {"greedy", "tools"} & totals["options"].keys()

    def test_with_url_and_stock_url_no_server_is_started(
        self, server: Launches, tmp_path: Path
    ) -> None:
        tested, stock = (server.listen(WrongLast((), env, tmp_path)) for env in (soak.STRICT_CHECKS, {}))
        code, totals = run(tmp_path, "--minutes", "5", "--url", tested, "--stock-url", stock)
        assert code == 1 and "differs from stock" in totals["problems"][0], "the tested server is compared with the stock one"
        supported = [option.name for option in OPTIONS if not option.needed_settings]
        assert (totals["flags"], [each["name"] for each in totals["requests"]]) == ({}, supported)
        assert not server.made, "none is started"

    def test_a_lossy_server_is_not_compared_with_stock(
        self, server: Launches, tmp_path: Path
    ) -> None:
        class WrongFirst(SoakServer):
            def break_answer(self, ids: list[int]) -> None:
                ids[:1] = [0] * len(ids[:1])

        server.make = WrongFirst
        code, totals = run(tmp_path, "--mode", "lossy", "--kv", "--kv-compressor hack --kv-bits 2")
        (lossy,) = server.made
        assert (code, totals["mode"]) == (0, "lossy") and totals["outcomes"]["answered"] > 0
        assert lossy.env == soak.STRICT_CHECKS and lossy.flags[lossy.flags.index("--kv-mode") + 1] == "lossy"

    def test_a_lossy_answer_that_is_too_short_ends_the_run(
        self, server: Launches, tmp_path: Path
    ) -> None:
        class Short(SoakServer):
            def break_answer(self, ids: list[int]) -> None:
                del ids[-1:]

        server.make = Short
        code, totals = run(tmp_path, "--minutes", "5", "--mode", "lossy", "--kv", "--kv-compressor hack")
        assert code == 1 and any("tokens" in problem for problem in totals["problems"])

    def test_two_lossy_servers_are_refused(self, server: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["soak", "--model", "m", "--prompts", "p", "--mode", "lossy", "--apart"]) != 0
        assert "--apart with --mode lossy" in capsys.readouterr().err and not server.made

    def test_each_reference_finds_an_idle_server(self) -> None:
        class Busy(SoakServer):
            idle = False

            def flush_cache(self) -> None:
                self.idle = True

            def post(self, path: str, body: dict[str, Any]) -> Any:
                assert self.idle
                self.idle = False
                return super().post(path, body)

        answers = soak.reference_answers(Busy((), {}, Path("log")), (PROMPT,), 4)  # type: ignore[arg-type]
        prompts, answers = answers
        assert len(prompts) == 4 and answers.keys() == {(case.prompt, case.option.name) for case in cases(1, 3)}

    def test_reference_that_stock_refuses_is_named(self) -> None:
        class Refusing(SoakServer):
            def post(self, path: str, body: dict[str, Any]) -> Any:
                raise ConnectionError("gone")

        with pytest.raises(CommandError, match="stock, greedy, p: ConnectionError: gone; .* pass --leave-out greedy"):
            soak.reference_answers(Refusing((), {}, Path("log")), (PROMPT,), 4)  # type: ignore[arg-type]


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
        self, server: Launches, tmp_path: Path, more: tuple[str, ...], overlapped: bool
    ) -> None:
        code, totals = run(tmp_path, *more)
        stock, verified = server.made
        assert (code, totals["overlapped"]) == (0, overlapped)
        assert (soak.PLAIN_LOOP not in stock.flags) == (soak.PLAIN_LOOP not in verified.flags) == overlapped

    def test_a_server_that_runs_the_other_one_is_refused(self) -> None:
        with pytest.raises(CommandError, match="runs SGLang's plain loop instead of the overlapped one"):
            soak.check_loop(SoakServer((soak.PLAIN_LOOP,), {}, Path("log")), True)  # type: ignore[arg-type]

    def test_flags_of_both_reach_both(self, server: Launches, tmp_path: Path) -> None:
        run(tmp_path, "--server-arg=--attention-backend triton")
        assert all(each.flags[-1] == "triton" or "triton" in each.flags for each in server.made)


class TestForcedRetraction:
    def test_variables_of_the_verified_server(self) -> None:
        added = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
        assert soak.server_environment(7) == soak.STRICT_CHECKS | added

    def test_less_than_one_step_is_refused_before_a_server_starts(self, server: Launches) -> None:
        assert main(["soak", "--model", "m", "--prompts", "p", "--force-retraction", "0"]) == 2
        assert server.made == []

    @pytest.mark.parametrize(("retractions", "code"), [(0, 1), (1, 0)])
    def test_run_fails_if_none_happened(
        self, server: Launches, tmp_path: Path, retractions: int, code: int
    ) -> None:
        server.make = type("Retracting", (SoakServer,), {"retractions": retractions})
        found, totals = run(tmp_path, "--force-retraction", "3")
        assert (found, bool(totals["retractions"])) == (code, bool(retractions))
        assert any("no request was retracted" in problem for problem in totals["problems"]) == bool(code)
