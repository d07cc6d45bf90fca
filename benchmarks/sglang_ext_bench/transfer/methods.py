"""The compared methods of KV transfer. Each is a pair of servers. Their flags differ only in how KV is transferred."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.config import disaggregation_options
from sglang_ext.config.options import BACKEND, QUANTIZED
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.options import find_repeated_flag
from sglang_ext_bench.baselines import CODECS

LYNX = "lynx"
STOCK = disaggregation_options.MOONCAKE_TCP
# Methods with early decoding, and their ``--kv-reference``: the precision that the residual restores.
SPLIT = {LYNX: "int8", "lynx-exact": "exact"}
# Methods that transfer prompts as quantized compressed KV, on which the decode server decodes: compressor and bits.
PACKED = {"hack4": ("hack", 4), "hack2": ("hack", 2), "int4-lossy": ("int4", 4)}
METHODS = (LYNX, "lynx-exact", "raw", *CODECS, *PACKED, STOCK)
# Methods that take suffixes, and the flag of each suffix: the partition size, or quantized prefill.
WITH_SUFFIXES = ("hack4", "hack2")
SUFFIX_FLAGS = {**dict.fromkeys(("32", "64", "128"), "--kv-partition"), QUANTIZED: "--kv-prefill"}


@dataclass(frozen=True)
class TransferMethod:
    """A method of KV transfer: the flags of a prefill server and a decode server.

    Attributes:
        name: Name as given in ``--method``, with suffixes.
        both: Flags of both servers.
        decode: Further flags of the decode server.
    """

    name: str
    both: tuple[str, ...]
    decode: tuple[str, ...] = ()

    @property
    def is_stock(self) -> bool:
        """The servers run without sglang-ext: no limit of the link, and no timeline."""
        return self.name == STOCK


def parse_method(name: str, drafting: tuple[str, ...] = ()) -> TransferMethod:
    """Return the method of a name.

    Args:
        name: One of ``METHODS``. One of :data:`WITH_SUFFIXES` may have ``:`` and a suffix of :data:`SUFFIX_FLAGS`, one for each flag.
        drafting: Further flags of a decode server that drafts.

    Raises:
        CommandError: There is no such method.
    """
    base, *suffixes = name.split(":")
    if base not in METHODS or not set(suffixes) <= set(SUFFIX_FLAGS) or len({SUFFIX_FLAGS[each] for each in suffixes}) < len(suffixes):
        raise CommandError(
            f"--method {name!r}: pass one of {', '.join(METHODS)}; hack methods take suffixes: hack4:32 for a partition, "
            f"hack4:{QUANTIZED}, or both"
        )
    if suffixes and base not in WITH_SUFFIXES:
        raise CommandError(f"--method {name!r}: {base} has no partitions and no quantized prefill: pass {base}")
    if name == STOCK:
        return TransferMethod(name, ("--disaggregation-transfer-backend", STOCK))
    backend = ("--disaggregation-transfer-backend", BACKEND)
    if name in SPLIT:
        return TransferMethod(name, (*backend, "--kv-reference", SPLIT[name]), ("--kv-mode", "verified", *drafting))
    if base in PACKED:
        compressor, bits = PACKED[base]
        flags = ("--kv-mode", "lossy", "--kv-compressor", compressor, "--kv-bits", str(bits))
        suffix_flags = (word for each in sorted(suffixes) for word in (SUFFIX_FLAGS[each], each))
        # Prompts that are too short for compressed KV are transferred raw.
        return TransferMethod(name, (*backend, "--kv-reference", "raw", *flags, *suffix_flags))
    chosen = ("--kv-reference", "raw") if name == "raw" else ("--kv-bench-codec", CODECS[name])
    return TransferMethod(name, (*backend, *chosen))


def obstacle(method: TransferMethod, gbps: float | None) -> str | None:
    """Why a method cannot be measured on this machine, and the remedy. None if it can.

    Args:
        method: How KV is transferred.
        gbps: Rate of the link in Gbit/s. None without a limit.
    """
    if not method.is_stock:
        return None
    if gbps is not None:
        return f"its link cannot be limited to {gbps:g} Gbit/s: pass --link-gbps 0, no limit, to measure it"
    return disaggregation_options.transport_obstacle(STOCK)


def make_flags(args: argparse.Namespace, method: TransferMethod, gbps: float | None, file: Path) -> dict[str, tuple[str, ...]]:
    """Flags of the servers of a method, by role.

    Args:
        args: Options of the command, with ``dtype``, ``server_arg`` and ``decode_arg``.
        method: How KV is transferred.
        gbps: Rate of the link in Gbit/s. None without a limit.
        file: Timeline of the servers. SGLang's own backend writes none.

    Raises:
        CommandError: An option repeats a flag of the method, so that the results would have a wrong name.
    """
    own = {word for word in method.both if word.startswith("--")}
    if method.name.split(":")[0] in WITH_SUFFIXES:
        own |= set(SUFFIX_FLAGS.values())
    for option, given in (("--server-arg", args.server_arg), ("--decode-arg", args.decode_arg)):
        if repeated := find_repeated_flag(given, own):
            others = f"{', '.join(METHODS)}; or hack4:32, hack4:{QUANTIZED}"
            raise CommandError(f"{option} has {repeated}, which --method {method.name} sets: leave it out, or pass another method: {others}")
    timeline = () if method.is_stock else ("--kv-bench-timeline", str(file))
    shared = ("--dtype", args.dtype, "--skip-server-warmup", *method.both, *timeline, *split_flags(args.server_arg))
    link = () if gbps is None or method.is_stock else ("--kv-link-gbps", f"{gbps:g}")
    return {
        "prefill": ("--disaggregation-mode", "prefill", *shared, *link),
        "decode": ("--disaggregation-mode", "decode", *shared, *split_flags(args.decode_arg), *method.decode),
    }
