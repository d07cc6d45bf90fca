"""Loads classes that a flag names: MODULE:CLASS in an installed package, or FILE.py:CLASS. Each process of a server imports them."""

import inspect
import re
import sys
import traceback
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TypeGuard, TypeVar
from zlib import crc32

from sglang_ext.core import OptionError

NAMED = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)+):(?P<name>[^\W\d]\w*)")
"""Matches MODULE:CLASS. The module's name has at least one dot."""
IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
"""Matches FILE.py:CLASS."""
Base = TypeVar("Base")


def load_class(value: str, setting: str, base: type[Base]) -> type[Base]:
    """Load the subclass of ``base`` that ``value`` names as :data:`NAMED`. Messages begin with ``setting``, the flag and its value.

    Raises:
        OptionError: The module cannot be imported, or has no such class. The message has the remedy.
    """
    named = NAMED.fullmatch(value)
    assert named is not None
    module_name, name = named.group("module", "name")
    module = import_named(module_name, setting)
    found = getattr(module, name, None)
    if _derives(found, base):
        return found
    there = [key for key, each in vars(module).items() if _derives(each, base) and each.__module__ == module.__name__]
    remedy = f"name one that it has: {', '.join(there)}" if there else f"name a module that has a subclass of {base.__name__}"
    raise OptionError(f"{setting}, but {module_name} has no subclass of {base.__name__} called {name}: {remedy}")


def import_named(module: str, setting: str) -> ModuleType:
    """Import a module. Messages begin with ``setting``, the flag and its value.

    Raises:
        OptionError: There is no such module, or it raises. The message has the remedy.
    """
    try:
        return import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise OptionError(
                f"{setting}, but there is no module {missing}: install its package where the server runs, or add its folder to PYTHONPATH"
            ) from error
        raise OptionError(f"{setting}, but module {module} raised {type(error).__name__}: {error}: correct the module") from error


def import_file(path: str, setting: str) -> ModuleType:
    """Run a Python file as the module :func:`file_module`, once. Messages and errors as :func:`import_named`'s."""
    module_name = file_module(path)
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


def file_module(path: str) -> str:
    """Name of the module as which a file is run."""
    return f"sglang_ext_own_methods.{Path(path).stem}_{crc32(path.encode()):x}"


def _derives(found: object, base: type[Base]) -> TypeGuard[type[Base]]:
    """Whether it is a class that derives from ``base`` and can be instantiated."""
    return isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found)
