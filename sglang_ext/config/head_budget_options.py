"""What ``--kv-head-budgets`` may be: how heads share what a compressed copy keeps."""

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
        # On a GPU not before it is measured there.
        served = not others and packs is None and _on_cpu(args) and attention_backends(args) <= set(copy_options.BACKENDS["cpu"])
        args.kv_head_budgets = "adaptive" if drops is not None and COMPRESSORS[drops].better_uneven and served else "equal"
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


def _on_cpu(args: "KVServerArgs") -> bool:
    return args.device == "cpu" or (args.device is None and not torch.cuda.is_available())
