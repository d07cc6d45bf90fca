"""Users' own methods: a class in a Python file or in an installed module.

``--kv-compressor ./my_method.py:KeyNorm`` names a file, ``--kv-compressor package.module:KeyNorm`` a module. Each process of a server
loads it once. A method is a subclass of :class:`Compressor`, which drops tokens, or of :class:`Quantizer`, which packs them in few bits
(docs/guides/adding-a-compressor.md).
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
from sglang_ext.named_classes import NAMED, import_named

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
    before = [(known, dict(known)) for known in (registry.COMPRESSORS, registry.QUANTIZERS)]
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
    builtin = {*registry.DROPPING, *registry.PACKING}
    registry.USER_METHODS.update({*registry.COMPRESSORS, *registry.QUANTIZERS} - {*before[0][1], *before[1][1]} - builtin)
    return found


def _register(method: type[Compressor] | type[Quantizer], name: str, setting: str) -> str:
    """Register the class under its own name, unless it registered itself. Returns the name."""
    classes = registry.COMPRESSORS | {known: packer.quantizer_class for known, packer in registry.QUANTIZERS.items()}
    found = next((known for known, cls in classes.items() if cls is method), None)
    if found is None:
        found = name
        register = registry.register(name) if issubclass(method, Compressor) else registry.register_quantizer(name, BITS)
        try:
            register(method)
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
