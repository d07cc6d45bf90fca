"""Users' benchmarks: each line becomes a task, or an error with the line and the remedy."""

import argparse
import json
from pathlib import Path

import pytest
from bench_helpers import CharTokenizer

from sglang_ext.tools import CommandError
from sglang_ext_bench.quality.options import BenchmarkFile, add_arguments, config_from
from sglang_ext_bench.quality.tasks import Task, load_benchmark


def load(folder: Path, lines: list[str], *words: str, limit: int | None = None) -> tuple[Task, ...]:
    path = folder / "gsm.jsonl"
    path.write_text("\n".join(lines))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--model", "m", "--parts", "functional", "--benchmark", str(path), *words])
    benchmark = config_from(args).benchmark
    assert benchmark is not None
    return load_benchmark(benchmark, CharTokenizer(), limit)


def text(task: Task) -> str:
    return "".join(map(chr, task.input_ids))


def test_lines_become_tasks_named_after_the_file(tmp_path):
    row = json.dumps({"question": "3 + 4?", "answer": "3 + 4 = 7\n#### 7"})
    (task,) = load(tmp_path, [row, ""], "--scored-by", "number", "--benchmark-tokens", "99")
    assert (task.kind, task.new_tokens, text(task)) == ("gsm", 99, "<[user]3 + 4?[assistant]")
    assert task.score("So it is 7.") == 1.0 and task.score("17") == 0.0


def test_fields_may_lie_inside_others_and_numbers_are_texts(tmp_path):
    row = json.dumps({"problem": {"text": "Which?"}, "solution": 70})
    words = ("--prompt-field", "problem.text", "--answer-field", "solution", "--raw-prompt")
    (task,) = load(tmp_path, [row], *words)
    assert text(task) == "<Which?" and task.score("It is 70.") == 1.0


def test_choices_follow_the_prompt_with_their_letters(tmp_path):
    row = json.dumps({"question": "Capital?", "options": ["Rome", "Oslo"], "answer": "B"})
    (task,) = load(tmp_path, [row], "--scored-by", "letter", "--raw-prompt")
    assert "Capital?\nA. Rome\nB. Oslo\n" in text(task)
    assert task.score("The answer is B.") == 1.0 and task.score("A. Rome") == 0.0


def test_the_limit_takes_the_first_lines(tmp_path):
    rows = [json.dumps({"question": f"{i}?", "answer": str(i)}) for i in range(5)]
    assert [text(task) for task in load(tmp_path, rows, "--raw-prompt", limit=2)] == ["<0?", "<1?"]


GOOD = '{"question": "q", "answer": "a"}'


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        ("{", (), r"gsm.jsonl:2 is not JSON.*each line needs one object"),
        ('["q", "a"]', (), r"gsm.jsonl:2 has no text or number in 'question'.*--prompt-field.*list instead of an object"),
        ('{"question": "q", "key": "A"}', (), "gsm.jsonl:2 .*'answer'; name the field with --answer-field .*key, q"),
        ('{"question": "q", "answer": [1]}', (), "'answer'; name the field"),
        ('{"question": " ", "answer": "a"}', (), "'question'; name the field"),
        ('{"question": "q", "answer": "none"}', ("--scored-by", "letter"), "gsm.jsonl:2: .*'none' has no letter"),
        ('{"question": "q", "answer": "many"}', ("--scored-by", "number"), "has no number; name another --answer-field"),
    ],
)
def test_malformed_lines_are_refused_with_file_line_and_remedy(tmp_path, line, words, message):
    first = '{"question": "q", "answer": "7 B"}' if words else GOOD
    with pytest.raises(CommandError, match=message):
        load(tmp_path, [first, line], *words)


def test_options_that_are_no_list_are_refused(tmp_path):
    row = json.dumps({"question": "q", "answer": "B", "options": "A or B"})
    with pytest.raises(CommandError, match="gsm.jsonl:1: options must be a list"):
        load(tmp_path, [row], "--scored-by", "letter")


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(CommandError, match="has no line"):
        load(tmp_path, [""])
    missing = BenchmarkFile(tmp_path / "absent.jsonl", "question", "answer", "contains", 8, chat=True)
    with pytest.raises(CommandError, match="absent.jsonl does not exist; pass a file"):
        load_benchmark(missing, CharTokenizer())
