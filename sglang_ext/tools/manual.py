"""Writes the pages of the manual that are generated from code: ``docs/flags.md`` and ``docs/compatibility.md``.

    python -m sglang_ext.tools.manual            # writes both
    python -m sglang_ext.tools.manual --check    # exit code 1 if one is out of date

Flags come from the help of :class:`~sglang_ext.arguments.KVServerArgs`, refusals from the tables that the server checks. Text between the
marks :data:`BEGIN` and :data:`END` is handwritten and kept.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass

from sglang_ext.arguments import KVServerArgs
from sglang_ext.config.disaggregation_options import PROGRESSIVE, ROLES
from sglang_ext.config.options import MODES
from sglang_ext.config.refusal import Refusal, flag
from sglang_ext.config.refused_options import CACHES, PARALLELISM, REFUSALS
from sglang_ext.mem_cache.compressors import catalogue

BEGIN, END = "<!-- by hand: begin -->", "<!-- by hand: end -->"
GENERATED = "<!-- Written by `python -m sglang_ext.tools.manual`, except the text between the marks. -->"
WIDTH = 110
VALUES = "|".join((*map(re.escape, catalogue.names()), *MODES, "auto", "null", r"\d+"))
# Fields in the order of the page.
GROUPS: dict[str, tuple[str, ...]] = {
    "Mode": ("kv_mode",),
    "What the compressed cache keeps": (
        *("kv_compressor", "kv_budget", "kv_sparse_from", "kv_bits", "kv_partition", "kv_prefill", "kv_head_budgets"),
        *("kv_more_compressors", "kv_scores", "kv_predictor", "kv_online_compressor"),
    ),
    "Tokens selected for each step": (
        *("kv_select", "kv_select_every", "kv_select_by", "kv_cache_ranks", "kv_cache_rank_gpu", "kv_pack_layers", "kv_cache_rank_gb"),
        "kv_score_bits",
    ),
    "Drafts": ("kv_draft_length", "kv_max_burst"),
    "Streams": ("kv_stream_pacing",),
    "Full KV in host memory": ("kv_host_gb", "kv_full_tier", "kv_offload_draft_length"),
    "Transfer of KV between servers": ("kv_reference", "kv_link_gbps", "kv_link_keys"),
    "For benchmarks and tests": ("kv_bench_acceptance", "kv_bench_corrupt_loads", "kv_bench_codec", "kv_bench_timeline"),
}
REFUSED: dict[str, tuple[Refusal, ...]] = {
    "Memory and caches": CACHES,
    "Parallelism": PARALLELISM,
    "Roles of prefill-decode disaggregation": ROLES,
    "Transfer backend progressive": PROGRESSIVE,
    "Everything else": tuple(refusal for refusal in REFUSALS if refusal not in (*CACHES, *PARALLELISM, *ROLES)),
}


def own_fields() -> tuple[str, ...]:
    """Names of the fields that :class:`KVServerArgs` adds to SGLang's arguments."""
    return tuple(KVServerArgs.__annotations__)


def flags_page(by_hand: str) -> str:
    """Render ``docs/flags.md``. ``by_hand`` is its handwritten part.

    Raises:
        ValueError: A flag is in no group, or in two.
    """
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(own_fields()):
        raise ValueError(f"GROUPS has {sorted(grouped)}, the arguments are {sorted(own_fields())}: put each flag into one group")
    parser = argparse.ArgumentParser()
    add_cli_args_from_dataclass(parser, KVServerArgs, fields=grouped)
    actions = {action.dest: action for action in parser._actions}
    lines = [
        "# Flags",
        GENERATED,
        "With `--kv-mode full` the other flags have no effect, except those of transfers. A warning at start names those that are given.\n"
        "In a program\n"
        '`sgl.Engine(model_path=..., kv_mode="verified", kv_budget=0.5)` takes them as keywords.',
    ]
    for group, names in GROUPS.items():
        lines += [f"## {group}", *(_flag(actions[name]) for name in names)]
    return _page(*lines, *_kept(by_hand))


def compatibility_page(by_hand: str) -> str:
    """Render ``docs/compatibility.md``. ``by_hand`` is its handwritten part."""
    lines = []
    for group, refusals in REFUSED.items():
        lines += [f"## Refused: {group[0].lower()}{group[1:]}", "\n".join(_refusals(refusals))]
    return _page("# Compatibility", GENERATED, *_kept(by_hand), *lines)


PAGES = {"flags.md": flags_page, "compatibility.md": compatibility_page}


def handwritten_part(text: str) -> str:
    """The text between the marks of a page. Empty if it has none.

    Raises:
        ValueError: There is one mark without the other.
    """
    if (BEGIN in text) != (END in text):
        raise ValueError(f"the page has one of {BEGIN} and {END}; handwritten text must be between both")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def render(folder: Path) -> dict[Path, str]:
    """Render each page of a ``docs`` folder."""
    found = {}
    for name, page in PAGES.items():
        path = folder / name
        found[path] = page(handwritten_part(path.read_text()) if path.exists() else "")
    return found


def outdated_pages(folder: Path) -> list[Path]:
    """Pages that are missing, or differ from the code."""
    return [path for path, text in render(folder).items() if not path.exists() or path.read_text() != text]


def _page(*blocks: str) -> str:
    return "\n\n".join(blocks) + "\n"


def _kept(by_hand: str) -> tuple[str, ...]:
    return tuple(filter(None, (BEGIN, by_hand, END)))


def _flag(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    said = [] if action.default is None and "efault" in text else ["none" if action.default is None else f"`{action.default}`"]
    default = [f"Default: {each}." for each in said]
    choices = [f"Values: {', '.join(f'`{choice}`' for choice in action.choices)}."] if action.choices else []
    blocks = (f"### `{action.option_strings[0]}`", " ".join(default + choices), _wrapped(text))
    return "\n\n".join(filter(None, blocks))


def _refusals(refusals: Iterable[Refusal]) -> Iterator[str]:
    for refusal in refusals:
        yield _wrapped(f"- {refusal.option}: {refusal.why}; {refusal.remedy}.", "  ")
        if refusal.parts:
            yield _wrapped(f"  With it: {', '.join(map(flag, refusal.parts))}.", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    """Wrap a text to lines of :data:`WIDTH`. Mark flags, with known values or numbers, and variables as code."""
    marked = re.sub(rf"(?<![\w`-])(--[a-z][a-z0-9-]*(?: (?:{VALUES})(?![\w+-]))?|SGLANG_[A-Z_]+)", r"`\1`", text)
    return textwrap.fill(marked, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with ``--check`` report the outdated ones. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.tools.manual", description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[2] / "docs", help="folder (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")
    args = parser.parse_args(arguments)
    late = outdated_pages(args.docs)
    for path in late:
        print(f"{path} is out of date: python -m sglang_ext.tools.manual" if args.check else f"{path} written")
    if args.check:
        return int(bool(late))
    for path, text in render(args.docs).items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
