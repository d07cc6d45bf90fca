"""The catalogue of compression methods that ``--kv-compressor`` may name: built-in ones, and users' own classes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import attention_scores, integer_quantizers, kvzip, level_quantizers, step_selectors
from sglang_ext.mem_cache.compressors.compressor import Compressor, KeepAll
from sglang_ext.mem_cache.compressors.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.registry import COMPRESSORS, QUANTIZERS, USER_METHODS, is_own, name_of

DEFAULT = "snapkv"
# Names that flags are checked for.
KVZAP, KVZIP, QUEST, SPADE = "kvzap", "kvzip", "quest", "spade"
# Modules whose classes register themselves.
BUILTIN_MODULES = attention_scores, integer_quantizers, kvzip, level_quantizers, step_selectors
# NAME or NAME:MORE. NAME contains colons if it has users' own classes: FILE.py:CLASS or PACKAGE.MODULE:CLASS.
WITH_MORE = re.compile(r"(?P<name>(?:[^:]*?\.\w+:[^\W\d]\w*)*[^:]*)(?::(?P<more>.*))?", re.DOTALL)
# Names with bits, as benchmarks write them: hack:2, hack4.
WITH_BITS = re.compile(r"(?P<name>.+?):?(?P<bits>\d+)")


@dataclass(frozen=True)
class MethodSpec:
    """A compression method: the compressor selects the tokens to keep, then the quantizer quantizes them; None to store them unchanged."""

    compressor: Compressor
    quantizer: Quantizer | None

    @property
    def needs_rotary(self) -> bool:
        """Whether it reads the model's rotary embedding. Models without a known one are then refused."""
        return self.compressor.needs_rotary or (self.quantizer is not None and self.quantizer.before_rotary)


def dropping() -> tuple[str, ...]:
    """Names of all methods that drop tokens: the default, then those that need no files, then the others."""
    return tuple(sorted(COMPRESSORS, key=lambda name: (name != DEFAULT, not is_online(name), COMPRESSORS[name].points, name)))


def packing() -> tuple[str, ...]:
    """Names of all methods that quantize tokens, sorted."""
    return tuple(sorted(QUANTIZERS))


def builtin_names(names: Iterable[str]) -> tuple[str, ...]:
    """The built-in ones of ``names``, which messages list."""
    return tuple(name for name in names if name not in USER_METHODS)


def is_online(name: str) -> bool:
    """Whether a method that drops tokens scores KV and queries during serving, and stores the kept KV."""
    return COMPRESSORS[name].reads is None and not COMPRESSORS[name].points


def online() -> tuple[str, ...]:
    """Names of the built-in methods for which :func:`is_online` holds."""
    return tuple(name for name in builtin_names(dropping()) if is_online(name))


def packable() -> tuple[str, ...]:
    """Names of methods that drop tokens and can be combined with a quantizer, because they store KV."""
    return tuple(name for name in dropping() if not COMPRESSORS[name].points)


def comparable() -> tuple[str, ...]:
    """Names of methods whose heads can share a budget: scores compare over heads and layers, and compressed KV is stored."""
    return tuple(name for name in packable() if COMPRESSORS[name].comparable)


def better_uneven() -> tuple[str, ...]:
    """Names of methods whose acceptance rate is higher if heads keep different numbers of tokens."""
    return tuple(name for name in dropping() if COMPRESSORS[name].better_uneven)


def on_gpu() -> tuple[str, ...]:
    """Names of quantizers that have kernels."""
    return tuple(name for name in packing() if QUANTIZERS[name].quantizer.has_kernels)


def names() -> Iterator[str]:
    """All values of ``--kv-compressor``; of users' own methods, those that were named before."""
    yield from (*dropping(), *packing(), *("+".join(pair) for pair in product(packable(), packing())))


def number(name: str) -> int:
    """Number that identifies a method among the processes of one server, from 1; 0 for no method."""
    return _numbers(len(COMPRESSORS) + len(QUANTIZERS)).get(name, 0)


def method_name(number: int) -> str:
    """Name of the method with this number."""
    return list(_numbers(len(COMPRESSORS) + len(QUANTIZERS)))[number - 1]


@cache
def _numbers(registered: int) -> dict[str, int]:
    """Numbers by name while ``registered`` methods are registered; users' own ones are registered later."""
    return {name: number for number, name in enumerate(names(), 1)}


@cache
def parse(value: str, flag: str = "--kv-compressor") -> tuple[str | None, str | None]:
    """Parse a value of ``--kv-compressor`` into the names of a dropping method and a quantizer; None for none. Messages name ``flag``.

    Raises:
        OptionError: The value is unknown. The message has the value and the allowed ones.
    """
    first, second = (None if part is None else name_of(part, flag) for part in parts(value))
    drops, packs = (first, second) if first in dropping() or second is not None else (None, first)
    if (drops is not None and drops not in dropping()) or (packs is not None and packs not in packing()):
        raise OptionError(
            f"{flag} is {value!r}; allowed: one that drops tokens ({', '.join(builtin_names(dropping()))}), one that packs them in "
            f"few bits ({', '.join(builtin_names(packing()))}), one of each, as in {DEFAULT}+kivi, or one of your own, as in "
            f"./my_method.py:KeyNorm or package.module:KeyNorm. Pass {_suggest_bits_flag(value, flag) or 'one of these'}."
        )
    if packs is not None and drops is not None and COMPRESSORS[drops].points:
        raise OptionError(
            f"{flag} is {value!r}; {drops} points to full KV and stores none that could be packed: pass {drops} alone, "
            f"or one of {', '.join(builtin_names(packable()))} before +{packs}"
        )
    return drops, packs


def _suggest_bits_flag(value: str, flag: str) -> str | None:
    """Flags that a name with bits in it probably means; None if it means nothing."""
    found = WITH_BITS.fullmatch(value)
    if found is None or found["name"].split("+")[-1] not in packing():
        return None
    return f"{flag} {found['name']} --kv-bits {found['bits']}"


def parts(value: str) -> tuple[str, str | None]:
    """Split a value into the method that drops tokens and the quantizer, as typed. Paths may contain a plus, too."""
    for place in (place for place, letter in enumerate(value) if letter == "+"):
        if value[:place] in dropping() or is_own(value[:place]):
            return value[:place], value[place + 1 :]
    return value, None


def split(text: str) -> tuple[str, str | None]:
    """Split a value of ``--kv-compressor`` at its colon into name and rest (a budget, bits); the rest is None without a colon."""
    return WITH_MORE.fullmatch(text).group("name", "more")


def points(value: str) -> bool:
    """Whether the method named ``value`` points to full KV. Raises :class:`OptionError` as :func:`parse`."""
    drops, _ = parse(value)
    return drops is not None and COMPRESSORS[drops].points


def needs_verifications(value: str) -> bool:
    """Whether verifications select the tokens of the method named ``value``. Raises :class:`OptionError` as :func:`parse`."""
    drops, _ = parse(value)
    return drops is not None and COMPRESSORS[drops].each_round and not COMPRESSORS[drops].every


def per_step_methods() -> tuple[str, ...]:
    """Names of methods that select tokens per step. The selection flags apply to them."""
    return tuple(name for name in dropping() if COMPRESSORS[name].every)


def code_bits(packs: str, bits: int | None) -> int:
    """Bits of a quantizer's codes. ``bits`` is the requested number, None for the default.

    Raises:
        OptionError: The number is not allowed. The message has the value and the allowed ones.
    """
    allowed = QUANTIZERS[packs].bits
    if bits is not None and bits not in allowed:
        raise OptionError(
            f"--kv-bits is {bits}; --kv-compressor {packs} has codes of {' or '.join(map(str, allowed))} bits. Pass one of "
            "these, or leave it out"
        )
    return allowed[0] if bits is None else bits


def partition_size(packs: str, partition: int | None) -> int | None:
    """Numbers that share a scale in a quantizer's blocks, None if they are fixed. ``partition`` is the requested size, None for the default.

    Raises:
        OptionError: The size is not allowed. The message has the value and the allowed ones.
    """
    allowed = QUANTIZERS[packs].partitions
    if partition is not None and partition not in allowed:
        sizes = f"has partitions of {' or '.join(map(str, allowed))} numbers. Pass one of these"
        choice = sizes if allowed else f"has none to choose. Pass --kv-compressor {partitioned()[0]}"
        raise OptionError(f"--kv-partition is {partition}; --kv-compressor {packs} {choice}, or leave it out")
    return partition or next(iter(allowed), None)


def partitioned() -> tuple[str, ...]:
    """Names of quantizers whose partition size can be chosen."""
    return tuple(name for name in packing() if QUANTIZERS[name].partitions)


def create(name: str) -> Compressor:
    """Create the compressor of this name, one of :func:`dropping`, with its defaults."""
    return COMPRESSORS[name]()


def quantizer(name: str, bits: int, partition: int | None = None) -> Quantizer:
    """Create the quantizer of this name, one of :func:`packing`, with codes of ``bits`` bits and this partition size."""
    sizes = {} if partition is None else {"partition": partition}
    return QUANTIZERS[name].quantizer(bits=bits, **sizes)


def method(value: str, bits: int | None = None, partition: int | None = None) -> MethodSpec:
    """Create the method for values of ``--kv-compressor``, ``--kv-bits`` and ``--kv-partition``.

    Raises:
        OptionError: No method has this name, or its codes cannot have these bits, or its partitions this size.
    """
    drops, packs = parse(value)
    compressor = KeepAll() if drops is None else create(drops)
    if packs is None:
        return MethodSpec(compressor, None)
    return MethodSpec(compressor, quantizer(packs, code_bits(packs, bits), partition_size(packs, partition)))
