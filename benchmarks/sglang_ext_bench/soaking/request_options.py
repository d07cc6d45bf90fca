"""The request options of a soak: sets of sampling parameters and fields. Each gives the same answer in every run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.soaking import tool_calls

GRAMMARS = ("regex", "json_schema", "ebnf")
ENDS = ("stop", "stop_regex", "stop_token_ids")
SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string", "maxLength": 24}, "is_code": {"type": "boolean"}},
    "required": ["topic", "is_code"],
}
EBNF = 'root ::= item (", " item)*\nitem ::= [a-z]+ "=" [0-9]+'
REGEX = "[a-z0-9 ,.]{60,70}"
SERVER_FLAGS = (
    *("--enable-deterministic-inference", "--enable-custom-logit-processor", "--enable-return-hidden-states"),
    # This parser needs no special tokens in the vocabulary; hermes, mistral and others need theirs.
    *("--tool-call-parser", "pythonic"),
)
"""Flags that a server needs for all of :data:`OPTIONS` and for seeds."""


@dataclass(frozen=True)
class Option:
    """A set of sampling parameters and fields of requests.

    Attributes:
        name: Its name in tables.
        sampling: Fields of ``sampling_params``.
        fields: Fields of the request itself.
        input_logprobs: The request asks for log-probabilities of the second half of the prompt.
        disallowed: Tokens that a custom logit processor removes.
        tool_choice: If set, the request is a chat completion with tools, and ``sampling`` has fields of the request itself.
        stream: The answer is streamed. None: chosen at random.
    """

    name: str
    sampling: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    input_logprobs: bool = False
    disallowed: tuple[int, ...] = ()
    tool_choice: str | None = None
    stream: bool | None = None

    @property
    def samples(self) -> int:
        """Number of answers to one request."""
        return int(self.sampling.get("n", 1))

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar determines the end of the answer."""
        return any(name in self.sampling for name in GRAMMARS)

    @property
    def can_end(self) -> bool:
        """Whether an answer may end before it has the requested length."""
        has_stop = any(name in self.sampling for name in ENDS) or not self.sampling.get("ignore_eos", True)
        return has_stop or self.has_grammar or self.tool_choice is not None

    @property
    def needed_settings(self) -> tuple[str, ...]:
        """Fields of SGLang's ``/server_info`` that must be set on a server that supports this option."""
        needs = {
            "enable_deterministic_inference": "sampling_seed" in self.sampling,
            "enable_custom_logit_processor": bool(self.disallowed),
            "enable_return_hidden_states": "return_hidden_states" in self.fields,
            "tool_call_parser": self.tool_choice is not None,
        }
        return tuple(name for name, needed in needs.items() if needed)

    @property
    def path(self) -> str:
        """Route of the requests."""
        return "generate" if self.tool_choice is None else tool_calls.PATH

    def body(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        """JSON body of a request to :attr:`path` for at most ``tokens`` tokens."""
        if self.tool_choice is not None:
            return tool_calls.chat_body(prompt.input_ids, tokens, self.tool_choice, self.sampling)
        params = {"max_new_tokens": tokens, "ignore_eos": not self.has_grammar, **self.sampling}
        if "min_new_tokens" in params:
            params["min_new_tokens"] = min(tokens, params["min_new_tokens"])
        body = {"input_ids": list(prompt.input_ids), "sampling_params": params, **self.fields}
        if self.input_logprobs:
            body["logprob_start_len"] = len(prompt.input_ids) // 2
        if self.disallowed:
            params["custom_params"] = {"token_ids": list(self.disallowed)}
            body["custom_logit_processor"] = _processor()
        return body


@cache
def _processor() -> str:
    """SGLang's processor that removes tokens, serialized for requests."""
    from sglang.srt.sampling.custom_logit_processor import (
        DisallowedTokensLogitsProcessor,
    )

    return DisallowedTokensLogitsProcessor.to_str()


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5, 17]}
OPTIONS = (
    Option("greedy", {"temperature": 0}),
    Option("to-its-end", {"temperature": 0, "ignore_eos": False}),
    Option("stop", {"temperature": 0, "stop": [" of the", "\n\n"]}),
    Option("stop-regex", {"temperature": 0, "stop_regex": "[.;] [A-Z]"}),
    Option("stop-tokens", {"temperature": 0, "stop_token_ids": [30, 28], "ignore_eos": False}),
    Option("logit-bias", {"temperature": 0, "logit_bias": {"28": -4.0, "30": 2.0}}),
    Option("frequency-penalty", {"temperature": 0, "frequency_penalty": 0.4}),
    Option("presence-penalty", {"temperature": 0, "presence_penalty": 0.5}),
    Option("repetition-penalty", {"temperature": 0, "repetition_penalty": 1.2}),
    Option("penalty-logprobs", {"temperature": 0, "frequency_penalty": 0.4}, LOGPROBS),
    Option("min-new-tokens", {"temperature": 0, "min_new_tokens": 20, "ignore_eos": False}),
    Option("min-p", {"temperature": 0, "min_p": 0.2}),
    Option("seeded", {"temperature": 0.8, "sampling_seed": 3}),
    Option("seeded-top-p", {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 4}),
    Option("seeded-top-k", {"temperature": 0.9, "top_k": 20, "sampling_seed": 6}),
    Option("seeded-top-p-k", {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "sampling_seed": 9}),
    Option("seeded-stop", {"temperature": 0.8, "sampling_seed": 8, "stop": ["\n", " the"]}),
    Option("two-samples", {"temperature": 0.8, "sampling_seed": 5, "n": 2}),
    Option("three-samples", {"temperature": 0.8, "top_k": 30, "sampling_seed": 7, "n": 3}),
    Option("regex", {"temperature": 0, "regex": REGEX}),
    Option("json-schema", {"temperature": 0, "json_schema": json.dumps(SCHEMA)}),
    Option("ebnf", {"temperature": 0, "ebnf": EBNF}),
    Option("seeded-regex", {"temperature": 0.8, "sampling_seed": 2, "regex": REGEX}),
    Option("logprobs", {"temperature": 0}, LOGPROBS),
    Option("input-logprobs", {"temperature": 0}, LOGPROBS, input_logprobs=True),
    Option("regex-logprobs", {"temperature": 0, "regex": REGEX}, LOGPROBS),
    Option("seeded-logprobs", {"temperature": 0.8, "sampling_seed": 11}, LOGPROBS),
    Option("two-samples-logprobs", {"temperature": 0.8, "sampling_seed": 12, "n": 2}, LOGPROBS),
    Option("three-samples-regex", {"temperature": 0.8, "sampling_seed": 13, "n": 3, "regex": REGEX}),
    Option("tools", {"temperature": 0}, tool_choice="required", stream=False),
    Option("tools-streamed", {"temperature": 0}, tool_choice="required", stream=True),
    Option("tools-auto", {"temperature": 0}, tool_choice="auto", stream=True),
    Option("logit-processor", {"temperature": 0}, disallowed=(28, 30, 198)),
    Option("hidden-states", {"temperature": 0}, {"return_hidden_states": "last"}),
)
