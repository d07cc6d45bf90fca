"""What requests may ask for: refused where the scheduler would end, and nothing else."""

import json
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_ext.core import OptionError
from sglang_ext.hooks.frontend import MAX_SHOWN_CHARS, check_preferred, check_request, check_shape

VOCABULARY = 1000


def arguments(deterministic=True, **given):
    return SimpleNamespace(
        **{
            "enable_deterministic_inference": deterministic,
            "kv_compressor": "snapkv",
            "kv_budget": 0.25,
            "kv_more_compressors": "",
            "kv_bench_acceptance": None,
            "disaggregation_mode": "null",
            **given,
        }
    )


def checked(body, deterministic=True, preferred=None):
    """Check a request as the frontend does; what SGLang's own checks were called with."""
    calls, request = [], GenerateReqInput(**{"text": "a", **body})
    request.normalize_batch_and_arguments()
    check_request(lambda *args: calls.append(args), manager(deterministic, preferred), request, body.get("input_ids", [1]))
    return calls


def manager(deterministic=True, preferred=None):
    """Of a server's frontend, what checks read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCABULARY, hidden_size=4),
        preferred_sampling_params=preferred,
        server_args=arguments(deterministic),
    )


@pytest.mark.parametrize("params", [
    None, {}, {"max_new_tokens": None}, {"temperature": 0}, {"temperature": None}, {"stop": "a"}, {"stop": ["a", "b"]},
    {"stop_token_ids": [1, None, "2"]}, {"logit_bias": {"5": 1}}, {"sampling_seed": 2**63 - 1}, {"sampling_seed": -(2**63)},
    {"top_k": -1}, {"top_k": 2**31 - 1}, {"custom_params": {"a": [1, "b"], "c": {"d": 1.5}}}, {"stop_strs": None}, {"is_normalized": False},
    {"regex": ""}, {"stream_interval": 0}, {"stop_token_ids": [VOCABULARY]}, {"logit_bias": {"5": -float("inf"), "6": 1e30}},
    {"min_p": 0.1, "temperature": 0}, {"min_p": 0.1, "top_k": 1}, {"min_p": 0}, {"temperature": 1e30}, {"repetition_penalty": 1e-6},
    {"top_k": 1.5, "temperature": 0}, {"top_k": 2**70, "temperature": 0}, {"temperature": False}, {"json_schema": {}}, {"regex": 0},
    {"stop_regex": "a+"}, {"stop_regex": ["[0-9]", r"\bx"]}, {"logit_bias": {" 5": 1}},
])  # fmt: skip
def test_what_sglang_serves_passes(params):
    assert len(checked({"sampling_params": params})) == 1


@pytest.mark.parametrize(("params", "words"), [
    ({"max_new_tokens": 3.5}, r"sampling_params.max_new_tokens is 3.5: expected `int \| null`, got `float`. Pass a value of that kind"),
    ({"temperature": "0"}, r"sampling_params.temperature is '0': expected `float`, got `str`"),
    ({"stop": {"a": 1}}, "sampling_params.stop is "),
    ({"logit_bias": {"5": None}}, "sampling_params.logit_bias is "),
    ({"regex": "\ud800"}, "sampling_params.regex is .*surrogates not allowed"),
    ({"max_new_tokens": 2**70}, "sampling_params.max_new_tokens is 1180591620717411303424: "),
    ({"custom_params": {"a": [[1]]}}, "sampling_params.custom_params is "),
    ({"stop_token_ids": 5}, "sampling_params.stop_token_ids is 5; pass a list of token ids"),
    ({"min_p": 0.1}, "sampling_params.min_p is 0.1; pass a number from 0 to 0 under --enable-deterministic-inference"),
    ({"stop_token_ids": [2**70]}, "sampling_params.stop_token_ids is "),
    ({"logit_bias": {"5": 1e39}}, r"sampling_params.logit_bias has 1e\+39 for token '5'; pass a number from -1e\+30 to 1e\+30"),
    ({"logit_bias": {"5": float("inf")}}, "sampling_params.logit_bias has inf"),
    ({"temperature": 1e308}, r"sampling_params.temperature is 1e\+308; pass a number from 0 to"),
    ({"repetition_penalty": 1e-300}, "sampling_params.repetition_penalty is 1e-300; pass a number from 1e-30 to 2, or"),
    ({"top_k": 1.5}, "sampling_params.top_k is 1.5: expected `int`, got `float`"),
    ({"stop_regex": "("}, r"sampling_params.stop_regex has '\(', which is not a regular expression \(missing \), unterminated"),
    ({"stop_regex": ["a", "(?<=b+)c"]}, r"sampling_params.stop_regex has '\(\?<=b\+\)c', which is not a regular expression \(look-behind"),
    ({"stop_regex": "a{99999999999}"}, "sampling_params.stop_regex has .*the repetition number is too large"),
    ({"logit_bias": {"a": 1}}, "sampling_params.logit_bias has 'a', which is not a token id; pass token ids from 0 to 999"),
    ({"stop_token_ids": [VOCABULARY], "min_new_tokens": 1}, "sampling_params.stop_token_ids has 1000 at place 0; .* from 0 to 999"),
    ({"top_k": 2**31}, "sampling_params.top_k is 2147483648; pass a number from -1 to 2147483647, -1 for all tokens"),
    ({"sampling_seed": 2**63}, "sampling_params.sampling_seed is 9223372036854775808; pass a number"),
    ({"is_normalized": True}, "sampling_params.is_normalized is True; SGLang sets it itself"),
    ({"max_tokens": 5}, "sampling_params has 'max_tokens', which SGLang does not know: .*max_new_tokens"),
    ({"custom_params": {"kv_budget": 1}}, "custom_params has 'kv_budget', which this server does not know"),
    ({"kv_compressor": "snapkv"}, "sampling_params has 'kv_compressor': pass it in sampling_params.custom_params or at the top level"),
    ({"Custom-Params": {}}, "sampling_params has 'Custom-Params', .*did you mean 'custom_params'"),
])  # fmt: skip
def test_what_ends_a_scheduler_is_named(params, words):
    with pytest.raises(ValueError, match=words) as raised:
        checked({"sampling_params": params})
    assert "leave it out" in str(raised.value)


def test_a_seed_is_read_in_deterministic_mode_alone():
    assert checked({"sampling_params": {"sampling_seed": 2**63, "min_p": 0.1}}, deterministic=False)


def test_the_servers_preferred_parameters_are_those_of_a_request_without():
    with pytest.raises(ValueError, match="sampling_params.top_k is 1.5"):
        checked({"sampling_params": {}}, preferred={"top_k": 1.5})
    assert checked({"sampling_params": {"top_k": 5}}, preferred={"top_k": 1.5})


def test_of_several_prompts_none_is_empty():
    """SGLang refuses an empty prompt where there is one, and its scheduler ends at an empty one of several."""
    request = GenerateReqInput(input_ids=[[1], []])
    request.normalize_batch_and_arguments()
    check_request(lambda *args: None, manager(), request[0], [1])
    with pytest.raises(ValueError, match="a prompt has no tokens; pass input_ids with at least one token id"):
        check_request(lambda *args: None, manager(), request[1], [])


@pytest.mark.parametrize(("body", "words"), [
    ({"text": None, "input_ids": [1, VOCABULARY]}, "input_ids has 1000 at place 1; .* from 0 to 999: take token ids from the model's own"),
    ({"return_sampling_mask": True}, "return_sampling_mask is true; .* leave it out, or start the server with --kv-mode full"),
    ({"session_params": [{}]}, r"session_params is \[\{\}\]; pass an object"),
    ({"text": None, "input_ids": [-1]}, "input_ids has -1 at place 0"),
    ({"session_params": {"rid": 5}}, r"session_params.rid is 5: expected `str \| null`, got `int`"),
    ({"session_params": {"unknown": 5}}, "session_params has 'unknown', which SGLang does not know"),
    ({"return_logprob": True, "logprob_start_len": -3}, "logprob_start_len is -3; pass a number from -1"),
    ({"custom_logit_processor": "abc"}, "custom_logit_processor is 'abc', which is not a processor"),
    ({"text": None, "input_embeds": [[0.5] * 4, [0.5] * 3]}, "input_embeds has a row of 3 numbers; this model's tokens have 4 each"),
    ({"return_logprob": True, "top_logprobs_num": VOCABULARY + 1}, "top_logprobs_num is 1001; pass a number from 0 to 1000"),
    ({"token_ids_logprob": [True]}, "token_ids_logprob is .True.: expected `int`"),
    ({"sampling_params": [{}]}, "sampling_params is .{}.; pass an object"),
])  # fmt: skip
def test_fields_of_the_request_are_checked_alike(body, words):
    with pytest.raises(ValueError, match=words):
        checked(body)


def test_numbers_of_log_probabilities_count_where_these_are_asked_for():
    assert checked({"top_logprobs_num": VOCABULARY + 1, "logprob_start_len": -3})


def test_a_large_value_is_not_written_out():
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its length is what counts
        checked({"sampling_params": {"stop": [[1] * 10_000]}})
    assert len(str(raised.value)) < 6 * MAX_SHOWN_CHARS


def shaped(body):
    """A request after SGLang made lists of what is given once."""
    request = GenerateReqInput(**body)
    check_shape(GenerateReqInput.normalize_batch_and_arguments, request)
    return request


@pytest.mark.parametrize("body", [
    {"text": "a"}, {"text": "a", "sampling_params": {"n": 1}}, {"text": "a", "sampling_params": {"n": 0}},
    {"text": ["a", "b"], "sampling_params": {"n": 2}}, {"text": ["a", "b"], "sampling_params": [{}, {}, {}]},
    {"text": ["a", "b"], "sampling_params": [{"n": 2}]}, {"text": ["a", "b"], "token_ids_logprob": [5]},
    {"text": "a", "sampling_params": {"n": 2}, "modalities": []},  # of the chat API
    {"text": ["a", "b"], "token_ids_logprob": []}, {"text": []}, {"text": ["a"], "rid": "r"}, {"text": "a", "rid": "r"},
    {"text": "a", "input_ids": [1]}, {"text": ["a", "b"], "input_ids": [[1], [2]]},
    {"text": "a", "input_ids": [1], "sampling_params": {"n": 2}},
    {"input_ids": [[1], [2]], "return_logprob": [True, False]}, {"input_embeds": [[[0.5]], [[0.5]]]},
])  # fmt: skip
def test_requests_that_sglang_takes_apart_pass(body):
    made = shaped(body)
    assert made.is_single or len([made[i] for i in range(made.batch_size)]) == made.batch_size


@pytest.mark.parametrize(("body", "words"), [
    ({"text": "a", "sampling_params": {"n": "2"}}, "sampling_params.n is '2'; pass a whole number from 1"),
    ({"text": "a", "sampling_params": {"n": 1.5}}, "sampling_params.n is 1.5; pass a whole number"),
    ({"text": "a", "sampling_params": {"n": 2.0}}, "sampling_params.n is 2.0; pass a whole number"),
    ({"text": "a", "sampling_params": {"n": None}}, "sampling_params.n is None; pass a whole number"),
    ({"text": "a", "sampling_params": {"n": 2**70}}, "sampling_params.n is 1180591620717411303424; pass a whole number"),
    ({"text": ["a"], "sampling_params": [{"n": [2]}]}, r"sampling_params.n is \[2\]; pass a whole number"),
    ({"text": ["a", "b"], "sampling_params": {"n": 0}}, "sampling_params.n is 0; pass a whole number from 1"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params is a list of 1, and there are 2 prompts; pass a list with one"),
    ({"text": ["a", "b"], "sampling_params": []}, r"sampling_params is \[\]; pass an object"),
    ({"text": "a", "sampling_params": "n"}, "sampling_params is 'n'; pass an object"),
    ({"text": ["a", "b", "c"], "lora_path": ["x", "y"]}, "lora_path is a list of 2, and there are 3 prompts"),
    ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num is a list of 1, and there are 2 prompts"),
    ({"text": ["a", "b"], "input_ids": [[1]]}, "input_ids is a list of 1, and there are 2 prompts"),
    ({"text": ["a", "b"], "input_ids": [1, 2]}, r"input_ids is \[1, 2\] together with text; pass a list of token ids for one text"),
    ({"text": "a", "input_ids": [[1]]}, r"input_ids is \[\[1\]\] together with text; pass"),
    ({"text": "a", "rid": ["r"]}, r"rid is \['r'\] with one prompt; pass one string"),
    ({"input_embeds": []}, r"input_embeds is \[\]; pass a row of numbers"),
    ({"input_embeds": [[]]}, r"input_embeds is \[\[\]\]; pass a row of numbers"),
])  # fmt: skip
def test_counts_and_lists_that_sglang_cannot_take_apart_are_named(body, words):
    with pytest.raises(ValueError, match=words):
        shaped(body)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever SGLang raises, or what follows
        stock = GenerateReqInput(**body)
        stock.normalize_batch_and_arguments()
        made = [stock] if stock.is_single else [stock[i] for i in range(stock.batch_size)]
        hash(made[-1].rid)
        array("q", made[-1].input_ids or [])
        pytest.fail("stock takes it")


def preferred(given):
    check_preferred(
        arguments(preferred_sampling_params=given, get_model_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))
    )


@pytest.mark.parametrize("given", [
    None, "", "{}", {}, {"temperature": 0}, '{"temperature": 0.5, "custom_params": {"kv_compressor": "snapkv"}}', {"min_new_tokens": 500},
    {"min_p": 0.1}, {"n": 1},
])  # fmt: skip
def test_preferred_parameters_that_requests_can_be_answered_with_pass(given):
    preferred(given)


@pytest.mark.parametrize(("given", "words"), [
    ({"custom_params": {"kv_compressor": "foo"}}, "kv_compressor is 'foo'; this server compresses with snapkv"),
    ({"temperature": "x"}, "sampling_params.temperature is 'x': expected `float`, got `str`"),
    ({"max_tokens": 5}, "sampling_params has 'max_tokens', which SGLang does not know"),
    ({"top_p": 5}, "top_p must be in"),
    ({"stop_regex": "("}, "sampling_params.stop_regex has"),
    ({"stop_token_ids": 5}, "sampling_params.stop_token_ids is 5"),
    ([1], r"sampling_params is \[1\]; pass an object"),
])  # fmt: skip
def test_preferred_parameters_that_no_request_could_be_answered_with_are_refused_at_start(given, words):
    for value in (given, json.dumps(given)):
        with pytest.raises(OptionError, match=f"^--preferred-sampling-params is .*: {words}.*or leave the flag out$"):
            preferred(value)


def test_preferred_parameters_that_are_no_json_are_refused_at_start():
    with pytest.raises(OptionError, match="^--preferred-sampling-params is '{a', which is not JSON .*or leave it out$"):
        preferred("{a")


ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


def room_checked(mode, **changed):
    """Check a request to a server of this role."""
    server = manager()
    server.server_args.disaggregation_mode = mode
    request = GenerateReqInput(text="a", **{**ROOM, **changed})
    request.normalize_batch_and_arguments()
    check_request(lambda *args: None, server, request, [1])


@pytest.mark.parametrize("changed", [{"bootstrap_room": 0}, {"bootstrap_room": -5}, {"bootstrap_room": 1 << 63}])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_room_that_no_server_finds_is_refused_by_both(mode, changed):
    with pytest.raises(ValueError, match="bootstrap_room is -?[0-9]+; pass a number from 1 to 9223372036854775807"):
        room_checked(mode, **changed)


@pytest.mark.parametrize("changed", [{"bootstrap_host": None}, {"bootstrap_host": ""}, {"bootstrap_port": 0}, {"bootstrap_port": 65536}])
def test_a_decode_server_refuses_who_does_not_say_where_the_prefill_server_is(changed):
    with pytest.raises(ValueError, match="pass the prefill server's host and its --disaggregation-bootstrap-port"):
        room_checked("decode", **changed)
    room_checked("prefill", **changed)


@pytest.mark.parametrize("text", ["a", ["a", "b"]])
def test_several_answers_of_one_room_pass_with_the_backend_that_tells_them_apart(text):
    room = {**ROOM, "bootstrap_room": [7, 8] if isinstance(text, list) else 7}
    asked = GenerateReqInput(text=text, sampling_params={"n": 2}, **room)
    check_shape(GenerateReqInput.normalize_batch_and_arguments, asked)
    server = manager()
    for mode in ("prefill", "decode"):
        server.server_args.disaggregation_mode, server.server_args.disaggregation_transfer_backend = mode, "progressive"
        check_request(lambda *args: None, server, asked[0], [1])
        server.server_args.disaggregation_transfer_backend = "mooncake_tcp"
        with pytest.raises(ValueError, match="sampling_params.n is 2, and .*mooncake_tcp gives one answer.*start both servers with progressive"):
            check_request(lambda *args: None, server, asked[0], [1])
    server.server_args.disaggregation_mode = "null"
    check_request(lambda *args: None, server, asked[0], [1])


def test_rooms_that_are_found_and_sglangs_warm_ups_pass():
    for mode in ("prefill", "decode"):
        room_checked(mode)
        room_checked(mode, bootstrap_room=(1 << 63) - 1, bootstrap_port=None)
        room_checked(mode, bootstrap_host=FAKE_BOOTSTRAP_HOST, bootstrap_room=0)
    room_checked("null", bootstrap_host=None, bootstrap_room=None)
