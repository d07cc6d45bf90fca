"""Errors of attention outputs, measured with the compressors of a server."""

import pytest
import torch

from sglang_ext.mem_cache.compressors.catalogue import create, method
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.attention import (
    attend,
    build_context,
    measure_errors,
    relative_errors,
)
from sglang_ext_bench.quality.capture import CapturedModel, LayerAttention

PROMPT, AFTER = 40, 5


def layers(count: int = 2, tokens: int = PROMPT + AFTER, kv_heads: int = 2, group: int = 3, dim: int = 8) -> list[LayerAttention]:
    draw = torch.Generator().manual_seed(0)
    return [
        LayerAttention(
            queries=torch.randn(tokens, kv_heads * group, dim, generator=draw),
            keys=torch.randn(tokens, kv_heads, dim, generator=draw),
            values=torch.randn(tokens, kv_heads, dim, generator=draw),
            scaling=dim**-0.5,
            layer_id=index,
        )
        for index in range(count)
    ]


def test_attention_of_the_newest_tokens_is_a_plain_causal_loop():
    (layer,) = layers(1)
    found = attend(layer.queries[PROMPT:], layer.keys, layer.values, layer.scaling)
    for token in range(AFTER):
        end = PROMPT + token + 1
        for head in range(6):
            keys, values = layer.keys[:end, head // 3].double(), layer.values[:end, head // 3].double()
            weights = (keys @ layer.queries[PROMPT + token, head].double() * layer.scaling).softmax(0)
            assert torch.allclose(found[token, head].double(), weights @ values, atol=1e-6)


@pytest.mark.parametrize("name", ["snapkv", "sink-recent"])
def test_a_whole_copy_has_no_error_and_less_has_more(name):
    errors = [relative_errors(layers(), PROMPT, method(name), budget) for budget in (1.0, 0.5, 0.1)]
    assert all(each.shape == (2, AFTER) for each in errors)
    assert errors[0].max() == 0
    assert 0 < errors[1].mean() < errors[2].mean()


def test_a_token_that_is_dropped_costs_its_share_of_the_output():
    (layer,) = layers(1)
    # All attention goes to token 10. sink-recent drops it, and no other token has its value.
    layer.keys[:], layer.values[:] = 0, 0
    layer.keys[10], layer.values[10], layer.queries[:] = 100, 1, 1
    errors = relative_errors([layer], PROMPT, method("sink-recent"), 0.5)
    assert torch.allclose(errors, torch.ones(1, AFTER), atol=1e-4)


def test_compressors_see_the_newest_queries_of_the_prompt():
    found = layers()
    context = build_context(found, PROMPT, create("snapkv"))
    assert context.query_positions.tolist() == list(range(PROMPT - 32, PROMPT))
    assert torch.equal(context.layer(1).queries, found[1].queries[PROMPT - 32 : PROMPT])
    assert torch.equal(context.layer(1).keys, found[1].keys[:PROMPT])
    assert build_context(found, PROMPT, create("sink-recent")).queries.shape[1] == 0


class TinyModel(CapturedModel):
    """A Llama of two layers with random weights."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self._model = self.llama = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()


def test_captured_attention_gives_the_models_own_outputs():
    model = TinyModel()
    ids = model.generate((1, 2, 3, 4, 5, 6), 4)
    captured = model.attention(ids)
    assert ids[:6] == (1, 2, 3, 4, 5, 6) and len(ids) == 10 and len(captured) == 2
    seen: list[torch.Tensor] = []
    projection = model.llama.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.inference_mode():
        model.llama(torch.tensor([ids]))
    handle.remove()
    last = captured[1]
    assert (last.keys.shape, last.queries.shape, last.layer_id) == ((10, 2, 8), (10, 4, 8), 1)
    outputs = attend(last.queries, last.keys, last.values, last.scaling).flatten(1)
    assert torch.allclose(outputs, seen[0][0], atol=1e-5)


def test_errors_are_pooled_over_prompts_by_layer():
    prompts = [Prompt("a", tuple(range(1, 41))), Prompt("b", tuple(range(5, 35)))]
    whole, part = measure_errors(TinyModel(), prompts, ["sink-recent"], [1.0, 0.25], tokens=3)
    assert (whole.mean, whole.worst) == (0, 0) and len(part.mean_by_layer) == 2
    assert 0 < part.mean < part.worst


def test_errors_grow_with_fewer_bits_and_with_dropped_tokens():
    found = layers(tokens=256 + AFTER, dim=64)
    error = {name: relative_errors(found, 256, method(name, bits), budget).mean() for name, bits, budget in (
        ("int8", None, 1.0), ("kivi", 4, 1.0), ("turboquant", 2, 1.0), ("snapkv+int8", None, 0.5),
    )}  # fmt: skip
    assert 0 < error["int8"] < 0.01 < error["kivi"] < error["turboquant"] < 1
    assert error["snapkv+int8"] > 5 * error["int8"]


def test_a_method_that_needs_the_models_rotary_embedding_gets_it():
    model = TinyModel()
    prompts = [Prompt("a", tuple(range(1, 40)))]
    (found,) = measure_errors(model, prompts, ["expected-attention"], [0.5], tokens=3)
    assert 0 < found.mean < 2
