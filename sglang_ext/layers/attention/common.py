"""Common parts of attention: finding a model's attention layers, writing the KV of new tokens, and refusing unsupported layers."""

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def check_supported(layer: "RadixAttention", options: dict[str, object], where: str, remedy: str) -> None:
    """Check that a layer asks for no attention option except a scale or a cap.

    Args:
        layer: A layer of the model.
        options: Options by name; None for an option that the layer does not ask for.
        where: Name of the attention, for the message.
        remedy: What the user can do instead.

    Raises:
        ValueError: The layer asks for another option.
    """
    wanted = [name for name, value in options.items() if value is not None]
    if wanted or layer.xai_temperature_len > 0:
        raise ValueError(
            f"layer {layer.layer_id} asks for {', '.join(wanted) or 'a temperature by length'}, which {where} lack; {remedy}"
        )


def write_kv(
    pool: "KVCache", layer: "RadixAttention", forward_batch: "ForwardBatch", keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the KV of the new tokens, [tokens, kv_heads, dim], to their slots in SGLang's pool."""
    where = KVWriteLoc(forward_batch.out_cache_loc, None)
    pool.set_kv_buffer(layer, where, keys, values, layer.k_scale, layer.v_scale)


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
