"""A user's own method: a class in a Python file, named by both, as in ``--kv-compressor ./my_method.py:KeyNorm``.

The file is run in each process of a server, once. A method is a subclass of :class:`Compressor`, which drops tokens, or of
:class:`Quantizer`, which packs them in few bits (docs/guides/adding-a-compressor.md).
"""

import re
import sys
import traceback
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zlib import crc32

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors.contracts import registry
from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer

NAMED = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
"""What names a method of one's own."""
GUIDE = "docs/guides/adding-a-compressor.md"
BITS = (4, 2)
"""Of a quantizer's codes, the default first, where it does not register itself with others."""


def name_of(value: str, flag: str) -> str:
    """The name under which the method that ``value`` names is registered; ``value`` itself where it names none of one's own.

    That is the name of its class, or the one that it registers itself with.

    Raises:
        OptionError: there is no such file or class, it cannot be run, or its class is no method; names ``flag`` and the remedy.
    """
    named = NAMED.fullmatch(value)
    if named is None:
        return value
    return _registered(str(Path(named["file"]).expanduser().resolve()), named["name"], f"{flag} is {value!r}")


@cache
def _registered(path: str, name: str, told: str) -> str:
    # What raises is not cached, and leaves nothing registered; a file is run again then.
    is_new = _module_name(path) not in sys.modules
    before = [(known, dict(known)) for known in (registry.COMPRESSORS, registry.QUANTIZERS)]
    try:
        method = _class(_run(path, told), name, told)
        found = _register(method, name, told)
    except OptionError:
        if is_new:
            for known, those in before:
                known.clear()
                known.update(those)
            sys.modules.pop(_module_name(path), None)
        raise
    registry.USER_METHODS.update({*registry.COMPRESSORS, *registry.QUANTIZERS} - {*before[0][1], *before[1][1]})
    return found


def _register(method: type[Compressor] | type[Quantizer], name: str, told: str) -> str:
    """The name that the class registered itself with, else its own, with which it is registered here."""
    classes = registry.COMPRESSORS | {known: packer.quantizer_class for known, packer in registry.QUANTIZERS.items()}
    found = next((known for known, cls in classes.items() if cls is method), None)
    if found is None:
        found = name
        register = registry.register(name) if issubclass(method, Compressor) else registry.register_quantizer(name, BITS)
        try:
            register(method)
        except ValueError as error:
            raise OptionError(f"{told}, but {error}") from error
    if issubclass(method, Compressor) and (called := method().name) != found:
        raise OptionError(f"{told}, but what {name} makes is called {called!r}: let `name` be that of the class, {found!r}")
    return found


def _module_name(path: str) -> str:
    return f"sglang_ext_own_methods.{Path(path).stem}_{crc32(path.encode()):x}"


def _run(path: str, told: str) -> ModuleType:
    module_name = _module_name(path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not Path(path).is_file():
        raise OptionError(f"{told}, but there is no file {path}: pass PATH.py:CLASS of a file that is there")
    spec = spec_from_file_location(module_name, path)
    assert isinstance(spec, ModuleSpec) and isinstance(spec.loader, SourceFileLoader)
    module = module_from_spec(spec)
    # Dataclasses look their module up while it is run; what lies beside the file may be imported.
    sys.modules[module_name] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = next((f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == path), None)
        where = f"{path}, line {line}" if line else path
        raise OptionError(f"{told}, but {where} raised {type(error).__name__}: {error}: correct the file") from error
    finally:
        sys.path.remove(str(Path(path).parent))
    return module


def _class(module: ModuleType, name: str, told: str) -> type[Compressor] | type[Quantizer]:
    """The class of that name, which can be made and served."""
    method = getattr(module, name, None)
    if not (isinstance(method, type) and issubclass(method, Compressor | Quantizer)):
        there = [
            key for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Compressor | Quantizer) and value.__module__ == module.__name__
        ]  # fmt: skip
        found = "is no method" if method is not None else "is not in it"
        remedy = f"name one that is there: {', '.join(there)}" if there else "derive a class from Compressor or Quantizer"
        raise OptionError(f"{told}, but {name} {found}: {remedy} ({GUIDE})")
    lacking = sorted(getattr(method, "__abstractmethods__", ()))
    if lacking:
        raise OptionError(f"{told}, but {name} has no {', '.join(lacking)}: add it ({GUIDE})")
    try:
        made = method() if issubclass(method, Compressor) else method(bits=BITS[0])
    except Exception as error:
        raise OptionError(
            f"{told}, but {name} cannot be made: {type(error).__name__}: {error}: give what it takes defaults ({GUIDE})"
        ) from error
    if isinstance(made, Compressor) and (made.reads is not None or made.keeps_all):
        which = "reads a folder" if made.reads is not None else "keeps all tokens"
        raise OptionError(f"{told}, but {name} {which}, which methods of the catalogue alone do: leave that out ({GUIDE})")
    return method
