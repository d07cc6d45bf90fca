"""Methods by the names that ``--kv-compressor`` takes: built-in ones, and users' own classes. The catalogue reads it.

``--kv-compressor ./my_method.py:KeyNorm`` names a class in a file, ``--kv-compressor package.module:KeyNorm`` one in a module. Each process
of a server loads it once. It is a subclass of :class:`Compressor`, which drops tokens, or of :class:`Quantizer`, which packs them in few bits
(docs/guides/adding-a-compressor.md).
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors.compressor import Compressor
from sglang_ext.mem_cache.compressors.quantizer import Quantizer
from sglang_ext.named_classes import IN_FILE, NAMED, file_module, import_file, import_named

# Letters of a method's name.
NAME = re.compile(r"[\w-]+")
GUIDE = "docs/guides/adding-a-compressor.md"
# Allowed bits of a user's quantizer that does not register itself with others, the default first.
BITS = (4, 2)


class PackingMethod(NamedTuple):
    """A quantizer with the arguments of :func:`register_quantizer`, the default first; no partitions if they are fixed."""

    quantizer: type[Quantizer]
    bits: tuple[int, ...]
    partitions: tuple[int, ...]


# Methods that drop tokens, and methods that pack them, by name.
COMPRESSORS: dict[str, type[Compressor]] = {}
QUANTIZERS: dict[str, PackingMethod] = {}
USER_METHODS: set[str] = set()
"""Names in the tables above that belong to users' own methods."""


def register(name: str) -> Callable[[type[Compressor]], type[Compressor]]:
    """Class decorator: make a compressor selectable as ``--kv-compressor NAME``.

    Raises:
        ValueError: The name is taken or malformed.
    """

    def decorate(cls: type[Compressor]) -> type[Compressor]:
        _check_name(name)
        COMPRESSORS[name], cls.name = cls, name
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
        _check_name(name)
        QUANTIZERS[name] = PackingMethod(cls, bits, partitions)
        return cls

    return decorate


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a method: use letters, digits, - and _")
    if name in COMPRESSORS or name in QUANTIZERS:
        raise ValueError(f"there is a method {name!r} already: give this one another name")


def name_of(value: str, flag: str) -> str:
    """Load the user's method that ``value`` names, and return its registered name; ``value`` itself if it names none.

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
    compressors, quantizers = dict(COMPRESSORS), dict(QUANTIZERS)
    try:
        module = import_file(source, setting) if source.endswith(".py") else import_named(source, setting)
        found = _register(_class(module, name, setting), name, setting)
    except OptionError:
        if is_new:
            for table, before in ((COMPRESSORS, compressors), (QUANTIZERS, quantizers)):
                table.clear()
                table.update(before)
            sys.modules.pop(module_name, None)
        raise
    USER_METHODS.update({*COMPRESSORS, *QUANTIZERS} - {*compressors, *quantizers})
    return found


def _register(method: type[Compressor] | type[Quantizer], name: str, setting: str) -> str:
    """Register the class under its own name, unless it registered itself. Returns the name."""
    named = [*COMPRESSORS.items(), *((known, each.quantizer) for known, each in QUANTIZERS.items())]
    found = next((known for known, cls in named if cls is method), None)
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
