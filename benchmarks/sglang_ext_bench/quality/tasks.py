"""Functional tasks: prompts in real text whose answers are right or wrong, in four kinds.

They are plain text to continue, without a chat template, so that a small model can do most of them with full KV.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ext_bench.corpus import (
    Document,
    code_documents,
    gather,
    reference_documents,
)
from sglang_ext_bench.prompts import Tokenizer, encode
from sglang_ext_bench.quality.scorers import (
    Scorer,
    begins,
    contains,
    function_parses,
    is_json_object,
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


@dataclass(frozen=True)
class Task:
    """A prompt with a scored answer.

    Attributes:
        kind: under which scores are averaged.
        new_tokens: longest answer.
        score: takes the answer's text, gives 0.0 to 1.0.
    """

    kind: str
    input_ids: tuple[int, ...]
    new_tokens: int
    score: Scorer


def build_tasks(tokenizer: Tokenizer, count: int, tokens: int) -> tuple[Task, ...]:
    """``count`` tasks of each kind, each in other text of about ``tokens`` tokens; the same in every call."""
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
    """A number is hidden at that share of the text, and asked for at its end."""
    city, secret = CITIES[index % len(CITIES)], str(10007 + 7919 * (index + 1) % 89989)
    at = round(depth * len(text))
    fact = f"\n\nThe secret number of {city} is {secret}.\n\n"
    question = f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
    before, after = tokenizer.decode(text[:at]), tokenizer.decode(text[at:])
    return Task("needle", encode(tokenizer, before + fact + after + question), 12, contains(secret))


def repetition(tokenizer: Tokenizer, text: list[int], depth: float) -> Task:
    """A passage of the text begins anew at its end, and has to go on word by word."""
    at = round(depth * (len(text) - LEAD_TOKENS - REPEATED_TOKENS))
    lead, rest = text[at : at + LEAD_TOKENS], text[at + LEAD_TOKENS : at + LEAD_TOKENS + REPEATED_TOKENS]
    asked = f"{tokenizer.decode(text)}\n\nOnce more, word by word:\n\n{tokenizer.decode(lead)}"
    # The last token may be part of a word.
    wanted = tokenizer.decode(rest).split()[:-1]
    return Task("repetition", encode(tokenizer, asked), REPEATED_TOKENS + 4, begins(" ".join(wanted)))


def json_record(tokenizer: Tokenizer, text: list[int], index: int) -> Task:
    """Examples of records in JSON, the text, and one more person whose record is asked for."""
    described = [_described(PEOPLE[(index + step) % len(PEOPLE)]) for step in range(EXAMPLES + 1)]
    examples = "".join(f"{sentence}\nJSON: {record}\n\n" for sentence, record in described[:EXAMPLES])
    asked = f"{examples}{tokenizer.decode(text)}\n\n{described[EXAMPLES][0]}\nJSON:"
    return Task("json", encode(tokenizer, asked), 64, is_json_object)


def python_function(tokenizer: Tokenizer, text: list[int], index: int) -> Task:
    """Python code, then the head and the docstring of a function whose body is asked for."""
    head, says = FUNCTIONS[index % len(FUNCTIONS)]
    source = tokenizer.decode(text)
    # The line's end is left to the answer: in most vocabularies one token holds it and the indentation.
    opening = f'{head}\n    """{says}"""'
    asked = f"{source[: source.rfind(chr(10)) + 1]}\n\n{opening}"
    return Task("python", encode(tokenizer, asked), 64, function_parses(opening))


def _described(person: tuple[str, int, str, str]) -> tuple[str, str]:
    name, age, city, job = person
    record = json.dumps({"name": name, "age": age, "city": city, "job": job})
    return f"Person: {name}, {age} years old, lives in {city} and works as a {job}.", record


def _texts(tokenizer: Tokenizer, documents: list[Document], tokens: int) -> Iterator[list[int]]:
    """Texts that begin with another document each, over and over."""
    while True:
        for start in range(len(documents)):
            yield gather(documents, start, tokenizer, tokens)
