"""Pacing of a round's tokens in a stream: ``--kv-stream-pacing``, and the same parameter of a request."""

from typing import TYPE_CHECKING, Any

from sglang_ext.config.options import check_allowed

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

BURST, EVEN = "burst", "even"
PACINGS = (BURST, EVEN)
PARAMETER = "kv_stream_pacing"
"""Key of a request's ``custom_params``. It overrides the flag."""


def check_flag(args: "KVServerArgs") -> None:
    """Refuse an unknown pacing.

    Raises:
        OptionError: Names the flag, its value and the allowed values.
    """
    check_allowed("--kv-stream-pacing", args.kv_stream_pacing, PACINGS)


def check_request(args: "KVServerArgs", asked: object) -> None:
    """Refuse an unknown pacing.

    Args:
        args: The server's arguments. Not used here.
        asked: The value of :data:`PARAMETER` in a request.

    Raises:
        ValueError: Names the key, its value and the allowed values.
    """
    if asked not in PACINGS:
        raise ValueError(f"{PARAMETER} is {asked!r}; pass {' or '.join(map(repr, PACINGS))}, or leave it out for the server's")


def request_pacing(default: str, custom_params: dict[str, Any] | None) -> str:
    """The pacing of a request: from its ``custom_params``, or the server's ``default``."""
    asked = custom_params.get(PARAMETER) if isinstance(custom_params, dict) else None
    return asked or default
