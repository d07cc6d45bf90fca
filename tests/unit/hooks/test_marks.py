"""The marks in the patches of a fork name the hooks of the tables, and these exist."""

import pkgutil
import re
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_ext.hooks.table import HOOKS, Hook
from sglang_ext.hooks.transfer_table import TRANSFER_HOOKS

PATCHES = sorted((Path(__file__).parents[3] / "patches").glob("*/*.patch"))


class Mark(NamedTuple):
    """A marked function of SGLang.

    Attributes:
        module: Dotted name of the function's module.
        function: Its name, without its class.
        hook: Dotted name of our function.
        part: The part of the fork with which the mark takes effect: ``views`` or ``transfer``.
    """

    module: str
    function: str
    hook: str
    part: str


def marks_in(patch: str) -> list[Mark]:
    """The marks that a patch adds, in order."""
    found = []
    for change in re.split(r"^diff --git ", patch, flags=re.MULTILINE):
        path = re.search(r"^\+\+\+ b/python/(\S+)\.py$", change, re.MULTILINE)
        # A mark is a line of its own. Other decorators may follow it before the function.
        added = re.findall(r'^\+ *@kv_seam\("([^"]+)"(?:, "([^"]+)")?\)\n(?:[ +] *@.*\n)*[ +] *(?:async )?def (\w+)', change, re.MULTILINE)
        assert len(added) == len(re.findall(r"^\+.*@kv_seam\(", change, re.MULTILINE)), f"a mark in {path} is not understood"
        found += [Mark(path[1].replace("/", "."), function, hook, part or "views") for hook, part, function in added]
    return found


def mark_of(hook: Hook) -> Mark:
    """The mark that a fork needs for a hook. Modules of SGLang have lower-case names, classes do not."""
    *owner, function = hook.target.split(".")
    part = "transfer" if hook in TRANSFER_HOOKS else "views"
    return Mark(".".join(takewhile(str.islower, owner)), function, hook.hook, part)


MARKS = [mark for patch in PATCHES for mark in marks_in(patch.read_text())]


def test_the_patches_mark_exactly_the_targets_of_the_tables() -> None:
    assert MARKS
    assert sorted(MARKS) == sorted(mark_of(hook) for hook in HOOKS + TRANSFER_HOOKS)


@pytest.mark.parametrize("name", sorted({mark.hook for mark in MARKS}))
def test_a_marked_hook_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_a_mark_that_cannot_be_read_is_not_overlooked() -> None:
    with pytest.raises(AssertionError, match="not understood"):
        marks_in('diff --git a b\n+++ b/python/sglang/srt/some.py\n+@kv_seam(name)\n def run():\n')
