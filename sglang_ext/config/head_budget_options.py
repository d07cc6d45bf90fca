"""What ``--kv-head-budgets`` may be: how heads share what a compressed copy keeps.

``auto`` follows from figures (docs/benchmarks.md, "Budgets that differ by head"). Where a method's scores say more over all heads
than within one, half as many tokens again come of a verification, and a draft takes a quarter longer on an H200: adaptive pays for
these methods, and for no other.
"""

from typing import TYPE_CHECKING

import torch

from sglang_ext.config import copy_options
from sglang_ext.config.method_options import offers
from sglang_ext.config.options import attention_backends, one_of
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.contracts.registry import COMPRESSORS

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

HEAD_BUDGETS = ("auto", "equal", "adaptive")


def resolve(args: "KVServerArgs") -> None:
    """Refuse what cannot be combined with ``adaptive``, and choose where ``auto`` leaves it open.

    Raises:
        OptionError: names the flag, its value and the remedy.
    """
    one_of("--kv-head-budgets", args.kv_head_budgets, HEAD_BUDGETS)
    first, *others = offers(args)
    drops, packs = first.drops, first.packs
    if args.kv_head_budgets == "auto":
        better = drops is not None and COMPRESSORS[drops].better_uneven
        args.kv_head_budgets = "adaptive" if better and not others and packs is None and _are_read(args) else "equal"
    if args.kv_head_budgets == "equal":
        return
    if others:
        raise OptionError(
            f"--kv-head-budgets is 'adaptive' with --kv-more-compressors {args.kv_more_compressors}: where heads keep different "
            "numbers of tokens, all copies are made by one method. Pass equal, or leave --kv-more-compressors out"
        )
    if packs is not None:
        raise OptionError(
            f"--kv-head-budgets is 'adaptive' with --kv-compressor {args.kv_compressor}: packed heads keep equal numbers of "
            f"tokens. Pass equal, or one of {', '.join(catalogue.listed(catalogue.comparable()))}"
        )
    if drops not in catalogue.comparable():
        raise OptionError(
            f"--kv-head-budgets is 'adaptive' with --kv-compressor {args.kv_compressor}, whose scores do not compare over heads: pass equal, "
            f"or one of {', '.join(catalogue.listed(catalogue.comparable()))}"
        )


def check_resolved(args: "KVServerArgs") -> None:
    """Refuse uneven heads where attention does not read them, once SGLang has chosen device and backends.

    Raises:
        OptionError: names what it chose, and the remedy.
    """
    if args.kv_head_budgets == "adaptive":
        copy_options.check_resolved(args, "copies of --kv-head-budgets adaptive", "--kv-head-budgets equal")


def _are_read(args: "KVServerArgs") -> bool:
    """Whether uneven heads are read with what was chosen so far, beside any request.

    In deterministic mode on a GPU nobody reads such a copy beside a request that cannot be drafted (round.py).
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    read = device in copy_options.BACKENDS and attention_backends(args) <= set(copy_options.BACKENDS[device])
    return read and (device == "cpu" or not args.enable_deterministic_inference)
