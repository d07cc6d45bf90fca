"""Loads classes that a flag names by module and class, as in ``--kv-compressor package.module:Class``.

A class is in a package of its own, which must be installed where the server runs. Each process of a server imports it.
"""

import inspect
import re
from importlib import import_module
from types import ModuleType
from typing import TypeGuard, TypeVar

from sglang_ext.core import OptionError

NAMED = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)+):(?P<name>[^\W\d]\w*)")
"""Matches MODULE:CLASS. The module's name has at least one dot."""
Base = TypeVar("Base")


def load_class(value: str, setting: str, base: type[Base]) -> type[Base]:
    """Load the class that ``value`` names.

    Args:
        value: MODULE:CLASS, as :data:`NAMED` matches it.
        setting: The flag and its value, with which messages begin.
        base: The class that it derives from.

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
    """Import a module.

    Args:
        module: Its name.
        setting: The flag and its value, with which messages begin.

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


def _derives(found: object, base: type[Base]) -> TypeGuard[type[Base]]:
    """Whether it is a class that derives from ``base`` and can be instantiated."""
    return isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found)
