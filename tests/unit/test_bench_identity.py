"""Identity bench without a server: comparison, acceptance maths, exit codes, prompts, responses."""

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.bench import BenchError, corpus, identity, identity_options, report
from sglang_ext.bench.__main__ import COMMANDS, main
from sglang_ext.bench.compare import (
    Acceptance,
    Comparison,
    PromptResult,
    Setting,
    acceptance,
    add_up,
    assumed_offers,
    at_least,
    compare,
    compare_prompt,
    exit_code,
    first_difference,
)
from sglang_ext.bench.generation import Generation, VerifyStats, parse_response
from sglang_ext.bench.prompts import Prompt, load_prompts
from sglang_ext.bench.client import SamplingSettings

SETTING = Setting("quant", 0.5, 1)
PROMPT = Prompt("p", (1, 2, 3))
STATS = VerifyStats(4, 7, 4, 2.0, (1, 2, 1))
tokens = st.lists(st.integers(0, 5), max_size=12)


class CharTokenizer:
    """One token per character; "<" stands for the begin token."""

    bos_token = "<"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in ("<" if add_special_tokens else "") + text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return "<" + "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"


def make_config(**changes: object) -> identity_options.IdentityConfig:
    values: dict[str, object] = {"model": "m", "prompts": Path("p"), "output_len": 4}
    values |= {"compressors": ("quant",), "budgets": (0.5,)}
    return identity_options.IdentityConfig(**(values | changes))  # type: ignore[arg-type]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    identity.add_arguments(parser)
    return parser.parse_args(["--model", "m", "--prompts", "p", "--output-len", "4", *words])


class TestFirstDifference:
    @given(tokens)
    def test_equal_outputs_have_none(self, ids: list[int]) -> None:
        assert first_difference(ids, tuple(ids)) is None

    @given(tokens, tokens)
    def test_everything_before_it_agrees_and_it_does_not(self, a: list[int], b: list[int]) -> None:
        at = first_difference(a, b)
        if at is None:
            assert a == b
        else:
            assert a[:at] == b[:at]
            assert a[at : at + 1] != b[at : at + 1]

    def test_an_output_that_ends_early_differs_at_its_end(self) -> None:
        assert first_difference([1, 2, 3], [1, 2]) == 2


class TestComparePrompt:
    def test_margin_is_the_stock_margin_at_the_first_difference(self) -> None:
        stock = Generation((1, 2, 3), margins=(9.0, 0.25, 7.0))
        result = compare_prompt(PROMPT, stock, Generation((1, 5, 6), verify=STATS))
        assert (result.identical, result.first_difference, result.margin) == (False, 1, 0.25)

    def test_difference_beyond_the_stock_output_has_no_margin(self) -> None:
        stock = Generation((1,), margins=(9.0,))
        result = compare_prompt(PROMPT, stock, Generation((1, 2), verify=STATS))
        assert (result.first_difference, result.margin) == (1, None)

    @pytest.mark.parametrize("arm", ["stock", "verified"])
    def test_failed_request_is_never_identical_and_names_its_arm(self, arm: str) -> None:
        good, bad = Generation((), verify=STATS), Generation(error="boom")
        pair = (bad, good) if arm == "stock" else (good, bad)
        result = compare_prompt(PROMPT, *pair)
        assert not result.identical
        assert result.error == f"{arm}: boom"

    @pytest.mark.parametrize("verify", [None, VerifyStats(0, 0, 0, 0.0, ())])
    def test_equal_output_that_was_not_verified_is_a_failure(self, verify: VerifyStats | None) -> None:
        ids = (1, 2, 3)
        result = compare_prompt(PROMPT, Generation(ids), Generation(ids, verify=verify))
        assert result.error is not None and "compared with stock" in result.error

    def test_fallback_with_a_reason_needs_no_counters(self) -> None:
        result = compare_prompt(PROMPT, Generation((1,)), Generation((1,), fallback="grammar"))
        assert result.identical and result.fallback == "grammar"

    def test_control_needs_no_counters(self) -> None:
        assert compare_prompt(PROMPT, Generation((1,)), Generation((1,)), needs_verify=False).identical

    def test_arms_of_unequal_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            compare(SETTING, [PROMPT], [Generation()], [], draft_length=2)


class TestAcceptance:
    def test_example_by_hand(self) -> None:
        # 4 verifies accept 0, 1, 1, 2 of the 2, 2, 2, 1 drafts offered.
        curve = acceptance(STATS, draft_length=2)
        assert curve == Acceptance(verifies=4, offered=(4, 3), accepted=(3, 1))
        assert curve.by_position == (3 / 4, 1 / 3)
        assert curve.accept_length == 2.0
        assert curve.rate == 4 / 7

    def test_offers_of_the_server_win_over_the_assumption(self) -> None:
        stats = VerifyStats(3, 4, 2, 5 / 3, (1, 2, 0), offered_histogram=(0, 2, 1))
        assert acceptance(stats, draft_length=2).offered == (3, 1)

    def test_verifies_without_drafts_count_as_one_token_each(self) -> None:
        curve = acceptance(VerifyStats(3, 0, 0, 1.0, (3,)), draft_length=4)
        assert (curve.accept_length, curve.rate, curve.by_position) == (1.0, None, ())

    def test_no_request_has_no_rates(self) -> None:
        empty = add_up([], 4)
        assert (empty.accept_length, empty.rate, empty.by_position) == (None, None, ())

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    def test_sum_over_positions_is_the_sum_of_accepted_drafts(self, histogram: list[int]) -> None:
        assert sum(at_least(histogram)) == sum(k * count for k, count in enumerate(histogram))

    @given(st.integers(0, 20), st.integers(0, 8), st.data())
    def test_assumed_offers_add_up_and_fall(self, verifies: int, length: int, data: st.DataObject) -> None:
        drafts = data.draw(st.integers(0, verifies * length))
        offered = assumed_offers(verifies, drafts, length)
        assert sum(offered) == drafts
        assert list(offered) == sorted(offered, reverse=True)
        assert all(count <= verifies for count in offered)

    @given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=4))
    def test_summed_rates_stay_shares(self, histograms: list[list[int]]) -> None:
        stats = []
        for counts in histograms:
            accepted = sum(k * count for k, count in enumerate(counts))
            stats.append(VerifyStats(sum(counts), accepted, accepted, 0.0, tuple(counts)))
        total = add_up(stats, draft_length=4)
        assert all(0 <= share <= 1 for share in total.by_position)
        assert sum(total.accepted) == sum(each.accepted for each in stats)


class TestExitCode:
    @pytest.mark.parametrize(
        ("margin", "dtype", "tolerance", "code"),
        [
            (0.001, "float32", 0.0, 1),
            (0.0, "float32", 0.0, 1),
            (0.001, "float32", 0.01, 0),
            (0.01, "float32", 0.01, 1),
            (None, "float32", 1.0, 1),
            (5.0, "bfloat16", 0.0, 0),
        ],
    )
    def test_difference(self, margin: float | None, dtype: str, tolerance: float, code: int) -> None:
        result = PromptResult("p", 3, 4, False, first_difference=1, margin=margin)
        assert exit_code([Comparison(SETTING, (result,), add_up([], 1))], dtype, tolerance) == code

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_error_fails_in_every_dtype(self, dtype: str) -> None:
        result = PromptResult("p", 3, 0, False, error="stock: boom")
        assert exit_code([Comparison(SETTING, (result,), add_up([], 1))], dtype, 1.0) == 1

    def test_one_bad_prompt_of_one_setting_is_enough(self) -> None:
        good = PromptResult("p", 3, 4, True)
        bad = PromptResult("q", 3, 4, False, first_difference=0, margin=1.0)
        fine = Comparison(SETTING, (good,), add_up([], 1))
        assert exit_code([fine], "float32", 0.0) == 0
        assert exit_code([fine, Comparison(SETTING, (good, bad), add_up([], 1))], "float32", 0.0) == 1


class TestParseResponse:
    def test_reads_tokens_margins_and_counters(self) -> None:
        meta = {
            "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 8, None]]],
            "kv_verifies": 4,
            "kv_drafts": 7,
            "kv_accepted": 4,
            "kv_accept_length": 2.0,
            "kv_accept_histogram": [1, 2, 1],
            "kv_fallback": None,
        }
        answer = parse_response({"output_ids": [7], "meta_info": meta}, 1.5)
        assert answer == Generation((7,), margins=(1.0,), verify=STATS, seconds=1.5)

    @pytest.mark.parametrize(
        ("payload", "message"),
        [
            ({"meta_info": {}}, "no output_ids"),
            ({"output_ids": [1], "meta_info": {"kv_verifies": 1}}, "malformed"),
            ({"meta_info": {"finish_reason": {"type": "abort", "message": "full"}}}, "aborted: full"),
        ],
    )
    def test_unusable_answer_becomes_an_error(self, payload: dict[str, object], message: str) -> None:
        answer = parse_response(payload)
        assert answer.error is not None and message in answer.error


class TestLoadPrompts:
    def test_folder_in_order_of_names_with_begin_token_once(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_text("<chat")
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "c.json").write_text("ignored")
        first, second = load_prompts(tmp_path, CharTokenizer())
        assert (first.name, first.input_ids) == ("a.txt", tuple(map(ord, "<text")))
        assert (second.name, second.input_ids) == ("b.txt", tuple(map(ord, "<chat")))

    def test_json_lines_with_text_and_messages(self, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        rows = [{"text": "hi"}, {"messages": [{"role": "user", "content": "yo"}]}]
        path.write_text("\n\n".join(map(json.dumps, rows)))
        texts = ["".join(map(chr, p.input_ids)) for p in load_prompts(path, CharTokenizer())]
        assert texts == ["<hi", "<[user]yo[assistant]"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [("{", "p.jsonl:1 is not JSON"), ('{"prompt": 1}', "`text`"), ("[]", "`text`"), ("", "no prompt")],
    )
    def test_malformed_file_is_named(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text(content)
        with pytest.raises(BenchError, match=message):
            load_prompts(path, CharTokenizer())

    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="does not exist"):
            load_prompts(tmp_path / "none", CharTokenizer())


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"output_len": 0}, "--output-len 0"),
            ({"concurrency": (1, 0)}, "--concurrency 0"),
            ({"concurrency": ()}, "--concurrency 0"),
            ({"limit": -1}, "--limit -1"),
            ({"budgets": (1.5,)}, "--budget 1.5"),
            ({"budgets": ()}, "--budget are needed"),
            ({"temperature": -1.0}, "--temperature -1"),
            ({"temperature": 0.8}, "--seed None"),
            ({"seed": 1}, "--seed 1"),
            ({"temperature": 0.8, "seed": 1, "margin_tolerance": 0.1}, "greedy"),
        ],
    )
    def test_what_cannot_be_compared_is_refused(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(BenchError, match=message):
            make_config(**changes)

    def test_arms_differ_only_in_kv_flags(self) -> None:
        config = make_config(compressors=("quant", "evict"), budgets=(0.5, 0.25), draft_length=8)
        assert identity.stock_arm(config).arguments == ("--kv-mode", "full")
        arms = identity.verified_arms(config)
        names = [arm.name.removeprefix("verified-") for arm in arms]
        assert names == ["quant-0.5", "quant-0.25", "evict-0.5", "evict-0.25"]
        expected = "--kv-mode verified --kv-compressor evict --kv-budget 0.25 --kv-draft-length 8"
        assert " ".join(arms[-1].arguments) == expected

    def test_control_runs_two_stock_servers(self) -> None:
        config = make_config(control=True, compressors=(), budgets=())
        arms = [identity.stock_arm(config), *identity.verified_arms(config)]
        assert [arm.arguments for arm in arms] == [(), ()]

    def test_seed_asks_for_deterministic_servers_unless_told_otherwise(self) -> None:
        words = ("--control", "--temperature", "0.8", "--seed", "1")
        flag = "--enable-deterministic-inference"
        assert flag in identity_options.config_from(parse(*words)).common_server_arguments
        without = identity_options.config_from(parse(*words, "--no-deterministic"))
        assert flag not in without.common_server_arguments
        assert without.sampling.as_json(4)["sampling_seed"] == 1

    def test_lists_and_server_arguments_are_split(self) -> None:
        words = ("--compressor", "a,b", "--budget", "0.5,0.25", "--concurrency", "1,8")
        config = identity_options.config_from(parse(*words, "--server-arg", "--max-total-tokens 64", "--server-arg=-x"))
        assert (config.compressors, config.budgets) == (("a", "b"), (0.5, 0.25))
        assert config.concurrency == (1, 8)
        assert config.common_server_arguments[-3:] == ("--max-total-tokens", "64", "-x")

    def test_greedy_request_carries_no_seed(self) -> None:
        expected = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        assert SamplingSettings().as_json(4) == expected


class FakeServer:
    """Stands for ServerProcess: the last prompt token repeats; logs what was asked."""

    log: list[tuple[object, ...]] = []
    broken: set[str] = set()

    def __init__(self, model: str, arguments: tuple[str, ...], *_: object) -> None:
        self.arguments = arguments

    def __enter__(self) -> "FakeServer":
        FakeServer.log.append(("start", self.arguments))
        if self.broken & set(self.arguments):
            raise BenchError("the server ended\ndetails")
        return self

    def __exit__(self, *_: object) -> None:
        FakeServer.log.append(("stop",))

    def flush_cache(self) -> None:
        FakeServer.log.append(("flush",))

    def generate(
        self, input_ids: tuple[int, ...], sampling: SamplingSettings, new_tokens: int, with_margins: bool = False
    ) -> Generation:
        FakeServer.log.append(("ask", input_ids, new_tokens))
        margins = (1.0,) * new_tokens if with_margins else None
        return Generation((input_ids[-1],) * new_tokens, margins, None if with_margins else STATS)


@pytest.fixture
def fake_server(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    monkeypatch.setattr(identity, "ServerProcess", FakeServer)
    monkeypatch.setattr(FakeServer, "log", [])
    monkeypatch.setattr(FakeServer, "broken", set())
    return FakeServer


class TestRun:
    prompts = (Prompt("a", (1,)), Prompt("b", (2,)), Prompt("c", (3,)))

    def run(self, tmp_path: Path, **changes: object) -> list[Comparison]:
        return identity.run_config(make_config(**changes), self.prompts, tmp_path, report.make_console())

    def test_stock_runs_once_for_all_settings(self, fake_server: type[FakeServer], tmp_path: Path) -> None:
        found = self.run(tmp_path, budgets=(0.5, 0.25), concurrency=(1, 2))
        starts = [entry[1] for entry in fake_server.log if entry[0] == "start"]
        assert ["full" in arguments for arguments in starts] == [True, False, False]
        assert [each.setting.concurrency for each in found] == [1, 2, 1, 2]
        assert all(each.identical == 3 for each in found)

    def test_cold_flushes_before_each_batch(self, fake_server: type[FakeServer], tmp_path: Path) -> None:
        self.run(tmp_path, concurrency=(2,))
        kinds = [entry[0] for entry in fake_server.log]
        assert kinds[:6] == ["start", "flush", "ask", "ask", "flush", "ask"]

    def test_warm_sends_one_token_first(self, fake_server: type[FakeServer], tmp_path: Path) -> None:
        self.run(tmp_path, cache="warm")
        asked = [entry[1:] for entry in fake_server.log if entry[0] == "ask"]
        assert asked[:4] == [((1,), 1), ((1,), 4), ((2,), 1), ((2,), 4)]

    def test_arm_that_fails_spares_the_others(self, fake_server: type[FakeServer], tmp_path: Path) -> None:
        fake_server.broken.add("bad")
        bad, good = self.run(tmp_path, compressors=("bad", "good"))
        assert {result.error for result in bad.results} == {"verified: the server ended"}
        assert good.identical == 3

    def test_stock_arm_that_fails_ends_the_run(self, fake_server: type[FakeServer], tmp_path: Path) -> None:
        fake_server.broken.add("full")
        with pytest.raises(BenchError, match="the server ended"):
            self.run(tmp_path)


class TestReport:
    comparison = compare(
        SETTING, [PROMPT], [Generation((1, 2), margins=(1.0, 0.5))], [Generation((1, 3), verify=STATS)], 2
    )

    def test_summary_tells_failures_and_curve(self) -> None:
        text = "\n".join(report.summary_lines(self.comparison, "float32", 0.0))
        assert "0 of 1 identical, 1 failed" in text
        assert "largest top-2 margin at the first difference 0.5" in text
        assert "acceptance by draft position: 0.75 0.33" in text

    def test_json_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "r.json"
        report.write_json(path, report.as_json({"a": Path("x")}, [self.comparison], "float32", 0.0))
        read = json.loads(path.read_text())
        assert read["config"] == {"a": "x"}
        assert {"sglang", "torch", "sglang_ext", "python"} <= set(read["versions"])
        entry = read["comparisons"][0]
        assert entry["summary"]["failed"] == 1
        assert entry["summary"]["acceptance_by_position"] == [0.75, pytest.approx(1 / 3)]
        assert entry["prompts"][0]["verify"]["accepted_histogram"] == [1, 2, 1]

    def test_plot_is_a_png(self, tmp_path: Path) -> None:
        report.write_plot(tmp_path / "p.png", [self.comparison])
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    def test_table_takes_names_with_brackets_literally(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = compare(SETTING, [Prompt("[b]x", (1,))], [Generation()], [Generation(error="[/x]")], 2)
        report.print_comparison(report.make_console(), found, "float32", 0.0, 2)
        assert "[b]x" in capsys.readouterr().out


class TestCorpus:
    documents = {"code": [corpus.Document(c, c * 400) for c in "abc"]}

    @given(st.integers(1, 30), st.integers(1, 500), st.integers(0, 500))
    def test_lengths_spread_over_the_range(self, count: int, low: int, more: int) -> None:
        lengths = corpus.targets(count, low, low + more)
        assert len(lengths) == count and lengths == sorted(lengths)
        assert lengths[0] == low and (count == 1 or lengths[-1] == low + more)

    def test_prompts_reach_their_length_and_repeat(self) -> None:
        first = list(corpus.build(CharTokenizer(), self.documents, [150, 900], seed=1))
        assert [prompt.tokens for prompt in first] == [150, 900]
        assert first == list(corpus.build(CharTokenizer(), self.documents, [150, 900], seed=1))
        assert all(prompt.text.endswith("[assistant]") for prompt in first)

    def test_too_little_text_is_an_error(self) -> None:
        with pytest.raises(BenchError, match="lower --max-tokens"):
            list(corpus.build(CharTokenizer(), self.documents, [5000], seed=1))

    def test_template_longer_than_the_prompt_is_an_error(self) -> None:
        with pytest.raises(BenchError, match="raise --min-tokens"):
            list(corpus.build(CharTokenizer(), self.documents, [10], seed=1))

    def test_this_python_has_text_of_each_kind(self) -> None:
        found = corpus.collect()
        assert {"code", "reference"} <= set(found)
        texts = [document.text for documents in found.values() for document in documents]
        assert len(texts) == len(set(texts))


class TestCommands:
    def test_every_command_shows_its_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        for name in COMMANDS:
            with pytest.raises(SystemExit) as stopped:
                main([name, "--help"])
            assert stopped.value.code == 0
            assert f"sglang_ext.bench {name}" in capsys.readouterr().out

    def test_unknown_command_and_failed_measurement_end_with_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["identify"]) == 2
        assert main(["prompts", "--out", str(tmp_path), "--tokenizer", "m", "--count", "0"]) == 2
        errors = capsys.readouterr().err
        assert "one of identity" in errors and "--count 0" in errors
