"""The requests of a soak: random choices among what stock has answered, of what becomes of them, and of their lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from sglang_ext.bench.prompts import Prompt
from sglang_ext.bench.soaking.request_options import Option
from sglang_ext.bench.soaking.soak_prompts import Case

STREAMED_SHARE = 0.35
ONE_TOKEN_SHARE = 0.06
EARLY_SHARE = 0.4
EARLIEST_DELAY = 0.3
LONGEST_DELAY = 4.0
"""Seconds after which a request is aborted at the latest, of some of them and of all."""

Kind = Literal["plain", "abort", "malformed"]
KINDS: dict[Kind, int] = {"plain": 8, "abort": 2, "malformed": 1}
"""Weights of what happens to requests."""
MALFORMED: tuple[Mapping[str, Any], ...] = (
    {"top_p": 7.0},
    {"temperature": -1.0},
    {"max_new_tokens": -5},
    {"frequency_penalty": 9.0},
    {"regex": "[a-z"},
)
"""Sampling options that must be refused."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        rid: its id, which is not the beginning of another's: SGLang aborts by what ids begin with.
        prompt: an index.
        option: how it is asked.
        tokens: most tokens of the answer.
        kind: "abort" is taken back after ``delay`` seconds, "malformed" has the options ``broken``.
        stream: whether its answer comes as it is made.
        delay: seconds.
        broken: sampling options that no server takes.
    """

    rid: str
    prompt: int
    option: Option
    tokens: int
    kind: Kind
    stream: bool
    delay: float
    broken: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What is sent."""
        body = self.option.body(prompts[self.prompt], self.tokens)
        body |= {"rid": self.rid, "stream": self.stream}
        body["sampling_params"] |= self.broken
        return body

    def __str__(self) -> str:
        marks = [
            f", {name}"
            for name, holds in (
                ("streamed", self.stream),
                ("to be aborted", self.kind == "abort"),
                (f"malformed {dict(self.broken)}", bool(self.broken)),
            )
            if holds
        ]
        return f"{self.rid} ({self.option.name}, prompt {self.prompt}, {self.tokens} tokens{''.join(marks)})"


def draw_request(chance: Random, rid: str, cases: Sequence[Case], longest: int) -> Request:
    """A random request for 1 to ``longest`` tokens of one of ``cases``.

    SGLang gives each of several samples an id of its own, so that such a request cannot be aborted;
    a malformed one is not streamed, for a stream has begun with status 200 when it is refused.
    """
    case = chance.choice(cases)
    option = case.option
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    if option.samples > 1 and kind == "abort":
        kind = "plain"
    latest = EARLIEST_DELAY if chance.random() < EARLY_SHARE else LONGEST_DELAY
    return Request(
        rid=rid,
        prompt=case.prompt,
        option=option,
        tokens=1 if chance.random() < ONE_TOKEN_SHARE else chance.randint(1, longest),
        kind=kind,
        stream=kind != "malformed" and chance.random() < STREAMED_SHARE,
        delay=chance.random() * latest,
        broken=chance.choice(MALFORMED) if kind == "malformed" else {},
    )
