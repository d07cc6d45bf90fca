"""Hooks in SGLang's frontend: checks of requests on arrival, and fields of ``meta_info`` about drafting.

*Checks.* A request that would crash the scheduler, or that has no meaning, gets status 400: hooks raise ``ValueError`` with the field, its
value, the allowed values and the remedy. A request with several prompts, or with ``n`` answers, is checked twice: as it arrived, by
:func:`check_shape`, and for each prompt, by :func:`check_request`.

SGLang sends requests to its scheduler in msgpack. The scheduler raises if a field has another type than declared, and nothing catches
the error. So each value is encoded and decoded here first. Other values pass that test and raise in a forward
pass. All of them crash stock SGLang too, except those that :func:`sglang_ext.config.request_params.check_params` refuses.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from math import inf
from typing import Any

import msgspec
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams, TokenizedGenerateReqInput, dec_hook, enc_hook
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.config import method_options, request_params
from sglang_ext.config.options import BACKEND, has_progressive_transfer
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError
from sglang_ext.hooks.request_body import add_custom_params
from sglang_ext.managers.spec_decode.request_states import meta_info_fields

INT32, INT64, MAX_PORT = (1 << 31) - 1, (1 << 63) - 1, (1 << 16) - 1
MAX_PARAMETER = 1e30
"""Divided by the least temperature, 1e-6, it is still finite in float32. Infinite logits crash the sampler."""
MAX_SHOWN_CHARS = 60
"""Maximum characters of a value in a message."""
TOKENS = msgspec.msgpack.Decoder(list[int])
SETTABLE_PARAMS = SamplingParams.__struct_fields__[: SamplingParams.__struct_fields__.index("stop_strs")]
"""Sampling parameters that a request may set. SGLang derives the others."""
DERIVED_FIELDS = ("input_text", "input_ids", "input_embeds", "mm_inputs", "sampling_params", "session_params", "time_stats", "lora_id")
"""Fields of a tokenized request that are not copied from the request."""
PER_PROMPT_FIELDS = (
    "input_ids", "image_data", "video_data", "audio_data", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "return_sampling_mask", "modalities", "lora_path", "lora_id", "custom_logit_processor",
    "positional_embed_overrides", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "multi_item_delimiter_indices",
)  # fmt: skip
"""Fields that may be lists with one item for each prompt. SGLang does not compare their lengths with the number of prompts."""


def check_shape(original: Callable, obj: GenerateReqInput) -> None:
    """Hook around ``GenerateReqInput.normalize_batch_and_arguments``: refuses counts and lists that SGLang cannot split (``ValueError``)."""
    add_custom_params(obj)
    for params in obj.sampling_params if isinstance(obj.sampling_params, list) else (obj.sampling_params or {},):
        _check_object(params)
        n = params.get("n", 1)
        if n != 1 and not (isinstance(n, int) and n <= INT32):
            # Lists of prompts cannot be multiplied by it.
            raise ValueError(f"sampling_params.n is {_short(n)}; pass a whole number from 1 to {INT32}, or leave it out")
    if obj.sampling_params == []:
        raise ValueError("sampling_params is []; pass an object, or a list with one object for each prompt, or leave it out")
    if obj.text is None and obj.input_ids is None and obj.input_embeds is not None and not (obj.input_embeds and obj.input_embeds[0]):
        raise ValueError(f"input_embeds is {_short(obj.input_embeds)}; pass a row of numbers for each token of the prompt, or text")
    lists = {name: value for name in PER_PROMPT_FIELDS if isinstance(value := getattr(obj, name), list)}
    # SGLang's chat API sends an empty list for modalities without images, and never reads it.
    given = {name: len(value) for name, value in lists.items() if value or name != "modalities"}
    original(obj)
    if obj.text is not None and obj.input_ids and isinstance(obj.input_ids[0], list) == obj.is_single:
        raise ValueError(
            f"input_ids is {_short(obj.input_ids)} together with text; pass a list of token ids for one text, a list of such lists "
            "for a list of texts, or leave either out"
        )
    if obj.is_single:
        if not isinstance(obj.rid, str):
            raise ValueError(f"rid is {_short(obj.rid)} with one prompt; pass one string, or leave it out")
        return
    if obj.batch_size and obj.parallel_sample_num < 1:
        raise ValueError(f"sampling_params.n is {obj.parallel_sample_num}; pass a whole number from 1, or leave it out")
    for name in given:
        if len(getattr(obj, name)) < obj.batch_size:
            raise ValueError(
                f"{name} is a list of {given[name]}, and there are {obj.batch_size} prompts; pass a list with one item for each, one "
                "value for all, or leave it out"
            )


def check_request(original: Callable, manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int] | None) -> None:
    """Hook around ``TokenizerManager._validate_one_request``: refuses requests that the scheduler cannot serve (``ValueError``).

    A body with several requests, or with ``n`` above 1, was split. ``original``, SGLang's checks, is called after the checks of types.
    """
    if not isinstance(obj, GenerateReqInput):
        original(manager, obj, input_ids)
        return
    if obj.return_sampling_mask:
        raise ValueError(
            "return_sampling_mask is true; this server samples several tokens at once and keeps no masks: leave it out, or start the "
            "server with --kv-mode full"
        )
    params, vocabulary = sampling_params_of(manager, obj), manager.model_config.vocab_size
    read = _check_sampling_types(params)
    _check_field_types(obj)
    _check_bootstrap(manager.server_args, obj, params.get("n") or 1)
    original(manager, obj, input_ids)
    if input_ids is not None:
        if not input_ids:
            # SGLang only checks this in a request with one prompt.
            raise ValueError("a prompt has no tokens; pass input_ids with at least one token id, or a text that is not empty")
        _check_tokens("input_ids", input_ids, vocabulary, "take token ids from the model's own tokenizer, or send text")
    _check_sampling_values(params, read, vocabulary, manager.server_args.enable_deterministic_inference)
    if obj.return_logprob:
        _check_range("top_logprobs_num", obj.top_logprobs_num, 0, vocabulary, ", the model's vocabulary")
        _check_range("logprob_start_len", obj.logprob_start_len, -1, INT64, ", -1 for the output alone")
    width = manager.model_config.hidden_size
    if (wrong := next((len(row) for row in obj.input_embeds or () if len(row) != width), None)) is not None:
        raise ValueError(f"input_embeds has a row of {wrong} numbers; this model's tokens have {width} each: pass as many, or leave it out")
    if processor := obj.custom_logit_processor:
        # If the server does not allow processors, SGLang has refused it already.
        try:
            CustomLogitProcessor.from_str(processor)
        except Exception as error:  # whatever unpickling raises
            raise ValueError(
                f"custom_logit_processor is {_short(processor)}, which is not a processor ({type(error).__name__}): pass the result of "
                "its to_str(), or leave it out"
            ) from None
    request_params.check_params(manager.server_args, params.get("custom_params"), has_processor=bool(processor))


def check_preferred(args: KVServerArgs) -> None:
    """Refuse ``--preferred-sampling-params`` (``OptionError``) that would be refused in each request that does not override them."""
    given = args.preferred_sampling_params
    try:
        params = json.loads(given) if given and isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise OptionError(
            f"--preferred-sampling-params is {_short(given)}, which is not JSON ({error}): pass an object, as in "
            """'{"temperature": 0}', or leave it out"""
        ) from None
    if not params:
        return
    vocabulary = args.get_model_config().vocab_size
    try:
        _check_object(params)
        read = _check_sampling_types(params)
        # Whether a seed or min_p is used depends on the request's other parameters.
        _check_sampling_values(params, read, vocabulary, deterministic=False)
        # A request may set more tokens than SGLang's default.
        SamplingParams(**{"max_new_tokens": None, **params}).verify(vocabulary)
        request_params.check_params(args, params.get("custom_params"))
    except ValueError as error:
        raise OptionError(f"--preferred-sampling-params is {_short(given)}: {error}; or leave the flag out") from None


def add_kv_fields(original: Callable, manager, meta_info: dict[str, Any], recv_obj, i: int) -> None:
    """Hook around ``_calculate_spec_decoding_metrics``: adds the ``kv_*`` fields of a finished request, which docs/metrics.md lists."""
    histograms = recv_obj.spec_cap_lens_histogram
    suffixes = [offer.suffix for offer in method_options.offered_methods(manager.server_args)]
    meta_info.update(meta_info_fields(histograms[i] if histograms else [], suffixes))
    forced = manager.server_args.kv_bench_acceptance
    if forced is not None:
        asked = sampling_params_of(manager, manager.rid_to_state[recv_obj.rids[i]].obj).get("custom_params")
        meta_info["kv_simulated_acceptance"] = request_params.request_acceptance(forced, asked)


def sampling_params_of(manager: TokenizerManager, obj: GenerateReqInput) -> dict[str, Any]:
    """A request's sampling parameters, with the server's preferred ones as defaults. Raises ``ValueError`` if they are no object."""
    _check_object(obj.sampling_params)
    return {**(manager.preferred_sampling_params or {}), **obj.sampling_params}


def _check_object(params: object) -> None:
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params is {_short(params)}; pass an object, or a list with one object for each prompt of a list")


@cache
def _types(struct: type[msgspec.Struct]) -> dict[str, msgspec.msgpack.Decoder]:
    """Decoders of a struct's fields, equal to those of SGLang."""
    return {field.name: msgspec.msgpack.Decoder(field.type, dec_hook=dec_hook) for field in msgspec.structs.fields(struct)}


def _check_sampling_types(params: dict[str, Any]) -> SamplingParams:
    """Refuse unknown names and wrong types. Return the parameters as SGLang reads them, without ``stop_token_ids``."""
    decoders = _types(SamplingParams)
    for name, value in params.items():
        if name not in decoders:
            # One of our parameters, or a similar key.
            request_params.check_key(name, "sampling_params")
        if name in request_params.REQUEST_PARAMS:
            raise ValueError(
                f"sampling_params has {name!r}: pass it in sampling_params.custom_params or at the top level of the request, or leave it out"
            )
        _check_known("sampling_params", name, name in decoders, SETTABLE_PARAMS)
        if name not in SETTABLE_PARAMS and value:
            raise ValueError(f"sampling_params.{name} is {_short(value)}; SGLang sets it itself: leave it out")
    temperature = params.get("temperature")
    if not isinstance(temperature, int | float | None):
        # SGLang would compare it before it checks the type.
        _check_type("sampling_params.temperature", temperature, decoders["temperature"])
    asked = {name: value for name, value in params.items() if name in SETTABLE_PARAMS and name != "stop_token_ids"}
    read = SamplingParams(**asked)
    for name in asked:
        _check_type(f"sampling_params.{name}", getattr(read, name), decoders[name])
    return read


def _check_field_types(obj: GenerateReqInput) -> None:
    for name, decoder in _types(TokenizedGenerateReqInput).items():
        value = None if name in DERIVED_FIELDS else getattr(obj, name, None)
        if value is not None:
            _check_type(name, value, decoder)
    known, session = _types(SessionParams), obj.session_params or {}
    if not isinstance(session, dict):
        raise ValueError(f"session_params is {_short(session)}; pass an object, or leave it out")
    for name, value in session.items():
        _check_known("session_params", name, name in known, known)
        _check_type(f"session_params.{name}", value, known[name])


def _check_bootstrap(args: KVServerArgs, obj: GenerateReqInput, answers: int) -> None:
    """Refuse a room, or the lack of a bootstrap host, with which a prefill or decode server has no counterpart."""
    mode = args.disaggregation_mode
    # SGLang's warm-up requests have no counterpart.
    if mode == "null" or obj.bootstrap_room is None or obj.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return
    if not 1 <= obj.bootstrap_room <= INT64:
        raise ValueError(f"bootstrap_room is {obj.bootstrap_room}; pass a number from 1 to {INT64}, the same to both servers")
    # SGLang sends all answers in one room, and its own backends treat them as one request.
    if answers > 1 and not has_progressive_transfer(args):
        raise ValueError(
            f"sampling_params.n is {answers}, and --disaggregation-transfer-backend {args.disaggregation_transfer_backend} "
            f"gives one answer to each request; send the request as many times, or start both servers with {BACKEND}"
        )
    # Without a port, the server's own flag applies.
    port = obj.bootstrap_port
    if mode == "decode" and not (obj.bootstrap_host and (port is None or 1 <= port <= MAX_PORT)):
        raise ValueError(
            f"bootstrap_host is {_short(obj.bootstrap_host)} and bootstrap_port {port}; pass the prefill server's "
            "host and its --disaggregation-bootstrap-port, or send requests to the router"
        )


def _check_known(holder: str, name: str, is_known: bool, names: Iterable[str]) -> None:
    if not is_known:
        raise ValueError(f"{holder} has {_short(name)}, which SGLang does not know: leave it out, or use one of {', '.join(names)}")


def _check_type(name: str, value: object, decoder: msgspec.msgpack.Decoder) -> None:
    try:
        decoder.decode(msgspec.msgpack.encode(value, enc_hook=enc_hook))
    except (msgspec.ValidationError, OverflowError, TypeError, UnicodeEncodeError, RecursionError) as error:
        why = str(error)
        raise ValueError(f"{name} is {_short(value)}: {why[:1].lower()}{why[1:]}. Pass a value of that kind, or leave it out") from None


def _check_sampling_values(params: dict[str, Any], read: SamplingParams, vocabulary: int, deterministic: bool) -> None:
    """Refuse values of the right type that crash a forward pass, or the check for an output's end."""
    _check_range("sampling_params.top_k", read.top_k, -1, INT32, ", -1 for all tokens")
    _check_range("sampling_params.temperature", read.temperature, 0, MAX_PARAMETER)
    _check_range("sampling_params.repetition_penalty", read.repetition_penalty, 1 / MAX_PARAMETER, 2)
    if deterministic:
        if read.min_p > 0 and read.top_k != 1:
            # SGLang's seeded sampler asserts that min_p is not used.
            _check_range("sampling_params.min_p", read.min_p, 0, 0, " under --enable-deterministic-inference")
        # Without deterministic mode no seed is used.
        _check_range("sampling_params.sampling_seed", read.sampling_seed, -INT64 - 1, INT64)
    _check_stop_tokens(params, vocabulary)
    for pattern in [read.stop_regex] if isinstance(read.stop_regex, str) else read.stop_regex or ():
        try:
            re.compile(pattern)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"sampling_params.stop_regex has {_short(pattern)}, which is not a regular expression ({error}): pass one in the syntax "
                "of Python's re, or leave it out"
            ) from None
    _check_bias(read.logit_bias, vocabulary)


def _check_range(name: str, value: float | None, least: float, most: float, why: str = "") -> None:
    """Refuse a number out of range. ``why`` is added to the message."""
    if value is not None and not least <= value <= most:
        limits = " to ".join(f"{limit:g}" if isinstance(limit, float) else str(limit) for limit in (least, most))
        raise ValueError(f"{name} is {_short(value)}; pass a number from {limits}{why}, or leave it out")


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
        # Until then the logits of these tokens are masked. Otherwise they are only compared with the output, so they may be outside the
        # vocabulary.
        _check_tokens(name, found, vocabulary, "leave it out")


def _check_bias(bias: dict[str, float] | None, vocabulary: int) -> None:
    for token, value in (bias or {}).items():
        try:
            int(token)
        except ValueError:
            raise ValueError(
                f"sampling_params.logit_bias has {_short(token)}, which is not a token id; pass token ids from 0 to {vocabulary - 1}, as "
                """in {"5": -1.5}, or leave it out"""
            ) from None
        if not (-MAX_PARAMETER <= value <= MAX_PARAMETER or value == -inf):
            raise ValueError(
                f"sampling_params.logit_bias has {_short(value)} for token {_short(token)}; pass a number from {-MAX_PARAMETER:g} to "
                f"{MAX_PARAMETER:g}, or leave it out"
            )


def _check_tokens(name: str, tokens: list[int], vocabulary: int, remedy: str) -> None:
    if tokens and not (0 <= min(tokens) and max(tokens) < vocabulary):
        place, token = next((at, token) for at, token in enumerate(tokens) if not 0 <= token < vocabulary)
        raise ValueError(
            f"{name} has {_short(token)} at place {place}; the model's vocabulary has token ids from 0 to {vocabulary - 1}: {remedy}"
        )


def _short(value: object) -> str:
    """Shorten a value for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, deep lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
