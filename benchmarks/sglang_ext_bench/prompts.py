"""The prompts of a measurement: files of prompts, pieces of a text, or random tokens."""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError

LOWEST_RANDOM_ID = 100

class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that this package uses."""

    bos_token: str | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Text of a chat, up to the start of the assistant's message (with ``tokenize`` False)."""


@dataclass(frozen=True)
class Prompt:
    """A named prompt.

    Attributes:
        name: File name, or file name and line.
        input_ids: Token ids that every server gets.
    """

    name: str
    input_ids: tuple[int, ...]


def load_tokenizer(model: str) -> Tokenizer:
    """Load the Hugging Face tokenizer of a model folder or name.

    Raises:
        CommandError: The model has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise CommandError(f"no tokenizer in {model!r}: {first_line}") from error


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Render messages with the model's chat template, up to the start of the assistant's message."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of a text. The begin token is added unless the text, such as a rendered chat, starts with it."""
    has_begin = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    return tuple(tokenizer.encode(text, add_special_tokens=not has_begin))


def load_prompts(path: Path, tokenizer: Tokenizer, option: str = "--prompts") -> tuple[Prompt, ...]:
    """Read all prompts of a folder of text files or of a file with JSON lines, in the order of file names or lines.

    Args:
        path: The folder or file.
        tokenizer: The model's tokenizer.
        option: Option that named the path, for the error message.

    Raises:
        CommandError: The path is missing, has no prompt, or has a malformed line.
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
            name = f"{path.name}:{number}"
            rows.append((name, _line_text(name, line, tokenizer)))
    return rows


def _line_text(name: str, line: str, tokenizer: Tokenizer) -> str:
    """Text of one JSON line. A line with ``messages`` is rendered with the chat template."""
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{name} is not JSON: {error}") from error
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return render_chat(tokenizer, row["messages"])
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return row["text"]
    raise CommandError(f"{name}: a row needs a `text` string or a `messages` list, got {line[:80]!r}")


@dataclass(frozen=True)
class Waves:
    """Assigns prompts to the waves of a measurement.

    Attributes:
        batches: Requests at once.
        repeats: Waves of each batch.
        fresh: Each wave has prompts of its own. Otherwise all waves begin with the first prompt.
    """

    batches: list[int]
    repeats: int
    fresh: bool

    @property
    def prompts(self) -> int:
        """Number of prompts that all waves need."""
        return self.repeats * sum(self.batches) if self.fresh else max(self.batches)

    def of(self, batch: int) -> list[slice]:
        """The positions of the prompts in each wave of a batch."""
        if not self.fresh:
            return [slice(0, batch)] * self.repeats
        start = self.repeats * sum(self.batches[: self.batches.index(batch)])
        return [slice(first, first + batch) for first in range(start, start + self.repeats * batch, batch)]


def make_prompts(
    args: argparse.Namespace, count: int, contexts: list[int]
) -> dict[int, list[tuple[int, ...]]]:
    """Make prompts from --prompt-file, or from random tokens if there is no file.

    Args:
        args: Options with ``model`` and ``prompt_file``.
        count: Prompts of each length.
        contexts: Lengths in tokens.

    Returns:
        Token ids of the prompts, by length.

    Raises:
        CommandError: --prompt-file is too short, or cannot be read.
        OptionError: The model has no config that can be read.
    """
    config = read_config(args.model)
    if args.prompt_file is None:
        draw = random.Random(0)
        # The first ids are special tokens in most vocabularies.
        lowest = min(1000, config["vocab_size"] // 2)
        return {
            length: [
                tuple(draw.randrange(lowest, config["vocab_size"]) for _ in range(length)) for _ in range(count)
            ]
            for length in contexts
        }
    return cut_prompts(
        read_text("--prompt-file", args.prompt_file), load_tokenizer(str(args.model)), count, contexts, "--prompt-file"
    )


def read_text(flag: str, path: Path) -> str:
    """Read the text file that ``flag`` names.

    Raises:
        CommandError: The file cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{flag} {path} cannot be read ({error}): pass a file of text") from error


def cut_prompts(text: str, tokenizer: Tokenizer, count: int, contexts: list[int], name: str) -> dict[int, list[tuple[int, ...]]]:
    """Cut ``count`` prompts of each length out of a text, at even distances. Prompts of all lengths begin at the same tokens.

    Args:
        text: The text.
        tokenizer: The model's tokenizer.
        count: Prompts of each length.
        contexts: Lengths in tokens.
        name: Name of the text in messages.

    Returns:
        Token ids of the prompts, by length.

    Raises:
        CommandError: The text is too short for so many different prompts.
    """
    ids = encode(tokenizer, text)
    needed = max(contexts) + count
    if len(ids) < needed:
        raise CommandError(f"{name} has {len(ids)} tokens; these prompts need {needed}: pass a longer text, or ask for fewer or shorter prompts")
    stride = (len(ids) - max(contexts)) // count
    if stride < max(contexts):
        print(f"{name} has {len(ids)} tokens: the {count} prompts overlap, each begins {stride} tokens after the last")
    return {length: [ids[i * stride : i * stride + length] for i in range(count)] for length in contexts}
