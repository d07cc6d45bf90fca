"""Latencies are computed from the record of SGLang's benchmark, and a failed run is an error."""

import argparse
import json
from types import SimpleNamespace

import pytest

from sglang_ext.tools import CommandError
from sglang_ext_bench.speed import latency


def arguments(folder, *flags):
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    return parser.parse_args(["--model", str(folder), "--requests", "2", *flags])


def record(**more):
    # The second request's tokens arrived as a first token, a burst of three and a burst of two.
    itls = [[0.5, 0.5001], [0.1, 0.1, 0.1, 0.2, 0.2]]
    return {"completed": 2, "output_throughput": 9.0, "ttfts": [1.0, 3.0], "itls": itls, **more}


def test_a_burst_is_one_gap_and_its_tokens_share_it():
    found = latency.summarize("stock", None, 2.0, record())
    assert latency.chunks([0.1, 0.1, 0.1, 0.2, 0.2]) == pytest.approx([0.3, 0.4])
    assert found.first_token[50] == pytest.approx(2000) and found.inter_token[50] == pytest.approx(200)
    assert found.gap[50] == pytest.approx(450) and found.gap[99] == pytest.approx(500, rel=0.01)
    assert found.request[50] == pytest.approx((2000.1 + 3700) / 2)
    assert "first token 2000.0 / 2980.0 ms" in latency.line(found)


def serving(monkeypatch, code, **more):
    """Fake a run of SGLang's benchmark that ends with ``code``. Returns the commands that were run."""
    asked = []

    def run(command, **options):
        asked.append(command)
        with open(command[command.index("--output-file") + 1], "w") as out:
            out.write(json.dumps(record(**more)) + "\n")
        return SimpleNamespace(returncode=code, stdout="", stderr="Traceback\nno such tokenizer")

    monkeypatch.setattr(latency.subprocess, "run", run)
    return asked


def test_traffic_is_poisson_of_the_rate_with_outputs_of_the_length(tmp_path, monkeypatch):
    asked = serving(monkeypatch, 0)
    args = arguments(tmp_path, "--output-len", "32")
    assert latency.send(args, SimpleNamespace(port=7), 2.5, tmp_path / "stock-2.5")["completed"] == 2
    text = " ".join(asked[0])
    assert "--request-rate 2.5 " in text and "--random-output-len 32 " in text and "--port 7 " in text


@pytest.mark.parametrize(
    ("code", "more", "words"),
    [
        (1, {}, "code 1.*no such tokenizer"),
        (0, {"completed": 1}, "1 of 2 requests"),
        (0, {"ttfts": [0.0, 1.0]}, "no text.*--skip-tokenizer-init"),
    ],
)
def test_a_failed_run_is_shown(tmp_path, monkeypatch, code, more, words):
    serving(monkeypatch, code, **more)
    with pytest.raises(CommandError, match=f"(?s){words}"):
        latency.send(arguments(tmp_path), SimpleNamespace(port=7), 1.0, tmp_path / "stock-1")


@pytest.mark.parametrize("flags", [("--rate", "fast"), ("--force-acceptance", "0.9,0.99")])
def test_bad_options_are_refused_before_a_server_starts(tmp_path, flags):
    with pytest.raises(CommandError, match=flags[0]):
        latency.run(arguments(tmp_path, *flags))


def test_a_plot_has_a_line_for_each_setting(tmp_path):
    results = [latency.summarize(name, None, rate, record()) for name in ("stock", "snapkv") for rate in (1.0, 2.0)]
    latency.write_plot(tmp_path / "plots" / "latency.png", results, "m")
    assert (tmp_path / "plots" / "latency.png").stat().st_size > 1000
