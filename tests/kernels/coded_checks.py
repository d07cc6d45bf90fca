"""Checks of keys in 8 and 4 bits, on a GPU or through Triton's interpreter: kernels code them, and choose by them, as PyTorch does."""

import torch
from backend_steps import on
from choose_checks import SLOTS, Asked, check_chosen
from marked_helpers import written

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, KeySpec
from sglang_ext.mem_cache.selection.scoring import group_attention
from sglang_ext.mem_cache.selection.scoring import mark_always

BITS = (8, 4)


def coded(buffers, bits):
    """The keys of all slots, as PyTorch codes them; on the host."""
    slots, heads, dim = buffers.keys[0].shape
    held = QuantizedKeys(KeySpec(len(buffers.keys), heads, dim, buffers.keys[0].dtype, bits), slots)
    held.write(torch.arange(slots), torch.stack(buffers.keys))
    return held


def check_code_keys(device):
    """Codes and words are PyTorch's, bit for bit, of groups around the kernel's padding, far numbers and equal ones; others stay."""
    from sglang_ext.layers.kernels.quantized_keys import quantize_keys

    half = torch.float16 if device == "cpu" else torch.bfloat16
    for bits in BITS:
        for layers, heads, dim, dtype, count in (
            (3, 2, 64, torch.float32, 40), (1, 8, 128, half, 8), (2, 1, 96, torch.float32, 33), (2, 3, 80, half, 1), (1, 1, 8, half, 16),
        ):  # fmt: skip
            noise = torch.Generator().manual_seed(bits + dim)
            sizes = 10 ** torch.randn(90, heads, 1, generator=noise)
            keys = tuple(torch.randn(90, heads, dim, generator=noise) * sizes for _ in range(layers))
            keys[0][5], keys[0][6] = 3.0, 0.0
            keys[0][7, 0, ::2] = 1e30 if dtype != torch.float16 else 60000.0
            buffers = KVBuffers(tuple(range(layers)), (0.1,) * layers, tuple(each.to(dtype) for each in keys), keys)
            held, slots = coded(buffers, bits), torch.cat([torch.arange(5, 8), torch.randperm(90, generator=noise)])[:count]
            there = on(device, buffers)
            codes, words = torch.full_like(held.codes, 77).to(device), torch.full_like(held.words, 77).to(device)
            quantize_keys(there.key_table, there.keys[0], slots.to(device), codes, words, held.sizes.group)
            others = torch.ones(90, dtype=torch.bool).index_fill(0, slots, False)
            for found, expected in ((codes.cpu(), held.codes), (words.cpu(), held.words)):
                assert torch.equal(found[:, slots], expected[:, slots]), (bits, dim, dtype)
                assert (found[:, others] == 77).all(), (bits, dim, dtype)


def scores(asked, held, request, layer):
    """As PyTorch scores by what codes mean: float32 [kv_heads, tokens]."""
    row, length = int(asked.rows[request]), asked.lengths[request]
    keys = held.read(layer, asked.table[row, :length].long()).transpose(0, 1)[None, None]
    found = group_attention(asked.queries[request, layer][None, None], keys, asked.buffers.scaling[layer])
    return mark_always(found, *asked.always)[0, 0]


def check_choose_by_codes(device):
    """What PyTorch chooses by the same codes, but for the rounding of queries to 15 bits: more query heads than a product has rows for,
    groups that fill no power of 2, shares of layers and requests; as positions and as pointers, which go to the pool."""
    from sglang_ext.layers.kernels.select_tokens import mark_tokens
    from sglang_ext.layers.kernels.quantized_keys import QuantizedKeyTensors

    half = torch.float16 if device == "cpu" else torch.bfloat16
    everything = slice(0, 2), slice(0, 2)
    shapes = (
        (2, 2, 3, 64, torch.float32, (1100, 63), (133, 45), everything),
        (2, 2, 4, 128, half, (300, 129), (60, 60), (slice(1, 2), slice(1, 2))),
        (2, 1, 20, 96, torch.float32, (129, 90), (100, 30), everything),
        (2, 1, 71, 80, half, (70, 33), (40, 33), everything),
        (2, 1, 1, 24, torch.float32, (65, 1), (40, 1), everything),
    )
    for bits in BITS:
        # The interpreter is slow: with 4 bits it leaves out the longest context.
        for layers, heads, group, dim, dtype, lengths, counts, part in shapes[1:] if device == "cpu" and bits == 4 else shapes:
            asked = Asked(layers, heads, group, dim, dtype, lengths, counts, (2, 8) if min(lengths) > 9 else (0, 0))
            held, there = coded(asked.buffers, bits), on(device, asked.buffers)
            by = QuantizedKeyTensors(held.codes.to(device), held.words.to(device), held.sizes.group)
            shared = asked.queries[part[1], part[0]].to(device), there.key_table, there.keys[0], there.scaling_table
            found = written(mark_tokens(*shared, asked.contexts(device, False), *part, by), max(counts)).cpu()
            assert written(mark_tokens(*shared, asked.contexts(device, True), *part, by)) is None
            pointed = torch.tensor_split(asked.targets, torch.tensor(asked.held).cumsum(0)[:-1])
            for layer in range(layers)[part[0]]:
                for request in range(len(lengths))[part[1]]:
                    count, expected = counts[request], scores(asked, held, request, layer)
                    kept = found[layer - part[0].start, request - part[1].start, :, :count].long()
                    for head in range(heads):
                        # Logits are left in float16 of pools of 16 bits.
                        tolerance = 2e-2 if dtype == half else 2e-3
                        check_chosen(kept[head], expected[head], count, tolerance, (bits, dim, group, layer, request, head))
                    slots = asked.pointers.read(there.keys[layer], pointed[request].to(device), count).cpu()
                    assert torch.equal(slots, asked.table[asked.rows[request]].long()[kept]), (bits, dim, layer, request)
            rest = torch.arange(SLOTS - sum(asked.held))
            for one, other in zip((*there.keys, *there.values), (*asked.buffers.keys, *asked.buffers.values)):
                assert torch.equal(one.cpu()[rest], other[rest])


def check_coded_keys(device):
    """Both."""
    check_code_keys(device)
    check_choose_by_codes(device)
