"""The prompts of a soak: some as they are, and others that begin like them, go on where they were answered, or are short."""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.soaking.request_options import OPTIONS, Option

SHORT_TOKENS = 60
"""Below the length at which drafting starts."""
NEXT_TURN_TOKENS = 24
DERIVED_SHARE = 4
"""A derived prompt is asked with every so manieth option, so that stock need not answer all pairs."""


@dataclass(frozen=True)
class Case:
    """What stock was asked, and a server is asked then: ``prompt`` is an index."""

    prompt: int
    option: Option


def next_turns(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> tuple[Prompt, ...]:
    """Each prompt with the first half of its answer, and with how the next prompt ends as the next turn.

    Args:
        prompts: that were answered.
        answers: tokens of the answer to each.
    """
    following = [*prompts[1:], *prompts[:1]]
    return tuple(
        Prompt(
            f"{prompt.name}, next turn",
            (*prompt.input_ids, *answer[: (len(answer) + 1) // 2], *other.input_ids[-NEXT_TURN_TOKENS:]),
        )
        for prompt, answer, other in zip(prompts, answers, following, strict=True)
    )


def shared_beginnings(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Two thirds of each prompt, and the last third of the next."""
    following = [*prompts[1:], *prompts[:1]]
    return tuple(
        Prompt(
            f"{prompt.name}, other end",
            (*prompt.input_ids[: _third(prompt) * 2 or 1], *other.input_ids[_third(other) * 2 :]),
        )
        for prompt, other in zip(prompts, following)
    )


def _third(prompt: Prompt) -> int:
    return len(prompt.input_ids) // 3


def short_ones(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The beginning of each prompt, too short to be drafted for."""
    return tuple(Prompt(f"{prompt.name}, short", prompt.input_ids[:SHORT_TOKENS]) for prompt in prompts)


def cases(given: int, derived: int, options: Sequence[Option] = OPTIONS) -> tuple[Case, ...]:
    """Each of ``given`` prompts with each option, then ``derived`` more of them with some, by turns."""
    full = [Case(p, option) for p in range(given) for option in options]
    more = [
        Case(given + p, option)
        for p in range(derived)
        for o, option in enumerate(options)
        if (p + o) % DERIVED_SHARE == 0
    ]
    return (*full, *more)
