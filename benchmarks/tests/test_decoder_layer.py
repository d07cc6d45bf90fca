"""What pack_cycles.py times as a decoder layer: on a CPU it computes what transformers' Qwen3 layer does."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM = 20, 64, 6, 2, 16


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "sglang_ext_bench/scripts"))
    yield __import__("decoder_layer")
    sys.modules.pop("decoder_layer", None)


@torch.no_grad()
def test_a_layer_is_that_of_the_model(layer):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
        num_hidden_layers=1, rope_theta=1e6, rms_norm_eps=layer.EPSILON, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model, rotary = Qwen3DecoderLayer(config, 0).eval(), Qwen3RotaryEmbedding(config)
    for name, weight in model.named_parameters():
        weight.copy_(1 + 0.3 * torch.randn_like(weight) if "norm" in name else torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    given, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected = model(given[None], attention_mask=mask, position_embeddings=rotary(given[None], positions[None]))
    expected = (expected[0] if isinstance(expected, tuple) else expected).view(TOKENS, HIDDEN)

    attention, network = model.self_attn, model.mlp
    of_layer = model.input_layernorm.weight, model.post_attention_layernorm.weight
    norms = layer.Norms(*of_layer, attention.q_norm.weight, attention.k_norm.weight)
    turns = torch.arange(TOKENS)[:, None] * 1e6 ** -(torch.arange(DIM // 2) / (DIM // 2))
    residual, hidden = torch.zeros_like(given), given.clone()
    layer.add_normalized(hidden, residual, norms.attention)
    joined = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    queries, *new = linear(hidden, joined).view(TOKENS, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    layer.turn_heads(queries, new[0], norms, torch.cat([turns.cos(), turns.sin()], -1), positions)
    # Slot 0 is nobody's.
    buffers = [torch.zeros(TOKENS + 1, KV_HEADS, DIM) for _ in "kv"]
    layer.store(*new, *buffers, positions + 1)
    read = (part.transpose(0, 1)[None] for part in (queries, *(buffer[1:] for buffer in buffers)))
    attended = scaled_dot_product_attention(*read, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    hidden = attention.o_proj(attended.reshape(TOKENS, -1))
    layer.add_normalized(hidden, residual, norms.feed_forward)
    hidden = network.down_proj(layer.activated(linear(hidden, torch.cat([network.gate_proj.weight, network.up_proj.weight]))))
    assert torch.allclose(hidden + residual, expected, rtol=1e-5, atol=1e-5)
    assert not buffers[0][0].any()
