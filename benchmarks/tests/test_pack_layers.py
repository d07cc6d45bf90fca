"""The layers that pack-cycles times: on a CPU they compute what transformers' Qwen3 layer does, and their queries change as asked."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RotaryEmbedding,
)

from sglang_ext.tools import CommandError
from sglang_ext_bench.packs import pack_layers
from sglang_ext_bench.packs.pack_layers import LayerPack, Load, Norms

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM = 20, 64, 6, 2, 16


@torch.no_grad()
def test_a_layer_computes_what_the_model_computes() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
        num_hidden_layers=1, rope_theta=1e6, rms_norm_eps=pack_layers.EPSILON, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model, rotary = Qwen3DecoderLayer(config, 0).eval(), Qwen3RotaryEmbedding(config)
    for name, weight in model.named_parameters():
        weight.copy_(1 + 0.3 * torch.randn_like(weight) if "norm" in name else torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    inputs, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected = model(inputs[None], attention_mask=mask, position_embeddings=rotary(inputs[None], positions[None]))
    expected = (expected[0] if isinstance(expected, tuple) else expected).view(TOKENS, HIDDEN)

    attention, network = model.self_attn, model.mlp
    norms = Norms(model.input_layernorm.weight, model.post_attention_layernorm.weight, attention.q_norm.weight, attention.k_norm.weight)
    angles = torch.arange(TOKENS)[:, None] * 1e6 ** -(torch.arange(DIM // 2) / (DIM // 2))
    residual, hidden = torch.zeros_like(inputs), inputs.clone()
    pack_layers.add_and_normalize(hidden, residual, norms.attention)
    qkv = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    queries, *new_kv = linear(hidden, qkv).view(TOKENS, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    pack_layers.rotate_heads(queries, new_kv[0], norms, torch.cat([angles.cos(), angles.sin()], -1), positions)
    # Slot 0 is unused.
    buffers = [torch.zeros(TOKENS + 1, KV_HEADS, DIM) for _ in "kv"]
    pack_layers.store_kv(*new_kv, *buffers, positions + 1)
    read = (part.transpose(0, 1)[None] for part in (queries, *(buffer[1:] for buffer in buffers)))
    attended = scaled_dot_product_attention(*read, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    hidden = attention.o_proj(attended.reshape(TOKENS, -1))
    pack_layers.add_and_normalize(hidden, residual, norms.feed_forward)
    gate_up = torch.cat([network.gate_proj.weight, network.up_proj.weight])
    hidden = network.down_proj(pack_layers.gated_silu(linear(hidden, gate_up)))
    assert torch.allclose(hidden + residual, expected, rtol=1e-5, atol=1e-5)
    assert not buffers[0][0].any()


def test_queries_that_persist_more_keep_more_of_a_selection() -> None:
    load = Load(1, 2000, 200)
    pack = LayerPack("tiny", 1, [load], torch.device("cpu"))
    little, much = (pack.find_persistence(load, stay) for stay in (0.5, 0.9))
    assert 0 < little < much < 1


@pytest.mark.parametrize("text", ["8", "8:32768", "8:16:x", "0:16:4", "8:16:17", "8:16:0"])
def test_wrong_loads_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match=text):
        Load.parse(text)
