"""A scored question of a suite, and the search for a prompt of a given length."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sglang_ext.tools import CommandError
from sglang_ext_bench.prompts import Tokenizer, encode, render_chat
from sglang_ext_bench.quality.scorers import Scorer, contains

SLACK = 0.02
"""Largest share by which a prompt may be shorter than the requested length. It is never longer."""
TRIES = 24


@dataclass(frozen=True)
class SuiteCase:
    """A question that is sent once to each arm.

    Attributes:
        suite: ``ruler`` or ``gsm8k``.
        task: Kind of question. A suite averages over its tasks.
        length: Requested tokens of the prompt. 0 if the suite does not choose them.
        index: Number of the case within its task and length.
        input_ids: Token ids of the prompt.
        new_tokens: Most tokens of an answer.
        answers: The expected answers.
        score: Maps the text of an answer to 0.0 to 1.0.
    """

    suite: str
    task: str
    length: int
    index: int
    input_ids: tuple[int, ...]
    new_tokens: int
    answers: tuple[str, ...]
    score: Scorer

    @cached_property
    def id(self) -> str:
        """Name of the case. It contains a hash of the prompt, so that a stored score of another prompt is never used."""
        digest = hashlib.sha256(np.asarray(self.input_ids, dtype=np.int64).tobytes()).hexdigest()[:12]
        return f"{self.suite}/{self.task}/{self.length}/{self.index}-{digest}"


def match_all(answers: tuple[str, ...]) -> Scorer:
    """A scorer: the share of the expected answers that occur in the text as whole words (after RULER's ``string_match_all``)."""
    scorers = [contains(answer) for answer in answers]
    return lambda text: sum(score(text) for score in scorers) / len(scorers)


def chat_prompt(tokenizer: Tokenizer, messages: list[dict[str, str]], prefix: str = "") -> str:
    """Format a chat as text, followed by the beginning of the answer. Without a chat template, the messages become paragraphs."""
    if getattr(tokenizer, "chat_template", True) is None:
        return "\n\n".join(message["content"] for message in messages) + "\n\n" + prefix
    return render_chat(tokenizer, messages) + prefix


def fit_prompt(tokenizer: Tokenizer, render: Callable[[int], str], length: int, amount: int) -> tuple[int, ...]:
    """Find a prompt of at most ``length`` and at least ``(1 - SLACK) * length`` tokens.

    Args:
        tokenizer: The model's tokenizer.
        render: Returns the text of the prompt for an amount of filler. More filler gives a longer prompt.
        length: Requested tokens.
        amount: The first amount to try.

    Returns:
        Token ids of the prompt.

    Raises:
        CommandError: The prompt is too long without any filler, or no amount fits.
    """
    shorter = 0, len(encode(tokenizer, render(0)))
    if shorter[1] >= length:
        raise CommandError(f"--lengths {length}: the question alone takes {shorter[1]} tokens; pass longer ones")
    longer: tuple[int, int] | None = None
    aim = (1 - SLACK / 2) * length
    for attempt in range(TRIES):
        ids = encode(tokenizer, render(amount))
        if (1 - SLACK) * length <= len(ids) <= length:
            return ids
        if len(ids) > length:
            longer = amount, len(ids)
        else:
            shorter = amount, len(ids)
        if longer is None:
            amount *= 2
        elif attempt % 4 == 3:
            amount = (shorter[0] + longer[0]) // 2
        else:
            # Interpolate linearly between the two amounts.
            share = (aim - shorter[1]) / (longer[1] - shorter[1])
            amount = shorter[0] + max(1, round(share * (longer[0] - shorter[0])))
    least = math.ceil((1 - SLACK) * length)
    raise CommandError(f"--lengths {length}: no amount of text gives a prompt of {least} to {length} tokens; pass longer ones")
