"""Chat completions with tools: builds the request, and parses the message of a whole answer or of a stream."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PATH = "v1/chat/completions"
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a topic.",
            "parameters": {
                "type": "object",
                "properties": {"topic": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
                "required": ["topic", "count"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two digits.",
            "parameters": {
                "type": "object",
                "properties": {"left": {"enum": [1, 2, 3]}, "right": {"enum": [4, 5, 6]}},
                "required": ["left", "right"],
            },
        },
    },
)
"""Tools with short arguments, so that an answer of 32 tokens contains a complete call."""


def chat_body(input_ids: Sequence[int], tokens: int, tool_choice: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """JSON body of a chat completion.

    Args:
        input_ids: Token ids of the prompt. The server uses them in place of the messages.
        tokens: Most tokens of the answer.
        tool_choice: "required" constrains the answer to calls of :data:`TOOLS`. "auto" only parses the answer.
        sampling: Fields of the chat request, for example ``temperature``.
    """
    return {
        "model": "default",
        "messages": [{"role": "user", "content": "Use the tools."}],
        "input_ids": list(input_ids),
        "tools": list(TOOLS),
        "tool_choice": tool_choice,
        "max_tokens": tokens,
        **sampling,
    }


def whole_message(payload: Mapping[str, Any]) -> tuple[str, str]:
    """Parse a whole answer. Return its message, as canonical JSON, and its finish reason.

    Raises:
        KeyError, IndexError, TypeError: The answer is malformed.
    """
    choice = payload["choices"][0]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return _canonical(message.get("content") or "", calls), choice["finish_reason"]


def streamed_message(chunks: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Join the chunks of a stream. Return what :func:`whole_message` returns; the finish reason is empty if no chunk has one.

    Raises:
        KeyError, IndexError, TypeError: A chunk is malformed, or reports an error.
    """
    content, finish = "", ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        if "error" in chunk:
            raise KeyError(f"the stream reports an error: {chunk['error']}")
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], ["", ""])
                call[0] += part["function"].get("name") or ""
                call[1] += part["function"].get("arguments") or ""
            finish = choice.get("finish_reason") or finish
    return _canonical(content, [(name, arguments) for _, (name, arguments) in sorted(calls.items())]), finish


def _canonical(content: str, calls: Sequence[tuple[str, str]]) -> str:
    return json.dumps({"content": content, "calls": [{"name": name, "arguments": arguments} for name, arguments in calls]})
