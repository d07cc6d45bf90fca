"""Registry of methods by the names that ``--kv-compressor`` takes. The catalogue reads it."""

import re
from collections.abc import Callable
from typing import NamedTuple

from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer


class QuantizerEntry(NamedTuple):
    """A quantizer class, the allowed bits of its codes, and the allowed sizes of its partitions, defaults first; no sizes if fixed."""

    quantizer_class: type[Quantizer]
    bits: tuple[int, ...]
    partitions: tuple[int, ...] = ()


COMPRESSORS: dict[str, type[Compressor]] = {}
QUANTIZERS: dict[str, QuantizerEntry] = {}
USER_METHODS: set[str] = set()
"""Names in the tables above that belong to users' own methods (user_methods.py)."""
NAME = re.compile(r"[\w-]+")


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
        name: The name in flags.
        bits: Allowed bits of a code, the default first.
        partitions: Values that ``--kv-partition`` may set its field ``partition`` to, the default first.

    Raises:
        ValueError: The name is taken or malformed.
    """

    def decorate(cls: type[Quantizer]) -> type[Quantizer]:
        _check_name(name)
        QUANTIZERS[name] = QuantizerEntry(cls, bits, partitions)
        return cls

    return decorate


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a method: use letters, digits, - and _")
    if name in COMPRESSORS or name in QUANTIZERS:
        raise ValueError(f"there is a method {name!r} already: give this one another name")
