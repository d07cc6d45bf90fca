"""The requests of a soak: prompts, cases that stock answers first, and random requests drawn from the cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.soaking.request_options import OPTIONS, Option

SHORT_TOKENS = 60
"""Length of a short prompt, in tokens. It is below the length from which a server drafts."""
NEXT_TURN_TOKENS = 24
DERIVED_SHARE = 4
"""Each derived prompt is combined with one in DERIVED_SHARE options, so that stock has fewer cases to answer."""
STREAMED_SHARE = 0.35
ONE_TOKEN_SHARE = 0.06
NO_TOKEN_SHARE = 0.03
"""Share of requests for 0 tokens. SGLang only prefills their prompts."""
EARLY_SHARE = 0.4
EARLIEST_DELAY = 0.3
LONGEST_DELAY = 4.0
"""A request is aborted after at most EARLIEST_DELAY seconds (EARLY_SHARE of the requests) or LONGEST_DELAY seconds (the others)."""

Kind = Literal["plain", "abort", "malformed"]
KINDS: dict[Kind, int] = {"plain": 8, "abort": 2, "malformed": 1}
"""Weights of the kinds of requests."""
MALFORMED: tuple[Mapping[str, Any], ...] = (
    {"top_p": 7.0},
    {"temperature": -1.0},
    {"max_new_tokens": -5},
    {"frequency_penalty": 9.0},
    {"regex": "[a-z"},
)
"""Sampling parameters that a server must refuse."""


@dataclass(frozen=True)
class SoakCase:
    """A prompt and a request option. Stock answers each case once; the tested server gets random ones.

    Attributes:
        prompt: Index of the prompt.
        option: The request option.
    """

    prompt: int
    option: Option


def next_turns(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> tuple[Prompt, ...]:
    """Continue each prompt with the first half of its answer and the end of the next prompt, like the next turn of a chat.

    Args:
        prompts: The answered prompts.
        answers: Token ids of the answer to each.
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
    """Join two thirds of each prompt with the last third of the next prompt."""
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


def short_prompts(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The beginning of each prompt, too short for a server to draft."""
    return tuple(Prompt(f"{prompt.name}, short", prompt.input_ids[:SHORT_TOKENS]) for prompt in prompts)


def cases(given: int, derived: int, options: Sequence[Option] = OPTIONS) -> tuple[SoakCase, ...]:
    """Combine prompts with options.

    Args:
        given: Number of the user's prompts. Each is combined with every option.
        derived: Number of prompts made from them, which have the next indices. Each is combined with one in DERIVED_SHARE options.
        options: The options.
    """
    full = [SoakCase(p, option) for p in range(given) for option in options]
    more = [
        SoakCase(given + p, option)
        for p in range(derived)
        for o, option in enumerate(options)
        if (p + o) % DERIVED_SHARE == 0
    ]
    return (*full, *more)


@dataclass(frozen=True)
class SoakRequest:
    """One request of the traffic.

    Attributes:
        rid: Request id. No id is a prefix of another one, because SGLang aborts all requests whose id starts with the given text.
        prompt: Index of the prompt.
        option: The request option.
        tokens: Most tokens of the answer, from 0.
        kind: "abort": the client aborts it after ``delay`` seconds. "malformed": it has the parameters ``invalid_params``.
        stream: The answer is streamed.
        delay: Seconds until the abort.
        invalid_params: Sampling parameters that a server must refuse.
        compressor: Value of the request's ``kv_compressor``. None: the request does not name a compressor.
    """

    rid: str
    prompt: int
    option: Option
    tokens: int
    kind: Kind
    stream: bool
    delay: float
    invalid_params: Mapping[str, Any] = field(default_factory=dict)
    compressor: str | None = None

    def body(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The JSON body of the request."""
        body = self.option.body(prompts[self.prompt], self.tokens)
        body |= {"rid": self.rid, "stream": self.stream}
        if self.invalid_params:
            body["sampling_params"] |= self.invalid_params
        if self.compressor is not None:
            params = body["sampling_params"] if "sampling_params" in body else body
            params["custom_params"] = {**params.get("custom_params", {}), "kv_compressor": self.compressor}
        return body

    def __str__(self) -> str:
        marks = [
            f", {name}"
            for name, holds in (
                ("streamed", self.stream),
                ("to be aborted", self.kind == "abort"),
                (f"malformed {dict(self.invalid_params)}", bool(self.invalid_params)),
                (f"compressor {self.compressor}", self.compressor is not None),
            )
            if holds
        ]
        return f"{self.rid} ({self.option.name}, prompt {self.prompt}, {self.tokens} tokens{''.join(marks)})"


def draw_request(random: Random, rid: str, cases: Sequence[SoakCase], longest: int, compressors: Sequence[str] = ()) -> SoakRequest:
    """Draw a random request.

    A request for several samples is not aborted, because SGLang gives each sample an id of its own. A malformed request is not streamed,
    because a stream starts with status 200 before the server refuses the request. A request with tools asks for ``longest`` tokens,
    because a shorter answer can parse to another message.

    Args:
        random: Source of the random choices.
        rid: Request id.
        cases: The cases to choose from.
        longest: Most tokens of an answer.
        compressors: Values of ``kv_compressor`` to choose from. Empty: the request names none.
    """
    case = random.choice(cases)
    option = case.option
    (kind,) = random.choices(list(KINDS), list(KINDS.values()))
    if option.samples > 1 and kind == "abort":
        kind = "plain"
    if option.tool_choice is not None and kind == "malformed":
        kind = "plain"
    latest = EARLIEST_DELAY if random.random() < EARLY_SHARE else LONGEST_DELAY
    return SoakRequest(
        rid=rid,
        prompt=case.prompt,
        option=option,
        tokens=longest if option.tool_choice is not None else _draw_length(random, longest),
        kind=kind,
        stream=kind != "malformed" and (random.random() < STREAMED_SHARE if option.stream is None else option.stream),
        delay=random.random() * latest,
        invalid_params=random.choice(MALFORMED) if kind == "malformed" else {},
        compressor=random.choice(compressors) if compressors else None,
    )


def _draw_length(random: Random, longest: int) -> int:
    drawn = random.random()
    if drawn < NO_TOKEN_SHARE:
        return 0
    return 1 if drawn < NO_TOKEN_SHARE + ONE_TOKEN_SHARE else random.randint(1, longest)
