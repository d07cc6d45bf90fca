"""Methods as ``--compressor`` names them.

``kivi:2`` is ``--kv-compressor kivi --kv-bits 2``; flags may follow, as in ``hack:2 --kv-partition 32``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_ext.config.prefill_options import QUANTIZED
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines import served_method


@dataclass(frozen=True)
class Named:
    """A method.

    Attributes:
        compressor: as ``--kv-compressor``.
        bits: as ``--kv-bits``; None for its default.
        more: further flags of its servers, and their values.
    """

    compressor: str
    bits: int | None = None
    more: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Named":
        """What ``text`` names.

        Raises:
            CommandError: there is no such method, or it has no codes of so many bits, or no such partitions.
        """
        # Flags begin with the first word that begins as one; a file's path may have blanks.
        name, dashes, flags = text.partition(" --")
        words = (dashes + flags).split()
        more = tuple(part for word in words for part in (word.split("=", 1) if word.startswith("--") else (word,)))
        typed, bits = catalogue.split(name.strip())
        compressor = served_method(typed)
        if bits and not bits.isdigit():
            raise CommandError(f"--compressor {text!r}: after the colon stand bits, as in kivi:2")
        if "--kv-bits" in more:
            raise CommandError(f"--compressor {text!r}: bits stand after a colon, as in kivi:2; leave --kv-bits out")
        found = cls(compressor, int(bits) if bits else None, more)
        try:
            packs = catalogue.parse(compressor)[1]
            if packs is not None:
                catalogue.code_bits(packs, found.bits)
                catalogue.partition_size(packs, found.partition)
        except OptionError as error:
            raise CommandError(f"--compressor {text!r}: {error}") from error
        if packs is None and bits:
            raise CommandError(f"--compressor {text!r}: {compressor} keeps tokens as they are, without bits: pass {compressor}")
        return found

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a server."""
        bits = () if self.bits is None else ("--kv-bits", str(self.bits))
        return ("--kv-compressor", self.compressor, *bits, *self.more)

    @property
    def partition(self) -> int | None:
        """As ``--kv-partition`` among :attr:`more`; None where it does not say.

        Raises:
            CommandError: it is no number.
        """
        values = [value for flag, value in pairwise((*self.more, "")) if flag == "--kv-partition"]
        if not all(value.isdigit() for value in values):
            raise CommandError(f"--compressor '{self.compressor} {' '.join(self.more)}': --kv-partition takes a number, such as 64")
        return int(values[-1]) if values else None

    @property
    def drops(self) -> str | None:
        """What drops tokens; None where all are kept."""
        return catalogue.parse(self.compressor)[0]

    @property
    def chooses_here(self) -> bool:
        """Whether it needs nothing but keys, values and queries of exact prompts; all else is for servers."""
        return self.serves_verified and (self.drops is None or catalogue.is_online(self.drops))

    @property
    def serves_lossy(self) -> bool:
        """Whether it can serve by itself; what verifications choose cannot."""
        return not catalogue.needs_verifications(self.compressor)

    @property
    def serves_verified(self) -> bool:
        """Whether it can draft for full KV; prompts on codes leave none that is exact."""
        return QUANTIZED not in self.more

    def budgets(self, asked: Sequence[float]) -> Sequence[float]:
        """Shares of the tokens that it can keep, of those asked for."""
        return (1.0,) if self.drops is None else asked
