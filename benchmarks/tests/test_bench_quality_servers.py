"""The servers of a quality run, their requests, and the report of a run."""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launched import LaunchedServer, Launches
from transformers import AutoConfig, Qwen3Config

from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines import SELECTORS
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality import command
from sglang_ext_bench.quality.arms import FULL, QualityArm, build_arms, collect_answers
from sglang_ext_bench.quality.named_method import NamedMethod
from sglang_ext_bench.quality.options import QualityConfig, add_arguments, config_from
from sglang_ext_bench.quality.reporting.plots import by_bytes, by_speed, write
from sglang_ext_bench.quality.reporting.results import ArmQuality, Results
from sglang_ext_bench.quality.server_measurements import (
    compressed_share,
    score_answer,
    tokens_per_second,
)
from sglang_ext_bench.server import RequestClient

TOPS = 3
OUTPUT = 4
SHAPES = Qwen3Config(
    vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
# Keys and values of a token, in float32.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


pytestmark = pytest.mark.usefixtures("checked_here")


def config(*words: str) -> QualityConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(["--model", "m", "--prompts", "p", "--output-len", str(OUTPUT), *words]))


class FakeServer(RequestClient):
    """Answers like a server of a mode. Each token is 5; a lossy server answers 6 from token 2 on. Compressed KV has half of the bytes.

    Attributes:
        mode: Value of ``--kv-mode``.
        asked: Bodies of the requests, except those during which bytes are measured.
        measured: Prompt tokens of those requests.
    """

    def __init__(self, mode: str) -> None:
        super().__init__(port=1)
        self.mode, self.asked, self.measured, self.flushed, self.held = mode, [], [], 0, 0
        self._lock, self._read = threading.Lock(), threading.Event()

    def flush_cache(self) -> None:
        self.flushed += 1

    def request(self, path: str, body: Any = None, timeout: float | None = None) -> str:
        assert path == "metrics"
        if self.held:
            self._read.set()
        return f'sglang_ext:compressed_bytes{{model_name="m"}} {self.held}'

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        if sampling.get("ignore_eos") and sampling["max_new_tokens"] > OUTPUT:
            self.measured.append(len(body["input_ids"]))
            self.held = len(body["input_ids"]) * TOKEN_BYTES // 2
            assert self._read.wait(10)
            self.held = 0
            return {"output_ids": [5], "meta_info": {}}
        with self._lock:
            self.asked.append(body)
        if "logprob_start_len" in body:
            return {"meta_info": self._scored(body)}
        tokens = body["sampling_params"]["max_new_tokens"]
        ids = [6 if self.mode == "lossy" and index >= 2 else 5 for index in range(tokens)]
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if self.mode == "verified":
            histogram = {"kv_accept_histogram": [0, 0, 1], "kv_offer_histogram": [0, 0, 0, 1]}
            meta |= {"kv_verifies": 1, "kv_drafts": 3, "kv_accepted": 2, "kv_accept_length": 3.0, **histogram}
        if body.get("top_logprobs_num"):
            wrong = -3.0 if self.mode != "lossy" else -0.1
            meta["output_top_logprobs"] = [[[-0.2, 5, None], [wrong, 6, None]]] * tokens
        return {"output_ids": ids, "meta_info": meta, "text": '{"a": 1}'}

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = body["input_ids"][body["logprob_start_len"] + 1 :]
        return {
            "input_token_logprobs": [[None, 0, None], *([-0.2, token, None] for token in answer)],
            "input_top_logprobs": [None, *([[[-0.2, 5, None], [-3.0, 6, None]]] * len(answer))],
        }


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model m has two layers of two KV heads of 16 channels."""
    read = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda model, **how: SHAPES if model == "m" else read(model, **how))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("acceptance", ["verified-snapkv-0.5-x8", "verified-snapkv-0.5-x4"]),
        ("kl", ["lossy-snapkv-0.5", "verified-snapkv-0.5-x8", "full"]),
        ("acceptance,functional", ["lossy-snapkv-0.5", "verified-snapkv-0.5-x8", "verified-snapkv-0.5-x4", "full"]),
        ("attention", []),
    ],
)
def test_only_servers_that_the_parts_need_start_and_stock_is_last(parts, expected):
    found = build_arms(config("--parts", parts, "--budget", "0.5", "--draft-length", "8,4"))
    assert [arm.name for arm in found] == expected


@pytest.mark.parametrize(
    ("compressor", "modes", "parts", "mode"),
    [
        ("hack --kv-prefill quantized", "verified", "kl", "lossy"),
        ("snapkv,hack --kv-prefill quantized", "lossy,verified", "acceptance", "lossy"),
        ("verify-guided", "lossy", "kl,attention", "verified"),
    ],
)
def test_a_compressor_of_which_nothing_would_be_measured_is_refused(compressor, modes, parts, mode):
    asked = config("--compressor", compressor, "--modes", modes, "--parts", parts)
    with pytest.raises(CommandError, match=f"this method runs only in mode {mode}, so that nothing would be measured; pass --modes {mode} and"):
        build_arms(asked)


def test_servers_get_their_mode_and_seeds_make_all_deterministic():
    lossy, verified, full = build_arms(config("--parts", "divergence", "--budget", "0.5", "--draft-length", "8"))
    assert lossy.arguments == ("--kv-mode", "lossy", "--kv-compressor", "snapkv", "--kv-budget", "0.5")
    assert verified.arguments[1] == "verified" and verified.arguments[-2:] == ("--kv-draft-length", "8")
    assert full.arguments == ("--kv-mode", "full")
    _, verified, full = build_arms(config("--parts", "kl", "--budget", "0.5", "--kv-arg", "--kv-bits 2"))
    assert verified.arguments[-2:] == ("--kv-bits", "2") and full.arguments == ("--kv-mode", "full")
    assert "--enable-deterministic-inference" in config().common_server_arguments
    assert "--enable-deterministic-inference" not in config("--temperature", "0").common_server_arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "kl,bytes"), "bytes.*acceptance, kl"),
        (("--parts", "kl", "--temperature", "0.7"), "add 0 to --temperature"),
        (("--budget", "1.5"), r"--budget 1.5: .*\(0, 1\]"),
        (("--tasks", "0"), "--tasks 0: --parts functional needs at least 1, or a --benchmark"),
        (("--output-len", "0"), "--output-len 0: must be at least 1"),
        (("--compressor", ","), "--compressor is empty"),
        (("--draft-length", "0"), "--draft-length '0'"),
    ],
)
def test_an_invalid_value_is_refused_with_its_option(words, message):
    with pytest.raises(CommandError, match=message):
        config(*words)


def test_only_functional_tasks_go_without_prompts():
    assert QualityConfig("m", ("functional",), None, ("snapkv",), (0.5,)).prompts is None
    with pytest.raises(CommandError, match="--parts kl needs --prompts"):
        QualityConfig("m", ("kl",), None, ("snapkv",), (0.5,))


def test_equal_requests_of_all_servers_get_equal_seeds_and_greedy_ones_none():
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3, 4, 5))]
    wanted = config("--parts", "divergence", "--seed", "7", "--concurrency", "1")
    for arm in (FULL, QualityArm("lossy", "snapkv", 0.5)):
        server = FakeServer(arm.mode)
        answers = collect_answers(wanted, arm, server, prompts, [])
        seeds = [body["sampling_params"].get("sampling_seed") for body in server.asked]
        # The measurement of bytes empties the cache, too.
        assert seeds == [None, None, 7, 8] and server.flushed == (2 if arm == FULL else 3)
        assert set(answers.prompts) == {0.0, 0.7} and not answers.tasks


def test_kept_caches_are_emptied_once():
    server = FakeServer("full")
    collect_answers(config("--parts", "divergence", "--keep-cache"), FULL, server, [Prompt("a", (1, 2))], [])
    assert server.flushed == 1


def test_further_draft_lengths_measure_only_acceptance():
    arm, server = QualityArm("verified", "snapkv", 0.5, 4), FakeServer("verified")
    answers = collect_answers(config("--draft-length", "8,4"), arm, server, [Prompt("a", (1, 2))], [])
    assert not answers.tasks and all("top_logprobs_num" not in body for body in server.asked)


@pytest.mark.parametrize(("lengths", "measured"), [((2, 900, 600), 600), ((2, 9), 9)])
def test_bytes_are_those_of_the_shortest_context_that_is_long_enough(lengths, measured):
    prompts = [Prompt(str(length), (1,) * length) for length in lengths]
    server = FakeServer("lossy")
    assert collect_answers(config("--parts", "divergence"), QualityArm("lossy", "snapkv", 0.5), server, prompts, []).bytes_share == 0.5
    assert server.measured == [measured]


def test_a_failed_request_fails_its_server():
    class Refusing(FakeServer):
        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            raise ConnectionError("gone")

    with pytest.raises(CommandError, match="at temperature 0 1 of 1 requests failed; request 0: .*gone"):
        collect_answers(config("--parts", "divergence"), FULL, Refusing("full"), [Prompt("a", (1, 2))], [])


class Metered(RequestClient):
    """A server that answers a request after all pages of its metrics were read."""

    def __init__(self, *pages: str) -> None:
        super().__init__(port=1)
        self.pages, self.flushed, self.read = list(pages), 0, threading.Event()

    def flush_cache(self) -> None:
        self.flushed += 1

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self.read.wait(10)
        return {"output_ids": [5], "meta_info": {}}

    def request(self, path: str, body: Any = None, timeout: float | None = None) -> str:
        page = self.pages.pop(0)
        if not self.pages:
            self.pages = [page]
            self.read.set()
        return page


PAGE = '# HELP x\nsglang_ext:compressed_bytes{model_name="m"} %s\nsglang_ext:query_bytes{model_name="m"} 9e9\n'


def test_the_share_of_bytes_is_the_most_that_the_server_reports_while_it_answers():
    server = Metered(PAGE % "0.0", PAGE % "300.0", PAGE % "2.5e+02", PAGE % "0.0")
    assert compressed_share(server, (1, 2, 3, 4, 5, 6), 8, 100) == 0.5 and server.flushed == 1


def test_a_server_that_reports_no_copy_has_no_share():
    assert compressed_share(Metered("sglang:x 1\n"), (1, 2), 8, 100) is None


def test_a_request_that_fails_while_bytes_are_measured_is_an_error():
    class Refusing(Metered):
        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            raise ConnectionError("gone")

    with pytest.raises(CommandError, match="bytes of the compressed KV could not be measured: .*gone"):
        compressed_share(Refusing(PAGE % "1.0"), (1, 2), 8, 100)


def test_stock_scores_each_token_of_an_answer_after_its_prompt():
    server = FakeServer("full")
    scored = score_answer(server, Prompt("a", (1, 2, 3)), (5, 6), TOPS)
    assert scored == (((5, -0.2), (6, -3.0)),) * 2
    assert server.asked[0]["input_ids"] == [1, 2, 3, 5, 6] and server.asked[0]["logprob_start_len"] == 2


def test_scores_of_other_tokens_are_refused():
    class Shifted(FakeServer):
        def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
            return super()._scored(body) | {"input_token_logprobs": [[None, 0, None], [-0.1, 9, None]]}

    with pytest.raises(CommandError, match="scored 1 other tokens than the 2 answered to a"):
        score_answer(Shifted("full"), Prompt("a", (1,)), (5, 6), TOPS)


class Launched(LaunchedServer):
    """A process that answers as ``server``."""

    def __init__(self, server: FakeServer, *given: Any) -> None:
        super().__init__(*given)
        self.flush_cache, self.request, self.post = server.flush_cache, server.request, server.post  # type: ignore[method-assign]


@pytest.fixture
def run(launches: Launches, tmp_path: Path, tiny: Path, char_tokenizer: None):
    """Runs the command with fake servers. Returns the exit code, the JSON report and the first bytes of the plot."""

    def go(*words: str, server: type[FakeServer] = FakeServer) -> tuple[int, dict[str, Any], bytes]:
        launches.make = lambda flags, env, log: Launched(server(flags[flags.index("--kv-mode") + 1]), flags, env, log)
        prompts = tmp_path / "p.jsonl"
        prompts.write_text("".join(f'{{"text": "{text * 20}"}}\n' for text in ("one ", "two ")))
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        common = ["--model", str(tiny), "--prompts", str(prompts), "--output-len", str(OUTPUT), "--budget", "0.5"]
        common += ["--task-tokens", "60", "--tasks", "1", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
        code = command.run(parser.parse_args([*common, *words]))
        plot = tmp_path / "r.png"
        return code, json.loads((tmp_path / "r.json").read_text()), plot.read_bytes()[:4] if plot.exists() else b""

    return go


def test_a_run_reports_the_loss_of_lossy_and_none_of_verified(run, capsys):
    code, report, plot = run("--draft-length", "3")
    lossy, verified, full = report["arms"]
    assert code == 0 and plot == b"\x89PNG" and report["failed"] == {}
    assert lossy["kl"]["per_step"] > 0.1 and verified["kl"]["per_step"] == full["kl"]["per_step"] == 0
    assert lossy["first_differences"]["0"]["indices"] == [2, 2] and full["first_differences"] == {}
    assert verified["first_differences"]["0.7"]["identical"] == 2
    # Two prompts, each with one verification that accepts 2 of 3.
    assert verified["acceptance"]["0"]["rate"] == pytest.approx(4 / 6) and lossy["acceptance"] == {}
    assert full["functional"]["0"] == {"needle": 0.0, "repetition": 0.0, "json": 1.0, "python": 0.0}
    assert [each["bytes_share"] for each in report["arms"]] == [0.5, 0.5, 1.0]
    assert report["attention"] and all(0 < each["mean"] <= each["worst"] for each in report["attention"])
    printed = capsys.readouterr().out
    for title in ("Acceptance", "KL divergence", "First token", "Share of tasks done", "attention outputs"):
        assert title in printed
    assert "times stock's own KL divergence: holds" in printed


def test_a_subset_of_parts_measures_nothing_else(run):
    code, report, _ = run("--parts", "divergence", "--temperature", "0")
    assert code == 0 and report["attention"] == []
    for each in report["arms"]:
        assert each["kl"] is None and not each["acceptance"] and not each["functional"]


def test_verified_decoding_above_the_noise_fails_the_run(run, capsys):
    class Wrong(FakeServer):
        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            found = super().post(path, body)
            if self.mode == "verified" and body.get("top_logprobs_num"):
                found["meta_info"]["output_top_logprobs"] = [[[-3.0, 5, None], [-0.2, 6, None]]] * OUTPUT
            return found

    code, report, _ = run("--parts", "kl", server=Wrong)
    assert code == 1 and report["above_noise"] == ["verified-snapkv-0.5-x4"]
    assert "does not hold for verified-snapkv-0.5-x4" in capsys.readouterr().out


def test_flags_that_a_server_would_refuse_end_the_run_before_one_starts(run):
    class Never(FakeServer):
        def __init__(self, mode: str) -> None:
            pytest.fail("a server starts")

    with pytest.raises(CommandError, match="verified-snapkv-0.5-x100 cannot start: --kv-draft-length is 100"):
        run("--draft-length", "100", server=Never)
    with pytest.raises(CommandError, match="--port 70000"):
        run("--port", "70000", server=Never)


def test_a_server_that_fails_costs_its_own_figures_alone(run):
    class Broken(FakeServer):
        def flush_cache(self) -> None:
            if self.mode == "lossy":
                raise CommandError("the server ended\nits log")

    code, report, _ = run("--parts", "divergence", server=Broken)
    assert code == 1 and list(report["failed"]) == ["lossy-snapkv-0.5"]
    assert [each["name"] for each in report["arms"]] == ["verified-snapkv-0.5-x4", "full"]


def test_a_server_that_does_not_report_bytes_is_drawn_at_its_budget():
    arm = QualityArm("lossy", "snapkv", 0.25)
    assert (ArmQuality(arm, None).share, ArmQuality(arm, 0.3).share) == (0.25, 0.3)
    (panel,) = by_bytes(Results((ArmQuality(arm, None, functional={0.0: {"needle": 0.5}}),)))
    assert panel.lines[0].points == ((0.25, 0.5),)


def test_quality_is_drawn_over_speed_where_stocks_is_known():
    arm = QualityArm("lossy", "snapkv", 0.25)
    fast = ArmQuality(arm, 0.3, functional={0.0: {"needle": 0.5}}, speed=30.0)
    assert by_speed(Results((fast,))) == []
    (panel,) = by_speed(Results((fast, ArmQuality(FULL, speed=20.0))))
    assert panel.lines[0].points == ((1.5, 0.5),)


class Timed(RequestClient):
    """A server that needs a fixed time for each token."""

    def __init__(self, of_token: float, of_first: float = 0.0) -> None:
        super().__init__(port=1)
        self.of_token, self.of_first, self.asked = of_token, of_first, []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body["sampling_params"]["max_new_tokens"]
        self.asked.append(tokens)
        time.sleep(self.of_first * (len(self.asked) == 1) + self.of_token * tokens)
        return {"output_ids": [5] * tokens, "meta_info": {}, "text": ""}


def test_speed_is_that_of_decoding_from_cached_prompts(monkeypatch):
    passed = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: passed.__setitem__(0, passed[0] + seconds))
    slow, quick = (tokens_per_second(Timed(each, 0.2), [Prompt("a", (1, 2))], 21, 1) for each in (0.03, 0.006))
    assert (slow, quick) == (pytest.approx(1 / 0.03), pytest.approx(1 / 0.006))
    assert tokens_per_second(Timed(0.0), [Prompt("a", (1, 2))], 1, 1) is None


def test_a_request_that_fails_while_speed_is_measured_is_an_error():
    class Refusing(Timed):
        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            raise ConnectionError("gone")

    with pytest.raises(CommandError, match="speed could not be measured: 1 of 1 requests failed; .*gone"):
        tokens_per_second(Refusing(0.0), [Prompt("a", (1, 2))], 4, 1)


def test_nothing_is_drawn_of_nothing(tmp_path):
    write(tmp_path / "none.png", Results(()), "m")
    assert by_bytes(Results(())) == by_speed(Results(())) == [] and not (tmp_path / "none.png").exists()


def test_methods_that_pack_keep_all_tokens_and_have_bits():
    (first, *_) = build_arms(config("--compressor", "verify-guided", "--budget", "0.5", "--parts", "kl"))
    assert first.mode == "verified", "nothing lossy is served with it"
    found = build_arms(config("--compressor", "kivi:2,snapkv+int8", "--budget", "0.5,0.25", "--parts", "kl"))
    assert [(each.mode, each.compressor, each.budget) for each in found[:2]] == [("lossy", "kivi:2", 1), ("verified", "kivi:2", 1)]
    assert found[0].arguments[2:8] == ("--kv-compressor", "kivi", "--kv-bits", "2", "--kv-budget", "1")
    assert [each.budget for each in found[2:-1]] == [0.5, 0.5, 0.25, 0.25] and "--kv-bits" not in found[2].arguments


@pytest.mark.usefixtures("own_methods")
def test_baselines_have_short_names():
    (arm, *_) = build_arms(config("--compressor", "tova", "--budget", "0.5", "--parts", "kl"))
    assert arm.compressor == "tova" and arm.arguments[2:4] == ("--kv-compressor", SELECTORS["tova"])


@pytest.mark.parametrize("name", ["gzip", "kivi:3", "kivi:few", "snapkv:4"])
def test_a_method_that_there_is_not_is_refused_before_a_server_starts(name):
    with pytest.raises(CommandError, match=f"--compressor '{name}'"):
        config("--compressor", name)


def test_flags_after_a_name_go_to_its_own_servers_alone():
    names = "hack:2 --kv-partition 32,hack --kv-prefill quantized,kivi"
    found = build_arms(config("--compressor", names, "--parts", "kl", "--draft-length", "8"))
    assert [(arm.mode, arm.compressor) for arm in found[:-1]] == [
        ("lossy", "hack:2 --kv-partition 32"),
        ("verified", "hack:2 --kv-partition 32"),
        ("lossy", "hack --kv-prefill quantized"),
        ("lossy", "kivi"),
        ("verified", "kivi"),
    ]
    assert found[0].arguments[:8] == ("--kv-mode", "lossy", "--kv-compressor", "hack", "--kv-bits", "2", "--kv-partition", "32")
    assert not {"--kv-partition", "--kv-prefill"} & {*found[3].arguments, *found[4].arguments}


def test_a_flag_after_a_name_may_have_its_value_behind_an_equals_sign():
    assert NamedMethod.parse("hack:2 --kv-partition=32") == NamedMethod.parse("hack:2 --kv-partition 32")
    assert NamedMethod.parse("hack --kv-partition=32").partition == 32
    assert not NamedMethod.parse("hack --kv-prefill=quantized").supports_verified


def test_prompts_on_codes_are_left_out_of_errors_that_are_of_exact_prompts():
    assert NamedMethod.parse("hack --kv-partition 32").runs_without_server
    assert not NamedMethod.parse("hack --kv-prefill quantized").runs_without_server


def test_modes_that_are_not_requested_have_no_server():
    given = ("--parts", "kl", "--budget", "0.5", "--draft-length", "8")
    assert [arm.mode for arm in build_arms(config(*given, "--modes", "lossy"))] == ["lossy", "full"]
    assert [arm.mode for arm in build_arms(config(*given, "--modes", "verified"))] == ["verified", "full"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--compressor", "hack --kv-partition 48"), "--kv-partition is 48"),
        (("--compressor", "kivi --kv-partition 32"), "kivi has none to choose"),
        (("--compressor", "hack --kv-partition=48"), "--kv-partition is 48"),
        (("--compressor", "hack --kv-partition many"), "takes a number"),
        (("--compressor", "hack --kv-partition"), "takes a number"),
        (("--compressor", "hack --kv-bits=2"), "pass bits after a colon"),
        (("--parts", "attention", "--kv-arg=--kv-partition 32"), "write it after the method"),
        (("--parts", "kl", "--modes", "full"), "--modes 'full'"),
        (("--parts", "acceptance", "--modes", "lossy"), "needs verified servers"),
        (("--parts", "attention", "--tail", "none"), "--tail 'none'"),
    ],
)
def test_an_invalid_name_is_refused(words, message):
    with pytest.raises(CommandError, match=message):
        config(*words)
