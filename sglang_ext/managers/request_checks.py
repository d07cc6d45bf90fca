"""What a request may ask for, checked where it enters: what would end the scheduler, or mean nothing, is a status 400.

SGLang sends requests to its scheduler by msgpack, which decodes each field as the type it is declared with; a value of
another type raises there, where nothing catches it. Here each is encoded and decoded beforehand. Other values pass that
and raise in a forward pass. All of them end stock SGLang too, but for what :func:`sglang_ext.managers.method_choice.check`
refuses.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput, dec_hook, enc_hook
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.managers import method_choice

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1
LARGE = 1e30
"""Divided by the least temperature, 1e-6, it is still finite in float32; probabilities that are not end the sampler."""
GREEDY = 1e-6
"""Temperatures below it mean the best token."""
SHOWN = 60
"""Characters of a value in a message."""
TOKENS = msgspec.msgpack.Decoder(list[int])
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
    if not isinstance(obj, GenerateReqInput):
        original(manager, obj, input_ids)
        return
    params, vocabulary = sampling_params_of(manager, obj), manager.model_config.vocab_size
    _check_sampling_types(params)
    _check_field_types(obj)
    original(manager, obj, input_ids)
    if input_ids is not None:
        _check_tokens("input_ids", input_ids, vocabulary)
    _check_values(obj, params, vocabulary, manager.server_args.enable_deterministic_inference)
    _check_stop_tokens(params, vocabulary)
    _check_bias(params.get("logit_bias"))
    _check_embeds(obj.input_embeds, manager.model_config.hidden_size)
    # SGLang has refused it by now where the server does not serve any.
    _check_processor(obj.custom_logit_processor)
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
        _check_known("sampling_params", name, name in decoders, _asked())
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
    known = _types(SessionParams)
    for name, value in (obj.session_params or {}).items():
        _check_known("session_params", name, name in known, known)
        _check_type(f"session_params.{name}", value, known[name])


def _check_known(holder: str, name: str, is_known: bool, names: Iterable[str]) -> None:
    if not is_known:
        raise ValueError(
            f"{holder} has {_short(name)}, which SGLang does not know: leave it out, or take one of {', '.join(names)}"
        )


def _check_type(name: str, value: object, decoder: msgspec.msgpack.Decoder) -> None:
    try:
        decoder.decode(msgspec.msgpack.encode(value, enc_hook=enc_hook))
    except (msgspec.ValidationError, OverflowError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"{name} is {_short(value)}: {_told(error)}. Pass a value of that kind, or leave it out") from None


def _told(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]


def _check_values(obj: GenerateReqInput, params: dict[str, Any], vocabulary: int, deterministic: bool) -> None:
    """Refuse numbers that their type admits and a forward pass does not."""
    for name, value, least, most, why in _limits(obj, params, vocabulary, deterministic):
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} is {_short(value)}; pass a number from {least} to {most}{why}, or leave it out")


def _limits(
    obj: GenerateReqInput, params: dict[str, Any], vocabulary: int, deterministic: bool
) -> Iterator[tuple[str, Any, float, float, str]]:
    yield "sampling_params.top_k", params.get("top_k"), -1, INT32, ", -1 for all tokens"
    yield "sampling_params.temperature", params.get("temperature"), 0, LARGE, ""
    yield "sampling_params.repetition_penalty", params.get("repetition_penalty"), 1 / LARGE, 2, ""
    if obj.return_logprob:
        yield "top_logprobs_num", obj.top_logprobs_num, 0, vocabulary, ", the model's vocabulary"
        yield "logprob_start_len", obj.logprob_start_len, -1, INT64, ", -1 for the output alone"
    if deterministic:
        if (params.get("min_p") or 0) > 0 and not _is_greedy(params):
            # SGLang's seeded sampler asserts that there is none.
            yield "sampling_params.min_p", params["min_p"], 0, 0, " under --enable-deterministic-inference"
        # Without deterministic mode no seed is read.
        yield "sampling_params.sampling_seed", params.get("sampling_seed"), -INT64 - 1, INT64, ""


def _is_greedy(params: dict[str, Any]) -> bool:
    temperature = params.get("temperature")
    return params.get("top_k") == 1 or (temperature is not None and temperature < GREEDY)


def _check_stop_tokens(params: dict[str, Any], vocabulary: int) -> None:
    name, tokens = "sampling_params.stop_token_ids", params.get("stop_token_ids")
    if not tokens:
        return
    try:
        found = [int(token) for token in tokens if token is not None]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {_short(tokens)}; pass a list of token ids, or leave it out") from None
    _check_type(name, found, TOKENS)
    if params.get("min_new_tokens"):
        # Until then the logits of these are taken out; else they are compared with the output, and need not exist.
        _check_tokens(name, found, vocabulary)


def _check_bias(bias: dict[str, float] | None) -> None:
    for token, value in (bias or {}).items():
        if not (-LARGE <= value <= LARGE or value == -inf):
            raise ValueError(
                f"sampling_params.logit_bias has {_short(value)} for token {_short(token)}; pass a number from {-LARGE:g} to {LARGE:g}, or "
                "leave it out"
            )


def _check_embeds(embeds: list[list[float]] | None, width: int) -> None:
    wrong = next((len(row) for row in embeds or () if len(row) != width), None)
    if wrong is not None:
        raise ValueError(f"input_embeds has a row of {wrong} numbers; this model's tokens have {width} each: pass so many, or leave it out")


def _check_processor(processor: str | None) -> None:
    if not processor:
        return
    try:
        CustomLogitProcessor.from_str(processor)
    except Exception as error:  # whatever unpickling raises
        raise ValueError(
            f"custom_logit_processor is {_short(processor)}, which is none ({type(error).__name__}): pass what its to_str() gives, or "
            "leave it out"
        ) from None


def _check_tokens(name: str, tokens: list[int], vocabulary: int) -> None:
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
