"""Every sampling field is accounted for: verified exactly, or a reason to serve with full KV."""

from types import SimpleNamespace

import pytest
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.core import FALLBACK_REASONS
from sglang_ext.managers.spec_decode.request_states import fallback_reason
from sglang_ext.core import TPRanks
from sglang_ext.managers.kv_transfer.feature import KVTransfer

VERIFIED = "verified"
# How a field is served: "verified" (the request is drafted, and verification makes it exact), or the reason why a request that uses the
# field is served with full KV.
SAMPLING_FIELDS: dict[str, str] = {
    **dict.fromkeys(("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "n"), VERIFIED),
    # Full KV ("grammar") only if the grammar backend cannot take drafts back.
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), VERIFIED),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"), VERIFIED),
    # Only custom logit processors read the first one.
    **dict.fromkeys(("custom_params", "logit_bias", "sampling_seed"), VERIFIED),
    **dict.fromkeys(("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"), VERIFIED),
    # Counted along the drafts (penalties.py).
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"), VERIFIED),
    "min_p": "min-p",
}
USED = {"min_p": 0.1}


class OneWay(BaseGrammarObject):
    """A grammar that cannot take tokens back."""


class TwoWay(BaseGrammarObject):
    def rollback(self, k):
        """Takes tokens back."""


class Wrapper(TwoWay):
    grammar = TwoWay()


def request(**params):
    return SimpleNamespace(
        sampling_params=SamplingParams(**params),
        grammar=None,
        custom_logit_processor=None,
        return_hidden_states=False,
    )


def test_no_field_of_sampling_params_is_unaccounted_for():
    assert set(SamplingParams.__struct_fields__) == set(SAMPLING_FIELDS)


def test_each_reason_is_a_known_one():
    assert set(SAMPLING_FIELDS.values()) - {VERIFIED} <= set(FALLBACK_REASONS)


@pytest.mark.parametrize("name", [n for n, fate in SAMPLING_FIELDS.items() if fate != VERIFIED])
def test_a_field_with_a_reason_is_served_with_full_kv_for_it(name):
    reason = fallback_reason(request(**{name: USED[name]}))
    assert FALLBACK_REASONS[reason] == SAMPLING_FIELDS[name]


@pytest.mark.parametrize("name", [n for n, fate in SAMPLING_FIELDS.items() if fate == VERIFIED])
def test_a_verified_field_drafts(name):
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "n": 2, "sampling_seed": 7,
              "logit_bias": {"5": 1.0}, "frequency_penalty": 0.5, "presence_penalty": -0.5,
              "repetition_penalty": 1.2, "min_new_tokens": 3, "stop": ["x"], "stop_token_ids": [3], "max_new_tokens": 5}
    assert fallback_reason(request(**({name: values[name]} if name in values else {}))) == 0


@pytest.mark.parametrize(("grammar", "reason"), [(TwoWay(), "none"), (OneWay(), "grammar"), (Wrapper(), "grammar")])
def test_a_grammar_that_cannot_take_drafts_back_is_served_with_full_kv(grammar, reason):
    req = request(regex="a+")
    req.grammar = grammar
    assert FALLBACK_REASONS[fallback_reason(req)] == reason


def test_custom_processors_and_hidden_states_are_served_with_full_kv():
    req = request()
    req.custom_logit_processor = "..."
    assert FALLBACK_REASONS[fallback_reason(req)] == "custom-logit-processor"
    req = request()
    req.return_hidden_states = True
    assert FALLBACK_REASONS[fallback_reason(req)] == "hidden-states"


@pytest.mark.parametrize(
    "given",
    [{}, {"lora_id": "an adapter"}, {"multimodal_inputs": object()}, {"input_embeds": [[0.5]]}, {"positional_embed_overrides": object()}],
)
def test_who_is_more_than_tokens_waits_for_all_kv_of_another_server(given):
    """As SGLang asks for a second prefill by tokens alone."""
    receives = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive"}
    feature = KVTransfer(SimpleNamespace(kv_mode="verified", kv_reference="exact", kv_bench_codec=None, **receives))
    model = SimpleNamespace(layers=1, query_heads=1, head_dim=8)
    worker = SimpleNamespace(
        memory=SimpleNamespace(model=model), model_runner=SimpleNamespace(dtype=None), queries=None, ranks=TPRanks(), compressed_kv="there"
    )
    feature.on_graphs_captured(worker)
    full_kv = feature.full_kv_provider(worker, None)
    asked = request(max_new_tokens=8)
    asked.lora_id = asked.multimodal_inputs = asked.input_embeds = asked.positional_embed_overrides = asked.extra_key = None
    vars(asked).update(given)
    assert full_kv is not None and feature.arriving_full_kv(asked) is (None if given else full_kv)
