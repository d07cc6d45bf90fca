"""FlashInfer's decode attention over exact keys and values, which kernels of this package are compared with."""

from collections.abc import Callable

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

WORKSPACE_BYTES = 256 << 20


def plan_decode(buffers: KVBuffers, slots: torch.Tensor, query_heads: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Plan FlashInfer's decode kernel for a batch of requests with equally many tokens.

    Args:
        buffers: Keys and values of each layer, [slots, kv_heads, dim].
        slots: Slots of each request, int32 [batch, tokens].
        query_heads: Query heads of a layer.

    Returns:
        A function of a layer's index and its queries, [batch, query_heads, dim], that returns the layer's outputs.
    """
    # Machines without a GPU lack this package, and print --help without it.
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    (batch, tokens), (_, kv_heads, dim), device = slots.shape, buffers.keys[0].shape, slots.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    last_page_lens = torch.ones(batch, dtype=torch.int32, device=device)
    dtypes = {"q_data_type": buffers.keys[0].dtype, "kv_data_type": buffers.keys[0].dtype}
    wrapper.plan(ends, slots.flatten(), last_page_lens, query_heads, kv_heads, dim, 1, **dtypes)
    pools = [(keys.unsqueeze(1), values.unsqueeze(1)) for keys, values in zip(buffers.keys, buffers.values)]
    return lambda layer, queries: wrapper.run(queries, pools[layer])
