"""Checks of how pointers into full KV are written and read, on a GPU or through Triton's interpreter."""

from typing import NamedTuple

import torch
from backend_steps import check_steps, on
from packed_helpers import attention

from sglang_ext.mem_cache.compressed.layouts.base import ExchangedRowLayout
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Slots of a pool.
SLOTS = 400


class Pointed(NamedTuple):
    """A pool whose slots hold random KV, and pointers of a request to some of a context's tokens."""

    buffers: KVBuffers
    kept: torch.Tensor
    context: torch.Tensor
    held: torch.Tensor
    others: torch.Tensor

    def led(self, layer, head):
        """Slots to which a head's pointers lead."""
        return self.context[self.kept[layer, head]]


def pointed(layers, heads, dim, count, dtype):
    """On the host; each head keeps ``count`` of 150 tokens; ``others`` are slots that nobody else has."""
    noise = torch.Generator().manual_seed(count + dim)
    keys, values = (tuple(torch.randn(SLOTS, heads, dim, generator=noise).to(dtype) for _ in range(layers)) for _ in "kv")
    buffers = KVBuffers(tuple(range(layers)), (0.1,) * layers, keys, values)
    kept = torch.stack([torch.randperm(150, generator=noise)[:count].sort().values for _ in range(layers * heads)])
    # Slot 0 is no request's.
    order, held = 1 + torch.randperm(SLOTS - 1, generator=noise), Pointers.for_pool(buffers, 1).packed_slots(count)
    return Pointed(buffers, kept.view(layers, heads, count), order[:150], order[150 : 150 + held], order[150 + held :])


def check_write_pointers(device):
    """Each head's pointers lead where PyTorch's do, over counts around the kernel's blocks; nothing else changes."""
    from sglang_ext.layers.kernels.kv_copies import write_pointers

    for layers, heads, dim, count, dtype in (
        (3, 2, 64, 140, torch.float16), (2, 3, 24, 33, torch.float32), (1, 1, 16, 1, torch.float32),
        (2, 1, 80, 40, torch.bfloat16),
    ):  # fmt: skip
        made = pointed(layers, heads, dim, count, dtype)
        there, pointers = on(device, made.buffers), Pointers.for_pool(made.buffers, 1)
        write_pointers(there.key_table, there.keys[0], *(part.to(device) for part in (made.kept, made.context, made.held)))
        pointers.write(made.buffers, made.kept, made.context, made.held)
        for layer in range(layers):
            found = pointers.read(there.keys[layer], made.held.to(device), count).cpu()
            assert torch.equal(found, torch.stack([made.led(layer, head) for head in range(heads)])), (layers, dim)
        rest = torch.tensor([slot for slot in range(SLOTS) if slot not in made.held.tolist()])
        for kind in ("keys", "values"):
            for one, other in zip(getattr(there, kind), getattr(made.buffers, kind)):
                assert torch.equal(one.cpu()[rest], other[rest]), (layers, heads, dim, kind)


def check_pointer_decode(device):
    """Attention over what heads are led to and the tokens after it, beside rows without pointers, in one batch."""
    from sglang_ext.layers.kernels.per_head_decode import pointer_decode

    half = torch.float16 if device == "cpu" else torch.bfloat16
    for layers, heads, group, dim, count, splits, dtype in (
        (2, 2, 3, 64, 70, (3, 2), torch.float32), (1, 1, 5, 24, 45, (8, 4), torch.float32), (1, 4, 1, 80, 41, (2, 1), half),
        # Of five steps parts take two each, and one, or two, are left over; or there are too many for the others, and none is.
        (1, 2, 2, 16, 150, (2, 1), torch.float32), (1, 1, 1, 32, 140, (3, 2), torch.float32), (1, 1, 2, 24, 150, (3, 1), torch.float32),
    ):  # fmt: skip
        made = pointed(layers, heads, dim, count, dtype)
        pointers, before, held, there = Pointers.for_pool(made.buffers, 1), made.buffers, len(made.held), on(device, made.buffers)
        pointers.write(there, *(part.to(device) for part in (made.kept, made.context, made.held)))
        table = torch.zeros(6, held + 60, dtype=torch.int32)
        table[4], table[2, :40] = torch.cat([made.held, made.others[:60]]), made.others[60:100]
        begins = PointerLayout.for_table(pointers, table.to(device))
        begins.counts[4] = count
        rows, lengths = (torch.tensor(part, device=device) for part in ([4, 2, 4], [held + 1, 40, held + 60]))
        queries = torch.randn(3, heads * group, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
        tolerance = 1e-5 if device == "cpu" and dtype == torch.float32 else 5e-3 if dtype != torch.bfloat16 else 3e-2
        for layer in range(layers):
            place = there.keys[layer], there.values[layer], table.to(device)
            found = pointer_decode(begins, queries.to(device), *place, rows, lengths, 0.1, splits).cpu()
            for head in range(heads):
                led, mine = made.led(layer, head), slice(head * group, (head + 1) * group)
                seen = torch.cat([led, made.others[:1]]), made.others[60:100], torch.cat([led, made.others[:60]])
                for request, slots in enumerate(seen):
                    k, v = (kind[layer][slots, head].double()[None] for kind in (before.keys, before.values))
                    expected = attention(queries[request, mine][None], k, v, 0.1)[0]
                    worst = float((found[request, mine].double() - expected).abs().max() / expected.abs().max())
                    assert worst < tolerance, (dim, layer, head, request, worst)


def check_pointer_backend(device):
    """The backend writes the newest KV and attends to what pointers lead to; a graph of it follows its tables."""
    from sglang_ext.layers.attention.per_head import PointerDecode

    count, index = 50, 1
    made = pointed(2, 2, 32, count, torch.float32)
    there, pointers = on(device, made.buffers), Pointers.for_pool(made.buffers, 1)
    begins = PointerLayout(pointers, torch.zeros(4, dtype=torch.int32, device=device))

    def write():
        pointers.write(there, *(part.to(device) for part in (made.kept, made.context, made.held)))
        begins.counts[3] = count

    steps = made.buffers, there, made.held, made.others, 2, index, write, lambda head: made.led(index, head)
    check_steps(lambda runner: PointerDecode(runner, begins), *steps)


def check_rows_backend(device):
    """Rows that begin with a copy's K and V, of other tokens for each head, are read as any tokens; so it is in a graph."""
    from sglang_ext.layers.attention.per_head import SentRowsDecode

    index = 1
    made = pointed(2, 2, 32, 60, torch.float32)
    there, slots = on(device, made.buffers), made.others[-60:]

    def write():
        there.copy_kept(*(part.to(device) for part in (made.kept, made.context, slots)))

    steps = made.buffers, there, slots, made.others[:-60], 2, index, write, lambda head: made.led(index, head)
    check_steps(lambda runner: SentRowsDecode(runner, ExchangedRowLayout()), *steps)


def check_pointers(device):
    """All of them, in one process: to import what they check takes longer than they do."""
    for check in (check_write_pointers, check_pointer_decode, check_pointer_backend, check_rows_backend):
        check(device)
