"""Generated long-context tasks after RULER (Hsieh et al. 2024, arXiv 2404.06654): four tasks at any length of the context.

- ``needles``: Real text hides eight keys, each with a number. The question asks for the numbers of four.
- ``tracking``: Real text hides a chain of five variable assignments. The question asks for all variables with a given value.
- ``copy``: The answer must repeat a marked passage of real text. RULER has no such task.
- ``aggregation``: A numbered list has words of different frequency. The question asks for the ten most frequent ones (common word extraction).

The real text is Python's language reference and standard library. The same Python, seed and tokenizer give the same cases.
The score of an answer is the share of the expected answers in it.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from random import Random

from sglang_ext_bench.corpus import Document, code_documents, reference_documents
from sglang_ext_bench.prompts import Tokenizer
from sglang_ext_bench.quality.suites.case import (
    SuiteCase,
    chat_prompt,
    fit_prompt,
    match_all,
)
from sglang_ext_bench.quality.suites.options import RULER

NEW_TOKENS = 64
CHARS_PER_TOKEN = 3.5
KEYS, REQUESTED_KEYS = 8, 4
HOPS = 4
COMMON_WORDS = 10
LONG_LIST = 4096
"""Lists of at least this number of tokens repeat their words more often, as in RULER."""
REPEATS, LONG_REPEATS = (6, 1), (30, 3)
"""How often a common word and any other word appear in a list."""
PASSAGE_WORDS, WORDS_PER_ANSWER = 24, 4


@dataclass(frozen=True)
class Texts:
    """The real text of the cases.

    Attributes:
        fillers: Long texts that hide statements.
        words: Distinct words of prose in lower case, sorted.
        vocabulary: All words and numbers of the fillers, in lower case.
    """

    fillers: tuple[str, ...]
    words: tuple[str, ...]
    vocabulary: frozenset[str]


@dataclass(frozen=True)
class Question:
    """A question and its hidden statements, without the filler.

    Attributes:
        filler: Index of the text that hides the statements.
        opening: First line of the prompt.
        statements: Lines to insert into the filler.
        closing: The question, after the filler.
        prefix: Beginning of the answer, which is part of the prompt.
        answers: Expected answers in the rest of the answer.
    """

    filler: int
    opening: str
    statements: tuple[str, ...]
    closing: str
    prefix: str
    answers: tuple[str, ...]


@cache
def texts() -> Texts:
    """The texts of this Python installation."""
    fillers = tuple(_joined(documents) for documents in (reference_documents(), code_documents()))
    everything = " ".join(fillers)
    words = set(re.findall(r"\b[a-z]{4,9}\b", fillers[0]))
    return Texts(fillers, tuple(sorted(words)), frozenset(re.findall(r"\w+", everything.lower())))


def _joined(documents: Iterable[Document]) -> str:
    # Leave out blank lines, so that a statement looks like any other line.
    return "\n".join(line for document in documents for line in document.text.splitlines() if line.strip())


def needles(random: Random, source: Texts) -> Question:
    """Eight keys with a number of seven digits each. The question asks for the numbers of four."""
    words = random.sample(source.words, 2 * KEYS)
    keys = [f"{first}-{second}" for first, second in zip(words[::2], words[1::2])]
    values = _distinct(lambda: str(random.randrange(10**6, 10**7)), KEYS, source)
    requested = random.sample(range(KEYS), REQUESTED_KEYS)
    key_names = ", ".join(keys[at] for at in requested)
    return Question(
        random.randrange(len(source.fillers)),
        "Some special magic numbers are hidden within the following text. Memorize them. I will ask for some of them afterwards.",
        tuple(f"One of the special magic numbers for {key} is: {value}." for key, value in zip(keys, values)),
        f"What are the special magic numbers for {key_names} mentioned in the text above?",
        f"The special magic numbers for {key_names} mentioned in the text are, in this order:",
        tuple(values[at] for at in requested),
    )


def tracking(random: Random, source: Texts) -> Question:
    """A chain of assignments. The question asks for all variables that have the value of the first one."""
    names = _distinct(lambda: "".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)), HOPS + 1, source)
    (value,) = _distinct(lambda: str(random.randrange(10**4, 10**5)), 1, source)
    chain = (f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before}" for before, name in zip(names, names[1:])))
    return Question(
        random.randrange(len(source.fillers)),
        "Memorize and track the chain of variable assignments hidden in the following text.",
        chain,
        f"Find all variables that are assigned the value {value} in the text above, directly or through other variables.",
        f"According to the chain of variable assignments in the text, {len(names)} variables are assigned the value {value}, they are:",
        tuple(names),
    )


def verbatim(random: Random, source: Texts) -> Question:
    """A marked passage of real text. Each run of four of its words is an expected answer."""
    name = "-".join(random.sample(source.words, 2))
    # Hide the passage in the other text, so that the prompt contains it once.
    origin = random.randrange(len(source.fillers))
    words = _passage(random, source.fillers[origin])
    runs = tuple(" ".join(words[at : at + WORDS_PER_ANSWER]) for at in range(0, PASSAGE_WORDS, WORDS_PER_ANSWER))
    return Question(
        (origin + 1) % len(source.fillers),
        "The following text contains a marked passage. I will ask you to repeat it word for word.",
        (f"[begin of passage {name}] {' '.join(words)} [end of passage {name}]",),
        f"Repeat the passage {name} word for word, without its marks.",
        f"The passage {name} is:",
        runs,
    )


def _passage(random: Random, text: str) -> list[str]:
    """Consecutive words of prose, without numbers and code."""
    written = _words(text)
    while True:
        at = random.randrange(len(written) - PASSAGE_WORDS)
        words = written[at : at + PASSAGE_WORDS]
        runs = [words[begin : begin + WORDS_PER_ANSWER] for begin in range(0, PASSAGE_WORDS, WORDS_PER_ANSWER)]
        if all(re.fullmatch(r"[A-Za-z]+[,.]?", word) for word in words) and len(set(map(tuple, runs))) == len(runs):
            return words


@cache
def _words(text: str) -> list[str]:
    return text.split()


def _distinct(draw: Callable[[], str], count: int, source: Texts) -> list[str]:
    """Draw different values that do not occur as words of the texts."""
    found: list[str] = []
    while len(found) < count:
        value = draw()
        if value not in found and value.lower() not in source.vocabulary:
            found.append(value)
    return found


HIDDEN: dict[str, Callable[[Random, Texts], Question]] = {"needles": needles, "tracking": tracking, "copy": verbatim}
"""Functions that draw questions with hidden statements, by task."""
AGGREGATION = "aggregation"
TASKS = (*HIDDEN, AGGREGATION)


def hidden_case(tokenizer: Tokenizer, task: str, length: int, index: int, seed: int) -> SuiteCase:
    """Build a case whose statements are hidden in real text, at random positions."""
    random, source = Random(f"{seed}/{task}/{length}/{index}"), texts()
    question = HIDDEN[task](random, source)
    filler = source.fillers[question.filler]
    start = random.randrange(len(filler))
    depths = sorted(random.random() for _ in question.statements)
    statements = question.statements
    if task == "needles":
        statements = tuple(random.sample(statements, len(statements)))

    def render(amount: int) -> str:
        context = insert_statements(_slice(filler, start, amount), statements, depths)
        content = f"{question.opening}\n\n{context}\n\n{question.closing}"
        return chat_prompt(tokenizer, [{"role": "user", "content": content}], question.prefix)

    ids = fit_prompt(tokenizer, render, length, round(CHARS_PER_TOKEN * length))
    return SuiteCase(RULER, task, length, index, ids, NEW_TOKENS, question.answers, match_all(question.answers))


def _slice(text: str, start: int, amount: int) -> str:
    """``amount`` characters of a text from ``start`` on. It continues at the beginning after the end of the text."""
    found = text[start : start + amount]
    while len(found) < amount:
        found += "\n" + text[: amount - len(found) - 1]
    return found


def insert_statements(text: str, statements: Sequence[str], depths: Sequence[float]) -> str:
    """Insert statements between the lines of a text. ``depths`` are their positions as shares of the lines, ascending."""
    lines = text.split("\n")
    places = [round(depth * len(lines)) for depth in depths]
    for place, statement in reversed(list(zip(places, statements))):
        lines.insert(place, statement)
    return "\n".join(lines)


def aggregation_case(tokenizer: Tokenizer, length: int, index: int, seed: int) -> SuiteCase:
    """Build a case with a numbered list of words in random order. The question asks for the ten most frequent words."""
    random, source = Random(f"{seed}/{AGGREGATION}/{length}/{index}"), texts()
    question = f"What are the {COMMON_WORDS} most common words in the list above?"
    opening = (
        "Below is a numbered list of words. In it some words appear more often than others. Memorize the ones that appear most often."
    )
    prefix = f"The {COMMON_WORDS} words that appear most often in the list are:"
    known = set(re.findall(r"[a-z]+", f"{opening} {question} {prefix}".lower()))
    words = [word for word in random.sample(source.words, len(source.words)) if word not in known]
    common, others = words[:COMMON_WORDS], words[COMMON_WORDS:]
    often, seldom = REPEATS if length < LONG_LIST else LONG_REPEATS
    order = random.randrange(2**32)

    def render(amount: int) -> str:
        # Each amount has its own order, drawn from the same seed.
        listed = [*common] * often + [others[at % len(others)] for at in range(-(-amount // seldom))] * seldom
        Random(order).shuffle(listed)
        numbered = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
        return chat_prompt(tokenizer, [{"role": "user", "content": f"{opening}\n\n{numbered}\n\n{question}"}], prefix)

    ids = fit_prompt(tokenizer, render, length, max(1, length // 8))
    answers = tuple(common)
    return SuiteCase(RULER, AGGREGATION, length, index, ids, NEW_TOKENS, answers, match_all(answers))


def build(tokenizer: Tokenizer, tasks: Sequence[str], lengths: Sequence[int], count: int, seed: int) -> tuple[SuiteCase, ...]:
    """Build ``count`` cases of each task and length.

    Args:
        tokenizer: The model's tokenizer.
        tasks: Names of :data:`TASKS`.
        lengths: Requested tokens of the prompts.
        count: Cases of each task and length.
        seed: Seed of all random choices.

    Raises:
        CommandError: A length is too short for a question.
    """
    texts()
    jobs = []
    for length in lengths:
        for task in tasks:
            make = aggregation_case if task == AGGREGATION else partial(hidden_case, task=task)
            jobs += [partial(make, tokenizer, length=length, index=index, seed=seed) for index in range(count)]
    # Tokenizers release the global interpreter lock.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return tuple(pool.map(lambda job: job(), jobs))
