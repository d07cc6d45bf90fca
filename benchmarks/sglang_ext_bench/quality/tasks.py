"""Functional tasks: prompts whose answers are right or wrong.

Four kinds of tasks are built in real text. Their prompts are plain text to continue, without a chat template, so that a small model can
do most of them with full KV. A user's benchmark adds tasks from a file of JSON lines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.corpus import (
    Document,
    code_documents,
    gather,
    reference_documents,
)
from sglang_ext_bench.prompts import Tokenizer, encode, render_chat
from sglang_ext_bench.quality.options import BenchmarkFile
from sglang_ext_bench.quality.scorers import (
    BY_NAME,
    Scorer,
    begins,
    chosen_letter,
    contains,
    function_parses,
    is_json_object,
    last_number,
)

CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Nairobi", "Toronto", "Perth", "Athens")
PEOPLE = (
    ("Alice Brown", 34, "Oslo", "baker"),
    ("Juan Perez", 51, "Quito", "pilot"),
    ("Mei Lin", 27, "Taipei", "nurse"),
    ("Omar Said", 45, "Cairo", "driver"),
    ("Eva Novak", 62, "Prague", "judge"),
    ("Tom Hill", 19, "Leeds", "student"),
    ("Ana Silva", 38, "Porto", "chemist"),
    ("Kofi Mensah", 29, "Accra", "farmer"),
)
FUNCTIONS = (
    ("def count_words(text):", "Return a dictionary from each word of the text to how often it occurs."),
    ("def is_palindrome(text):", "Return whether the text reads the same backwards."),
    ("def mean(values):", "Return the arithmetic mean of a list of numbers."),
    ("def largest(values):", "Return the largest of a list of numbers."),
)
EXAMPLES = 3
LEAD_TOKENS, REPEATED_TOKENS = 40, 16
CHOICES = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Task:
    """A prompt with a scored answer.

    Attributes:
        kind: Kind of the task. Scores are averaged by kind.
        input_ids: Token ids of the prompt.
        new_tokens: Most tokens of the answer.
        score: Maps the text of an answer to 0.0 to 1.0.
    """

    kind: str
    input_ids: tuple[int, ...]
    new_tokens: int
    score: Scorer


def build_tasks(tokenizer: Tokenizer, count: int, tokens: int) -> tuple[Task, ...]:
    """Build tasks. Each call with the same arguments gives the same tasks.

    Args:
        tokenizer: The model's tokenizer.
        count: Tasks of each kind.
        tokens: Tokens of real text in each task. Each task has another text.
    """
    prose = [each for each in reference_documents() if len(each.text) >= 4 * tokens] or list(reference_documents())
    code = [each for each in code_documents() if len(each.text) >= 4 * tokens] or list(code_documents())
    texts = _texts(tokenizer, prose, tokens)
    sources = _texts(tokenizer, code, tokens)
    found: list[Task] = []
    for index in range(count):
        depth = (index + 0.5) / count
        found.append(needle(tokenizer, next(texts), index, depth))
        found.append(repetition(tokenizer, next(texts), depth))
        found.append(json_record(tokenizer, next(texts), index))
        found.append(python_function(tokenizer, next(sources), index))
    return tuple(found)


def needle(tokenizer: Tokenizer, text: list[int], index: int, depth: float) -> Task:
    """Hide a number in the text, at the share ``depth`` of its length. The end of the prompt asks for it."""
    city, secret = CITIES[index % len(CITIES)], str(10007 + 7919 * (index + 1) % 89989)
    at = round(depth * len(text))
    fact = f"\n\nThe secret number of {city} is {secret}.\n\n"
    question = f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
    before, after = tokenizer.decode(text[:at]), tokenizer.decode(text[at:])
    return Task("needle", encode(tokenizer, before + fact + after + question), 12, contains(secret))


def repetition(tokenizer: Tokenizer, text: list[int], depth: float) -> Task:
    """Repeat the beginning of a passage at the end of the prompt. The answer must continue it word by word."""
    at = round(depth * (len(text) - LEAD_TOKENS - REPEATED_TOKENS))
    lead, rest = text[at : at + LEAD_TOKENS], text[at + LEAD_TOKENS : at + LEAD_TOKENS + REPEATED_TOKENS]
    prompt = f"{tokenizer.decode(text)}\n\nOnce more, word by word:\n\n{tokenizer.decode(lead)}"
    # The last token may be part of a word.
    wanted = tokenizer.decode(rest).split()[:-1]
    return Task("repetition", encode(tokenizer, prompt), REPEATED_TOKENS + 4, begins(" ".join(wanted)))


def json_record(tokenizer: Tokenizer, text: list[int], index: int) -> Task:
    """Show records of persons in JSON, then the text, then one more person. The answer is that person's record."""
    described = [_described(PEOPLE[(index + step) % len(PEOPLE)]) for step in range(EXAMPLES + 1)]
    examples = "".join(f"{sentence}\nJSON: {record}\n\n" for sentence, record in described[:EXAMPLES])
    prompt = f"{examples}{tokenizer.decode(text)}\n\n{described[EXAMPLES][0]}\nJSON:"
    return Task("json", encode(tokenizer, prompt), 64, is_json_object)


def python_function(tokenizer: Tokenizer, text: list[int], index: int) -> Task:
    """Show Python code, then the head and the docstring of a function. The answer is its body."""
    head, says = FUNCTIONS[index % len(FUNCTIONS)]
    source = tokenizer.decode(text)
    # The prompt ends before the end of the line, because most vocabularies have one token for it and the indentation.
    opening = f'{head}\n    """{says}"""'
    prompt = f"{source[: source.rfind(chr(10)) + 1]}\n\n{opening}"
    return Task("python", encode(tokenizer, prompt), 64, function_parses(opening))


def _described(person: tuple[str, int, str, str]) -> tuple[str, str]:
    name, age, city, job = person
    record = json.dumps({"name": name, "age": age, "city": city, "job": job})
    return f"Person: {name}, {age} years old, lives in {city} and works as a {job}.", record


def _texts(tokenizer: Tokenizer, documents: list[Document], tokens: int) -> Iterator[list[int]]:
    """Texts without end. Each begins with the next document."""
    while True:
        for start in range(len(documents)):
            yield gather(documents, start, tokenizer, tokens)


def load_benchmark(benchmark: BenchmarkFile, tokenizer: Tokenizer, limit: int | None = None) -> tuple[Task, ...]:
    """Load the tasks of a user's benchmark. Their kind is the name of the file.

    If answers are letters and a line has a list ``options`` (MMLU-Pro), the options and their letters follow the prompt.

    Args:
        benchmark: The file, and how it is read.
        tokenizer: The model's tokenizer.
        limit: Number of lines to load. None: all.

    Raises:
        CommandError: The file is missing or empty, or a line is malformed. The message has the line, the problem and the remedy.
    """
    if not benchmark.path.is_file():
        raise CommandError(f"--benchmark {benchmark.path} does not exist; pass a file of JSON lines")
    lines = enumerate(benchmark.path.read_text().splitlines(), start=1)
    rows = [(number, line) for number, line in lines if line.strip()][:limit]
    if not rows:
        raise CommandError(f"--benchmark {benchmark.path} has no line; each line needs a prompt and an expected answer in JSON")
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
    """The text of a field. Numbers are converted to text."""
    value = row
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        has = ", ".join(sorted(row)) if isinstance(row, dict) else f"{type(row).__name__} instead of an object"
        raise CommandError(f"{where} has no text or number in {field!r}; name the field with {flag} (the line has: {has})")
    return str(value)


def _check_expected(benchmark: BenchmarkFile, expected: str, where: str) -> None:
    """Refuse an expected answer that no answer can match."""
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
