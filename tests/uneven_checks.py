"""Checks of how copies of uneven heads are written and read, on a GPU or through Triton's interpreter."""

from dataclasses import replace
from typing import NamedTuple

import torch

from packed_backend import batch_of_nobody, captured, layer_of, runner_of
from packed_helpers import attention
from sglang_ext.mem_cache.head_cells import HeadCells, KeptCells
from sglang_ext.mem_cache.kv_buffers import KVBuffers

# Tokens of a context, and slots of a pool.
CONTEXT, SLOTS = 90, 400
KINDS = ("keys", "values")


class UnevenCopy(NamedTuple):
    """Layers of random KV, what heads keep of a context in them, and where the copy of it goes."""

    buffers: KVBuffers
    kept: KeptCells
    sources: torch.Tensor
    targets: torch.Tensor


def uneven_copy(layers, heads, dim, copied, dtype):
    """A copy of ``copied`` slots, on the host; a third of the heads keep one token together, others many."""
    noise = torch.Generator().manual_seed(copied)
    keys, values = (tuple(torch.randn(SLOTS, heads, dim, generator=noise).to(dtype) for _ in range(layers)) for _ in "kv")
    cells = layers * heads * copied
    ends = torch.randint(cells + 1, (layers * heads - 1,), generator=noise).sort().values
    ends[: layers * heads // 3] = 1
    bounds = torch.tensor([0, *ends.tolist(), cells], dtype=torch.int32)
    kept = KeptCells(torch.randint(CONTEXT, (cells,), generator=noise), bounds)
    # Slot 0 is no request's.
    order = 1 + torch.randperm(SLOTS - 1, generator=noise)
    buffers = KVBuffers(tuple(range(layers)), (0.1,) * layers, keys, values)
    return UnevenCopy(buffers, kept, order[:CONTEXT], order[CONTEXT : CONTEXT + copied])


def check_scatter_cells(device):
    """Each head's tokens land in the cells that PyTorch fills, over sizes around the kernel's blocks; nothing else changes."""
    from sglang_ext.layers.kernels.scatter_cells import scatter_cells

    shapes = (3, 2, 64, 40, torch.float16), (2, 3, 24, 33, torch.float32), (1, 1, 16, 1, torch.float32)
    for layers, heads, dim, copied, dtype in shapes:
        made = uneven_copy(layers, heads, dim, copied, dtype)
        found = [[buffer.to(device, copy=True) for buffer in kind] for kind in (made.buffers.keys, made.buffers.values)]
        tables = [torch.tensor([buffer.data_ptr() for buffer in kind], device=device) for kind in found]
        given = (part.to(device) for part in (*made.kept, made.sources, made.targets))
        scatter_cells(*tables, *(kind[0] for kind in found), *given)
        HeadCells.of(made.buffers, 2).copy(made.kept, made.sources, made.targets)
        for kind, expected in zip(found, (made.buffers.keys, made.buffers.values)):
            assert all(torch.equal(one.cpu(), other) for one, other in zip(kind, expected)), (layers, heads, dim, copied)


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


def check_uneven_backend(device):
    """The backend writes the newest KV and attends to each head's cells; a graph of it follows its tables."""
    from sglang_ext.layers.attention.uneven_decode import UnevenDecode

    layers, heads, group, dim, copied, exact, index = 3, 2, 2, 32, 20, 40, 1
    made = uneven_copy(layers, heads, dim, copied, torch.float32)
    before = made.buffers
    buffers = replace(before, **{kind: tuple(part.to(device, copy=True) for part in getattr(before, kind)) for kind in KINDS})
    cells = HeadCells.of(buffers, 4)
    # Row 3 will begin with the copy; row 1 holds tokens as they are.
    tail = torch.tensor([slot for slot in range(1, SLOTS) if slot not in (*made.sources.tolist(), *made.targets.tolist())])
    table = torch.zeros(4, copied + exact, dtype=torch.int32, device=device)
    table[3], table[1, :30] = torch.cat([made.targets, tail[:exact]]), tail[exact : exact + 30]
    backend = UnevenDecode(runner_of(Layers(buffers), table, heads * group), cells)
    backend.splits = lambda requests: (2, 1)
    layer, batch = layer_of(index, heads * group, dim), batch_of_nobody(device)
    noise = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, count * dim, generator=noise).to(device) for count in (heads * group, heads, heads))
    run = captured(lambda: backend.forward_decode(q, k, v, layer, batch), device)
    # What changes between replays: the cells of a row, who reads which row, and how long it is.
    cells.write(3, KeptCells(*(part.to(device) for part in made.kept)), made.sources.to(device), made.targets.to(device))
    batch.req_pool_indices.copy_(torch.tensor([3, 1]))
    batch.seq_lens.copy_(torch.tensor([copied + exact, 30]))
    newest = torch.stack([tail[exact - 1], tail[exact + 29]])
    batch.out_cache_loc.copy_(newest)
    found = run().view(2, heads * group, dim).cpu().double()
    of_layer = [kind[index].clone() for kind in (before.keys, before.values)]
    for buffer, written, new in zip(of_layer, (buffers.keys, buffers.values), (k, v)):
        buffer[newest] = new.view(2, heads, dim).cpu()
        assert torch.equal(written[index][newest.to(device)].cpu(), buffer[newest])
    bounds = made.kept.bounds[index * heads :].tolist()
    for head, mine in enumerate(range(0, heads * group, group)):
        kept = made.sources[made.kept.tokens[bounds[head] : bounds[head + 1]]]
        for request, slots in enumerate((torch.cat([kept, tail[:exact]]), tail[exact : exact + 30])):
            queries = q[request].view(1, -1, dim)[:, mine : mine + group].cpu()
            expected = attention(queries, *(buffer[slots, head][None].double() for buffer in of_layer), 0.1)[0]
            worst = float((found[request, mine : mine + group] - expected).abs().max() / expected.abs().max())
            assert worst < (5e-3 if device == "cuda" else 1e-5), (head, request, worst)
