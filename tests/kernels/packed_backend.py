"""A check of the attention backend of steps over packed copies, on a GPU or through Triton's interpreter."""

from types import SimpleNamespace

import torch
from packed_helpers import attention, packed_pool

from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout


class Pool:
    """One layer of SGLang's KV pool."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def get_key_buffer(self, layer):
        return self.keys

    def get_value_buffer(self, layer):
        return self.values

    def set_kv_buffer(self, layer, where, k, v, k_scale, v_scale):
        self.keys[where.loc], self.values[where.loc] = k.view(-1, *self.keys.shape[1:]), v.view(-1, *self.keys.shape[1:])


def runner_of(pool, table, query_heads):
    """What a backend reads of SGLang's model runner, with the token ``table``."""
    return SimpleNamespace(
        model_config=SimpleNamespace(num_attention_heads=query_heads), dtype=torch.float32, token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table), server_args=SimpleNamespace(tp_size=1),
    )  # fmt: skip


def layer_of(index, query_heads, dim):
    """What a backend reads of SGLang's attention layer."""
    return SimpleNamespace(
        layer_id=index, tp_q_head_num=query_heads, qk_head_dim=dim, scaling=0.1, logit_cap=0.0, xai_temperature_len=-1,
        k_scale=None, v_scale=None,
    )  # fmt: skip


def batch_of_nobody(device):
    """A decode of two requests of one token, in row 0 and slot 0."""
    return SimpleNamespace(
        req_pool_indices=torch.tensor([0, 0], device=device), seq_lens=torch.tensor([1, 1], device=device),
        out_cache_loc=torch.tensor([0, 0], device=device),
    )  # fmt: skip


def check_packed_backend(device):
    """The backend writes the newest KV and attends over rows with blocks and without; a graph of it follows its tables."""
    from sglang_ext.layers.attention.packed import PackedDecode

    made = packed_pool("kivi", 4, 2, 40)
    pool = Pool(*(part[0].to(device) for part in (made.buffers.keys, made.buffers.values)))
    (_, heads, dim), group, tokens = pool.keys.shape, 2, made.keys.shape[1]
    table = torch.zeros(4, len(made.row), dtype=torch.int32, device=device)
    table[1, :40], table[3] = made.row[made.packed :], made.row
    rows = QuantizedLayout.for_table(made.packing, table)
    backend = PackedDecode(runner_of(pool, table, heads * group), rows)
    assert [backend.splits(n) for n in (1, 64, 1000)] == [(60, 4), (28, 4), (4, 4)]
    backend.splits = lambda requests: (2, 1)
    layer, batch = layer_of(0, heads * group, dim), batch_of_nobody(device)
    noise = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, count * dim, generator=noise).to(device) for count in (heads * group, heads, heads))
    run = captured(lambda: backend.forward_decode(q, k, v, layer, batch), device)
    # What a step changes between replays: who reads which row, how long it is, how much of it is packed.
    rows.counts[3] = made.packed
    batch.req_pool_indices.copy_(torch.tensor([3, 1]))
    batch.seq_lens.copy_(torch.tensor([len(made.row), 30]))
    newest = torch.stack([made.row[-1], made.row[made.packed + 29]])
    batch.out_cache_loc.copy_(newest)
    found = run().view(2, heads * group, dim).cpu()
    assert torch.equal(pool.keys[newest.to(device)].flatten(1), k) and torch.equal(pool.values[newest.to(device)].flatten(1), v)
    means = [part.clone() for part in (made.keys, made.values)]
    for part, new in zip(means, (k, v)):
        for request, place in enumerate((tokens - 1, tokens - 11)):
            part[:, place] = new[request].view(heads, dim).double().cpu()
    for request, read in enumerate((slice(0, tokens), slice(tokens - 40, tokens - 10))):
        expected = attention(q[request].view(1, -1, dim).cpu(), *(part[:, read] for part in means), 0.1)[0]
        tolerance = 5e-3 if device == "cuda" else 1e-5
        assert float((found[request] - expected).abs().max() / expected.abs().max()) < tolerance, request


def captured(run, device):
    """``run`` as a CUDA graph, after it ran outside of one; as it is where there is no GPU."""
    run()
    if device == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return lambda: (graph.replay(), torch.cuda.synchronize(), out)[-1]
