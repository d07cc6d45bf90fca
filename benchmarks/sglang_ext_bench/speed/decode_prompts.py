"""The prompts of the decode benchmark: random ones or pieces of a text, and which of them each wave takes."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError
from sglang_ext_bench.prompts import Tokenizer, encode, load_tokenizer


@dataclass(frozen=True)
class Waves:
    """Which prompts each wave takes of all that there are of a length.

    Attributes:
        batches: requests at once.
        repeats: waves of each batch.
        fresh: whether each wave takes others; else all begin with the first.
    """

    batches: list[int]
    repeats: int
    fresh: bool

    @property
    def prompts(self) -> int:
        """Prompts that all waves need."""
        return self.repeats * sum(self.batches) if self.fresh else max(self.batches)

    def of(self, batch: int) -> list[slice]:
        """Where the prompts of a batch's waves lie."""
        if not self.fresh:
            return [slice(0, batch)] * self.repeats
        before = self.repeats * sum(self.batches[: self.batches.index(batch)])
        return [slice(first, first + batch) for first in range(before, before + self.repeats * batch, batch)]


def make_prompts(
    args: argparse.Namespace, count: int, contexts: list[int]
) -> dict[int, list[tuple[int, ...]]]:
    """``count`` different prompts of each length.

    Raises:
        CommandError: the model has no config, or --prompt-file is too short or cannot be read.
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
    return cut(read_text("--prompt-file", args.prompt_file), load_tokenizer(str(args.model)), count, contexts, "--prompt-file")


def read_text(flag: str, path: Path) -> str:
    """The text of a file that ``flag`` names.

    Raises:
        CommandError: The file cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{flag} {path} cannot be read ({error}): pass a file of text") from error


def cut(text: str, tokenizer: Tokenizer, count: int, contexts: list[int], name: str) -> dict[int, list[tuple[int, ...]]]:
    """Cut ``count`` prompts of each length out of a text, at even distances. Prompts of all lengths begin at the same tokens.

    Args:
        text: The text.
        tokenizer: The model's.
        count: Prompts of each length.
        contexts: Lengths in tokens.
        name: Name of the text in messages.

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
