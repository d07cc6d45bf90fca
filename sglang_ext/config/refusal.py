"""What an option is refused with: reason and remedy, and the options that are part of it."""

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
        option: the flag as users type it, or the environment variable.
        asked: whether the arguments ask for it.
        why: the reason, for the message.
        remedy: what to do instead.
        parts: fields of SGLang's arguments that do something only with this option: refused where they are given.
    """

    option: str
    asked: Callable[["KVServerArgs"], bool]
    why: str
    remedy: str
    parts: tuple[str, ...] = ()

    def check(self, args: "KVServerArgs", beside: str | None = None) -> None:
        """Raise where the arguments ask for it, or for a part of it.

        Args:
            args: before SGLang resolves them.
            beside: the flag with which the option cannot be combined; the mode where none is given.

        Raises:
            OptionError: names the option, the reason and the remedy.
        """
        refused = f"{beside or f'--kv-mode {args.kv_mode}'} cannot be combined with"
        if self.asked(args):
            raise OptionError(f"{refused} {self.option}: {self.why}; {self.remedy}.")
        for name in self.parts:
            if given(args, name):
                raise OptionError(
                    f"{refused} {flag(name)} ({getattr(args, name)!r}): it is part of {self.option}, which is refused, as "
                    f"{self.why}; leave it out, or use --kv-mode full."
                )


def flag(name: str) -> str:
    """A field of the arguments as users type it."""
    return f"--{name.replace('_', '-')}"


def given(args: "KVServerArgs", name: str) -> bool:
    """Whether a field has another value than its default."""
    field = type(args).__dataclass_fields__[name]
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return getattr(args, name) != default


def round_up(least: float) -> str:
    """A number as a message advises it: two digits that are no less, so that what is advised is taken."""
    step = 10.0 ** (math.floor(math.log10(least)) - 1)
    return f"{math.ceil(least / step) * step:.3g}"


def when_set(name: str) -> Callable[["KVServerArgs"], bool]:
    """Whether a field says anything but no, none or nothing."""
    return lambda args: bool(getattr(args, name))


def above(name: str, most: int) -> Callable[["KVServerArgs"], bool]:
    """Whether a field's number is larger than what is served."""
    return lambda args: (getattr(args, name) or 0) > most


def refused(name: str, why: str, remedy: str = "leave it out", parts: tuple[str, ...] = ()) -> Refusal:
    """Of an option that is refused whenever it says anything, by its field."""
    return Refusal(flag(name), when_set(name), why, remedy, parts)


def at_most_one(name: str, why: str, parts: tuple[str, ...] = ()) -> Refusal:
    """Of an option that is a number, refused above 1, by its field."""
    return Refusal(flag(name), above(name, 1), why, f"use {flag(name)} 1", parts)


def variable(name: str, why: str) -> Refusal:
    """Of one of SGLang's environment variables, which is to be unset."""
    return Refusal(name, lambda args: getattr(envs, name).get(), why, "unset that variable")
