"""Where methods register under the names that ``--kv-compressor`` takes; the catalogue reads it."""

import re
from collections.abc import Callable
from typing import NamedTuple

from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer


class QuantizerEntry(NamedTuple):
    """A quantizer, the bits that its codes may have, and the sizes of its partitions, the default first; none where it has no choice."""

    quantizer_class: type[Quantizer]
    bits: tuple[int, ...]
    partitions: tuple[int, ...] = ()


COMPRESSORS: dict[str, type[Compressor]] = {}
QUANTIZERS: dict[str, QuantizerEntry] = {}
USER_METHODS: set[str] = set()
"""Of these names, those of users' own methods (user_methods.py)."""
NAME = re.compile(r"[\w-]+")


def register(name: str) -> Callable[[type[Compressor]], type[Compressor]]:
    """Class decorator: make a compressor selectable as ``--kv-compressor NAME``.

    Raises:
        ValueError: another method has that name, or it is none.
    """

    def decorate(cls: type[Compressor]) -> type[Compressor]:
        _check_name(name)
        COMPRESSORS[name], cls.name = cls, name
        return cls

    return decorate


def register_quantizer(
    name: str, bits: tuple[int, ...], partitions: tuple[int, ...] = ()
) -> Callable[[type[Quantizer]], type[Quantizer]]:
    """Class decorator: make a quantizer with codes of so many ``bits``, the default first, selectable as ``--kv-compressor NAME``.

    Args:
        name: as flags have it.
        bits: of a code.
        partitions: values of its field ``partition`` that ``--kv-partition`` may choose, the default first.

    Raises:
        ValueError: another method has that name, or it is none.
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
