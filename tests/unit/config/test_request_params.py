"""Parameters that a request sets for the plugin: misspelled ones are refused, SGLang's own fields never are."""

import dataclasses
from types import SimpleNamespace

import pytest
from pydantic import BaseModel
from sglang.srt.entrypoints.anthropic import protocol as anthropic
from sglang.srt.entrypoints.ollama import protocol as ollama
from sglang.srt.entrypoints.openai import protocol as openai
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.config.request_params import CUSTOM_PARAMS, MAX_LENGTH, REQUEST_PARAMS, check_key, check_params

ARGS = SimpleNamespace(kv_compressor="snapkv", kv_budget=0.25, kv_more_compressors="", kv_bench_acceptance=None)


@pytest.mark.parametrize("key", [
    "kv-compressor", "KV_compressor", "compressor", "kvCompressor", "KV-Compressor", "kv_copmressor", "kv_compresor", "kv.compressor",
])  # fmt: skip
def test_a_misspelled_parameter_is_refused_with_the_right_name(key):
    with pytest.raises(ValueError, match=f"^custom_params has '{key}', .* did you mean 'kv_compressor'. .*leave it out"):
        check_params(ARGS, {key: "snapkv"})


@pytest.mark.parametrize("key", ["kv_budget", "KV-budget", "kvbits", "kv_" + 10_000 * "x"])
def test_an_unknown_parameter_of_ours_is_refused_with_those_that_there_are(key):
    told = f"has '{key[:MAX_LENGTH]}', which this server does not know. A request may set kv_compressor, kv_stream_pacing, at its top level"
    with pytest.raises(ValueError, match=told):
        check_params(ARGS, {key: 1})


def test_a_logit_processor_has_keys_of_its_own_but_for_the_prefix():
    check_params(ARGS, {"compressor": 1, "Acceptance": 2, "token_ids": [3]}, has_processor=True)
    check_params(ARGS, {"token_ids": [3], "thinking_budget": 4, "compression": "gzip", "kv_transfer_params": None})
    with pytest.raises(ValueError, match="'kv_copmressor'"):
        check_params(ARGS, {"kv_copmressor": 1}, has_processor=True)


def test_custom_params_are_an_object():
    check_params(ARGS, None)
    with pytest.raises(ValueError, match="custom_params is 'snapkv'; pass an object"):
        check_params(ARGS, "snapkv")


def test_no_field_of_sglangs_requests_is_taken_for_one_of_ours():
    models = [value for module in (openai, anthropic, ollama) for value in vars(module).values() if isinstance(value, type)]
    fields = {name for model in models if issubclass(model, BaseModel) for name in model.model_fields}
    structs = [value for value in vars(io_struct).values() if isinstance(value, type)]
    fields |= {field.name for struct in structs if dataclasses.is_dataclass(struct) for field in dataclasses.fields(struct)}
    fields |= set(SamplingParams.__struct_fields__)
    assert {"max_new_tokens", "messages", "stream_options", "input_ids", CUSTOM_PARAMS} <= fields
    for name in fields:
        check_key(name, "the request")
    assert not fields & set(REQUEST_PARAMS)
