"""Where full KV of running requests lies on the servers that a benchmark compares."""

import argparse
from dataclasses import dataclass

from sglang_ext.config.options import FULL_TIERS
from sglang_ext.tools import CommandError
from sglang_ext_bench.options import numbers


@dataclass(frozen=True)
class Tier:
    """Where full KV of running requests lies.

    Attributes:
        name: value of ``--kv-full-tier``.
        longest: drafts before full KV is loaded; of ``device``, 0.
    """

    name: str = "device"
    longest: int = 0


def tiers(args: argparse.Namespace) -> list[Tier]:
    """What --full-tier and --offload-draft-length ask for.

    Raises:
        CommandError: a tier is unknown, or has no host memory.
    """
    found = []
    for name in args.full_tier.split(","):
        if name not in FULL_TIERS:
            raise CommandError(f"--full-tier {args.full_tier!r}: pass {', '.join(FULL_TIERS)}, separated by commas")
        if name != "device" and not args.host_gb:
            raise CommandError(f"--full-tier {name} keeps full KV in host memory: pass --host-gb")
        longest = [0] if name == "device" else numbers(args.offload_draft_length, "--offload-draft-length")
        found += [Tier(name, each) for each in longest]
    return found
