"""A user's own method: a class in a Python file, named by both, as in ``--kv-compressor ./my_method.py:KeyNorm``.

The file is run in each process of a server, once. A method is a subclass of :class:`Compressor`, which drops tokens, or of
:class:`Quantizer`, which packs them in few bits (docs/guides/adding-a-compressor.md).
"""

import inspect
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
    # What raises is not cached.
    method = _class(_run(path, told), name, told)
    known = next((name for name, cls in _classes().items() if cls is method), None)
    if known is not None:
        return known
    register = registry.register(name) if issubclass(method, Compressor) else registry.register_quantizer(name, BITS)
    try:
        register(method)
    except ValueError as error:
        raise OptionError(f"{told}, but {error}") from error
    return name


def _classes() -> dict[str, type]:
    return registry.COMPRESSORS | {name: packer.made_by for name, packer in registry.QUANTIZERS.items()}


def _run(path: str, told: str) -> ModuleType:
    module_name = f"sglang_ext_own_methods.{Path(path).stem}_{crc32(path.encode()):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not Path(path).is_file():
        raise OptionError(f"{told}, but there is no file {path}: pass PATH.py:CLASS of a file that is there")
    spec = spec_from_file_location(module_name, path)
    assert isinstance(spec, ModuleSpec) and isinstance(spec.loader, SourceFileLoader)
    module = module_from_spec(spec)
    # Dataclasses look their module up while it is run.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        line = next((f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == path), None)
        where = f"{path}, line {line}" if line else path
        raise OptionError(f"{told}, but {where} raised {type(error).__name__}: {error}: correct the file") from error
    return module


def _class(module: ModuleType, name: str, told: str) -> type[Compressor] | type[Quantizer]:
    method = getattr(module, name, None)
    if isinstance(method, type) and issubclass(method, Compressor | Quantizer):
        lacking = sorted(getattr(method, "__abstractmethods__", ()))
        if lacking:
            raise OptionError(f"{told}, but {name} has no {', '.join(lacking)}: add it (docs/guides/adding-a-compressor.md)")
        wanted = [
            each.name for each in list(inspect.signature(method).parameters.values())
            if each.default is each.empty and each.name != "bits" and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]  # fmt: skip
        if wanted:
            raise OptionError(f"{told}, but {name} cannot be made without {', '.join(wanted)}: give it defaults")
        return method
    there = [
        key for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Compressor | Quantizer) and value.__module__ == module.__name__
    ]  # fmt: skip
    found = "is no method" if method is not None else "is not in it"
    remedy = f"name one that is there: {', '.join(there)}" if there else "derive a class from Compressor or Quantizer"
    raise OptionError(f"{told}, but {name} {found}: {remedy} (docs/guides/adding-a-compressor.md)")
