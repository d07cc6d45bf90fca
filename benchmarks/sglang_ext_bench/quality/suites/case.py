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
"""Largest share by which a prompt may be shorter than the length that was asked for; it is never longer."""
TRIES = 24


@dataclass(frozen=True)
class Case:
    """A question that is sent once to each arm.

    Attributes:
        suite: ``ruler`` or ``gsm8k``.
        task: the kind of question; a suite averages over its tasks.
        length: tokens of the prompt that were asked for; 0 where the suite does not choose them.
        index: number of the case within its task and length.
        input_ids: token ids of the prompt.
        new_tokens: the most tokens of an answer.
        answers: the expected answers.
        score: maps the text of an answer to 0.0 to 1.0.
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
        """A name that contains a hash of the prompt, so that a stored score of another prompt is never used."""
        digest = hashlib.sha256(np.asarray(self.input_ids, dtype=np.int64).tobytes()).hexdigest()[:12]
        return f"{self.suite}/{self.task}/{self.length}/{self.index}-{digest}"


def match_all(answers: tuple[str, ...]) -> Scorer:
    """The share of the expected answers that occur in the text (``string_match_all`` of RULER), here as whole words."""
    scorers = [contains(answer) for answer in answers]
    return lambda text: sum(score(text) for score in scorers) / len(scorers)


def chat_prompt(tokenizer: Tokenizer, messages: list[dict[str, str]], prefix: str = "") -> str:
    """The chat as text, followed by the beginning of the answer. A model without a chat template gets the messages as paragraphs."""
    if getattr(tokenizer, "chat_template", True) is None:
        return "\n\n".join(message["content"] for message in messages) + "\n\n" + prefix
    return render_chat(tokenizer, messages) + prefix


def fit(tokenizer: Tokenizer, render: Callable[[int], str], length: int, amount: int) -> tuple[int, ...]:
    """Token ids of the prompt whose length is at most ``length`` tokens and at least ``(1 - SLACK) * length``.

    Args:
        tokenizer: the model's.
        render: the prompt's text for an amount of filler; more filler gives a longer prompt.
        length: tokens.
        amount: the first amount to try.

    Raises:
        CommandError: the prompt is too long without any filler, or no amount fits.
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
