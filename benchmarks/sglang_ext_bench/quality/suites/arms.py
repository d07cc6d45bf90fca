"""The arms of a suite, and the fewest servers that serve them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.config.method_options import OfferedMethod, resolve_budget
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.registry import COMPRESSORS
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines import served_method
from sglang_ext_bench.quality.suites.options import DEFAULT_ARMS, FULL

SELECT_EVERY = "--kv-select-every"


@dataclass(frozen=True)
class SuiteArm:
    """Stock, or one method in ``--kv-mode lossy``.

    Attributes:
        name: Name on the command line: ``full``, or ``METHOD[:BUDGET] [FLAGS]``.
        offer: The method, as the server offers it to requests. None for stock.
        flags: Further flags of its server.
    """

    name: str
    offer: OfferedMethod | None
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SuiteArm":
        """Parse the name of an arm.

        Raises:
            CommandError: The method or the budget does not exist, or ``lossy`` does not support it.
        """
        method, dashes, rest = text.strip().partition(" --")
        if method == FULL:
            if dashes:
                raise CommandError(f"--arms {text!r}: {FULL} is stock SGLang and takes no flags; pass those of all servers as --server-arg")
            return cls(FULL, None)
        named, budget = catalogue.split(method)
        compressor = served_method(named)
        try:
            share = None if budget is None else float(budget)
        except ValueError:
            raise CommandError(f"--arms {text!r}: {budget!r} is not a number; pass METHOD:BUDGET, for example snapkv:0.25") from None
        try:
            offer = OfferedMethod(f"{compressor}{method.removeprefix(named)}", compressor, resolve_budget(compressor, share, "--arms"))
        except OptionError as error:
            raise CommandError(str(error)) from error
        if catalogue.needs_verifications(compressor):
            raise CommandError(f"--arms {text!r}: {compressor} selects by verifications, which lossy servers do not have; leave it out")
        return cls(text.strip(), offer, tuple(shlex.split(dashes + rest)))

    @property
    def points_to_full_kv(self) -> bool:
        """Whether its compressed KV points to the full KV. Such a method needs its own server."""
        return self.offer is not None and self.offer.drop_method is not None and COMPRESSORS[self.offer.drop_method].points

    @property
    def quantizer(self) -> str | None:
        """Name of the quantizer. None if tokens are not quantized."""
        return None if self.offer is None else self.offer.quant_method


@dataclass(frozen=True)
class SuiteServer:
    """A server and its arms.

    Attributes:
        arms: Arms that only drop tokens come first, because quantization frees the full KV that they read from the prefix cache.
    """

    arms: tuple[SuiteArm, ...]

    @property
    def name(self) -> str:
        """The names of its arms, for logs."""
        return "+".join(arm.name for arm in self.arms)

    def flags(self, on_gpus: bool) -> tuple[str, ...]:
        """Flags of this server beside those of all servers.

        Args:
            on_gpus: The server runs on NVIDIA GPUs.
        """
        *more, first = self.arms
        if first.offer is None:
            return ("--kv-mode", FULL)
        offer = first.offer
        found = ["--kv-mode", "lossy", "--kv-compressor", offer.compressor, "--kv-budget", f"{offer.budget:g}", *first.flags]
        if more:
            found += ["--kv-more-compressors", ",".join(arm.offer.name for arm in more if arm.offer is not None)]
        if on_gpus and offer.drop_method == Quest.name and "--page-size" not in first.flags:
            found += ["--page-size", str(Quest.page)]
        return tuple(found)


def group_arms(arms: Sequence[SuiteArm]) -> list[SuiteServer]:
    """Group arms into as few servers as possible, stock first.

    Arms share a server if they have the same flags, none points to the full KV, and they have at most one quantizer.
    """
    groups: list[list[SuiteArm]] = []
    for arm in sorted(arms, key=lambda arm: (arm.offer is not None, arm.quantizer is None)):
        group = None if arm.offer is None or arm.points_to_full_kv else next((group for group in groups if _fits(arm, group)), None)
        if group is None:
            groups.append([arm])
        else:
            group.append(arm)
    return [SuiteServer(tuple(sorted(group, key=lambda arm: arm.quantizer is not None))) for group in groups]


def _fits(arm: SuiteArm, group: Sequence[SuiteArm]) -> bool:
    if any(each.offer is None or each.points_to_full_kv or each.flags != arm.flags for each in group):
        return False
    return len({each.quantizer for each in (arm, *group)} - {None}) <= 1


def parse_arms(text: str | None) -> tuple[SuiteArm, ...]:
    """Parse ``--arms``: names separated by commas. For None, return :data:`DEFAULT_ARMS`.

    Raises:
        CommandError: An arm is unknown or occurs twice, or there is none.
    """
    named = DEFAULT_ARMS if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
    if not named:
        raise CommandError(f"--arms {text!r} is empty; pass arms separated by commas, for example full,kivi,snapkv:0.25")
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise CommandError(f"--arms has {twice!r} twice; leave one out")
    return tuple(SuiteArm.parse(name) for name in named)


def selection_interval(arm: SuiteArm) -> int:
    """The selection interval of an arm that selects tokens in decode steps, in steps.

    A lossy server selects in each step with ``auto``. It refuses other values that are not numbers.
    """
    words = [word for flag in arm.flags for word in flag.split("=", 1)]
    given = words[words.index(SELECT_EVERY) + 1] if SELECT_EVERY in words[:-1] else ""
    return max(1, int(given)) if given.isdecimal() else 1


def selector_share(arm: SuiteArm) -> float:
    """Bytes that the selector reads in each decode step, as a share of the full KV. 0 for methods that select once.

    At each selection, Spade reads all keys, which are half of the full KV. Quest reads two keys of each page, the least and the largest.
    """
    drops = None if arm.offer is None else arm.offer.drop_method
    if drops == Quest.name:
        read = 1 / Quest.page
    elif drops is not None and COMPRESSORS[drops].every:
        read = 0.5
    else:
        return 0.0
    return read / selection_interval(arm)
