"""Registry of methods by the names that ``--kv-compressor`` takes. The catalogue reads it.

The module of a built-in method is imported when its class is first used. :data:`DROPPING` and :data:`PACKING` have the properties that flags
and their help need before. A test compares them with the classes.
"""

import pkgutil
import re
from collections.abc import Callable
from typing import NamedTuple

from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer

FOLDER = "sglang_ext.mem_cache.compressors"


class DroppingMethod(NamedTuple):
    """Properties of a built-in method that drops tokens.

    Attributes:
        target: Module and class, in this folder.
        needs_folder: Whether it reads a folder (:attr:`Compressor.reads`). For the other attributes see :class:`Compressor`.
    """

    target: str
    needs_folder: bool = False
    points: bool = False
    every: int = 0
    each_round: bool = False
    comparable: bool = False
    better_uneven: bool = False

    @classmethod
    def of(cls, method: type[Compressor]) -> "DroppingMethod":
        """The properties of a class."""
        target = f"{method.__module__}.{method.__name__}".removeprefix(f"{FOLDER}.")
        names = "points", "every", "each_round", "comparable", "better_uneven"
        return cls(target, method.reads is not None, *(getattr(method, name) for name in names))


class PackingMethod(NamedTuple):
    """Properties of a built-in quantizer: its module and class, and those of :class:`QuantizerEntry`."""

    target: str
    bits: tuple[int, ...] = (4, 2)
    partitions: tuple[int, ...] = ()
    has_kernels: bool = True


DROPPING = {
    "expected-attention": DroppingMethod("expected_attention.ExpectedAttention"),
    "kvzap": DroppingMethod("kvzap.KVzap", needs_folder=True, comparable=True, better_uneven=True),
    "kvzip": DroppingMethod("kvzip.KVzip", needs_folder=True, comparable=True, better_uneven=True),
    "quest": DroppingMethod("each_step.quest.Quest", points=True, every=1, each_round=True),
    "sink-recent": DroppingMethod("sink_recent.SinkRecent"),
    "snapkv": DroppingMethod("snapkv.SnapKV", comparable=True),
    "spade": DroppingMethod("spade.Spade", points=True, every=1, each_round=True),
    "verify-guided": DroppingMethod("verify_guided.VerifyGuided", points=True, each_round=True),
}
PACKING = {
    "hack": PackingMethod("hack.Hack", partitions=(64, 32, 128)),
    "int4": PackingMethod("plain_int.PlainInt", bits=(4,)),
    "int8": PackingMethod("plain_int.PlainInt", bits=(8,)),
    "kivi": PackingMethod("kivi.Kivi"),
    "kvquant": PackingMethod("kvquant.KVQuant", has_kernels=False),
    "lynx": PackingMethod("lynx.Lynx"),
    "rotatekv": PackingMethod("rotatekv.RotateKV"),
    "turboquant": PackingMethod("turboquant.TurboQuant"),
}


class QuantizerEntry(NamedTuple):
    """A quantizer class, the allowed bits of its codes, and the allowed sizes of its partitions, defaults first; no sizes if fixed."""

    quantizer_class: type[Quantizer]
    bits: tuple[int, ...]
    partitions: tuple[int, ...] = ()

    @property
    def has_kernels(self) -> bool:
        """Whether kernels read its blocks."""
        return self.quantizer_class.has_kernels


class Compressors(dict[str, type[Compressor]]):
    """Classes of the methods that drop tokens, by name. A built-in one is imported when it is first looked up."""

    def __missing__(self, name: str) -> type[Compressor]:
        if name not in DROPPING:
            raise KeyError(name)
        # Importing the module registers the class, unless it was imported before.
        found = pkgutil.resolve_name(f"{FOLDER}.{DROPPING[name].target}")
        self[name] = found
        return found


class Quantizers(dict[str, QuantizerEntry]):
    """Quantizers by name, as :class:`Compressors`."""

    def __missing__(self, name: str) -> QuantizerEntry:
        if name not in PACKING:
            raise KeyError(name)
        method = PACKING[name]
        found = self[name] = QuantizerEntry(pkgutil.resolve_name(f"{FOLDER}.{method.target}"), method.bits, method.partitions)
        return found


COMPRESSORS, QUANTIZERS = Compressors(), Quantizers()
USER_METHODS: set[str] = set()
"""Names in the tables above that belong to users' own methods (user_methods.py)."""
NAME = re.compile(r"[\w-]+")


def register(name: str) -> Callable[[type[Compressor]], type[Compressor]]:
    """Class decorator: make a compressor selectable as ``--kv-compressor NAME``.

    Raises:
        ValueError: The name is taken or malformed.
    """

    def decorate(cls: type[Compressor]) -> type[Compressor]:
        _check_name(name, cls)
        COMPRESSORS[name], cls.name = cls, name
        return cls

    return decorate


def register_quantizer(
    name: str, bits: tuple[int, ...], partitions: tuple[int, ...] = ()
) -> Callable[[type[Quantizer]], type[Quantizer]]:
    """Class decorator: make a quantizer selectable as ``--kv-compressor NAME``.

    Args:
        name: The name in flags.
        bits: Allowed bits of a code, the default first.
        partitions: Values that ``--kv-partition`` may set its field ``partition`` to, the default first.

    Raises:
        ValueError: The name is taken or malformed.
    """

    def decorate(cls: type[Quantizer]) -> type[Quantizer]:
        _check_name(name, cls)
        QUANTIZERS[name] = QuantizerEntry(cls, bits, partitions)
        return cls

    return decorate


def _check_name(name: str, method: type[Compressor] | type[Quantizer]) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a method: use letters, digits, - and _")
    builtin = DROPPING.get(name) or PACKING.get(name)
    is_builtin = builtin is not None and f"{method.__module__}.{method.__name__}" == f"{FOLDER}.{builtin.target}"
    if name in COMPRESSORS or name in QUANTIZERS or (builtin is not None and not is_builtin):
        raise ValueError(f"there is a method {name!r} already: give this one another name")
