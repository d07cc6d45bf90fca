"""Which of the server's methods a request asks for: ``"custom_params": {"kv_compressor": NAME}``.

A request that asks there for what the server does not have is refused.
"""

from typing import TYPE_CHECKING, Any

from sglang_ext.config import benchmark_options
from sglang_ext.config.method_options import Offer, offers

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

PARAMETER = "kv_compressor"
PREFIX = "kv_"
PARAMETERS = (PARAMETER, benchmark_options.PARAMETER)
"""Of ``custom_params``, what is this project's."""


def place_of(found: tuple[Offer, ...], custom_params: dict[str, Any] | None) -> int | None:
    """Place among ``found`` of the method that a request asks for; 0, the first, where it asks for none.

    None where there is no such method.
    """
    asked = custom_params.get(PARAMETER) if isinstance(custom_params, dict) else None
    if asked is None:
        return 0
    return next((place for place, offer in enumerate(found) if offer.is_called(asked)), None)


def check(args: "KVServerArgs", custom_params: object) -> None:
    """Refuse a method or forced acceptance that the server does not have, and what looks like one.

    Raises:
        ValueError: ``custom_params`` is no object, or has a key that begins with ``kv_`` and means nothing; names the method and
            those that the server has; or the acceptance, which the server does not force, or which is no probability.
    """
    if custom_params is None:
        return
    if not isinstance(custom_params, dict):
        raise ValueError(f"custom_params is {custom_params!r}; pass an object, as in {{{PARAMETER!r}: 'snapkv'}}, or leave it out")
    for key in custom_params:
        if key.startswith(PREFIX) and key not in PARAMETERS:
            # The other one is refused unless the server forces acceptance.
            taken = PARAMETERS if args.kv_bench_acceptance is not None else (PARAMETER,)
            raise ValueError(
                f"custom_params has {key!r}, which means nothing here; a request may ask for {' and '.join(taken)}: spell it "
                "so, or leave it out"
            )
    found = offers(args)
    if place_of(found, custom_params) is None:
        raise ValueError(
            f"{PARAMETER} in custom_params is {custom_params[PARAMETER]!r}; this server compresses with "
            f"{', '.join(offer.name for offer in found)}: ask for one of these, or leave it out for the first"
        )
    benchmark_options.check_request(args.kv_bench_acceptance, custom_params)
