"""Methods by the names that ``--kv-compressor`` takes: built-in ones, and users' own classes. The catalogue reads it.

The module of a built-in method is imported when its class is first used. :data:`DROPPING` and :data:`PACKING` have the properties that flags
and their help need before. A test compares them with the classes.

``--kv-compressor ./my_method.py:KeyNorm`` names a class in a file, ``--kv-compressor package.module:KeyNorm`` one in a module. Each process
of a server loads it once. It is a subclass of :class:`Compressor`, which drops tokens, or of :class:`Quantizer`, which packs them in few bits
(docs/guides/adding-a-compressor.md).
"""

import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from zlib import crc32

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors.compressor import Compressor
from sglang_ext.mem_cache.compressors.quantizer import Quantizer
from sglang_ext.named_classes import NAMED, import_named

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
    "expected-attention": DroppingMethod("attention_scores.ExpectedAttention"),
    "kvzap": DroppingMethod("kvzap.KVzap", needs_folder=True, comparable=True, better_uneven=True),
    "kvzip": DroppingMethod("kvzip.KVzip", needs_folder=True, comparable=True, better_uneven=True),
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
"""Names in the tables above that belong to users' own methods."""
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


IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
"""Matches FILE.py:CLASS."""
GUIDE = "docs/guides/adding-a-compressor.md"
BITS = (4, 2)
"""Allowed bits of a user's quantizer that does not register itself with others, the default first."""


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
    """Register the class ``name`` of a file or module, and return its registered name.

    Args:
        source: Path of the file, which ends in ``.py``, or name of the module.
        name: Name of the class.
        setting: The flag and its value, with which messages begin.
    """
    # A failure is not cached, and leaves nothing registered. The file is run again at the next call.
    module_name = _module_name(source) if source.endswith(".py") else source
    is_new = module_name not in sys.modules
    before = [(known, dict(known)) for known in (COMPRESSORS, QUANTIZERS)]
    try:
        module = _run(source, setting) if source.endswith(".py") else import_named(source, setting)
        method = _class(module, name, setting)
        found = _register(method, name, setting)
    except OptionError:
        if is_new:
            for known, those in before:
                known.clear()
                known.update(those)
            sys.modules.pop(module_name, None)
        raise
    # A user's module may import built-in methods, which registers them.
    builtin = {*DROPPING, *PACKING}
    USER_METHODS.update({*COMPRESSORS, *QUANTIZERS} - {*before[0][1], *before[1][1]} - builtin)
    return found


def _register(method: type[Compressor] | type[Quantizer], name: str, setting: str) -> str:
    """Register the class under its own name, unless it registered itself. Returns the name."""
    classes = COMPRESSORS | {known: packer.quantizer_class for known, packer in QUANTIZERS.items()}
    found = next((known for known, cls in classes.items() if cls is method), None)
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


def _module_name(path: str) -> str:
    return f"sglang_ext_own_methods.{Path(path).stem}_{crc32(path.encode()):x}"


def _run(path: str, setting: str) -> ModuleType:
    module_name = _module_name(path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not Path(path).is_file():
        raise OptionError(f"{setting}, but there is no file {path}: pass PATH.py:CLASS of an existing file")
    spec = spec_from_file_location(module_name, path)
    assert isinstance(spec, ModuleSpec) and isinstance(spec.loader, SourceFileLoader)
    module = module_from_spec(spec)
    # Dataclasses look up their module while it runs. The file may import its neighbours.
    sys.modules[module_name] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = next((f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == path), None)
        where = f"{path}, line {line}" if line else path
        raise OptionError(f"{setting}, but {where} raised {type(error).__name__}: {error}: correct the file") from error
    finally:
        sys.path.remove(str(Path(path).parent))
    return module


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
