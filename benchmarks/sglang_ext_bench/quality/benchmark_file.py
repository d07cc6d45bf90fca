"""Benchmarks that users supply: JSON lines with a prompt and an expected answer."""

import json
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.prompts import Tokenizer, encode, render_chat
from sglang_ext_bench.quality.config import BenchmarkFile
from sglang_ext_bench.quality.scorers import BY_NAME, chosen_letter, last_number
from sglang_ext_bench.quality.tasks import Task

CHOICES = "ABCDEFGHIJ"


def load_benchmark(benchmark: BenchmarkFile, tokenizer: Tokenizer, limit: int | None = None) -> tuple[Task, ...]:
    """A benchmark's tasks, of a kind that is named after its file; the first ``limit`` lines.

    Where answers are letters and a row has a list ``options`` (MMLU-Pro), these follow the prompt with their letters.

    Raises:
        CommandError: the file is missing or empty, or a line is malformed; names the line and what it needs.
    """
    if not benchmark.path.is_file():
        raise CommandError(f"--benchmark {benchmark.path} does not exist; pass a file of JSON lines")
    lines = enumerate(benchmark.path.read_text().splitlines(), start=1)
    rows = [(number, line) for number, line in lines if line.strip()][:limit]
    if not rows:
        raise CommandError(f"--benchmark {benchmark.path} holds no line; each needs a prompt and an expected answer in JSON")
    return tuple(_task(benchmark, f"{benchmark.path}:{number}", line, tokenizer) for number, line in rows)


def _task(benchmark: BenchmarkFile, where: str, line: str, tokenizer: Tokenizer) -> Task:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{where} is not JSON: {error}; each line needs one object") from error
    prompt = _text(row, benchmark.prompt_field, "--prompt-field", where)
    expected = _text(row, benchmark.answer_field, "--answer-field", where)
    _check_expected(benchmark, expected, where)
    if benchmark.scored_by == "letter":
        prompt += _choices(row, where)
    text = render_chat(tokenizer, [{"role": "user", "content": prompt}]) if benchmark.chat else prompt
    return Task(benchmark.path.stem, encode(tokenizer, text), benchmark.new_tokens, BY_NAME[benchmark.scored_by](expected))


def _text(row: Any, field: str, flag: str, where: str) -> str:
    """A field's text; numbers are taken as text."""
    value = row
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        has = ", ".join(sorted(row)) if isinstance(row, dict) else f"no object but {type(row).__name__}"
        raise CommandError(f"{where} has no text or number in {field!r}; name the field with {flag} (the line has: {has})")
    return str(value)


def _check_expected(benchmark: BenchmarkFile, expected: str, where: str) -> None:
    """Refuse an expected answer that no answer could match."""
    missing = benchmark.scored_by == "number" and last_number(expected) is None
    missing |= benchmark.scored_by == "letter" and chosen_letter(expected) is None
    if missing:
        wanted = "number" if benchmark.scored_by == "number" else "letter from A to J"
        raise CommandError(
            f"{where}: the expected answer {expected[:80]!r} has no {wanted}; name another --answer-field, or --scored-by"
        )


def _choices(row: dict[str, Any], where: str) -> str:
    options = row.get("options")
    if options is None:
        return ""
    if not isinstance(options, list) or len(options) > len(CHOICES):
        raise CommandError(f"{where}: options must be a list of at most {len(CHOICES)} texts, got {str(options)[:80]!r}")
    return "".join(f"\n{name}. {option}" for name, option in zip(CHOICES, options)) + "\nAnswer with the letter."
