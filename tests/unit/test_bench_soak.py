"""A whole soak against a stand-in for both servers."""

import json
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from bench_helpers import PROMPT

from sglang_ext.bench import BenchError, soak
from sglang_ext.bench.__main__ import main
from sglang_ext.bench.tally import Tally


class FakeServer:
    """Counts up from 1; ``break_answer`` may change an answer of the verified server."""

    made: list["FakeServer"] = []
    retractions = 0

    def __init__(self, model: str, flags: tuple[str, ...], log: Path, **options: Any) -> None:
        self.flags, self.env = flags, options.get("env")
        self.made.append(self)

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None: ...

    def describe_log(self) -> str:
        return "log"

    def flush_cache(self) -> None: ...

    def post_quietly(self, path: str, body: Mapping[str, Any]) -> None: ...

    def post(self, path: str, body: dict[str, Any]) -> Any:
        params = body["sampling_params"]
        if params.get("top_p", 0) > 1:
            raise HTTPError("url", 400, "top_p", Message(), None)
        answers = [self.answer(body, params["max_new_tokens"]) for _ in range(params.get("n", 1))]
        return answers if "n" in params else answers[0]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        count = body["sampling_params"]["max_new_tokens"]
        for end in range(1, count):
            chunk = self.answer(body, end)
            chunk["meta_info"]["finish_reason"] = None
            yield chunk
        yield self.answer(body, count)

    def answer(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        ids = list(range(1, count + 1))
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if self.env is not None:
            meta |= {"num_retractions": self.retractions, "kv_drafts": 2, "kv_accepted": 1}
            self.break_answer(ids)
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        return {"output_ids": ids, "meta_info": meta}

    def break_answer(self, ids: list[int]) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    monkeypatch.setattr(soak, "ServerProcess", FakeServer)
    monkeypatch.setattr(soak, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(soak, "load_prompts", lambda path, tokenizer: (PROMPT,))
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(FakeServer, "made", [])
    return FakeServer


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command for a moment; its exit code and totals."""
    path = folder / "totals.json"
    common = ("--model", "m", "--prompts", "p", "--minutes", "0.005", "--workers", "2")
    code = main(["soak", *common, "--output-len", "5", "--logs", str(folder), "--json", str(path), *words])
    return code, json.loads(path.read_text())


class TestRun:
    def test_right_answers_pass_and_are_counted(self, server: type[FakeServer], tmp_path: Path) -> None:
        code, totals = run(tmp_path)
        assert (code, totals["problems"], totals["retractions"]) == (0, [], 0)
        assert totals["outcomes"]["answered"] > 0 and totals["outcomes"]["refused"] > 0
        assert totals["streamed"] > 0 and totals["drafts"] == 2 * totals["accepted"] > 0
        assert sum(totals["options"].values()) == sum(totals["outcomes"].values())

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
        monkeypatch.setattr(FakeServer, "break_answer", lambda self, ids: ids.__setitem__(-1, 0))
        code, totals = run(tmp_path, "--minutes", "5")
        assert code == 1
        assert any("differs from stock at token" in problem for problem in totals["problems"])

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
        assert len(answers) == len(soak.OPTIONS)

    def test_reference_that_stock_refuses_is_named(self, server: type[FakeServer]) -> None:
        class Refusing(FakeServer):
            def post(self, path: str, body: dict[str, Any]) -> Any:
                raise ConnectionError("gone")

        with pytest.raises(BenchError, match="stock, greedy, p: ConnectionError: gone"):
            soak.reference_answers(Refusing("m", (), Path("log")), (PROMPT,), 4)  # type: ignore[arg-type]


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


def test_progress_shows_outcomes_and_retractions() -> None:
    tally = Tally(retractions=3)
    assert tally.progress() == "no answer yet, 3 retractions"
    tally.outcomes.update(answered=2, aborted=1)
    assert tally.progress() == "1 aborted, 2 answered, 3 retractions"
