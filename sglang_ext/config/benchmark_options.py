"""Flags for benchmarks and tests, ``--kv-bench-*``: allowed values and requirements.

They are flags rather than environment variables. A shell may have left a variable set, without the server's users noticing.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.config import refusal
from sglang_ext.core import OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

PARAMETER = "kv_acceptance"
"""Key of a request's custom_params: the probability that its drafts are accepted."""
# The effect of each flag, for the log.
EFFECTS = {
    "kv_bench_acceptance": "drafts are accepted by chance, so answers are of no use",
    "kv_bench_corrupt_loads": "host memory loses bits on purpose; outputs stay correct, and some are recomputed",
}
# The effect of flags that apply to transfers only, in any mode.
TRANSFER_EFFECTS = {
    "kv_bench_codec": "KV arrives as a lossy codec leaves it, so answers are of no use",
    "kv_bench_timeline": "the times of requests' KV and drafts are written to that file",
}


def is_probability(value: object) -> bool:
    """Whether it is a number from 0 to 1. ``True`` is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def check_flags(args: "KVServerArgs") -> None:
    """Refuse values out of range, and flags whose requirements are not met.

    Raises:
        OptionError: Names the flag, its value, the allowed values and the remedy.
    """
    probability, every = args.kv_bench_acceptance, args.kv_bench_corrupt_loads
    if probability is not None and not is_probability(probability):
        raise OptionError(
            f"--kv-bench-acceptance is {probability!r}; a draft is accepted with this probability: pass a number from 0 to 1, or "
            "leave it out, so that verification decides"
        )
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise OptionError(
            f"--kv-bench-corrupt-loads is {every!r}; it is the number of loads per corrupted page: pass a whole number from 1, for "
            "example 7, or leave it out for none"
        )
    for name, flag, value in _given(args):
        lack = _obstacle(args, name)
        if lack is not None:
            raise OptionError(f"{flag} is {value}, but {lack}, or leave {flag} out")


def check_timeline(args: "KVServerArgs") -> None:
    """Refuse a file that cannot be written.

    Raises:
        OptionError: Names the flag, its value and the remedy.
    """
    folder = None if args.kv_bench_timeline is None else Path(args.kv_bench_timeline).parent
    if folder is not None and not folder.is_dir():
        raise OptionError(f"--kv-bench-timeline is {args.kv_bench_timeline!r}, and there is no folder {str(folder)!r}: make it, or name another")
    if folder is not None and Path(args.kv_bench_timeline).is_dir():
        raise OptionError(f"--kv-bench-timeline is {args.kv_bench_timeline!r}, a folder: name a file in it")


def warn(args: "KVServerArgs", effects: Mapping[str, str] = EFFECTS) -> None:
    """Log the effects of the given flags."""
    for name, flag, value in _given(args, effects):
        logger.warning("sglang-ext: %s is %s: %s", flag, value, effects[name])


def _given(args: "KVServerArgs", effects: Mapping[str, str] = EFFECTS) -> list[tuple[str, str, object]]:
    """Field, flag and value of each given flag."""
    # A probability of 0 counts as given.
    return [(name, refusal.flag(name), value) for name in effects if (value := getattr(args, name)) is not None]


def _obstacle(args: "KVServerArgs", name: str) -> str | None:
    """Why the server cannot apply the flag of field ``name``, and the remedy. None if it can."""
    if args.kv_mode != "verified":
        return f"--kv-mode is {args.kv_mode!r}, which verifies nothing: pass --kv-mode verified"
    if name == "kv_bench_corrupt_loads" and not args.kv_host_gb:
        return "--kv-host-gb is 0, so that nothing is loaded: pass a number of GB"
    return None


def check_request(args: "KVServerArgs", value: object) -> None:
    """Refuse an acceptance that is not a probability, or on a server where verification decides.

    Args:
        args: The server's arguments.
        value: The value of :data:`PARAMETER` in a request.

    Raises:
        ValueError: The server forces nothing, or the value is not a number from 0 to 1.
    """
    forced = args.kv_bench_acceptance
    if forced is None:
        raise ValueError(
            f"{PARAMETER} in custom_params is {value!r}, and on this server verification decides which drafts are accepted: leave it out, "
            "or start a server for benchmarks with --kv-bench-acceptance"
        )
    if not is_probability(value):
        raise ValueError(
            f"{PARAMETER} in custom_params is {value!r}; pass a number from 0 to 1, or leave it out for the server's {forced:g}"
        )


def request_acceptance(forced: float, custom_params: dict[str, Any] | None) -> float:
    """Probability that a draft is accepted if all previous ones were: the request's own, or the server's ``forced``."""
    value = _request_value(custom_params)
    return float(forced if value is None else value)


def _request_value(custom_params: dict[str, Any] | None) -> object:
    """The request's value. None if it has none."""
    return custom_params.get(PARAMETER) if isinstance(custom_params, dict) else None
