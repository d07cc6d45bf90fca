"""Scorers of answers. A scorer maps the text of an answer to 1.0 (right) or 0.0 (wrong)."""

import ast
import json
import re
from collections.abc import Callable
from decimal import Decimal

Scorer = Callable[[str], float]

NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
LETTER = re.compile(r"\b([A-J])\b")
STATED = re.compile(r"(?i:answer|choice|option)\s*(?i:is|:)?[\s:*(\[]*([A-J])\b")
TRUNCATED_LINES = 3
"""Lines at the end of a function that may belong to a statement that the answer's length truncates."""


def normalized(text: str) -> str:
    """The text in lower case, with single spaces and without a full stop at the end."""
    return " ".join(text.lower().split()).rstrip(".")


def exact(expected: str) -> Scorer:
    """The answer equals the expected one, apart from case, white space and a full stop at the end."""
    return lambda answer: float(normalized(answer) == normalized(expected))


def contains(expected: str) -> Scorer:
    """The answer contains the expected one as whole words, apart from case and white space."""
    wanted = re.compile(rf"(?<!\w){re.escape(normalized(expected))}(?!\w)")
    return lambda answer: float(wanted.search(normalized(answer)) is not None)


def begins(expected: str) -> Scorer:
    """The answer begins with the expected text, apart from white space."""
    wanted = expected.split()
    return lambda answer: float(answer.split()[: len(wanted)] == wanted)


def last_number(text: str) -> Decimal | None:
    """The last number of a text. It is the result in GSM8K's answers and in most others."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def number(expected: str) -> Scorer:
    """The last number of the answer equals the last one of the expected answer."""
    wanted = last_number(expected)
    return lambda answer: float(wanted is not None and last_number(answer) == wanted)


def chosen_letter(text: str) -> str | None:
    """The letter A to J that a text chooses: the last one after a word such as "answer", else the first single letter."""
    stated = STATED.findall(text)
    if stated:
        return stated[-1].upper()
    found = LETTER.search(text)
    return found.group(1) if found else None


def letter(expected: str) -> Scorer:
    """The answer chooses the expected letter of a multiple choice."""
    wanted = chosen_letter(expected)
    return lambda answer: float(wanted is not None and chosen_letter(answer) == wanted)


def is_json_object(answer: str) -> float:
    """The first opening brace of the answer begins a well-formed JSON object."""
    begin = answer.find("{")
    if begin < 0:
        return 0.0
    try:
        json.JSONDecoder().raw_decode(answer, begin)
    except ValueError:
        return 0.0
    return 1.0


def function_parses(head: str) -> Scorer:
    """The head of a Python function and the answer up to the end of the function are valid Python.

    The function ends before the first line that is not indented. Up to :data:`TRUNCATED_LINES` lines at its end may belong to a
    truncated statement. At least one line must remain.

    Args:
        head: The beginning of the function. The answer begins with the end of its last line.
    """

    def score(answer: str) -> float:
        body = function_body(answer)
        shortest = max(2, len(body) - TRUNCATED_LINES)
        return float(any(_parses(head + "\n".join(body[:end])) for end in range(len(body), shortest - 1, -1)))

    return score


def function_body(answer: str) -> list[str]:
    """The rest of the head's last line, and the lines up to the first that is not indented. Empty if they have no text."""
    first, *lines = answer.rstrip().split("\n")
    body = [first]
    for line in lines:
        if line.strip() and not line.startswith((" ", "\t")):
            break
        body.append(line)
    return body if "".join(body).strip() else []


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


BY_NAME: dict[str, Callable[[str], Scorer]] = {"exact": exact, "contains": contains, "number": number, "letter": letter}
"""Scorers of users' benchmarks. Each maps an expected answer to its scorer."""
