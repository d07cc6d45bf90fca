"""What a request may ask for, checked where it enters: what would end the scheduler, or mean nothing, is a status 400.

SGLang sends requests to its scheduler by msgpack, which decodes each field as the type it is declared with; a value of
another type raises there, where nothing catches it. Here each is encoded and decoded beforehand. Other values pass that
and raise in a forward pass. All of them end stock SGLang too, but for what :func:`sglang_ext.managers.method_choice.check`
refuses.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput, dec_hook, enc_hook
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.managers import method_choice

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1
SHOWN = 60
"""Characters of a value in a message."""
DERIVED = ("input_text", "input_ids", "input_embeds", "mm_inputs", "sampling_params", "session_params", "time_stats", "lora_id")
"""Fields of a tokenized request that are no copies of the request's."""


def check_request(
    original: Callable, manager: "TokenizerManager", obj: "GenerateReqInput | EmbeddingReqInput", input_ids: list[int] | None
) -> None:
    """Hook around ``TokenizerManager._validate_one_request``: refuse what no scheduler can take.

    Args:
        original: SGLang's own checks, made after those of types.
        manager: of the server.
        obj: one request; a body with several, or with ``n`` above 1, was split.
        input_ids: its prompt.

    Raises:
        ValueError: names the field, its value, what is allowed and the remedy. SGLang answers with status 400.
    """
    if isinstance(obj, GenerateReqInput):
        params = sampling_params_of(manager, obj)
        _check_sampling_types(params)
        _check_field_types(obj)
    original(manager, obj, input_ids)
    if isinstance(obj, GenerateReqInput):
        vocabulary = manager.model_config.vocab_size
        _check_tokens("input_ids", input_ids or (), vocabulary)
        _check_values(obj, params, vocabulary, manager.server_args.enable_deterministic_inference)
        method_choice.check(manager.server_args, params.get("custom_params"))


def sampling_params_of(manager: "TokenizerManager", obj: GenerateReqInput) -> dict[str, Any]:
    """Those of a request over the server's preferred ones.

    Raises:
        ValueError: they are no object.
    """
    if not isinstance(obj.sampling_params, dict):
        raise ValueError(
            f"sampling_params is {_short(obj.sampling_params)}; pass an object, or a list with one object for each prompt of a list"
        )
    return {**(manager.preferred_sampling_params or {}), **obj.sampling_params}


@cache
def _types(struct: type[msgspec.Struct]) -> dict[str, msgspec.msgpack.Decoder]:
    """Decoders of a struct's fields, as SGLang's own decodes them."""
    return {field.name: msgspec.msgpack.Decoder(field.type, dec_hook=dec_hook) for field in msgspec.structs.fields(struct)}


def _check_sampling_types(params: dict[str, Any]) -> None:
    decoders = _types(SamplingParams)
    for name, value in params.items():
        if name not in decoders:
            raise ValueError(f"sampling_params has {_short(name)}, which SGLang does not know: leave it out, or take one of {', '.join(_asked())}")
        if name not in _asked() and value:
            raise ValueError(f"sampling_params.{name} is {_short(value)}; SGLang sets it by itself: leave it out")
        if value is not None and name != "stop_token_ids":
            _check_type(f"sampling_params.{name}", value, decoders[name])


@cache
def _asked() -> tuple[str, ...]:
    """Sampling parameters that a request may set: the others follow from them."""
    names = SamplingParams.__struct_fields__
    return names[: names.index("stop_strs")]


def _check_field_types(obj: GenerateReqInput) -> None:
    for name, decoder in _types(TokenizedGenerateReqInput).items():
        value = None if name in DERIVED else getattr(obj, name, None)
        if value is not None:
            _check_type(name, value, decoder)


def _check_type(name: str, value: object, decoder: msgspec.msgpack.Decoder) -> None:
    try:
        decoder.decode(msgspec.msgpack.encode(value, enc_hook=enc_hook))
    except (msgspec.ValidationError, OverflowError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"{name} is {_short(value)}: {_told(error)}. Pass a value of that kind, or leave it out") from None


def _told(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]


def _check_values(obj: GenerateReqInput, params: dict[str, Any], vocabulary: int, deterministic: bool) -> None:
    """Refuse numbers that its type admits and a forward pass does not."""
    for name, value, least, most, why in _limits(obj, params, vocabulary, deterministic):
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} is {_short(value)}; pass a number from {least} to {most}{why}, or leave it out")
    stop = params.get("stop_token_ids")
    if stop:
        _check_stop_tokens(stop, vocabulary)


def _limits(
    obj: GenerateReqInput, params: dict[str, Any], vocabulary: int, deterministic: bool
) -> Iterator[tuple[str, Any, int, int, str]]:
    yield "sampling_params.top_k", params.get("top_k"), -1, INT32, ", -1 for all tokens"
    yield "sampling_params.stream_interval", params.get("stream_interval"), 1, INT64, ""
    yield "top_logprobs_num", obj.top_logprobs_num, 0, vocabulary, ", the model's vocabulary"
    if deterministic:
        # Without deterministic mode no seed is read.
        yield "sampling_params.sampling_seed", params.get("sampling_seed"), -INT64 - 1, INT64, ""


def _check_stop_tokens(tokens: object, vocabulary: int) -> None:
    name = "sampling_params.stop_token_ids"
    try:
        found = [int(token) for token in tokens if token is not None]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {_short(tokens)}; pass a list of token ids, or leave it out") from None
    _check_tokens(name, found, vocabulary)


def _check_tokens(name: str, tokens: "list[int] | tuple[int, ...]", vocabulary: int) -> None:
    if tokens and not (0 <= min(tokens) and max(tokens) < vocabulary):
        place, token = next((at, token) for at, token in enumerate(tokens) if not 0 <= token < vocabulary)
        raise ValueError(
            f"{name} has {_short(token)} at place {place}; the model's vocabulary has token ids from 0 to {vocabulary - 1}: leave it out"
        )


def _short(value: object) -> str:
    """A value in a message, whatever its length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, deep lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
