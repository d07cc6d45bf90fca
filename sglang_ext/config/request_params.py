"""The parameters that a request may set for this plugin, such as ``kv_compressor``, and the refusal of misspelled ones.

A request sets them in ``custom_params``, or at the top level of its body (hooks/request_body.py). To add a parameter, add a line to
:data:`REQUEST_PARAMS`.
"""

import difflib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sglang_ext.config import method_options
from sglang_ext.config.rules import KVServerArgs, Range

CUSTOM_PARAMS = "custom_params"
PACING, ACCEPTANCE = "kv_stream_pacing", "kv_acceptance"
"""When the tokens of a round are sent, and the probability that drafts are accepted. They override the server's flags."""
BURST, EVEN = PACINGS = ("burst", "even")
PROBABILITY = Range(0, 1, integers_only=False)


def _check_pacing(args: KVServerArgs, asked: object) -> None:
    """Refuse an unknown pacing."""
    if asked not in PACINGS:
        raise ValueError(f"{PACING} is {asked!r}; pass {' or '.join(map(repr, PACINGS))}, or leave it out for the server's")


def _check_acceptance(args: KVServerArgs, asked: object) -> None:
    """Refuse an acceptance that is not a probability, or on a server where verification decides."""
    forced, setting = args.kv_bench_acceptance, f"{ACCEPTANCE} in custom_params is {asked!r}"
    if forced is None:
        raise ValueError(
            f"{setting}, and on this server verification decides which drafts are accepted: leave it out, or start a server for benchmarks "
            "with --kv-bench-acceptance"
        )
    if not PROBABILITY.allows(asked):
        raise ValueError(f"{setting}; pass {PROBABILITY}, or leave it out for the server's {forced:g}")


def request_value(custom_params: dict[str, Any] | None, key: str, default: Any) -> Any:
    """A request's own value of a parameter, or the server's ``default``."""
    asked = custom_params.get(key) if isinstance(custom_params, dict) else None
    return default if asked is None else asked


def request_acceptance(forced: float, custom_params: dict[str, Any] | None) -> float:
    """Probability that a draft is accepted if all previous ones were: the request's own, or the server's ``forced``."""
    return float(request_value(custom_params, ACCEPTANCE, forced))


REQUEST_PARAMS: dict[str, Callable[[KVServerArgs, Any], None]] = {
    method_options.COMPRESSOR_PARAM: method_options.check_compressor,
    PACING: _check_pacing,
    ACCEPTANCE: _check_acceptance,
}
"""The check of each parameter: called with the server's arguments and a value that is not None; raises ValueError."""

OFFERED = tuple(name for name in REQUEST_PARAMS if name != ACCEPTANCE)
"""Parameters that messages name: a server without ``--kv-bench-acceptance`` refuses that of benchmarks."""

PREFIX = "kv_"
FOREIGN = frozenset({"kv_transfer_params"})
"""Keys that gateways for vLLM send in every request. They are ignored, as stock SGLang ignores them."""
MIN_SIMILARITY = 0.8
"""Similarity (:class:`difflib.SequenceMatcher`) from which a key counts as misspelled. All fields of SGLang's requests are below it."""
MAX_LENGTH = 40
"""Longest key that is compared, in characters. Comparing takes time quadratic in the length, and the client chooses the length."""


def check_params(args: KVServerArgs, custom_params: object, has_processor: bool = False) -> None:
    """Refuse unknown parameters, and values that this server cannot serve (``ValueError``).

    A custom logit processor (``has_processor``) reads keys of its own from ``custom_params``: only keys that begin with ``kv_`` are refused.
    """
    if custom_params is None:
        return
    if not isinstance(custom_params, dict):
        raise ValueError(
            f"{CUSTOM_PARAMS} is {custom_params!r}; pass an object, as in {{{method_options.COMPRESSOR_PARAM!r}: 'snapkv'}}, or leave it out"
        )
    for key in custom_params:
        if not has_processor or key.startswith(PREFIX):
            check_key(key, CUSTOM_PARAMS)
    for key, check_value in REQUEST_PARAMS.items():
        if custom_params.get(key) is not None:
            check_value(args, custom_params[key])


def check_key(key: str, holder: str) -> None:
    """Refuse a key of ``holder`` that resembles a parameter of this plugin but is none.

    ``ValueError`` names the key, the parameter that it resembles, and those that a request may set (:data:`OFFERED`).
    """
    if key in REQUEST_PARAMS or key == CUSTOM_PARAMS or key in FOREIGN:
        return
    similar = similar_param(key)
    if similar is None and not key.lower().startswith("kv"):
        return
    question = f"; did you mean {similar!r}?" if similar else "."
    raise ValueError(
        f"{holder} has {key[:MAX_LENGTH]!r}, which this server does not know{question} A request may set {', '.join(OFFERED)}, at "
        f"its top level or in {CUSTOM_PARAMS}: use one of these names, or leave it out"
    )


@lru_cache(maxsize=1024)
def similar_param(key: str) -> str | None:
    """The parameter, or ``custom_params``, that a key resembles, case and punctuation aside. Without ``kv_`` the rest must be equal."""
    if len(key) > MAX_LENGTH:
        return None
    letters = _letters(key)
    names = {_letters(name): name for name in (*REQUEST_PARAMS, CUSTOM_PARAMS)}
    bare = {_letters(name.removeprefix(PREFIX)): name for name in REQUEST_PARAMS}
    found = difflib.get_close_matches(letters, names, 1, MIN_SIMILARITY)
    return bare.get(letters) or (names[found[0]] if found else None)


def _letters(key: str) -> str:
    return re.sub("[^a-z0-9]", "", key.lower())
