"""What ``--kv-compressor`` and the flags of its methods may be: ``--kv-budget`` and ``--kv-bits``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext import copy_options
from sglang_ext.options import COMPRESSORS, ONLINE_COMPRESSORS, POINTING, OptionError, one_of

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

# The share of tokens that is kept unless told.
DEFAULT_BUDGET = 0.25
# Methods that pack tokens, and the bits that each may have, the default first.
QUANTIZERS: dict[str, tuple[int, ...]] = {
    "int8": (8,), "int4": (4,), "kivi": (4, 2), "kvquant": (4, 2), "rotatekv": (4, 2), "turboquant": (4, 2),
}  # fmt: skip
# Of these, the ones that no kernel reads on a GPU: it neither rotates keys nor adds outliers.
ON_CPU_ONLY = ("kvquant",)
# Methods that drop tokens, and whose copies can be packed besides: they hold KV.
PACKABLE = tuple(name for name in COMPRESSORS if name not in POINTING)
# All values of --kv-compressor.
METHODS = (*COMPRESSORS, *QUANTIZERS, *(f"{drops}+{packs}" for drops in PACKABLE for packs in QUANTIZERS))


def resolve(args: "KVServerArgs") -> None:
    """Refuse wrong values of ``--kv-compressor``, ``--kv-budget`` and ``--kv-bits``; set the budget where it was left open.

    Raises:
        OptionError: names the flag, its value and the remedy.
    """
    drops, packs = parse_compressor(args.kv_compressor)
    budget = args.kv_budget
    if budget is not None and not (isinstance(budget, int | float) and 0 < budget <= 1):
        raise OptionError(
            f"--kv-budget is {budget}; it is the share of the KV cache that is kept: pass a number above 0 and at most 1, "
            "for example 0.25"
        )
    if drops is None and budget is not None and budget < 1:
        raise OptionError(
            f"--kv-budget is {budget}, but --kv-compressor {packs} keeps all tokens, in few bits: leave it out, or name what "
            f"drops the others too: --kv-compressor {COMPRESSORS[0]}+{packs}"
        )
    if packs is not None:
        code_bits(packs, args.kv_bits)
    elif args.kv_bits is not None:
        raise OptionError(
            f"--kv-bits is {args.kv_bits}, but --kv-compressor {drops} keeps tokens as they are: leave it out, or name what "
            f"packs them too: --kv-compressor {drops}+kivi"
        )
    if budget is None:
        args.kv_budget = 1.0 if drops is None else DEFAULT_BUDGET
    one_of("--kv-online-compressor", args.kv_online_compressor, ONLINE_COMPRESSORS)
    SCORES.check(args.kv_compressor, args.kv_scores)
    PREDICTOR.check(args.kv_compressor, args.kv_predictor)


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

    def check(self, compressor: str, folder: str | None) -> None:
        """Refuse ``folder``, the flag's value, where ``compressor`` reads none, and its absence where it does.

        Raises:
            OptionError: names the flag, its value and the remedy.
        """
        reads = parse_compressor(compressor)[0] == self.method
        if reads and folder is None:
            raise OptionError(
                f"--kv-compressor is {compressor!r}, which {self.why}: pass {self.flag} FOLDER, written by "
                f"python -m {self.maker}, or one of {', '.join(ONLINE_COMPRESSORS)}"
            )
        if not reads and folder is not None:
            raise OptionError(
                f"{self.flag} is {folder!r} with --kv-compressor {compressor}, which reads none: pass --kv-compressor "
                f"{self.method}, or leave it out"
            )
        if folder is not None and not Path(folder).is_dir():
            module = self.maker.split()[0]
            raise OptionError(f"{self.flag} is {folder!r}, which is no folder: pass one that python -m {module} wrote to")


SCORES = Folder("--kv-scores", "kvzip", "reads scores that were computed ahead", "sglang_ext.precompress")
PREDICTOR = Folder("--kv-predictor", "kvzap", "needs a network fitted to the model", "sglang_ext.fit kvzap")


def parse_compressor(name: str) -> tuple[str | None, str | None]:
    """What drops tokens and what packs them, of a value of ``--kv-compressor``; None for nobody.

    Raises:
        OptionError: names the value and what is allowed.
    """
    drops, packs = (name, None) if name in COMPRESSORS else (None, name)
    if packs is not None and "+" in packs:
        drops, _, packs = name.partition("+")
    if (drops is not None and drops not in COMPRESSORS) or (packs is not None and packs not in QUANTIZERS):
        raise OptionError(
            f"--kv-compressor is {name!r}; allowed: one that drops tokens ({', '.join(COMPRESSORS)}), one that packs them in "
            f"few bits ({', '.join(QUANTIZERS)}), or one of each, as in {COMPRESSORS[0]}+kivi. Pass one of these."
        )
    if packs is not None and drops in POINTING:
        raise OptionError(
            f"--kv-compressor is {name!r}; {drops} leads into full KV and holds none that could be packed: pass {drops} alone, "
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


def check_resolved(args: "KVServerArgs") -> None:
    """Refuse methods where hooks or attention cannot serve them, once SGLang has chosen graphs, device and backends.

    Raises:
        OptionError: names what it chose, and the remedy.
    """
    drops, packs = parse_compressor(args.kv_compressor)
    if drops == PREDICTOR.method and args.cuda_graph_config.prefill.backend == "tc_piecewise":
        raise OptionError(
            "--cuda-graph-backend-prefill is 'tc_piecewise'; --kv-compressor kvzap reads hidden states by hooks, which are "
            "untested in compiled graphs. Pass breakable or disabled."
        )
    if drops in POINTING:
        copies = f"the copies of --kv-compressor {drops}"
        copy_options.check_resolved(args, copies, f"one that copies tokens: {', '.join(PACKABLE)}")
    if packs is None:
        return
    copies = f"the packed copies of --kv-compressor {args.kv_compressor}"
    copy_options.check_resolved(args, copies, f"a compressor that only drops tokens: {', '.join(PACKABLE)}")
    if args.device != "cpu":
        _check_kernel(args, packs)


def _check_kernel(args: "KVServerArgs", packs: str) -> None:
    """Refuse copies that the kernel of a GPU does not read."""
    if packs in ON_CPU_ONLY:
        others = ", ".join(name for name in QUANTIZERS if name not in ON_CPU_ONLY)
        raise OptionError(
            f"--device is {args.device} with --kv-compressor {args.kv_compressor}; the kernel of packed copies there turns no "
            f"keys: {packs} is served on a CPU only. Pass {others}, or one that only drops tokens: {', '.join(COMPRESSORS)}."
        )
