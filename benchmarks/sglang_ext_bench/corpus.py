"""Build a folder of prompts from text in this Python installation.

The sources are the code of the standard library, the language reference, and the descriptions and licences of installed packages. Each
prompt uses the model's chat template, and asks to summarise, explain or continue one text. The same Python environment and options give
the same files.
"""

import argparse
import hashlib
import importlib.metadata
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sglang_ext.tools import CommandError
from sglang_ext_bench.prompts import (
    Prompt,
    Tokenizer,
    encode,
    load_tokenizer,
    render_chat,
)

MIN_CHARS = 1500
"""Shortest text that is used."""
TASKS = (
    "Summarise the following text in a few sentences.",
    "Explain the following text step by step to a student.",
    "Continue the following text in the same style.",
    "List the most important points of the following text, each with its reason.",
)


@dataclass(frozen=True)
class Document:
    """A text with the name of its file, chapter or package."""

    name: str
    text: str


@dataclass(frozen=True)
class BuiltPrompt:
    """A prompt with its file name and its length in tokens."""

    name: str
    text: str
    tokens: int


def code_documents() -> Iterator[Document]:
    """Yield the top-level modules of the standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield Document(path.name, path.read_text(errors="replace"))


def reference_documents() -> Iterator[Document]:
    """Yield the chapters of the language reference that ``help()`` shows."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(name, topics[name])


def description_documents() -> Iterator[Document]:
    """Yield the long descriptions (README) of installed packages."""
    for found in _distributions():
        text = found.metadata.get_payload()
        yield Document(found.metadata["Name"], text if isinstance(text, str) else "")


def licence_documents() -> Iterator[Document]:
    """Yield the licence and notice files of installed packages."""
    for found in _distributions():
        for file in found.files or []:
            if file.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE", "COPYING")):
                path = Path(str(found.locate_file(file)))
                if path.is_file():
                    yield Document(f"{found.metadata['Name']}/{file.name}", path.read_text(errors="replace"))


SOURCES = {
    "code": code_documents,
    "reference": reference_documents,
    "description": description_documents,
    "licence": licence_documents,
}


def collect() -> dict[str, list[Document]]:
    """Collect the different documents of each source that are long enough. A source without documents is left out.

    Raises:
        CommandError: No source has such a document.
    """
    kept: dict[str, list[Document]] = {}
    seen: set[str] = set()
    for kind, read in SOURCES.items():
        for document in read():
            if len(document.text) >= MIN_CHARS and document.text not in seen:
                seen.add(document.text)
                kept.setdefault(kind, []).append(document)
    if not kept:
        raise CommandError(f"found no text of {MIN_CHARS} characters in this Python installation")
    return kept


def spread_lengths(count: int, low: int, high: int) -> list[int]:
    """Spread ``count`` lengths evenly from ``low`` to ``high`` tokens."""
    return [low + round((high - low) * i / max(count - 1, 1)) for i in range(count)]


def gather(documents: list[Document], start: int, tokenizer: Tokenizer, length: int) -> list[int]:
    """Take the first ``length`` tokens of the documents from index ``start`` on. After the last document the first one follows.

    Raises:
        CommandError: All documents together are too short.
    """
    text = ""
    for step in range(len(documents)):
        text += documents[(start + step) % len(documents)].text + "\n\n"
        is_last = step == len(documents) - 1
        if is_last or len(text) >= 3 * length:  # fewer characters rarely give enough tokens
            ids = tokenizer.encode(text[: 16 * length], add_special_tokens=False)
            if len(ids) >= length:
                return ids[:length]
    raise CommandError(f"all texts together hold less than {length} tokens; lower --max-tokens")


def fit(tokenizer: Tokenizer, task: str, body: list[int], max_tokens: int) -> str:
    """Render a chat whose text is cut so that the chat has at most ``max_tokens`` tokens. Without a chat template, returns its text.

    Args:
        tokenizer: The model's tokenizer.
        task: Question about the text.
        body: Token ids of the text.
        max_tokens: Longest chat.

    Raises:
        CommandError: The task and the chat template alone are longer.
    """
    keep, has_template = len(body), getattr(tokenizer, "chat_template", True) is not None
    while keep > 0:
        text = tokenizer.decode(body[:keep]).rstrip("\ufffd")
        chat = f"{task}\n\n{text}"
        if has_template:
            chat = render_chat(tokenizer, [{"role": "user", "content": chat}])
        excess = len(encode(tokenizer, chat)) - max_tokens
        if excess <= 0:
            return chat
        keep -= excess
    raise CommandError(f"the chat template takes more than {max_tokens} tokens; raise --min-tokens")


def build(
    tokenizer: Tokenizer, sources: dict[str, list[Document]], lengths: list[int], seed: int
) -> Iterator[BuiltPrompt]:
    """Build one prompt for each length. Sources and tasks alternate, and the first document of a prompt is random."""
    kinds = sorted(sources)
    for index, length in enumerate(lengths):
        kind = kinds[index % len(kinds)]
        documents = sources[kind]
        start = Random(f"{seed}/{index}").randrange(len(documents))
        task = TASKS[(index // len(kinds)) % len(TASKS)]
        body = gather(documents, start, tokenizer, length)
        text = fit(tokenizer, task, body, length)
        yield BuiltPrompt(f"{index:03d}-{kind}.txt", text, len(encode(tokenizer, text)))


def default_prompts(tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The prompts of a command without --prompts: eight prompts of 300 to 1,500 tokens."""
    built = build(tokenizer, collect(), spread_lengths(8, 300, 1500), seed=0)
    return tuple(Prompt(each.name, encode(tokenizer, each.text)) for each in built)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prompts``."""
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder for the prompts; it must have no .txt file")
    add("--tokenizer", required=True, help="model whose tokenizer and chat template are used")
    add("--count", type=int, default=24, help="number of prompts (default: %(default)s)")
    add("--min-tokens", type=int, default=500, help="length of the shortest prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=4000, help="length of the longest prompt (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the choice of texts (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the prompts, and print their lengths and a digest of all texts."""
    if args.count < 1 or not 1 <= args.min_tokens <= args.max_tokens:
        raise CommandError(
            f"--count {args.count} --min-tokens {args.min_tokens} --max-tokens {args.max_tokens}: need "
            "at least one prompt and 1 <= min <= max"
        )
    if args.out.is_dir() and any(args.out.glob("*.txt")):
        raise CommandError(f"--out {args.out} holds .txt files already; pass an empty folder")
    args.out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    lengths = spread_lengths(args.count, args.min_tokens, args.max_tokens)
    for prompt in build(load_tokenizer(args.tokenizer), collect(), lengths, args.seed):
        (args.out / prompt.name).write_text(prompt.text)
        digest.update(prompt.text.encode())
        print(f"{prompt.name:24} {prompt.tokens:6} tokens")
    print(f"{args.count} prompts in {args.out}, sha256 {digest.hexdigest()[:16]}")
    return 0


def _distributions() -> list[importlib.metadata.Distribution]:
    found = {each.metadata["Name"]: each for each in importlib.metadata.distributions()}
    return [found[name] for name in sorted(name for name in found if name)]
