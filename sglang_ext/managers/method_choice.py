"""Which of the server's methods a request asks for: ``"custom_params": {"kv_compressor": NAME}``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def refuse_unknown(
    original: Callable, manager: "TokenizerManager", obj: "GenerateReqInput | EmbeddingReqInput", input_ids: list[int] | None
) -> None:
    """Hook around ``TokenizerManager._validate_one_request``: a method that the server does not have.

    Raises:
        ValueError: names it, and those that the server has; SGLang answers with status 400.
    """
    found = offers(manager.server_args)
    custom_params = {**(manager.preferred_sampling_params or {}), **obj.sampling_params}.get("custom_params")
    if place_of(found, custom_params) is None:
        raise ValueError(
            f"{PARAMETER} in custom_params is {custom_params[PARAMETER]!r}; this server compresses with "
            f"{', '.join(offer.name for offer in found)}: ask for one of these, or leave it out for the first"
        )
    original(manager, obj, input_ids)
