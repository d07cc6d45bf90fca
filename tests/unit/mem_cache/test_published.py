"""Compressors keep the tokens that the published code keeps: NVIDIA's kvpress, on real text, at equal settings."""

import argparse
import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import LayerKV, top_positions
from sglang_ext.mem_cache.compressors.attention_scores import ExpectedAttention, SinkRecent, SnapKV
from sglang_ext.mem_cache.scores import FitRecord, Predictor
from sglang_ext.tools.reconstruction import AttentionInputs, PromptPrefix, ReconstructionConfig, reconstruction_scores

TOKENS, CHUNK = 192, 100
BUDGETS = (0.5, 0.25, 0.125)


@pytest.fixture(scope="module")
def presses():
    """The published methods by module; without the package's own ``__init__``, which wants data sets."""
    package = ModuleType("kvpress")
    package.__path__ = importlib.util.find_spec("kvpress").submodule_search_locations
    sys.modules["kvpress"] = package
    names = ("expected_attention", "kvzap", "kvzip", "snapkv", "streaming_llm")
    yield SimpleNamespace(**{name: importlib.import_module(f"kvpress.presses.{name}_press") for name in names})
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpress"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def published(model, presses):
    """The demo model after one prefill under KVzipPress: inputs of its attention layers, its cache, KVzip's scores."""
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = PromptPrefix(chat=True).tokens(tokenizer, inspect.getsource(argparse)[:9000])[:TOKENS]
    inputs, kvzip = [], []
    watches = [
        layer.self_attn.register_forward_hook(lambda m, _, kwargs, out: inputs.append((m, kwargs)), with_kwargs=True)
        for layer in llama.model.layers
    ]
    press = presses.kvzip.KVzipPress(compression_ratio=0.5, chunk_size=CHUNK)
    press.compress_post = lambda _: kvzip.append(press.score_val[:, 0].clone())
    cache = DynamicCache()
    with torch.inference_mode(), press(llama):
        llama.model(input_ids=torch.tensor([tokens]), past_key_values=cache)
        prefix = press.prefix_length
        for watch in watches:
            watch.remove()
    given = {"llama": llama, "tokenizer": tokenizer, "tokens": tokens, "prefix": prefix}
    return SimpleNamespace(**given, inputs=inputs, cache=cache, kvzip=kvzip[0])


def layers(published, window):
    """Each layer as a compressor sees it."""
    positions = torch.arange(TOKENS - window, TOKENS)
    rotary = Rotary(published.llama.model.rotary_emb.inv_freq)
    for index, ((module, kwargs), kv) in enumerate(zip(published.inputs, published.cache.layers)):
        queries = module.q_proj(kwargs["hidden_states"]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
        keys, values = (kv.keys[0].transpose(0, 1), kv.values[0].transpose(0, 1))
        yield LayerKV(keys, values, queries[0].transpose(0, 1)[-window:], positions, module.scaling, index, rotary)


def kept(scores):
    """The sets that each head keeps at all budgets."""
    return [set(row) for budget in BUDGETS for row in top_positions(scores, int(TOKENS * budget)).flatten(0, -2).tolist()]


def overlap(one, other):
    """Share of the tokens that both keep."""
    return sum(len(a & b) for a, b in zip(one, other)) / sum(map(len, one))


@pytest.mark.parametrize(
    ("ours", "module", "name", "settings"),
    [
        (SnapKV(window=48, kernel=7), "snapkv", "SnapKVPress", {"window_size": 48, "kernel_size": 7}),
        (ExpectedAttention(window=TOKENS), "expected_attention", "ExpectedAttentionPress", {"epsilon": 0.0}),
        (
            ExpectedAttention(window=TOKENS, coming=64, sinks=8, block=100),
            "expected_attention",
            "ExpectedAttentionPress",
            {"n_future_positions": 64, "n_sink": 8, "epsilon": 0.0},
        ),
    ],
    ids=["snapkv", "expected-attention", "other settings"],
)
@torch.inference_mode()
def test_the_kept_sets_are_those_of_the_published_code(published, presses, ours, module, name, settings):
    press = getattr(getattr(presses, module), name)(**settings)
    shared = []
    for layer, (attention, kwargs), kv in zip(layers(published, ours.window), published.inputs, published.cache.layers):
        theirs = press.score(attention, kwargs["hidden_states"], kv.keys, kv.values, None, kwargs)[0]
        shared.append(overlap(kept(theirs), kept(ours.scores(layer))))
    assert min(shared) > 0.99 and sum(shared) / len(shared) > 0.9999


@torch.inference_mode()
def test_sink_recent_keeps_what_the_published_code_keeps(published, presses):
    layer, kv = next(layers(published, 1)), published.cache.layers[0]
    for budget in BUDGETS:
        press = presses.streaming_llm.StreamingLLMPress(compression_ratio=1 - budget)
        theirs = press.score(None, None, kv.keys, kv.values, None, {})[0]
        assert torch.equal(top_positions(theirs, int(TOKENS * budget)), top_positions(SinkRecent().scores(layer), int(TOKENS * budget)))


@torch.inference_mode()
def test_kvzip_keeps_what_the_published_code_keeps_chunk_by_chunk(published):
    how = ReconstructionConfig(chunk=CHUNK, begin=published.prefix)

    def encode(text):
        return published.tokenizer.encode(text, add_special_tokens=False)

    suffix = PromptPrefix(chat=True).suffix(published.tokenizer)
    ours = reconstruction_scores(published.llama, encode, published.tokens, suffix, how)
    # The published code keeps the first tokens too, by a score of its own, where it selects.
    published.kvzip[..., : how.sinks] = float("inf")
    assert published.prefix > how.sinks
    torch.testing.assert_close(ours, published.kvzip, atol=1e-4, rtol=1e-3)
    assert overlap(kept(published.kvzip), kept(ours)) > 0.9999
    assert overlap(kept(published.kvzip), kept(ours.half().float())) > 0.999


@torch.inference_mode()
def test_kvzip_plus_scores_are_those_of_the_published_code(published, presses):
    llama, tokens, found = published.llama, published.tokens[:150], []
    llama.set_attn_implementation("sdpa")
    press = presses.kvzip.KVzipPress(compression_ratio=0.5, chunk_size=CHUNK, kvzip_plus_normalization=True)
    press.compress_post = lambda _: found.append(press.score_val[:, 0].clone())
    with press(llama):
        llama.model(input_ids=torch.tensor([tokens]), past_key_values=DynamicCache())

    how, inputs = ReconstructionConfig(chunk=CHUNK, begin=published.prefix), AttentionInputs(len(found[0]), torch.arange(0))

    def encode(text):
        return published.tokenizer.encode(text, add_special_tokens=False)

    with inputs.record_inputs(llama):
        ours = reconstruction_scores(llama, encode, tokens, PromptPrefix(chat=True).suffix(published.tokenizer), how, inputs=inputs)
    found[0][..., : how.sinks] = float("inf")
    torch.testing.assert_close(ours, found[0], atol=1e-5, rtol=2e-3)


@pytest.mark.parametrize("width", [None, 5])
def test_predicted_scores_are_those_of_the_published_network(presses, width):
    config = presses.kvzap.KVzapConfig(input_dim=6, output_dim=3, n_modules=2, hidden_dim=width)
    theirs = presses.kvzap.KVzapModel(config).eval()
    maps = [[layer] if width is None else [layer[0], layer[2]] for layer in theirs.layers]
    weights = [tensor.detach() for place in (-1, 0) for name in ("weight", "bias") for tensor in [
        torch.stack([getattr(of_layer[place], name) for of_layer in maps])
    ]]
    inner = weights[2:] if width else (None, None)
    ours = Predictor(*weights[:2], FitRecord("", "", 0, 0, (), ()), *inner)
    states = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = torch.stack([ours(layer, states[:, layer]) for layer in range(2)], dim=1)
        torch.testing.assert_close(found, theirs(states))
