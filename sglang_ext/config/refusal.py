"""Refusals of options: reason, remedy, and the dependent options."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.environ import envs

from sglang_ext.core import OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


@dataclass(frozen=True)
class Refusal:
    """An option that cannot be combined with a compressed KV cache yet.

    Attributes:
        option: The flag as users type it, or the environment variable.
        asked: Whether the arguments request it.
        why: The reason, for the message.
        remedy: What to do instead.
        parts: Fields of SGLang's arguments that only have an effect with this option. They are refused if given.
    """

    option: str
    asked: Callable[["KVServerArgs"], bool]
    why: str
    remedy: str
    parts: tuple[str, ...] = ()

    def check(self, args: "KVServerArgs", beside: str | None = None) -> None:
        """Raise if the arguments request the option, or a dependent one.

        Args:
            args: Arguments before SGLang resolves them.
            beside: The flag with which the option cannot be combined. None for the mode.

        Raises:
            OptionError: Names the option, the reason and the remedy.
        """
        refused = f"{beside or f'--kv-mode {args.kv_mode}'} cannot be combined with"
        if self.asked(args):
            raise OptionError(f"{refused} {self.option}: {self.why}; {self.remedy}.")
        for name in self.parts:
            if given(args, name):
                raise OptionError(
                    f"{refused} {flag(name)} ({getattr(args, name)!r}): it is part of {self.option}, which is refused: "
                    f"{self.why}; leave it out, or use --kv-mode full."
                )


def flag(name: str) -> str:
    """The flag of a field, as users type it."""
    return f"--{name.replace('_', '-')}"


def given(args: "KVServerArgs", name: str) -> bool:
    """Whether a field differs from its default."""
    field = type(args).__dataclass_fields__[name]
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return getattr(args, name) != default


def round_up(least: float) -> str:
    """Round up to two digits, for messages: the advised number is never too small."""
    step = 10.0 ** (math.floor(math.log10(least)) - 1)
    return f"{math.ceil(least / step) * step:.3g}"


def when_set(name: str) -> Callable[["KVServerArgs"], bool]:
    """Return a predicate: the field has a true value."""
    return lambda args: bool(getattr(args, name))


def above(name: str, most: int) -> Callable[["KVServerArgs"], bool]:
    """Return a predicate: the field's number is above ``most``."""
    return lambda args: (getattr(args, name) or 0) > most


def refused(name: str, why: str, remedy: str = "leave it out", parts: tuple[str, ...] = ()) -> Refusal:
    """Refusal of an option, given by its field, whenever it is set."""
    return Refusal(flag(name), when_set(name), why, remedy, parts)


def at_most_one(name: str, why: str, parts: tuple[str, ...] = ()) -> Refusal:
    """Refusal of a numeric option, given by its field, above 1."""
    return Refusal(flag(name), above(name, 1), why, f"use {flag(name)} 1", parts)


def variable(name: str, why: str) -> Refusal:
    """Refusal of one of SGLang's environment variables when it is set."""
    return Refusal(name, lambda args: getattr(envs, name).get(), why, "unset that variable")
