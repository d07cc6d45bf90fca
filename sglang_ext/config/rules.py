"""The server's arguments, and the classes of the table of flags (flags.py).

Texts may name values of the arguments, as in ``--tp-size {args.tp_size}``.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.arg_utils import Arg
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_ext.core import MIN_CONTEXT, OptionError
from sglang_ext.mem_cache.compressors import catalogue


@dataclass
class KVServerArgs(ServerArgs):
    """SGLang's server arguments with a field for each flag of flags.py. :class:`~sglang_ext.arguments.CheckedServerArgs` checks them."""

    kv_mode: str = "full"
    kv_compressor: str = catalogue.DEFAULT
    kv_budget: float | None = None
    kv_sparse_from: int = MIN_CONTEXT
    kv_bits: int | None = None
    kv_partition: int | None = None
    kv_prefill: str = "exact"
    kv_head_budgets: str = "auto"
    kv_more_compressors: str | None = None
    kv_scores: str | None = None
    kv_predictor: str | None = None
    kv_online_compressor: str = catalogue.DEFAULT
    kv_select: float | None = None
    kv_select_every: int | str = "auto"
    kv_select_by: str = "current"
    kv_cache_ranks: int = 0
    kv_cache_rank_gpu: int | None = None
    kv_pack_layers: int | str = "auto"
    kv_cache_rank_gb: float | None = None
    kv_score_bits: int | None = None
    kv_draft_length: int | str = "auto"
    kv_max_burst: int | None = None
    kv_stream_pacing: str = "burst"
    kv_host_gb: float = 0.0
    kv_store: str | None = None
    kv_store_form: str = "raw"
    kv_full_tier: str = "device"
    kv_offload_draft_length: int = 64
    kv_reference: str = "exact"
    kv_link_gbps: float | None = None
    kv_link_keys: str | None = None
    kv_bench_acceptance: float | None = None
    kv_bench_corrupt_loads: int | None = None
    kv_bench_codec: str | None = None
    kv_bench_timeline: str | None = None


Predicate = Callable[[KVServerArgs], bool]


def option(name: str) -> str:
    """The flag of a field, as users type it."""
    return f"--{name.replace('_', '-')}"


def round_up(minimum: float) -> str:
    """Round up to two digits, for messages: the advised number is never too small."""
    step = 10.0 ** (math.floor(math.log10(minimum)) - 1)
    return f"{math.ceil(minimum / step) * step:.3g}"


def parse_int_or_word(text: str) -> int | str:
    """Parse a flag's value: a whole number, or a word such as ``auto``, which is checked later."""
    return int(text) if text.lstrip("-").isdigit() else text


def one_of(values: Iterable[object]) -> str:
    """Values as text: ``auto, device or host``."""
    *first, last = map(str, values)
    comma = "," if any(" " in each for each in first) else ""
    return f"{', '.join(first)}{comma} or {last}" if first else last


@dataclass(frozen=True)
class Range:
    """Finite numbers that a flag allows. As text: ``a whole number of tokens from 1 to 64``, where ``tokens`` is the unit.

    With ``accepts_float_type`` a whole number may be a ``float``, such as 2048.0.
    """

    minimum: float
    maximum: float = math.inf
    unit: str = ""
    excludes_minimum: bool = False
    integers_only: bool = True
    accepts_float_type: bool = False

    def allows(self, value: object) -> bool:
        """Whether the flag may have this value."""
        if isinstance(value, bool) or not isinstance(value, int if self.integers_only and not self.accepts_float_type else int | float):
            return False
        inside = self.minimum <= value <= self.maximum and value < math.inf and not (self.excludes_minimum and value == self.minimum)
        return inside and (not self.integers_only or value == int(value))

    def __str__(self) -> str:
        number = f"a {'whole ' * self.integers_only}number{self.unit and f' of {self.unit}'}"
        maximum = "" if self.maximum == math.inf else f" {'and at most' if self.excludes_minimum else 'to'} {self.maximum}"
        return f"{number} {'above' if self.excludes_minimum else 'from'} {self.minimum}{maximum}"


@dataclass(frozen=True)
class Condition:
    """A condition under which a flag has an effect. Otherwise the log says ``unmet``, and a remedy.

    Help and documents show its ``text``, unless that is empty.
    """

    text: str
    holds: Predicate
    unmet: str | Callable[[KVServerArgs], str]
    remedy: str | Callable[[KVServerArgs], str]


def render_text(text: str | Callable[[KVServerArgs], str], args: KVServerArgs) -> str:
    """Fill a text of the table with values of the arguments, for a message."""
    return text(args) if callable(text) else text.format(args=args)


IS_NOT_FULL_MODE = Condition("", lambda args: args.kv_mode != "full", "--kv-mode is full, stock SGLang", "pass --kv-mode verified or lossy")
"""Scope of most flags."""
ANY_MODE = Condition("", lambda args: True, "", "")
"""Scope of flags that all modes read."""


@dataclass(frozen=True)
class Refusal:
    """An option that a flag cannot be combined with.

    Attributes:
        option: The option as users type it, or an environment variable.
        dependent_fields: Fields of SGLang's arguments that only have an effect with this option. Values other than the defaults are refused.
        value: The only value of the flag that is refused. None for any value other than the default.
        needs_device: The option is known only after SGLang selected the device.
    """

    option: str
    is_requested: Predicate
    why: str
    remedy: str
    dependent_fields: tuple[str, ...] = ()
    value: object = None
    needs_device: bool = False

    def check(self, args: KVServerArgs, flag: str, otherwise: str = "") -> None:
        """Refuse arguments that request the option, or a dependent one: ``OptionError`` names ``flag``, the option, the reason and the remedy.

        ``flag`` includes its value. ``otherwise`` is appended to the remedy.
        """
        combination = f"{flag} cannot be combined with"
        if self.is_requested(args):
            named, why, remedy = (render_text(text, args) for text in (self.option, self.why, self.remedy))
            raise OptionError(f"{combination} {named}: {why}; {remedy}{otherwise}.")
        for name in self.dependent_fields:
            field = type(args).__dataclass_fields__[name]
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default
            if getattr(args, name) != default:
                raise OptionError(
                    f"{combination} {option(name)} ({getattr(args, name)!r}): it is part of {self.option}, which is refused: "
                    f"{self.why}; leave it out{otherwise}."
                )


def fields_with_prefix(prefix: str) -> tuple[str, ...]:
    """Fields of SGLang's arguments whose names begin with ``prefix``."""
    return tuple(field.name for field in dataclasses.fields(ServerArgs) if field.name.startswith(prefix))


def refuse_if_set(name: str, why: str, remedy: str = "leave it out", dependent_fields: tuple[str, ...] = ()) -> Refusal:
    """Refusal of an option, given by its field, whenever it is set."""
    return Refusal(option(name), lambda args: bool(getattr(args, name)), why, remedy, dependent_fields)


def at_most_one(name: str, why: str, dependent_fields: tuple[str, ...] = (), remedy: str = "") -> Refusal:
    """Refusal of a numeric option, given by its field, above 1."""
    return Refusal(option(name), lambda args: (getattr(args, name) or 0) > 1, why, remedy or f"use {option(name)} 1", dependent_fields)


def refuse_env_var(name: str, why: str) -> Refusal:
    """Refusal of one of SGLang's environment variables when it is set."""
    return Refusal(name, lambda args: getattr(envs, name).get(), why, "unset that variable")


@dataclass(frozen=True, kw_only=True)
class Flag(Arg):
    """A flag of the table. SGLang's parser reads the fields of ``Arg``, which are set from the others.

    Attributes:
        group: Section of the documents.
        values: Allowed values and ranges. Empty if a function checks the flag.
        example: A usual value, for messages.
        scope: Condition under which the server reads the flag. Otherwise its value is not checked, and the log says that the flag has no effect.
        requires: Further conditions for an effect. The log names a flag of which one is not met.
        conflicts: Combinations that are refused.
        warning: Consequence of the flag that the log names.
    """

    text: str
    group: str
    values: tuple[object, ...] = ()
    example: object = None
    scope: Condition = IS_NOT_FULL_MODE
    requires: tuple[Condition, ...] = ()
    conflicts: tuple[Refusal, ...] = ()
    warning: str = ""
    name: str = ""
    default: Any = None

    def __post_init__(self) -> None:
        has_range = any(isinstance(each, Range) for each in self.values)
        allowed = f" Allowed: {one_of(self.values)}." if has_range else ""
        needs = f" Needs {', '.join(self.needs)}." if self.needs else ""
        object.__setattr__(self, "help", self.text + allowed + needs)
        object.__setattr__(self, "choices", None if has_range else list(self.values) or None)
        object.__setattr__(self, "type_parser", parse_int_or_word if has_range and "auto" in self.values else None)

    @property
    def option(self) -> str:
        """The flag as users type it."""
        return option(self.name)

    @property
    def needs(self) -> list[str]:
        """The conditions for an effect as texts."""
        return [condition.text for condition in (self.scope, *self.requires) if condition.text]

    def is_given(self, args: KVServerArgs) -> bool:
        """Whether the flag differs from its default."""
        return getattr(args, self.name) != self.default

    def check_value(self, args: KVServerArgs) -> None:
        """Refuse a value out of range, with an :class:`OptionError` that names the allowed values."""
        value = getattr(args, self.name)
        is_allowed = any(each.allows(value) if isinstance(each, Range) else each == value for each in self.values)
        if self.values and not is_allowed and (value is not None or self.default is not None):
            example = "" if self.example is None else f", for example {self.example}"
            raise OptionError(f"{self.option} is {value!r}; pass {one_of(self.values)}{example}, or leave it out")

    def check_conflicts(self, args: KVServerArgs, has_device: bool = False) -> None:
        """Refuse combinations with the flag, if it is given: those with ``needs_device`` if ``has_device``, else the others."""
        value = getattr(args, self.name)
        otherwise = f", or use {self.option} {self.default}" if self.name == "kv_mode" else f", or leave {self.option} out"
        for each in self.conflicts if self.is_given(args) else ():
            if each.needs_device == has_device and each.value in (None, value):
                each.check(args, f"{self.option} {value}", otherwise)

    def find_unmet(self, args: KVServerArgs) -> Condition | None:
        """The first condition for an effect that is not met. None if the flag is not given, or has an effect."""
        conditions = (self.scope, *self.requires) if self.is_given(args) else ()
        return next((each for each in conditions if not each.holds(args)), None)
