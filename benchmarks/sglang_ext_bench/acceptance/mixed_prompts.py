"""Prompts of many kinds of text that a Debian machine with Python and Perl has, for choices of tokens: docs/results/longcot.md.

    sglang-ext-bench mixed-prompts --model MODEL --out FOLDER [--part report]

Code, man pages, licences, Python's documentation, descriptions of packages, and chats made of questions that are asked often, with
their answers. Methods are chosen on the part ``choose``, and figures of ``report`` told; no text is in both.
"""

import argparse
import importlib
import inspect
import os
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path

from transformers import AutoTokenizer

from sglang_ext_bench.prompts import render_chat

LICENCES, PERL = Path("/usr/share/common-licenses"), Path("/usr/share/perl/5.36.0")
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "choose": {
        "code": ("difflib", "heapq", "textwrap"),
        "manual": ("tar", "sed"),
        "licence": ("Apache-2.0", "LGPL-2.1"),
        "reference": ("specialnames",),
        "description": ("rich",),
        "chat": ("IO/Compress/FAQ.pod",),
    },
    "report": {
        "code": ("argparse", "statistics", "csv"),
        "manual": ("bash", "git", "curl"),
        "licence": ("GPL-3", "MPL-1.1"),
        "reference": ("typesmapping", "formatstrings"),
        "description": ("pydantic",),
        "chat": ("ExtUtils/MakeMaker/FAQ.pod", "Net/libnetFAQ.pod"),
    },
}
SPARE = 1.1
"""Text is cut to so many times the tokens, as those at its end may join others when it is read again."""


def code(name: str) -> str:
    """A module of the standard library."""
    return inspect.getsource(importlib.import_module(name))


def manual(name: str) -> str:
    """A man page, as it is shown."""
    env = {**os.environ, "MANWIDTH": "100"}
    shown = subprocess.run(["man", "--pager=cat", name], capture_output=True, text=True, check=True, env=env)
    return re.sub(".\b", "", shown.stdout)


def licence(name: str) -> str:
    """A licence that Debian ships."""
    return (LICENCES / name).read_text()


def reference(name: str) -> str:
    """A chapter of the language reference."""
    from pydoc_data.topics import topics

    return topics[name]


def description(name: str) -> str:
    """What an installed package says of itself."""
    return str(metadata(name).get_payload())


def chat(name: str) -> list[dict[str, str]]:
    """Questions and answers of one of Perl's lists, by turns."""
    parts = re.split(r"^=(?:item|head\d) (.*\?)\s*$", (PERL / name).read_text(), flags=re.MULTILINE)[1:]
    turns = zip(parts[::2], (re.sub(r"^=.*$", "", answer, flags=re.MULTILINE).strip() for answer in parts[1::2]))
    return [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]


SOURCES: dict[str, Callable[[str], str | list[dict[str, str]]]] = {
    each.__name__: each for each in (code, manual, licence, reference, description, chat)
}


def main() -> None:
    """Write one file a text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=list(PARTS), default="report")
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, names in PARTS[args.part].items():
        for name in names:
            text = SOURCES[kind](name)
            ids = tokenizer.encode(text if isinstance(text, str) else render_chat(tokenizer, text))
            if len(ids) < args.tokens:
                print(f"left out: {kind} {name} has {len(ids)} tokens")
                continue
            file = args.out / f"{kind}-{Path(name).stem if kind != 'chat' else Path(name).parent.name or name}.txt"
            file.write_text(tokenizer.decode(ids[: int(SPARE * args.tokens)]))
            print(f"{file.name}: {len(tokenizer.encode(file.read_text()))} tokens")


if __name__ == "__main__":
    main()
