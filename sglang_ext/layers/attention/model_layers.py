"""Finds the attention layers of an SGLang model."""

import torch


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is one of SGLang's attention layers."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return isinstance(module, RadixAttention)


def first_attention_layer(model: torch.nn.Module) -> torch.nn.Module:
    """The first of the model's attention layers. All have the same heads."""
    return next(module for module in model.modules() if is_attention(module))


def attention_scaling(model: torch.nn.Module) -> dict[int, float]:
    """Factor on query-key products by layer index, from the model's attention layers."""
    return {module.layer_id: module.scaling for module in model.modules() if is_attention(module)}
