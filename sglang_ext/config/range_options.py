"""Flags that are numbers or names: refused where they are out of range."""

from typing import TYPE_CHECKING

from sglang_ext.config.options import FULL_TIERS, MAX_DRAFT_LENGTH, MAX_OFFLOAD_DRAFT_LENGTH, MODES, offload_obstacle, one_of
from sglang_ext.core import OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def check_flags(args: "KVServerArgs") -> None:
    """Refuse flag values out of range.

    Raises:
        OptionError: names the flag, its value and the allowed values.
    """
    one_of("--kv-mode", args.kv_mode, MODES)
    one_of("--kv-full-tier", args.kv_full_tier, FULL_TIERS)
    burst = args.kv_max_burst
    if burst is not None and not (isinstance(burst, int) and burst >= 2):
        raise OptionError(
            f"--kv-max-burst is {burst}; a round gives at least a draft and the verifier's token: pass a whole number "
            "from 2, or leave it out"
        )
    length = args.kv_draft_length
    if length != "auto" and not (isinstance(length, int) and 1 <= length <= MAX_DRAFT_LENGTH):
        raise OptionError(
            f"--kv-draft-length is {length}; pass a whole number from 1 to {MAX_DRAFT_LENGTH}, for example 15, or auto"
        )
    _check_host(args)
    _check_offload(args)


def _check_offload(args: "KVServerArgs") -> None:
    length = args.kv_offload_draft_length
    if not (isinstance(length, int) and 1 <= length <= MAX_OFFLOAD_DRAFT_LENGTH):
        raise OptionError(
            f"--kv-offload-draft-length is {length}; pass a whole number from 1 to {MAX_OFFLOAD_DRAFT_LENGTH}, for example 64"
        )
    obstacle = offload_obstacle(args)
    if args.kv_full_tier == "host" and obstacle is not None:
        raise OptionError(f"--kv-full-tier is 'host', but {obstacle}, or use --kv-full-tier device")


def _check_host(args: "KVServerArgs") -> None:
    size = args.kv_host_gb
    if not isinstance(size, int | float) or not 0 <= size < float("inf"):
        raise OptionError(f"--kv-host-gb is {size}; pass GB of host memory for full KV, from 0, for none, for example 16")
