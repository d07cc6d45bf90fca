"""Reports of an identity run: console lines, JSON and plot."""

import json
from pathlib import Path

import pytest
from bench_helpers import PROMPT, SETTING, STATS, tops

from sglang_ext_bench import report
from sglang_ext_bench.client import Generation
from sglang_ext_bench.comparing import identity_report
from sglang_ext_bench.comparing.compare import compare
from sglang_ext_bench.comparing.verdict import Rules, judge
from sglang_ext_bench.prompts import Prompt

RULES = Rules("float32")


class TestReport:
    comparison = compare(
        SETTING, [PROMPT], [Generation((1, 2), tops(1.0, 0.5))], [Generation((1, 3), verify=STATS)], 2
    )

    def test_summary_tells_failures_and_curve(self) -> None:
        text = "\n".join(identity_report.summary_lines(self.comparison, RULES))
        assert "0 of 1 identical, 1 failed" in text
        assert "largest top-2 margin at the first difference 0.5" in text
        assert "acceptance by draft position: 0.75 0.33" in text

    def test_json_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "r.json"
        verdict = judge([self.comparison], RULES)
        report.write_json(path, identity_report.as_json({"a": Path("x")}, [self.comparison], RULES, verdict))
        read = json.loads(path.read_text())
        assert read["config"] == {"a": "x"}
        assert {"sglang", "torch", "sglang_ext", "python"} <= set(read["versions"])
        entry = read["comparisons"][0]
        assert entry["summary"]["failed"] == 1
        assert entry["summary"]["acceptance_by_position"] == [0.75, pytest.approx(1 / 3)]
        assert entry["prompts"][0]["verify"]["accepted_histogram"] == [1, 2, 1]

    def test_largest_logprob_difference_is_in_table_summary_and_json(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answer = Generation((1, 2), (((7, -0.5),), ((7, -0.75),)), STATS)
        stock = Generation((1, 2), (((7, -0.5),), ((7, -1.0),)))
        found = compare(SETTING, [PROMPT], [stock], [answer], 2)
        identity_report.print_comparison(report.make_console(), found, RULES, 2)
        printed = capsys.readouterr().out
        assert "0.25 @1" in printed and "largest logprob difference 0.25: p at token 1" in printed
        (entry,) = identity_report.as_json({}, [found], RULES, judge([found], RULES))["comparisons"]
        where = {"value": 0.25, "index": 1, "token": 7}
        assert entry["prompts"][0]["max_logprob_difference"] == where
        assert entry["summary"]["max_logprob_difference"] == {"prompt": "p", **where}

    def test_verdict_ends_the_console_report(self, capsys: pytest.CaptureFixture[str]) -> None:
        identity_report.print_verdict(report.make_console(), judge([self.comparison], Rules("float32", 1.0)))
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("tolerated: quant 0.5") and lines[-1] == "FAILED"

    def test_plot_is_a_png(self, tmp_path: Path) -> None:
        identity_report.write_plot(tmp_path / "p.png", [self.comparison], "m, float32")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    def test_table_takes_names_with_brackets_literally(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = compare(SETTING, [Prompt("[b]x", (1,))], [Generation()], [Generation(error="[/x]")], 2)
        identity_report.print_comparison(report.make_console(), found, RULES, 2)
        assert "[b]x" in capsys.readouterr().out
