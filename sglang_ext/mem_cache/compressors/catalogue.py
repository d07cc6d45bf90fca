"""The one catalogue of methods: what ``--kv-compressor`` may name. What is to be known of a method its class says.

A method is one file of this folder, or of ``each_step/``, which is found there, or a user's own (user_methods.py).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from pkgutil import iter_modules

from sglang_ext.core import OptionError
from sglang_ext.mem_cache import compressors
from sglang_ext.mem_cache.compressors import each_step, user_methods
from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor, KeepAll
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.contracts.registry import COMPRESSORS, USER_METHODS, QUANTIZERS

DEFAULT = "snapkv"
# NAME, or NAME:MORE, where NAME may have colons of its own, of users' files.
WITH_MORE = re.compile(r"(?P<name>(?:[^:]*?\.py:\w+)*[^:]*)(?::(?P<more>.*))?", re.DOTALL)
# As benchmarks name methods with bits: hack:2, hack4.
WITH_BITS = re.compile(r"(?P<name>.+?):?(?P<bits>\d+)")


@dataclass(frozen=True)
class MethodSpec:
    """What becomes of full KV: selected first, then quantized.

    Attributes:
        compressor: chooses what a copy keeps.
        quantizer: packs it; None where it stays as it is.
    """

    compressor: Compressor
    quantizer: Quantizer | None

    @property
    def needs_rotary(self) -> bool:
        """Whether it reads the model's rotary embedding; models without a known one are refused then."""
        return self.compressor.needs_rotary or (self.quantizer is not None and self.quantizer.before_rotary)


@cache
def _load() -> None:
    for folder in (compressors, each_step):
        for module in iter_modules(folder.__path__, f"{folder.__name__}."):
            import_module(module.name)


def dropping() -> tuple[str, ...]:
    """Names of all methods that drop tokens: the default, those that need nothing but a server, the others."""
    _load()
    return tuple(sorted(COMPRESSORS, key=lambda name: (name != DEFAULT, not is_online(name), COMPRESSORS[name].points, name)))


def packing() -> tuple[str, ...]:
    """Names of all methods that pack tokens in few bits, sorted."""
    _load()
    return tuple(sorted(QUANTIZERS))


def builtin_names(names: Iterable[str]) -> tuple[str, ...]:
    """Of these, those that the catalogue has by itself: what messages name."""
    return tuple(name for name in names if name not in USER_METHODS)


def is_online(name: str) -> bool:
    """Whether a method that drops tokens looks at KV and queries as they are made, and makes copies of what it keeps."""
    return COMPRESSORS[name].reads is None and not COMPRESSORS[name].points


def online() -> tuple[str, ...]:
    """Names of those of the catalogue for which that is so."""
    return tuple(name for name in builtin_names(dropping()) if is_online(name))


def packable() -> tuple[str, ...]:
    """Names of methods that drop tokens, and whose copies can be packed besides: they hold KV."""
    return tuple(name for name in dropping() if not COMPRESSORS[name].points)


def comparable() -> tuple[str, ...]:
    """Names of methods whose scores compare over heads and layers, and whose copies hold KV, which heads can share unevenly."""
    return tuple(name for name in packable() if COMPRESSORS[name].comparable)


def better_uneven() -> tuple[str, ...]:
    """Names of those whose drafts are accepted more often where heads keep different numbers of tokens."""
    return tuple(name for name in dropping() if COMPRESSORS[name].better_uneven)


def on_gpu() -> tuple[str, ...]:
    """Names of methods that pack tokens, and have kernels."""
    return tuple(name for name in packing() if QUANTIZERS[name].quantizer_class.has_kernels)


def names() -> Iterator[str]:
    """All values of ``--kv-compressor``, of users' own those that were named."""
    yield from (*dropping(), *packing(), *("+".join(pair) for pair in product(packable(), packing())))


def number(name: str) -> int:
    """Of a method, by which processes of one server tell it: from 1; 0 for none."""
    return _numbers(len(COMPRESSORS) + len(QUANTIZERS)).get(name, 0)


def method_name(number: int) -> str:
    """The method of that number."""
    return list(_numbers(len(COMPRESSORS) + len(QUANTIZERS)))[number - 1]


@cache
def _numbers(registered: int) -> dict[str, int]:
    return {name: number for number, name in enumerate(names(), 1)}


@cache
def parse(value: str, flag: str = "--kv-compressor") -> tuple[str | None, str | None]:
    """Names of what drops tokens and of what packs them, of a value of ``--kv-compressor``; None for nobody. Messages name ``flag``.

    Raises:
        OptionError: names the value and what is allowed.
    """
    _load()
    first, second = (None if part is None else user_methods.name_of(part, flag) for part in parts(value))
    drops, packs = (first, second) if first in dropping() or second is not None else (None, first)
    if (drops is not None and drops not in dropping()) or (packs is not None and packs not in packing()):
        raise OptionError(
            f"{flag} is {value!r}; allowed: one that drops tokens ({', '.join(builtin_names(dropping()))}), one that packs them in "
            f"few bits ({', '.join(builtin_names(packing()))}), one of each, as in {DEFAULT}+kivi, or one of your own, as in ./my_method.py:KeyNorm. "
            f"Pass {_apart_from_bits(value, flag) or 'one of these'}."
        )
    if packs is not None and drops is not None and COMPRESSORS[drops].points:
        raise OptionError(
            f"{flag} is {value!r}; {drops} leads into full KV and holds none that could be packed: pass {drops} alone, "
            f"or one of {', '.join(builtin_names(packable()))} before +{packs}"
        )
    return drops, packs


def _apart_from_bits(value: str, flag: str) -> str | None:
    """Flags for what a name with bits in it seems to mean; None where it means nothing."""
    found = WITH_BITS.fullmatch(value)
    if found is None or found["name"].split("+")[-1] not in packing():
        return None
    return f"{flag} {found['name']} --kv-bits {found['bits']}"


def parts(value: str) -> tuple[str, str | None]:
    """What drops tokens, and what packs them besides, as it was typed; paths may have a plus, too."""
    for place in (place for place, letter in enumerate(value) if letter == "+"):
        if value[:place] in dropping() or user_methods.NAMED.fullmatch(value[:place]):
            return value[:place], value[place + 1 :]
    return value, None


def split(text: str) -> tuple[str, str | None]:
    """A value of ``--kv-compressor``, and what stands behind it after a colon (a budget, bits); None without a colon."""
    return WITH_MORE.fullmatch(text).group("name", "more")


def points(value: str) -> bool:
    """Whether copies of the method that ``value`` names lead into full KV; False where it names none."""
    dropping = _dropping_of(value)
    return dropping is not None and dropping.points


def needs_verifications(value: str) -> bool:
    """Whether verifications choose what copies of the method keep that ``value`` names; False where it names none."""
    dropping = _dropping_of(value)
    return dropping is not None and dropping.each_round and not dropping.every


def per_step_methods() -> tuple[str, ...]:
    """Names of methods that choose tokens for each step, which the flags of selection are for."""
    return tuple(name for name in dropping() if COMPRESSORS[name].every)


def _dropping_of(value: str) -> type[Compressor] | None:
    try:
        drops, _ = parse(value)
    except OptionError:
        return None
    return None if drops is None else COMPRESSORS[drops]


def code_bits(packs: str, bits: int | None) -> int:
    """Bits of the codes of a quantizer; ``bits`` as asked for, None for its default.

    Raises:
        OptionError: names the value and what is allowed.
    """
    allowed = allowed_bits(packs)
    if bits is not None and bits not in allowed:
        raise OptionError(
            f"--kv-bits is {bits}; --kv-compressor {packs} has codes of {' or '.join(map(str, allowed))} bits. Pass one of "
            "these, or leave it out"
        )
    return allowed[0] if bits is None else bits


def allowed_bits(packs: str) -> tuple[int, ...]:
    """Bits that the codes of a quantizer may have, the default first."""
    _load()
    return QUANTIZERS[packs].bits


def partition_size(packs: str, partition: int | None) -> int | None:
    """Numbers that share a scale in copies of a quantizer; ``partition`` as asked for, None for its default.

    None where it has no choice.

    Raises:
        OptionError: names the value and what is allowed.
    """
    allowed = allowed_partitions(packs)
    if partition is not None and partition not in allowed:
        sizes = f"has partitions of {' or '.join(map(str, allowed))} numbers. Pass one of these"
        choice = sizes if allowed else f"has none to choose. Pass --kv-compressor {partitioned()[0]}"
        raise OptionError(f"--kv-partition is {partition}; --kv-compressor {packs} {choice}, or leave it out")
    return partition or next(iter(allowed), None)


def allowed_partitions(packs: str) -> tuple[int, ...]:
    """Sizes that the partitions of a quantizer may have, the default first; none where it has no choice."""
    _load()
    return QUANTIZERS[packs].partitions


def partitioned() -> tuple[str, ...]:
    """Names of methods that pack tokens in partitions whose size can be chosen."""
    return tuple(name for name in packing() if QUANTIZERS[name].partitions)


def create(name: str) -> Compressor:
    """The compressor of that name with its defaults.

    Raises:
        ValueError: no compressor has that name.
    """
    if name not in dropping():
        raise ValueError(f"no compressor is called {name!r}; there are: {', '.join(dropping())}")
    return COMPRESSORS[name]()


def quantizer(name: str, bits: int, partition: int | None = None) -> Quantizer:
    """The quantizer of that name with codes of ``bits`` bits, and partitions of such a size; None for its own.

    Raises:
        ValueError: no quantizer has that name.
    """
    if name not in packing():
        raise ValueError(f"no quantizer is called {name!r}; there are: {', '.join(packing())}")
    sizes = {} if partition is None else {"partition": partition}
    return QUANTIZERS[name].quantizer_class(bits=bits, **sizes)


def method(value: str, bits: int | None = None, partition: int | None = None) -> MethodSpec:
    """The method of that name, as ``--kv-compressor``, ``--kv-bits`` and ``--kv-partition`` say.

    Raises:
        OptionError: no method has that name, or it has no codes of so many bits, or no such partitions.
    """
    drops, packs = parse(value)
    compressor = KeepAll() if drops is None else create(drops)
    if packs is None:
        return MethodSpec(compressor, None)
    return MethodSpec(compressor, quantizer(packs, code_bits(packs, bits), partition_size(packs, partition)))
