"""Parses the methods of ``--compressor``.

``kivi:2`` is ``--kv-compressor kivi --kv-bits 2``. Flags may follow, as in ``hack:2 --kv-partition 32``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_ext.config.options import QUANTIZED
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines import served_method


@dataclass(frozen=True)
class NamedMethod:
    """A compression method and the flags of its servers.

    Attributes:
        compressor: Value of ``--kv-compressor``.
        bits: Value of ``--kv-bits``. None: the method's default.
        more: Further flags and their values.
    """

    compressor: str
    bits: int | None = None
    more: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "NamedMethod":
        """Parse one method of ``--compressor``.

        Raises:
            CommandError: The method does not exist, or it does not support these bits or this partition.
        """
        # Flags begin at the first " --", because the path of a file may contain blanks.
        name, dashes, flags = text.partition(" --")
        words = (dashes + flags).split()
        more = tuple(part for word in words for part in (word.split("=", 1) if word.startswith("--") else (word,)))
        typed, bits = catalogue.split(name.strip())
        compressor = served_method(typed)
        if bits and not bits.isdigit():
            raise CommandError(f"--compressor {text!r}: pass a number of bits after the colon, as in kivi:2")
        if "--kv-bits" in more:
            raise CommandError(f"--compressor {text!r}: pass bits after a colon, as in kivi:2, and leave --kv-bits out")
        found = cls(compressor, int(bits) if bits else None, more)
        try:
            quantizer = catalogue.parse(compressor)[1]
            if quantizer is not None:
                catalogue.code_bits(quantizer, found.bits)
                catalogue.partition_size(quantizer, found.partition)
        except OptionError as error:
            raise CommandError(f"--compressor {text!r}: {error}") from error
        if quantizer is None and bits:
            raise CommandError(f"--compressor {text!r}: {compressor} does not quantize, so that it has no bits: pass {compressor}")
        return found

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of a server."""
        bits = () if self.bits is None else ("--kv-bits", str(self.bits))
        return ("--kv-compressor", self.compressor, *bits, *self.more)

    @property
    def partition(self) -> int | None:
        """Value of ``--kv-partition`` in :attr:`more`. None if the flag is missing.

        Raises:
            CommandError: The value is not a number.
        """
        values = [value for flag, value in pairwise((*self.more, "")) if flag == "--kv-partition"]
        if not all(value.isdigit() for value in values):
            raise CommandError(f"--compressor '{self.compressor} {' '.join(self.more)}': --kv-partition takes a number, such as 64")
        return int(values[-1]) if values else None

    @property
    def drop_method(self) -> str | None:
        """Name of the method that drops tokens. None if all tokens are kept."""
        return catalogue.parse(self.compressor)[0]

    @property
    def runs_without_server(self) -> bool:
        """Whether it needs only keys, values and queries of prompts with full KV."""
        return self.supports_verified and (self.drop_method is None or catalogue.is_online(self.drop_method))

    @property
    def supports_lossy(self) -> bool:
        """Whether a lossy server can run it. Methods that select tokens by verifications need a verified server."""
        return not catalogue.needs_verifications(self.compressor)

    @property
    def supports_verified(self) -> bool:
        """Whether a verified server can run it. A quantized prefill leaves no exact full KV for verification."""
        return QUANTIZED not in self.more

    def budgets(self, requested: Sequence[float]) -> Sequence[float]:
        """Select the budgets that it supports: 1 if it keeps all tokens, else all requested ones."""
        return (1.0,) if self.drop_method is None else requested
