"""Writes the pages of the manual that are generated from code: ``docs/flags.md`` and ``docs/compatibility.md``.

    sglang-ext-bench manual            # writes both
    sglang-ext-bench manual --check    # exit code 1 if one is out of date

Flags come from the table of flags, refusals from the tables that the server checks. Text between the marks :data:`BEGIN` and
:data:`END` is handwritten and kept.
"""

import argparse
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_ext.config.combinations import CACHES, FULL_MODE, PARALLELISM, REFUSALS
from sglang_ext.config.disaggregation_options import TRANSFER_REFUSALS, ROLE_REFUSALS
from sglang_ext.config.flags import FLAGS, GROUPS
from sglang_ext.config.options import MODES
from sglang_ext.config.rules import Flag, Refusal, one_of, option
from sglang_ext.mem_cache.compressors import catalogue

BEGIN, END = "<!-- by hand: begin -->", "<!-- by hand: end -->"
GENERATED = "<!-- Written by `sglang-ext-bench manual`, except the text between the marks. -->"
WIDTH = 110
PLACEHOLDER = re.compile(r"\{args\.(?:kv_)?(\w+)\}")
SGLANG_VALUES = ("auto", "null", "prefill", "decode", "progressive", "cpu", "cuda")
VALUES = "|".join((*map(re.escape, catalogue.names()), *MODES, *SGLANG_VALUES, r"\d+"))
# Mode full with host memory refuses the first three groups, modes verified and lossy all but the third.
REFUSED: dict[str, tuple[Refusal, ...]] = {
    "Memory and caches": CACHES,
    "Parallelism": PARALLELISM,
    "Host memory in mode full": tuple(refusal for refusal in FULL_MODE if refusal not in (*CACHES, *PARALLELISM)),
    "Roles of prefill-decode disaggregation": ROLE_REFUSALS,
    "Transfer backend progressive": TRANSFER_REFUSALS,
    "Everything else": tuple(refusal for refusal in REFUSALS if refusal not in (*CACHES, *PARALLELISM, *ROLE_REFUSALS)),
}


def flags_page(by_hand: str) -> str:
    """Render ``docs/flags.md``. ``by_hand`` is its handwritten part."""
    lines = [
        "# Flags",
        GENERATED,
        "With `--kv-mode full` the other flags have no effect, except those of host memory, of a prefix store and of transfers. At start a warning\n"
        "lists the given flags without effect.\n"
        "In a program\n"
        '`sgl.Engine(model_path=..., kv_mode="verified", kv_budget=0.5)` takes them as keywords.\n'
        "A word in capitals is a value of another flag. The reason says which values are refused.",
    ]
    for group in GROUPS:
        lines += [f"## {group}", *(_flag(flag) for flag in FLAGS if flag.group == group)]
    return "\n\n".join([*lines, *_kept(by_hand)]) + "\n"


def compatibility_page(by_hand: str) -> str:
    """Render ``docs/compatibility.md``. ``by_hand`` is its handwritten part."""
    lines = ["# Compatibility", GENERATED, *_kept(by_hand)]
    for group, refusals in REFUSED.items():
        lines += [f"## Refused: {group[0].lower()}{group[1:]}", "\n".join(_refusals(refusals))]
    return "\n\n".join(lines) + "\n"


PAGES = {"flags.md": flags_page, "compatibility.md": compatibility_page}


def handwritten_part(text: str) -> str:
    """The text between the marks of a page. Empty if it has none."""
    if (BEGIN in text) != (END in text):
        raise ValueError(f"the page has one of {BEGIN} and {END}; handwritten text must be between both")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def render(folder: Path) -> dict[Path, str]:
    """Render each page of a ``docs`` folder."""
    paths = {folder / name: page for name, page in PAGES.items()}
    return {path: page(handwritten_part(path.read_text()) if path.exists() else "") for path, page in paths.items()}


def outdated_pages(folder: Path) -> list[Path]:
    """Pages that are missing, or differ from the code."""
    return [path for path, text in render(folder).items() if not path.exists() or path.read_text() != text]


def _kept(by_hand: str) -> tuple[str, ...]:
    return tuple(filter(None, (BEGIN, by_hand, END)))


def _flag(flag: Flag) -> str:
    default = "none" if flag.default is None else f"`{flag.default}`"
    # A text names a default that depends on other flags.
    facts = [] if flag.default is None and "efault" in flag.text else [f"Default: {default}."]
    if flag.values:
        facts.append(f"Values: {one_of(f'`{each}`' if isinstance(each, str | int) else each for each in flag.values)}.")
    if flag.needs:
        facts.append(f"Needs {', '.join(flag.needs)}.")
    # The conflicts of the mode are in docs/compatibility.md.
    refused = () if flag.conflicts is REFUSALS else (_conflict(each) for each in flag.conflicts)
    return "\n\n".join(filter(None, (f"### `{flag.option}`", _wrapped(" ".join(facts)), _wrapped(flag.text), "\n".join(refused))))


def _conflict(refusal: Refusal) -> str:
    """A line about a refused combination. Values of the arguments are named like variables."""
    refused = "Refused" if refusal.value is None else f"`{refusal.value}` is refused"
    text = f"- {refused} with {refusal.option}: {refusal.why}; {refusal.remedy}."
    return _wrapped(PLACEHOLDER.sub(lambda found: found[1].rpartition("_")[2].upper(), text), "  ")


def _refusals(refusals: Iterable[Refusal]) -> Iterator[str]:
    for refusal in refusals:
        yield _wrapped(f"- {refusal.option}: {refusal.why}; {refusal.remedy}.", "  ")
        if refusal.dependent_fields:
            yield _wrapped(f"  With it: {', '.join(map(option, refusal.dependent_fields))}.", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    """Wrap a text to lines of :data:`WIDTH`. Mark flags, with known values or numbers, and variables as code."""
    marked = re.sub(rf"(?<![\w`-])(--[a-z][a-z0-9-]*(?: (?:{VALUES})(?![\w+-]))?|SGLANG_[A-Z_]+)", r"`\1`", text)
    return textwrap.fill(marked, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[3] / "docs", help="folder (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")


def run(args: argparse.Namespace) -> int:
    """Write the pages, or with ``--check`` report the outdated ones. Return the exit code."""
    late = outdated_pages(args.docs)
    for path in late:
        print(f"{path} is out of date: sglang-ext-bench manual" if args.check else f"{path} written")
    if args.check:
        return int(bool(late))
    for path, text in render(args.docs).items():
        path.write_text(text)
    return 0
