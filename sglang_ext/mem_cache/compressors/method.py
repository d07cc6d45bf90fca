"""What ``--kv-compressor`` names: a method that drops tokens, one that packs them in few bits, or one of each."""

from dataclasses import dataclass

from sglang_ext.config.compressor_options import code_bits, parse_compressor
from sglang_ext.mem_cache.compressors.base import Compressor, create
from sglang_ext.mem_cache.compressors.keep_all import KeepAll
from sglang_ext.mem_cache.compressors.quantizer import Quantizer, quantizer


@dataclass(frozen=True)
class Method:
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


def method(name: str, bits: int | None = None) -> Method:
    """The method of that name, as ``--kv-compressor`` and ``--kv-bits`` say.

    Raises:
        OptionError: no method has that name, or it has no codes of so many bits.
    """
    drops, packs = parse_compressor(name)
    compressor = KeepAll() if drops is None else create(drops)
    return Method(compressor, None if packs is None else quantizer(packs, code_bits(packs, bits)))
