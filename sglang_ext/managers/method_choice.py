"""Which of the server's methods a request asks for: ``"custom_params": {"kv_compressor": NAME}``.

A request that asks there for what the server does not have is refused.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.managers import simulation
from sglang_ext.method_options import Offer, offers

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

PARAMETER = "kv_compressor"


def place_of(found: tuple[Offer, ...], custom_params: dict[str, Any] | None) -> int | None:
    """Place among ``found`` of the method that a request asks for; 0, the first, where it asks for none.

    None where there is no such method.
    """
    asked = custom_params.get(PARAMETER) if isinstance(custom_params, dict) else None
    if asked is None:
        return 0
    return next((place for place, offer in enumerate(found) if offer.name == asked), None)


def custom_params_of(manager: "TokenizerManager", obj: "GenerateReqInput | EmbeddingReqInput") -> dict[str, Any] | None:
    """Those of a request, or the server's preferred ones where it brings none."""
    return {**(manager.preferred_sampling_params or {}), **obj.sampling_params}.get("custom_params")


def refuse_unknown(
    original: Callable, manager: "TokenizerManager", obj: "GenerateReqInput | EmbeddingReqInput", input_ids: list[int] | None
) -> None:
    """Hook around ``TokenizerManager._validate_one_request``: a method that the server does not have, or a forced acceptance.

    Raises:
        ValueError: names the method, and those that the server has; or the acceptance, which the server does not force, or
            which is no probability (simulation.py). SGLang answers with status 400.
    """
    found = offers(manager.server_args)
    custom_params = custom_params_of(manager, obj)
    if place_of(found, custom_params) is None:
        raise ValueError(
            f"{PARAMETER} in custom_params is {custom_params[PARAMETER]!r}; this server compresses with "
            f"{', '.join(offer.name for offer in found)}: ask for one of these, or leave it out for the first"
        )
    simulation.check(manager.server_args.kv_bench_acceptance, custom_params)
    original(manager, obj, input_ids)
