"""The requests of a soak: ways to ask, and random choices among them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from sglang_ext.bench.prompts import Prompt

GRAMMARS = ("regex", "json_schema")
SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string", "maxLength": 24}, "is_code": {"type": "boolean"}},
    "required": ["topic", "is_code"],
}
STREAMED_SHARE = 0.3
LONGEST_DELAY = 4.0
"""Seconds after which a request is aborted at the latest."""

Kind = Literal["plain", "abort", "malformed"]
KINDS: dict[Kind, int] = {"plain": 8, "abort": 2, "malformed": 1}
"""Weights of what happens to requests."""


@dataclass(frozen=True)
class Option:
    """A way to ask: ``sampling`` goes to ``sampling_params``, ``fields`` to the request itself."""

    name: str
    sampling: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Answers to one request."""
        return int(self.sampling.get("n", 1))

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar decides where the answer ends."""
        return any(name in self.sampling for name in GRAMMARS)

    def body(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        """A request of ``/generate`` for at most ``tokens`` tokens."""
        params = {"max_new_tokens": tokens, "ignore_eos": not self.has_grammar, **self.sampling}
        return {"input_ids": list(prompt.input_ids), "sampling_params": params, **self.fields}


OPTIONS = (
    Option("greedy", {"temperature": 0}),
    Option("stop", {"temperature": 0, "stop": [" of the", "\n\n"]}),
    Option("logit-bias", {"temperature": 0, "logit_bias": {"28": -4.0, "30": 2.0}}),
    Option("frequency-penalty", {"temperature": 0, "frequency_penalty": 0.4}),
    Option("repetition-penalty", {"temperature": 0, "repetition_penalty": 1.2}),
    Option("seeded", {"temperature": 0.8, "sampling_seed": 3}),
    Option("seeded-top-p-k", {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "sampling_seed": 9}),
    Option("two-samples", {"temperature": 0.8, "sampling_seed": 5, "n": 2}),
    Option("regex", {"temperature": 0, "regex": "[a-z0-9 ,.]{60,70}"}),
    Option("json-schema", {"temperature": 0, "json_schema": json.dumps(SCHEMA)}),
    Option("logprobs", {"temperature": 0}, {"return_logprob": True, "top_logprobs_num": 2}),
)


@dataclass(frozen=True)
class Request:
    """One request: ``prompt`` is an index; ``kind`` "abort" takes it back after ``delay`` seconds."""

    rid: str
    prompt: int
    option: Option
    tokens: int
    kind: Kind
    stream: bool
    delay: float

    def body(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What is sent; a malformed request has a ``top_p`` that must be refused."""
        body = self.option.body(prompts[self.prompt], self.tokens)
        body |= {"rid": self.rid, "stream": self.stream}
        if self.kind == "malformed":
            body["sampling_params"] |= {"top_p": 7.0}
        return body

    def __str__(self) -> str:
        streamed = ", streamed" if self.stream else ""
        aborted = ", to be aborted" if self.kind == "abort" else ""
        return f"{self.rid} ({self.option.name}, prompt {self.prompt}, {self.tokens} tokens{streamed}{aborted})"


def draw_request(chance: Random, rid: str, prompts: int, longest: int) -> Request:
    """A random request for 1 to ``longest`` tokens after one of ``prompts`` prompts.

    Several samples come with one answer each, so such a request is neither streamed nor aborted;
    a malformed one is not streamed, for a stream has begun with status 200 when it is refused.
    """
    option = chance.choice(OPTIONS)
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    if option.samples > 1 and kind == "abort":
        kind = "plain"
    can_stream = option.samples == 1 and kind != "malformed"
    return Request(
        rid=rid,
        prompt=chance.randrange(prompts),
        option=option,
        tokens=chance.randint(1, longest),
        kind=kind,
        stream=can_stream and chance.random() < STREAMED_SHARE,
        delay=chance.random() * LONGEST_DELAY,
    )
