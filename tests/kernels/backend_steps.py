"""A check that attention backends of steps over copies share: what they write, and what they attend to as their tables change."""

import torch
from packed_backend import batch_of_nobody, captured, layer_of, runner_of
from packed_helpers import attention

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Exact tokens after the copy of the row that has one, and tokens of the row without.
EXACT, PLAIN = 40, 30


class Layers:
    """SGLang's KV pool with several layers."""

    def __init__(self, buffers):
        self.buffers = buffers

    def get_key_buffer(self, layer):
        return self.buffers.keys[layer]

    def get_value_buffer(self, layer):
        return self.buffers.values[layer]

    def set_kv_buffer(self, layer, where, k, v, k_scale, v_scale):
        keys, values = self.buffers.keys[layer.layer_id], self.buffers.values[layer.layer_id]
        keys[where.loc], values[where.loc] = k.view(-1, *keys.shape[1:]), v.view(-1, *keys.shape[1:])


def on(device, buffers):
    """The same buffers there."""
    keys, values = (tuple(part.to(device, copy=True) for part in kind) for kind in (buffers.keys, buffers.values))
    return KVBuffers(buffers.layer_ids, buffers.scaling, keys, values)


def table_of(copy, tail, device):
    """Row 3 will begin with the slots ``copy``; row 1 holds tokens as they are; both go on in ``tail``."""
    table = torch.zeros(4, len(copy) + EXACT, dtype=torch.int32, device=device)
    table[3], table[1, :PLAIN] = torch.cat([copy, tail[:EXACT]]), tail[EXACT : EXACT + PLAIN]
    return table


def check_steps(make, before, there, copy, tail, group, index, write, kept_by):
    """The backend writes the newest KV and attends to copy and tail; a graph of it follows its tables.

    ``make``: of what it reads of SGLang's model runner, the backend; ``before``, ``there``: buffers on the host, and where it runs;
    ``copy``: slots of the copy; ``write`` puts it there, in row 3; ``kept_by``: of a head of layer ``index``, slots of what it keeps.
    """
    (_, heads, dim), device = before.keys[0].shape, there.keys[0].device.type
    backend = make(runner_of(Layers(there), table_of(copy, tail, device), heads * group))
    backend.splits = lambda requests: (2, 1)
    layer, batch = layer_of(index, heads * group, dim), batch_of_nobody(device)
    noise = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, width * dim, generator=noise).to(device) for width in (heads * group, heads, heads))
    run = captured(lambda: backend.forward_decode(q, k, v, layer, batch), device)
    # What changes between replays: what a row begins with, who reads which row, and how long it is.
    write()
    batch.req_pool_indices.copy_(torch.tensor([3, 1]))
    batch.seq_lens.copy_(torch.tensor([len(copy) + EXACT, PLAIN]))
    newest = tail[[EXACT - 1, EXACT + PLAIN - 1]]
    batch.out_cache_loc.copy_(newest)
    found = run().view(2, heads * group, dim).cpu().double()
    of_layer = [kind[index].clone() for kind in (before.keys, before.values)]
    for buffer, written, new in zip(of_layer, (there.keys, there.values), (k, v)):
        buffer[newest] = new.view(2, heads, dim).cpu()
        assert torch.equal(written[index][newest.to(device)].cpu(), buffer[newest])
    for head, mine in enumerate(range(0, heads * group, group)):
        for request, slots in enumerate((torch.cat([kept_by(head), tail[:EXACT]]), tail[EXACT : EXACT + PLAIN])):
            queries = q[request].view(1, -1, dim)[:, mine : mine + group].cpu()
            expected = attention(queries, *(buffer[slots, head][None].double() for buffer in of_layer), 0.1)[0]
            worst = float((found[request, mine : mine + group] - expected).abs().max() / expected.abs().max())
            assert worst < (5e-3 if device == "cuda" else 1e-5), (head, request, worst)
