"""What a method may be called, alone: names, bits and folders. What they may be together is in method_options.py."""

from dataclasses import dataclass
from pathlib import Path

from sglang_ext.config.options import COMPRESSORS, ONLINE_COMPRESSORS, POINTING, OptionError

# The share of tokens that is kept unless told.
DEFAULT_BUDGET = 0.25
# Methods that pack tokens, and the bits that each may have, the default first.
QUANTIZERS: dict[str, tuple[int, ...]] = {
    "int8": (8,), "int4": (4,), "kivi": (4, 2), "kvquant": (4, 2), "rotatekv": (4, 2), "turboquant": (4, 2),
}  # fmt: skip
# Of these, those that have no kernels, and those that have.
CPU_QUANTIZERS = ("kvquant",)
GPU_QUANTIZERS = tuple(name for name in QUANTIZERS if name not in CPU_QUANTIZERS)
# Methods that drop tokens, and whose copies can be packed besides: they hold KV.
PACKABLE = tuple(name for name in COMPRESSORS if name not in POINTING)
# All values of --kv-compressor.
METHODS = (*COMPRESSORS, *QUANTIZERS, *(f"{drops}+{packs}" for drops in PACKABLE for packs in QUANTIZERS))


@dataclass(frozen=True)
class Folder:
    """A folder that one method reads and the others do not.

    Attributes:
        flag: that names it.
        method: that reads it.
        why: the method needs it.
        maker: the module that writes it, and its arguments.
    """

    flag: str
    method: str
    why: str
    maker: str

    def check(self, compressors: tuple[str, ...], folder: str | None) -> None:
        """Refuse ``folder``, the flag's value, where none of ``compressors`` reads it, and its absence where one does.

        Raises:
            OptionError: names the flag, its value and the remedy.
        """
        reader = next((name for name in compressors if parse_compressor(name)[0] == self.method), None)
        if reader is not None and folder is None:
            named = "--kv-compressor is" if reader == compressors[0] else "--kv-more-compressors has"
            raise OptionError(
                f"{named} {reader!r}, which {self.why}: pass {self.flag} FOLDER, written by "
                f"python -m {self.maker}, or one of {', '.join(ONLINE_COMPRESSORS)}"
            )
        if reader is None and folder is not None:
            raise OptionError(
                f"{self.flag} is {folder!r} with --kv-compressor {', '.join(compressors)}, which reads none: pass "
                f"--kv-compressor {self.method}, or leave it out"
            )
        if folder is not None and not Path(folder).is_dir():
            module = self.maker.split()[0]
            raise OptionError(f"{self.flag} is {folder!r}, which is no folder: pass one that python -m {module} wrote to")


SCORES = Folder("--kv-scores", "kvzip", "reads scores that were computed ahead", "sglang_ext.precompress")
PREDICTOR = Folder("--kv-predictor", "kvzap", "needs a network fitted to the model", "sglang_ext.fit kvzap")


def parse_compressor(name: str, flag: str = "--kv-compressor") -> tuple[str | None, str | None]:
    """What drops tokens and what packs them, of a value of ``--kv-compressor``; None for nobody. Messages name ``flag``.

    Raises:
        OptionError: names the value and what is allowed.
    """
    drops, packs = (name, None) if name in COMPRESSORS else (None, name)
    if packs is not None and "+" in packs:
        drops, _, packs = name.partition("+")
    if (drops is not None and drops not in COMPRESSORS) or (packs is not None and packs not in QUANTIZERS):
        raise OptionError(
            f"{flag} is {name!r}; allowed: one that drops tokens ({', '.join(COMPRESSORS)}), one that packs them in "
            f"few bits ({', '.join(QUANTIZERS)}), or one of each, as in {COMPRESSORS[0]}+kivi. Pass one of these."
        )
    if packs is not None and drops in POINTING:
        raise OptionError(
            f"{flag} is {name!r}; {drops} leads into full KV and holds none that could be packed: pass {drops} alone, "
            f"or one of {', '.join(PACKABLE)} before +{packs}"
        )
    return drops, packs


def code_bits(packs: str, bits: int | None) -> int:
    """Bits of the codes of a quantizer; ``bits`` as asked for, None for its default.

    Raises:
        OptionError: names the value and what is allowed.
    """
    allowed = QUANTIZERS[packs]
    if bits is not None and bits not in allowed:
        raise OptionError(
            f"--kv-bits is {bits}; --kv-compressor {packs} has codes of {' or '.join(map(str, allowed))} bits. Pass one of "
            "these, or leave it out"
        )
    return allowed[0] if bits is None else bits
