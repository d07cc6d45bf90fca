"""Ways to move KV that are compared: each is a pair of servers whose flags differ in how KV travels, and in nothing else."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.config import transports
from sglang_ext.config.options import BACKEND
from sglang_ext.config.prefill_options import QUANTIZED
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines import CODECS
from sglang_ext_bench.comparing.identity_options import given_again, words

LYNX = "lynx"
STOCK = transports.MOONCAKE_TCP
# Of the reference: what the residual restores.
SPLIT = {LYNX: "int8", "lynx-exact": "exact"}
# Prompts that travel as the codes of their copies, on which the decode server answers: method and bits.
PACKED = {"hack4": ("hack", 4), "hack2": ("hack", 2), "int4-lossy": ("int4", 4)}
METHODS = (LYNX, "lynx-exact", "raw", *CODECS, *PACKED, STOCK)
# Of these, after the name: sizes of a partition, and prompts that are computed on codes; the flag of each.
PARTITIONED = ("hack4", "hack2")
FORMS = {**dict.fromkeys(("32", "64", "128"), "--kv-partition"), QUANTIZED: "--kv-prefill"}


@dataclass(frozen=True)
class Method:
    """Two servers.

    Attributes:
        name: as asked for.
        both, decode: flags of both, and of the decode server alone.
    """

    name: str
    both: tuple[str, ...]
    decode: tuple[str, ...] = ()

    @property
    def is_stock(self) -> bool:
        """Whether nothing of sglang-ext runs: no link to pace, and no timeline."""
        return self.name == STOCK

    @property
    def splits(self) -> bool:
        """Whether decoding begins before all has arrived."""
        return self.name in SPLIT


def method(name: str, drafting: tuple[str, ...] = ()) -> Method:
    """That of a name.

    Args:
        name: one of ``METHODS``; of :data:`PARTITIONED` followed by ``:`` and one of :data:`FORMS`, of each flag at most.
        drafting: further flags of a decode server that drafts.

    Raises:
        CommandError: there is none of that name.
    """
    plain, *more = name.split(":")
    if plain not in METHODS or not set(more) <= set(FORMS) or len({FORMS[each] for each in more}) < len(more):
        raise CommandError(f"--method {name!r}: one of {', '.join(METHODS)}; of hack also hack4:32 for a partition, hack4:{QUANTIZED}, or both")
    if more and plain not in PARTITIONED:
        raise CommandError(f"--method {name!r}: {plain} has no partitions, and computes no prompts on codes: pass {plain}")
    if name == STOCK:
        return Method(name, ("--disaggregation-transfer-backend", STOCK))
    over = ("--disaggregation-transfer-backend", BACKEND)
    if name in SPLIT:
        return Method(name, (*over, "--kv-reference", SPLIT[name]), ("--kv-mode", "verified", *drafting))
    if plain in PACKED:
        packs, bits = PACKED[plain]
        asked = (word for each in sorted(more) for word in (FORMS[each], each))
        # Short prompts travel as they are.
        return Method(
            name, (*over, "--kv-reference", "raw", "--kv-mode", "lossy", "--kv-compressor", packs, "--kv-bits", str(bits), *asked)
        )
    chosen = ("--kv-reference", "raw") if name == "raw" else ("--kv-bench-codec", CODECS[name])
    return Method(name, (*over, *chosen))


def obstacle(chosen: Method, gbps: float | None) -> str | None:
    """Why a method cannot be measured here over such a link, in a line; None where it can."""
    if not chosen.is_stock:
        return None
    if gbps is not None:
        return f"its link cannot be held to {gbps:g} Gbit/s: it is measured with a link of 0, which has no limit"
    return transports.transport_obstacle(STOCK)


def flags_of(args: argparse.Namespace, chosen: Method, gbps: float | None, file: Path) -> dict[str, tuple[str, ...]]:
    """Flags of servers by role, whose timeline is ``file``.

    Args:
        args: with ``dtype``, ``server_arg`` and ``decode_arg``.
        chosen: how KV travels.
        gbps: of the link; None without a limit.
        file: for what becomes of requests; stock's servers keep none.

    Raises:
        CommandError: a flag of the method is given again, after which figures would have the name of another one.
    """
    own = {word for word in chosen.both if word.startswith("--")}
    if chosen.name.split(":")[0] in PARTITIONED:
        own |= set(FORMS.values())
    for option, given in (("--server-arg", args.server_arg), ("--decode-arg", args.decode_arg)):
        if again := given_again(given, own):
            others = f"{', '.join(METHODS)}; or hack4:32, hack4:{QUANTIZED}"
            raise CommandError(f"{option} has {again}, which --method {chosen.name} sets: leave it out, or name another of {others}")
    watched = () if chosen.is_stock else ("--kv-bench-timeline", str(file))
    shared = ("--dtype", args.dtype, "--skip-server-warmup", *chosen.both, *watched, *words(args.server_arg))
    paced = () if gbps is None or chosen.is_stock else ("--kv-link-gbps", f"{gbps:g}")
    return {
        "prefill": ("--disaggregation-mode", "prefill", *shared, *paced),
        "decode": ("--disaggregation-mode", "decode", *shared, *words(args.decode_arg), *chosen.decode),
    }
