"""What attention backends of our own do alike: write the new tokens' KV, and refuse what no model served here asks for."""

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def check_supported(layer: "RadixAttention", options: dict[str, object], where: str, remedy: str) -> None:
    """Let pass a layer that wants of attention no more than a scale, or a cap.

    Args:
        layer: of the model.
        options: what it asks for by name; None for what it does not.
        where: names the attention, for the message.
        remedy: what to do instead.

    Raises:
        ValueError: it wants more.
    """
    wanted = [name for name, value in options.items() if value is not None]
    if wanted or layer.xai_temperature_len > 0:
        raise ValueError(
            f"layer {layer.layer_id} asks for {', '.join(wanted) or 'a temperature by length'}, which {where} lack; {remedy}"
        )


def write_kv(
    pool: "KVCache", layer: "RadixAttention", forward_batch: "ForwardBatch", keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Put the new tokens' KV, [tokens, kv_heads, dim], to their slots of SGLang's pool."""
    where = KVWriteLoc(forward_batch.out_cache_loc, None)
    pool.set_kv_buffer(layer, where, keys, values, layer.k_scale, layer.v_scale)
