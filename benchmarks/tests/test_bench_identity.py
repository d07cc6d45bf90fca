"""``sglang-ext-bench identity`` without a server: its options, and the arms of a run."""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import make_config, parse
from launched import LaunchedServer, Launches

from sglang_ext.config.method_options import resolve_budget
from sglang_ext.tools import CommandError
from sglang_ext_bench import report
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.comparing import arms, identity
from sglang_ext_bench.comparing.arms import control_arms, stock_arm, verified_arms
from sglang_ext_bench.comparing.compare import Comparison, LogprobDifference
from sglang_ext_bench.comparing.identity_config import config_from
from sglang_ext_bench.comparing.verdict import Rules, judge
from sglang_ext_bench.prompts import Prompt

pytestmark = pytest.mark.usefixtures("checked_here")


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"output_len": 0}, "--output-len 0"),
            ({"concurrency": (1, 0)}, "--concurrency 0"),
            ({"concurrency": ()}, "--concurrency 0"),
            ({"limit": -1}, "--limit -1"),
            ({"budgets": (1.5,)}, "--budget 1.5"),
            ({"port": 99999}, "--port 99999: must be from 1 to 65535, or 0"),
            ({"port": -1}, "--port -1"),
            ({"compressors": ()}, "--compressor has no names"),
            ({"temperature": -1.0}, "--temperature -1"),
            ({"temperature": 0.8}, "--seed None"),
            ({"seed": 1}, "--seed 1"),
            ({"temperature": 0.8, "seed": 1, "margin_tolerance": 0.1}, "greedy"),
            ({"margin_tolerance": -1.0}, "--margin-tolerance -1"),
            ({"margin_tolerance": float("nan")}, "--margin-tolerance nan"),
            ({"margin_tolerance": "auto"}, "--control-arg"),
            ({"margin_tolerance": "auto", "control_arms": (("-x",),), "dtype": "bfloat16"}, "float32"),
        ],
    )
    def test_what_cannot_be_compared_is_refused(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(CommandError, match=message):
            make_config(**changes)

    def test_arms_differ_only_in_kv_flags(self) -> None:
        config = make_config(compressors=("quant", "evict"), budgets=(0.5, 0.25), draft_length=8)
        assert stock_arm(config).arguments == ("--kv-mode", "full")
        found = verified_arms(config)
        names = [arm.name.removeprefix("verified-") for arm in found]
        assert names == ["quant-0.5", "quant-0.25", "evict-0.5", "evict-0.25"]
        expected = "--kv-mode verified --kv-compressor evict --kv-budget 0.25 --kv-draft-length 8"
        assert " ".join(found[-1].arguments) == expected

    def test_control_runs_two_stock_servers(self) -> None:
        config = make_config(control=True, compressors=(), budgets=())
        found = [stock_arm(config), *control_arms(config), *verified_arms(config)]
        assert [arm.arguments for arm in found] == [(), ()]

    def test_seed_asks_for_deterministic_servers_unless_told_otherwise(self) -> None:
        words = ("--control", "--temperature", "0.8", "--seed", "1")
        flag = "--enable-deterministic-inference"
        assert flag in config_from(parse(*words)).common_server_arguments
        without = config_from(parse(*words, "--no-deterministic"))
        assert flag not in without.common_server_arguments
        assert without.sampling.as_json(4)["sampling_seed"] == 1

    def test_lists_and_server_arguments_are_split(self) -> None:
        words = ("--compressor", "a,b", "--budget", "0.5,0.25", "--concurrency", "1,8")
        config = config_from(parse(*words, "--server-arg", "--max-total-tokens 64", "--server-arg=-x"))
        assert (config.compressors, config.budgets) == (("a", "b"), (0.5, 0.25))
        assert config.concurrency == (1, 8)
        assert config.common_server_arguments[-3:] == ("--max-total-tokens", "64", "-x")

    def test_kv_arguments_are_those_of_the_verified_arms(self) -> None:
        words = ("--compressor", "a", "--budget", "0.5", "--kv-arg", "--kv-full-tier host", "--kv-arg=--kv-host-gb 3")
        config = config_from(parse(*words))
        asked = ("--kv-full-tier", "host", "--kv-host-gb", "3")
        assert verified_arms(config)[0].arguments[-4:] == asked
        assert not set(asked) & {*config.common_server_arguments, *stock_arm(config).arguments}

    def test_control_arguments_form_one_arm_and_each_control_arm_another(self) -> None:
        words = ("--compressor", "a", "--budget", "0.5", "--control-arg", "--x 1", "--control-arg=--y")
        config = config_from(parse(*words, "--control-arm", "--chunked-prefill-size 512", "--control-arm=--z 2"))
        assert [arm.arguments for arm in control_arms(config)] == [
            ("--x", "1", "--y"),
            ("--chunked-prefill-size", "512"),
            ("--z", "2"),
        ]
        assert len({arm.name for arm in control_arms(config)}) == 3

    @pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("0.5", 0.5)])
    def test_tolerance_is_a_number_or_measured(self, word: str, value: float | str) -> None:
        words = ("--control", "--control-arg=-x", "--margin-tolerance", word)
        assert config_from(parse(*words)).margin_tolerance == value

    def test_the_model_alone_is_enough(self) -> None:
        parser = argparse.ArgumentParser()
        identity.add_arguments(parser)
        config = config_from(parser.parse_args(["--model", "m"]))
        assert (config.prompts, config.output_len) == (None, 64)
        (arm,) = verified_arms(config)
        assert (arm.compressor, arm.budget) == ("snapkv", resolve_budget("snapkv", None))
        packed = config_from(parser.parse_args(["--model", "m", "--compressor", "kivi,snapkv"]))
        assert [arm.budget for arm in verified_arms(packed)] == [1.0, 0.25]
        with pytest.raises(CommandError, match="--compressor is 'zip'"):
            verified_arms(config_from(parser.parse_args(["--model", "m", "--compressor", "zip"])))

    def test_greedy_request_carries_no_seed(self) -> None:
        expected = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        assert SamplingSettings().as_json(4) == expected


class FakeServers:
    """The servers of a run, whose outputs repeat the last prompt token. It records all calls.

    Attributes:
        log: The calls.
        broken: Flags with which a server does not start.
        wrong_prompts: Last tokens of the prompts whose verified outputs are wrong.
        passed: Seconds that each request takes, on the clock of the test.
    """

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.broken: set[str] = set()
        self.wrong_prompts: set[int] = set()
        self.passed = 0.0
        self.now = 0.0

    def make(self, flags: tuple[str, ...], env: Mapping[str, str], log: Path) -> "FakeServer":
        return FakeServer(self, flags, env, log)


class FakeServer(LaunchedServer):
    def __init__(self, servers: FakeServers, flags: tuple[str, ...], env: Mapping[str, str], log: Path) -> None:
        super().__init__(flags, env, log)
        self.servers = servers
        servers.log.append(("start", flags))

    def can_start(self) -> bool:
        return not self.servers.broken & set(self.flags)

    def flush_cache(self) -> None:
        self.servers.log.append(("flush",))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        input_ids, new_tokens, top = tuple(body["input_ids"]), body["sampling_params"]["max_new_tokens"], body.get("top_logprobs_num", 0)
        self.servers.log.append(("ask", input_ids, new_tokens, top))
        self.servers.now += self.servers.passed
        # A stock server with another batch shape has log-probabilities that differ by 0.01.
        shift = 0.01 if "--chunked-prefill-size" in self.flags else 0.0
        ids, meta = [input_ids[-1]] * new_tokens, {}
        if top:
            meta["output_top_logprobs"] = [[[-0.5 - shift, 7, None], [-1.5, 8, None], [-2.5, 9, None]]] * new_tokens
        if "verified" in self.flags:
            meta |= {"kv_verifies": 4, "kv_drafts": 7, "kv_accepted": 4, "kv_accept_length": 2.0, "kv_accept_histogram": [1, 2, 1]}
            if input_ids[-1] in self.servers.wrong_prompts:
                ids[-1] = 0
        return {"output_ids": ids, "meta_info": meta}


@pytest.fixture
def fake_server(launches: Launches) -> FakeServers:
    servers = FakeServers()
    launches.make = servers.make
    return servers


class TestRun:
    prompts = (Prompt("a", (1,)), Prompt("b", (2,)), Prompt("c", (3,)))

    def run(self, tmp_path: Path, **changes: object) -> list[Comparison]:
        console = report.make_console()
        return identity.run_config(make_config(**changes), self.prompts, tmp_path, console)[0]

    def test_stock_runs_once_for_all_settings(self, fake_server: FakeServers, tmp_path: Path) -> None:
        found = self.run(tmp_path, budgets=(0.5, 0.25), concurrency=(1, 2))
        starts = [entry[1] for entry in fake_server.log if entry[0] == "start"]
        assert ["full" in arguments for arguments in starts] == [True, False, False]
        assert [each.setting.concurrency for each in found] == [1, 2, 1, 2]
        assert all(each.identical == 3 for each in found)

    def test_cold_flushes_before_each_batch(self, fake_server: FakeServers, tmp_path: Path) -> None:
        self.run(tmp_path, concurrency=(2,))
        kinds = [entry[0] for entry in fake_server.log]
        assert kinds[:6] == ["start", "flush", "ask", "ask", "flush", "ask"]

    def test_warm_sends_one_token_first(self, fake_server: FakeServers, tmp_path: Path) -> None:
        self.run(tmp_path, cache="warm")
        asked = [entry[1:] for entry in fake_server.log if entry[0] == "ask"]
        assert [entry[:2] for entry in asked[:4]] == [((1,), 1), ((1,), 4), ((2,), 1), ((2,), 4)]

    def test_arm_that_fails_spares_the_others(self, fake_server: FakeServers, tmp_path: Path) -> None:
        fake_server.broken.add("bad")
        bad, good = self.run(tmp_path, compressors=("bad", "good"))
        assert {result.error for result in bad.results} == {"verified: the server ended with code 1 while it started"}
        assert good.identical == 3

    def test_stock_arm_that_fails_ends_the_run(self, fake_server: FakeServers, tmp_path: Path) -> None:
        fake_server.broken.add("full")
        with pytest.raises(CommandError, match="the server ended"):
            self.run(tmp_path)

    def test_progress_is_told_now_and_then(
        self, fake_server: FakeServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + fake_server.now)
        fake_server.passed = arms.PROGRESS_SECONDS
        self.run(tmp_path)
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == ["stock: starting", "stock: 1 of 3 responses", "stock: 2 of 3 responses"]
        assert lines[3].startswith("stock: 3 responses")
        fake_server.passed = 0.0
        self.run(tmp_path)
        assert " of 3 responses" not in capsys.readouterr().out


class TestRefusedAtOnce:
    """Options that only the verified server or the end of the run would refuse."""

    def refused(self, capsys: pytest.CaptureFixture[str], *words: str, model: str = "m") -> str:
        assert main(["identity", "--model", model, "--prompts", "p", *words]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        (line,) = told.err.splitlines()
        return line

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (("--compressor", "foo"), "--compressor is 'foo'; allowed: "),
            (("--compressor", "foo", "--budget", "0.5"), "verified-foo-0.5 cannot start: --kv-compressor is 'foo'; allowed: "),
            (("--draft-length", "100"), "--kv-draft-length is 100; pass a whole number from 1 to 64"),
            (("--kv-arg=--kv-foo",), "unrecognized arguments: --kv-foo"),
            (("--kv-arg=--kv-full-tier host",), "pass --kv-host-gb"),
            (("--server-arg=--enable-mixed-chunk",), "cannot be combined with --enable-mixed-chunk"),
            (("--control-arm=--page-size many",), "the server control-1 cannot start: argument --page-size: invalid int"),
            (("--port", "99999"), "--port 99999"),
            (("--json", "/proc/x.json"), "--json is '/proc/x.json', which cannot be written"),
            (("--plot", "/proc/x.png"), "--plot is '/proc/x.png', which cannot be written"),
            (("--plot", "x.foo"), "--plot is 'x.foo'; a plot is one of "),
            (("--logs", "/proc/x"), "--logs is '/proc/x', to which nothing can be written"),
        ],
    )
    def test_before_a_server_starts(
        self, fake_server: FakeServers, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
    ) -> None:
        assert reason in self.refused(capsys, *words)
        assert fake_server.log == []

    def test_a_model_that_is_not_there(self, fake_server: FakeServers, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "--model /proc/nope: no such folder" in self.refused(capsys, model="/proc/nope")
        assert "this folder has no config.json" in self.refused(capsys, model=str(tmp_path))
        assert fake_server.log == []

    def test_a_folder_in_place_of_a_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "(Is a directory)" in self.refused(capsys, "--json", str(tmp_path))

    def test_an_unknown_dtype(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["identity", "--model", "m", "--dtype", "foo"])
        assert "argument --dtype: invalid choice: 'foo'" in capsys.readouterr().err


class TestControls:
    prompts = (Prompt("a", (1,)), Prompt("b", (2,)), Prompt("c", (3,)))
    controls = (("--chunked-prefill-size", "512"), ("--other",))

    def run(self, tmp_path: Path, **changes: object) -> tuple[list[Comparison], Rules]:
        return identity.run_config(make_config(**changes), self.prompts, tmp_path, report.make_console())

    def test_controls_run_before_the_verified_arms(self, fake_server: FakeServers, tmp_path: Path) -> None:
        found, _ = self.run(tmp_path, control_arms=self.controls)
        labels = [each.setting.label for each in found]
        assert labels == [
            "control --chunked-prefill-size 512, concurrency 1",
            "control --other, concurrency 1",
            "quant 0.5, concurrency 1",
        ]

    def test_auto_tolerance_is_ten_times_the_controls_largest_difference(
        self, fake_server: FakeServers, tmp_path: Path
    ) -> None:
        found, rules = self.run(tmp_path, control_arms=self.controls, margin_tolerance="auto")
        assert rules.margin_tolerance == pytest.approx(0.1)
        assert found[0].max_logprob_difference == ("a", LogprobDifference(pytest.approx(0.01), 0, 7))

    @pytest.mark.parametrize(("margin_tolerance", "failed"), [(2.0, 0), (0.5, 1), ("auto", 1)])
    def test_a_difference_is_judged_by_the_tolerance(
        self, fake_server: FakeServers, tmp_path: Path, margin_tolerance: float | str, failed: int
    ) -> None:
        fake_server.wrong_prompts.add(2)
        changes = {"control_arms": self.controls, "margin_tolerance": margin_tolerance}
        verdict = judge(*self.run(tmp_path, **changes))
        assert (verdict.failed, len(verdict.tolerated.differences), verdict.exit_code) == (failed, 1 - failed, 1)

    @pytest.mark.parametrize("logprobs", [False, True])
    def test_verified_arms_are_asked_for_logprobs_on_demand_and_stock_always(
        self, fake_server: FakeServers, tmp_path: Path, logprobs: bool
    ) -> None:
        found, _ = self.run(tmp_path, control_arms=self.controls, logprobs=logprobs)
        asked = [entry[3] for entry in fake_server.log if entry[0] == "ask"]
        assert asked == [3] * 9 + [3 if logprobs else 0] * 3
        assert (found[-1].max_logprob_difference is not None) == logprobs

    def test_control_run_compares_logprobs_of_stock_with_stock(
        self, fake_server: FakeServers, tmp_path: Path
    ) -> None:
        (found,), rules = self.run(tmp_path, control=True, compressors=(), budgets=())
        assert found.max_logprob_difference is not None and rules.judges_control

    @pytest.mark.parametrize(("wrong", "code"), [(set(), 0), ({ord("b")}, 1)])
    def test_command_writes_the_verdict_and_ends_with_its_code(
        self,
        fake_server: FakeServers,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        char_tokenizer: None,
        wrong: set[int],
        code: int,
    ) -> None:
        fake_server.wrong_prompts |= wrong
        path, prompts = tmp_path / "r.json", tmp_path / "p.jsonl"
        prompts.write_text("".join(f'{{"text": "{letter}"}}\n' for letter in "abc"))
        words = ["--model", "m", "--prompts", str(prompts), "--output-len", "4", "--compressor", "snapkv", "--budget", "0.5"]
        words += ["--dtype", "bfloat16", "--control-arm", "--chunked-prefill-size 512", "--json", str(path)]
        assert main(["identity", *words]) == code
        found = json.loads(path.read_text())
        assert found["config"]["control_arms"] == [["--chunked-prefill-size", "512"]]
        assert (found["verdict"]["holds"], found["verdict"]["noise"]["rate_holds"]) == (not code, not code)
        told = capsys.readouterr().out
        assert f"limit 1.5: {'does not hold' if code else 'holds'}" in told
        assert told.startswith("3 prompts for each of 3 servers: stock, control-1, verified-snapkv-0.5\n")
