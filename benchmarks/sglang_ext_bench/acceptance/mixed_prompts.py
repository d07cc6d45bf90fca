"""Builds prompts of many kinds of text that a Debian machine with Python and Perl has.

    sglang-ext-bench mixed-prompts --model MODEL --out FOLDER --part report

The texts are code, man pages, licences, Python's language reference, descriptions of packages, and chats made of frequently asked questions
and their answers. Methods are tuned on the part `choose` and measured on the part `report`. No text is in both.

A line for each file has its name and its number of tokens. Texts with fewer than --tokens tokens are left out.
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

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.prompts import load_tokenizer, render_chat

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
# A file has so many times --tokens tokens, because its text may have fewer tokens when it is encoded again.
SPARE = 1.1


def read_code(name: str) -> str:
    """Source of a module of the standard library."""
    return inspect.getsource(importlib.import_module(name))


def read_manual(name: str) -> str:
    """A man page as text."""
    env = {**os.environ, "MANWIDTH": "100"}
    shown = subprocess.run(["man", "--pager=cat", name], capture_output=True, text=True, check=True, env=env)
    return re.sub(".\b", "", shown.stdout)


def read_licence(name: str) -> str:
    """A licence that Debian ships."""
    return (LICENCES / name).read_text()


def read_reference(name: str) -> str:
    """A chapter of Python's language reference."""
    from pydoc_data.topics import topics

    return topics[name]


def read_description(name: str) -> str:
    """The long description of an installed package."""
    return str(metadata(name).get_payload())


def read_chat(name: str) -> list[dict[str, str]]:
    """A list of questions and answers about Perl, as the messages of a chat."""
    parts = re.split(r"^=(?:item|head\d) (.*\?)\s*$", (PERL / name).read_text(), flags=re.MULTILINE)[1:]
    answers = (re.sub(r"^=.*$", "", answer, flags=re.MULTILINE).strip() for answer in parts[1::2])
    return [{"role": role, "content": text} for pair in zip(parts[::2], answers) for role, text in zip(("user", "assistant"), pair)]


READERS: dict[str, Callable[[str], str | list[dict[str, str]]]] = {
    "code": read_code,
    "manual": read_manual,
    "licence": read_licence,
    "reference": read_reference,
    "description": read_description,
    "chat": read_chat,
}


def read_text(kind: str, name: str) -> str | list[dict[str, str]]:
    """Read a text of this machine.

    Raises:
        CommandError: This machine does not have the text.
    """
    try:
        return READERS[kind](name)
    except (OSError, ImportError, KeyError, subprocess.CalledProcessError) as error:
        raise CommandError(
            f"the text {kind} {name} cannot be read ({error}): run this on Debian with man pages, Perl's documentation and {name}"
        ) from error


def file_name(kind: str, name: str) -> str:
    """Name of the file with the prompt of a text."""
    stem = (Path(name).parent.name or name) if kind == "chat" else Path(name).stem
    return f"{kind}-{stem}.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", required=True, help="model whose tokenizer and chat template are used")
    add("--out", type=Path, required=True, help="folder for the files")
    add("--part", choices=list(PARTS), default="report", help="texts to use (default: %(default)s)")
    add("--tokens", type=int, default=2048, help="smallest number of tokens of a prompt (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write one file for each text. Returns 0."""
    check_counts({"--tokens": args.tokens})
    tokenizer = load_tokenizer(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, names in PARTS[args.part].items():
        for name in names:
            text = read_text(kind, name)
            ids = tokenizer.encode(text if isinstance(text, str) else render_chat(tokenizer, text))
            if len(ids) < args.tokens:
                print(f"left out: {kind} {name} has {len(ids)} tokens")
                continue
            file = args.out / file_name(kind, name)
            file.write_text(tokenizer.decode(ids[: int(SPARE * args.tokens)]))
            print(f"{file.name}: {len(tokenizer.encode(file.read_text()))} tokens")
    return 0
