"""Bodies of requests as nobody should send them: each field of SGLang's requests and sampling parameters with odd values."""

from typing import Any

from hypothesis import strategies as st
from small_model import VOCABULARY

LAST_TOKEN = VOCABULARY - 1
EXTREMES = (0, 1, -1, 2, 3, 7, 128, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30)
FRACTIONS = (0.0, 0.5, -0.5, 1.0, 3.5, 1e-9, 1e-300, 1e39, 1e300, -1e300)
WORDS = ("", "a", " ", "abc", "0", "1.5", "null", "[a-z]+", "(", "\x00", "é", "漢字", "🙂", "\u202e", "x" * 5000, "-" * 64)

integers = st.sampled_from(EXTREMES) | st.integers(-10, 300)
numbers = integers | st.sampled_from(FRACTIONS) | st.floats(allow_nan=False, allow_infinity=False)
words = st.sampled_from(WORDS) | st.text(max_size=8)
scalars = st.none() | st.booleans() | numbers | words
lists = st.lists(scalars, max_size=4) | st.lists(integers, max_size=4) | st.just([1] * 3000) | st.just([[1]] * 4) | st.just([])
anything = scalars | lists | st.dictionaries(words, scalars, max_size=3) | st.just({"a": {"b": [{}]}}) | st.just([None]) | st.just([[[]]])


def either(valid: st.SearchStrategy[Any], odds: int = 3) -> st.SearchStrategy[Any]:
    """Mostly what is allowed."""
    return st.one_of(*[valid] * odds, anything)


SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": either(st.integers(0, 4), 6),
    "stop": st.sampled_from(("e", ["a", " the"], "", [], ["", ""])),
    "stop_token_ids": st.lists(st.integers(0, LAST_TOKEN), max_size=3),
    "stop_regex": st.sampled_from(("[a-e]", ["x+", "y"], "", "(", "(?P<n", "a{1000000000}", "(a*)*b")),
    "temperature": st.sampled_from((0, 0, 0.0, 1e-9, 0.7, 1, 2.5, 100)),
    "top_p": st.sampled_from((1, 0.9, 0.1, 1e-9)),
    "top_k": st.sampled_from((-1, 1, 5, 1000, 1 << 30)),
    "min_p": st.sampled_from((0, 0.1, 1)),
    "frequency_penalty": st.sampled_from((0, 0.5, -2, 2)),
    "presence_penalty": st.sampled_from((0, 0.5, -2, 2)),
    "repetition_penalty": st.sampled_from((1, 0.5, 2, 1e-6)),
    "min_new_tokens": st.integers(0, 8),
    "n": st.sampled_from((0, 1, 2, 3)),
    "json_schema": st.sampled_from(('{"type": "integer"}', "{}", "$$ANY$$", "{", '{"type": "nonsense"}', '{"$ref": "#/none"}')),
    "regex": st.sampled_from(("(yes|no)", "[0-9]{3}", "(", "a{2,1}", "\\", ".*")),
    "ebnf": st.sampled_from(('root ::= "a" | "b"', "root ::=", 'root ::= root "a"', "x", "root ::= (")),
    "structural_tag": st.sampled_from(("{}", '{"structures": [], "triggers": []}', "x")),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "no_stop_trim": st.booleans(),
    "stream_interval": st.integers(1, 5),
    "logit_bias": st.sampled_from(({"5": 100.0}, {"5": -100}, {str(LAST_TOKEN): 1e30}, {"5": 1e39}, {"99999999": 1}, {"x": 1}, {"5": "a"}, {})),
    "sampling_seed": integers,
    "custom_params": st.sampled_from(
        ({}, {"a": 1}, {"kv_compressor": "snapkv"}, {"kv_compressor": "no"}, {"kv_copmressor": "snapkv"}, {"kv_acceptance": 1}, {"a": [1, {}]})
    ),
    "stop_strs": anything,
    "stop_regex_strs": anything,
    "stop_str_max_len": anything,
    "stop_regex_max_len": anything,
    "is_normalized": anything,
    "unknown": anything,
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "rid": words,
    "session_id": words,
    "input_embeds": st.sampled_from(([[0.5] * 576] * 3, [[0.5]], [[]], [])),
    "image_data": words,
    "video_data": words,
    "audio_data": words,
    "return_logprob": st.booleans(),
    "logprob_start_len": integers,
    "top_logprobs_num": st.integers(0, 5) | integers,
    "token_ids_logprob": st.lists(st.integers(0, LAST_TOKEN), max_size=3),
    "return_sampling_mask": st.booleans(),
    "return_text_in_logprobs": st.booleans(),
    "return_flat_raw_top_logprobs": st.booleans(),
    "return_flat_raw_top_logprobs_b64": st.booleans(),
    "stream": st.booleans(),
    "log_metrics": st.booleans(),
    "return_hidden_states": st.booleans(),
    "return_routed_experts": st.booleans(),
    "routed_experts_start_len": integers,
    "return_indexer_topk": st.booleans(),
    "modalities": st.just(["image"]),
    "session_params": st.sampled_from(({}, {"id": "none"}, {"rid": 5}, {"id": 3.5, "offset": "a"}, {"unknown": 1})),
    "lora_path": words,
    "lora_id": words,
    "custom_logit_processor": words,
    "positional_embed_overrides": anything,
    "bootstrap_host": words,
    "bootstrap_port": integers,
    "bootstrap_room": integers,
    "bootstrap_pair_key": words,
    "decode_tp_size": integers,
    "routed_dp_rank": integers,
    "disagg_prefill_dp_rank": integers,
    "routing_key": words,
    "conversation_id": words,
    "background": st.booleans(),
    "require_reasoning": st.booleans(),
    "max_thinking_tokens": integers,
    "priority": integers,
    "extra_key": words,
    "no_logs": st.booleans(),
    "custom_labels": st.just({"a": "b"}),
    "return_bytes": st.booleans(),
    "return_entropy": st.booleans(),
    "return_prompt_token_ids": st.booleans(),
    "external_trace_header": st.just({"a": "b"}),
    "received_time": numbers,
    "need_wait_for_mm_inputs": st.booleans(),
    "num_items_assigned": anything,
    "mm_data_mooncake": anything,
    "mm_hashes": anything,
    "use_audio_in_video": st.booleans(),
    "encoder_urls": st.just(["a"]),
    "max_dynamic_patch": integers,
    "min_dynamic_patch": integers,
    "image_max_dynamic_patch": integers,
    "video_max_dynamic_patch": integers,
    "images_config": st.just({}),
    "multi_item_delimiter_indices": st.lists(integers, max_size=3),
}
PROMPTS = st.one_of(
    st.fixed_dictionaries({"text": st.sampled_from(("hi there", "Once upon a time", "def main():", "x", " ", "🙂")) | words}),
    st.fixed_dictionaries({"input_ids": st.lists(st.integers(1, LAST_TOKEN), min_size=1, max_size=40)}),
    st.fixed_dictionaries({"input_ids": lists.filter(lambda ids: len(ids) < 1000)}),
    st.fixed_dictionaries({"text": st.lists(words, max_size=3)}),
    st.fixed_dictionaries({"text": anything}),
)


def _chosen(fields: dict[str, st.SearchStrategy[Any]], most: int, odds: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return names.flatmap(lambda found: st.fixed_dictionaries({name: either(fields[name], odds) for name in found}))


params = st.builds(lambda length, more: {"max_new_tokens": length, **more}, st.integers(0, 4), _chosen(SAMPLING, 3, 8))
bodies = st.builds(
    lambda prompt, found, more: {**prompt, "sampling_params": found, **more},
    st.one_of(PROMPTS, st.just({"text": "Once upon a time"})),
    params,
    _chosen(FIELDS, 2, 8),
) | st.builds(lambda found: {"text": "Once upon a time", "sampling_params": found}, anything.filter(bool))
"""Bodies of ``/generate``; most answers are short."""
# Each of these values is one that SGLang's documents allow, alone and together.
ALLOWED = (
    *("stop_token_ids", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),
)
# Log-probabilities of chosen tokens beside a request for others end stock.
ALLOWED_FIELDS = ("return_logprob", "return_text_in_logprobs", "stream", "no_logs", "return_prompt_token_ids")
valid_bodies = st.builds(
    lambda length, found, more: {"text": "Once upon a time", "sampling_params": {"temperature": 0, **found, "max_new_tokens": length}, **more},
    st.integers(0, 4),
    st.fixed_dictionaries({}, optional={name: SAMPLING[name] for name in ALLOWED} | {"regex": st.sampled_from(("(yes|no)", "[0-9]{3}"))}),
    st.fixed_dictionaries({}, optional={name: FIELDS[name] for name in ALLOWED_FIELDS}),
)
drawn = st.tuples(bodies, st.just(False)) | st.tuples(valid_bodies, st.just(True))
"""Bodies, and whether they are valid by their making."""
