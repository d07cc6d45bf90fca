"""The requests of a soak: random choices among what stock has answered, of what becomes of them, and of their lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.soaking.request_options import Option
from sglang_ext_bench.soaking.soak_prompts import Case

STREAMED_SHARE = 0.35
ONE_TOKEN_SHARE = 0.06
NO_TOKEN_SHARE = 0.03
"""Share of requests that ask for 0 tokens: SGLang prefills their prompts only."""
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
        tokens: most tokens of the answer, from 0.
        kind: "abort" is taken back after ``delay`` seconds, "malformed" has the options ``broken``.
        stream: whether its answer comes as it is made.
        delay: seconds.
        broken: sampling options that no server takes.
        compressor: Value of the request's ``kv_compressor``. None: the request does not name a compressor.
    """

    rid: str
    prompt: int
    option: Option
    tokens: int
    kind: Kind
    stream: bool
    delay: float
    broken: Mapping[str, Any] = field(default_factory=dict)
    compressor: str | None = None

    def body(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What is sent."""
        body = self.option.body(prompts[self.prompt], self.tokens)
        body |= {"rid": self.rid, "stream": self.stream}
        if self.broken:
            body["sampling_params"] |= self.broken
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
                (f"malformed {dict(self.broken)}", bool(self.broken)),
                (f"compressor {self.compressor}", self.compressor is not None),
            )
            if holds
        ]
        return f"{self.rid} ({self.option.name}, prompt {self.prompt}, {self.tokens} tokens{''.join(marks)})"


def draw_request(chance: Random, rid: str, cases: Sequence[Case], longest: int, compressors: Sequence[str] = ()) -> Request:
    """A random request for 0 to ``longest`` tokens of one of ``cases``, served by a random one of ``compressors`` if there are any.

    SGLang gives each of several samples an id of its own, so that such a request cannot be aborted;
    a malformed one is not streamed, for a stream has begun with status 200 when it is refused.
    A request with tools asks for ``longest`` tokens, because a shorter answer can parse to another message.
    """
    case = chance.choice(cases)
    option = case.option
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    if option.samples > 1 and kind == "abort":
        kind = "plain"
    if option.tool_choice is not None and kind == "malformed":
        kind = "plain"
    latest = EARLIEST_DELAY if chance.random() < EARLY_SHARE else LONGEST_DELAY
    return Request(
        rid=rid,
        prompt=case.prompt,
        option=option,
        tokens=longest if option.tool_choice is not None else _draw_length(chance, longest),
        kind=kind,
        stream=kind != "malformed" and (chance.random() < STREAMED_SHARE if option.stream is None else option.stream),
        delay=chance.random() * latest,
        broken=chance.choice(MALFORMED) if kind == "malformed" else {},
        compressor=chance.choice(compressors) if compressors else None,
    )


def _draw_length(chance: Random, longest: int) -> int:
    drawn = chance.random()
    if drawn < NO_TOKEN_SHARE:
        return 0
    return 1 if drawn < NO_TOKEN_SHARE + ONE_TOKEN_SHARE else chance.randint(1, longest)
