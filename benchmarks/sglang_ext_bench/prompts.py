"""Prompts for a measurement: a folder of text files, or a file of JSON lines."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sglang_ext.tools import CommandError

LOWEST_RANDOM_ID = 100

class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    bos_token: str | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Text of a chat up to where the assistant answers (``tokenize`` False)."""


@dataclass(frozen=True)
class Prompt:
    """A named prompt as the token ids that both servers get."""

    name: str
    input_ids: tuple[int, ...]


def load_tokenizer(model: str) -> Tokenizer:
    """The Hugging Face tokenizer of a model folder or name.

    Raises:
        CommandError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]  # of five lines of advice
        raise CommandError(f"no tokenizer in {model!r}: {first}") from error


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """The model's chat template, open for the assistant's answer."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids; the begin token is added unless the text (a rendered chat) starts with it."""
    has_begin = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    return tuple(tokenizer.encode(text, add_special_tokens=not has_begin))


def load_prompts(path: Path, tokenizer: Tokenizer, option: str = "--prompts") -> tuple[Prompt, ...]:
    """Read all prompts, in the order of file names or lines; ``option`` named them.

    Raises:
        CommandError: the path is missing, holds no prompt, or a row is malformed.
    """
    if path.is_dir():
        texts = [(file.name, file.read_text()) for file in sorted(path.glob("*.txt"))]
    elif path.is_file():
        texts = _read_lines(path, tokenizer)
    else:
        raise CommandError(f"{option} {path} does not exist; pass a folder of .txt files or a .jsonl file")
    prompts = tuple(Prompt(name, encode(tokenizer, text)) for name, text in texts)
    if not prompts:
        raise CommandError(f"{option} {path} holds no prompt; a folder needs *.txt files, a file JSON lines")
    for prompt in prompts:
        if not prompt.input_ids:
            raise CommandError(f"prompt {prompt.name} of {path} is empty; remove it")
    return prompts


def random_prompts(count: int, tokens: int, vocabulary: int) -> list[tuple[int, ...]]:
    """``count`` prompts of random token ids below ``vocabulary``, the same in each run. Lower ids are often special tokens."""
    draw = random.Random(0)
    return [tuple(draw.randrange(LOWEST_RANDOM_ID, vocabulary) for _ in range(tokens)) for _ in range(count)]


def _read_lines(path: Path, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            where = f"{path.name}:{number}"
            rows.append((where, _row_text(where, line, tokenizer)))
    return rows


def _row_text(where: str, line: str, tokenizer: Tokenizer) -> str:
    """Text of one JSON line; a ``messages`` row goes through the chat template."""
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{where} is not JSON: {error}") from error
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return render_chat(tokenizer, row["messages"])
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return row["text"]
    raise CommandError(f"{where}: a row needs a `text` string or a `messages` list, got {line[:80]!r}")
