"""Checks of how copies of uneven heads are written and read, on a GPU or through Triton's interpreter."""

from typing import NamedTuple

import torch
from backend_steps import check_steps, on

from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout, RaggedSelection
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Tokens of a context, and slots of a pool.
CONTEXT, SLOTS = 90, 400


class UnevenCopy(NamedTuple):
    """Layers of random KV, what heads keep of a context in them, and where the copy of it goes."""

    buffers: KVBuffers
    kept: RaggedSelection
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
    kept = RaggedSelection(torch.randint(CONTEXT, (cells,), generator=noise), bounds)
    # Slot 0 is no request's.
    order = 1 + torch.randperm(SLOTS - 1, generator=noise)
    buffers = KVBuffers(tuple(range(layers)), (0.1,) * layers, keys, values)
    return UnevenCopy(buffers, kept, order[:CONTEXT], order[CONTEXT : CONTEXT + copied])


def check_scatter_cells(device):
    """Each head's tokens land in the cells that PyTorch fills, over sizes around the kernel's blocks; nothing else changes."""
    from sglang_ext.layers.kernels.kv_copies import scatter_cells

    # The last: a head has more cells than its programs copy at a time.
    shapes = (3, 2, 64, 40), (2, 3, 24, 33), (1, 1, 16, 1), (1, 2, 16, 300)
    for (layers, heads, dim, copied), dtype in zip(shapes, (torch.float16, torch.float32, torch.float32, torch.float16)):
        made = uneven_copy(layers, heads, dim, copied, dtype)
        there = on(device, made.buffers)
        found = there.keys, there.values
        given = (part.to(device) for part in (*made.kept, made.sources, made.targets))
        scatter_cells(there.key_table, there.value_table, *(kind[0] for kind in found), *given)
        RaggedHeadLayout.of(made.buffers, 2).write(None, made.kept, made.sources, made.targets)
        for kind, expected in zip(found, (made.buffers.keys, made.buffers.values)):
            assert all(torch.equal(one.cpu(), other) for one, other in zip(kind, expected)), (layers, heads, dim, copied)


def check_uneven_backend(device):
    """The backend writes the newest KV and attends to each head's cells; a graph of it follows its tables."""
    from sglang_ext.layers.attention.per_head import RaggedHeadsDecode

    layers, heads, copied, index = 3, 2, 20, 1
    made = uneven_copy(layers, heads, 32, copied, torch.float32)
    there = on(device, made.buffers)
    cells = RaggedHeadLayout.of(there, 4)
    tail = torch.tensor([slot for slot in range(1, SLOTS) if slot not in (*made.sources.tolist(), *made.targets.tolist())])
    bounds = made.kept.bounds[index * heads :].tolist()

    def write():
        cells.write(3, RaggedSelection(*(part.to(device) for part in made.kept)), made.sources.to(device), made.targets.to(device))

    def kept_by(head):
        return made.sources[made.kept.tokens[bounds[head] : bounds[head + 1]]]

    check_steps(lambda runner: RaggedHeadsDecode(runner, cells), made.buffers, there, made.targets, tail, 2, index, write, kept_by)
