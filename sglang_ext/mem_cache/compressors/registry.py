"""Methods by the names that ``--kv-compressor`` takes: built-in ones, and users' own classes. The catalogue reads it.

The module of a built-in method is imported when its class is first used. :data:`DROPPING` and :data:`PACKING` have the properties that flags and
their help need without importing the class. Registering a class checks them.

``--kv-compressor ./my_method.py:KeyNorm`` names a class in a file, ``--kv-compressor package.module:KeyNorm`` one in a module. Each process
of a server loads it once. It is a subclass of :class:`Compressor`, which drops tokens, or of :class:`Quantizer`, which packs them in few bits
(docs/guides/adding-a-compressor.md).
"""

import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors.compressor import Compressor, RequiredFolder
from sglang_ext.mem_cache.compressors.quantizer import Quantizer
from sglang_ext.named_classes import IN_FILE, NAMED, file_module, import_file, import_named

FOLDER = "sglang_ext.mem_cache.compressors"
# Letters of a method's name.
NAME = re.compile(r"[\w-]+")
GUIDE = "docs/guides/adding-a-compressor.md"
# Allowed bits of a user's quantizer that does not register itself with others, the default first.
BITS = (4, 2)
PREDICTOR_FOLDER = RequiredFolder("--kv-predictor", "needs a network fitted to the model", "sglang_ext.fit kvzap")
SCORES_FOLDER = RequiredFolder("--kv-scores", "reads scores that were computed ahead", "sglang_ext.precompress")


class DroppingMethod(NamedTuple):
    """Properties of a method that drops tokens: its module, in this folder if it is built in, and class; and those of :class:`Compressor`."""

    target: str
    reads: RequiredFolder | None = None
    points: bool = False
    every: int = 0
    each_round: bool = False
    comparable: bool = False
    better_uneven: bool = False


class PackingMethod(NamedTuple):
    """Properties of a quantizer, as :func:`register_quantizer`'s arguments; no partitions if they are fixed."""

    target: str
    bits: tuple[int, ...] = BITS
    partitions: tuple[int, ...] = ()
    has_kernels: bool = True


DROPPING = {
    "expected-attention": DroppingMethod("attention_scores.ExpectedAttention"),
    "kvzap": DroppingMethod("kvzip.KVzap", PREDICTOR_FOLDER, comparable=True, better_uneven=True),
    "kvzip": DroppingMethod("kvzip.KVzip", SCORES_FOLDER, comparable=True, better_uneven=True),
    "quest": DroppingMethod("step_selectors.Quest", points=True, every=1, each_round=True),
    "sink-recent": DroppingMethod("attention_scores.SinkRecent"),
    "snapkv": DroppingMethod("attention_scores.SnapKV", comparable=True),
    "spade": DroppingMethod("step_selectors.Spade", points=True, every=1, each_round=True),
    "verify-guided": DroppingMethod("attention_scores.VerifyGuided", points=True, each_round=True),
}
PACKING = {
    "hack": PackingMethod("integer_quantizers.Hack", partitions=(64, 32, 128)),
    "int4": PackingMethod("integer_quantizers.PlainInt", bits=(4,)),
    "int8": PackingMethod("integer_quantizers.PlainInt", bits=(8,)),
    "kivi": PackingMethod("integer_quantizers.Kivi"),
    "kvquant": PackingMethod("level_quantizers.KVQuant", has_kernels=False),
    "lynx": PackingMethod("level_quantizers.Lynx"),
    "rotatekv": PackingMethod("integer_quantizers.RotateKV"),
    "turboquant": PackingMethod("level_quantizers.TurboQuant"),
}
BUILTIN = {name: each.target for name, each in DROPPING.items()} | {name: each.target for name, each in PACKING.items()}


class Classes(dict[str, type]):
    """Classes of methods by name. A built-in one is imported when it is first looked up in ``methods``, the table of its properties."""

    def __init__(self, methods: Mapping[str, DroppingMethod | PackingMethod]):
        super().__init__()
        self._methods = methods

    def __missing__(self, name: str) -> type:
        # Importing the module registers the class, unless it was imported before.
        found = self[name] = pkgutil.resolve_name(f"{FOLDER}.{self._methods[name].target}")
        return found


COMPRESSORS: dict[str, type[Compressor]] = Classes(DROPPING)
QUANTIZERS: dict[str, type[Quantizer]] = Classes(PACKING)
TABLES: tuple[dict, ...] = COMPRESSORS, QUANTIZERS, DROPPING, PACKING
USER_METHODS: set[str] = set()
"""Names in the tables above that belong to users' own methods."""


def register(name: str) -> Callable[[type[Compressor]], type[Compressor]]:
    """Class decorator: make a compressor selectable as ``--kv-compressor NAME``.

    Raises:
        ValueError: The name is taken or malformed.
    """

    def decorate(cls: type[Compressor]) -> type[Compressor]:
        _check_name(name, cls)
        COMPRESSORS[name], cls.name = cls, name
        found = DroppingMethod(_target(cls), *(getattr(cls, each) for each in DroppingMethod._fields[1:]))
        assert DROPPING.setdefault(name, found) == found, f"{found} differs from its entry in DROPPING"
        return cls

    return decorate


def register_quantizer(
    name: str, bits: tuple[int, ...], partitions: tuple[int, ...] = ()
) -> Callable[[type[Quantizer]], type[Quantizer]]:
    """Class decorator: make a quantizer selectable as ``--kv-compressor NAME``.

    Args:
        bits: Allowed bits of a code, the default first.
        partitions: Values that ``--kv-partition`` may set its field ``partition`` to, the default first.

    Raises:
        ValueError: The name is taken or malformed.
    """

    def decorate(cls: type[Quantizer]) -> type[Quantizer]:
        _check_name(name, cls)
        QUANTIZERS[name] = cls
        found = PackingMethod(_target(cls), bits, partitions, cls.has_kernels)
        assert PACKING.setdefault(name, found) == found, f"{found} differs from its entry in PACKING"
        return cls

    return decorate


def _target(method: type[Compressor] | type[Quantizer]) -> str:
    return f"{method.__module__}.{method.__name__}".removeprefix(f"{FOLDER}.")


def _check_name(name: str, method: type[Compressor] | type[Quantizer]) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a method: use letters, digits, - and _")
    if name in COMPRESSORS or name in QUANTIZERS or BUILTIN.get(name, _target(method)) != _target(method):
        raise ValueError(f"there is a method {name!r} already: give this one another name")


def name_of(value: str, flag: str) -> str:
    """Load the user's method that ``value`` names, and return its registered name; ``value`` itself if it names none.

    The name is that of its class, or the one that the class registers itself with.

    Raises:
        OptionError: The file, module or class does not exist, the file or module raises, or its class is not a method. The message has
            ``flag`` and the remedy.
    """
    setting = f"{flag} is {value!r}"
    if in_file := IN_FILE.fullmatch(value):
        return _registered(str(Path(in_file["file"]).expanduser().resolve()), in_file["name"], setting)
    if in_module := NAMED.fullmatch(value):
        return _registered(in_module["module"], in_module["name"], setting)
    return value


def is_own(value: str) -> bool:
    """Whether ``value`` names a user's own method."""
    return any(form.fullmatch(value) for form in (IN_FILE, NAMED))


@cache
def _registered(source: str, name: str, setting: str) -> str:
    """Register the class ``name`` of ``source``, a path that ends in ``.py`` or a module's name. Returns its registered name."""
    # A failure is not cached, and leaves nothing registered. The file is run again at the next call.
    module_name = file_module(source) if source.endswith(".py") else source
    is_new = module_name not in sys.modules
    before = [dict(table) for table in TABLES]
    try:
        module = import_file(source, setting) if source.endswith(".py") else import_named(source, setting)
        found = _register(_class(module, name, setting), name, setting)
    except OptionError:
        if is_new:
            for table, those in zip(TABLES, before):
                table.clear()
                table.update(those)
            sys.modules.pop(module_name, None)
        raise
    USER_METHODS.update({*DROPPING, *PACKING} - {*before[2], *before[3]})
    return found


def _register(method: type[Compressor] | type[Quantizer], name: str, setting: str) -> str:
    """Register the class under its own name, unless it registered itself. Returns the name."""
    found = next((known for known, cls in (*COMPRESSORS.items(), *QUANTIZERS.items()) if cls is method), None)
    if found is None:
        found = name
        decorate = register(name) if issubclass(method, Compressor) else register_quantizer(name, BITS)
        try:
            decorate(method)
        except ValueError as error:
            raise OptionError(f"{setting}, but {error}") from error
    if issubclass(method, Compressor) and (called := method().name) != found:
        raise OptionError(f"{setting}, but {name} objects are called {called!r}: set `name` to that of the class, {found!r}")
    return found


def _class(module: ModuleType, name: str, setting: str) -> type[Compressor] | type[Quantizer]:
    """The class of that name, checked: it can be instantiated and served."""
    method = getattr(module, name, None)
    if not (isinstance(method, type) and issubclass(method, Compressor | Quantizer)):
        there = [
            key for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Compressor | Quantizer) and value.__module__ == module.__name__
        ]  # fmt: skip
        found = "is not a method" if method is not None else f"is not in {module.__file__}"
        remedy = f"name one that is: {', '.join(there)}" if there else "derive a class from Compressor or Quantizer"
        raise OptionError(f"{setting}, but {name} {found}: {remedy} ({GUIDE})")
    lacking = sorted(getattr(method, "__abstractmethods__", ()))
    if lacking:
        raise OptionError(f"{setting}, but {name} has no {', '.join(lacking)}: add it ({GUIDE})")
    try:
        made = method() if issubclass(method, Compressor) else method(bits=BITS[0])
    except Exception as error:
        raise OptionError(
            f"{setting}, but {name} cannot be created: {type(error).__name__}: {error}: give its parameters defaults ({GUIDE})"
        ) from error
    if isinstance(made, Compressor) and (made.reads is not None or made.keeps_all):
        which = "reads a folder" if made.reads is not None else "keeps all tokens"
        raise OptionError(f"{setting}, but {name} {which}, which only built-in methods may do: leave that out ({GUIDE})")
    return method
