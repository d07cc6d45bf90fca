"""Equation (4) gives what dequantized operands give, and costs no more precision than float32 has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import attention

from sglang_ext.layers.attention.packed import packed_attention, partitions_of_keys, partitions_of_values
from sglang_ext.layers.kernels.packed.integer_attention import Partitioned, quantize_partitions, product
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.quantizer import whole
from sglang_ext.mem_cache.compressors.integer_quantizers import Hack

PARTITIONS = (32, 64, 128)
# Sizes of numbers, and what is added to all of them.
SIZES = st.sampled_from([0.0, 1e-40, 1e-12, 1e-3, 1.0, 300.0, 6e4])
OFFSETS = st.sampled_from([0.0, 1e-12, -0.2, 5.0, 1e3, -6e4])


def matrix(rows, length, size, offset, seed):
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) * size + offset


def in_bits(numbers, partition, bits, seed=None):
    """Rows as HACK's values are: partitions along their length, cut ones filled with zeros that belong to nothing."""
    rows, length = numbers.shape
    scale, zero, codes = [], [], []
    for part in numbers.split(partition, -1):
        drawn = None if seed is None else torch.rand(1, 1, part.shape[1], rows, generator=torch.Generator().manual_seed(seed))
        packs = Hack(bits, partition=partition)
        block = packs.quantize(part.t()[None, None], packs.value_grid(rows)._replace(tokens=part.shape[1]), drawn)
        scale.append(block.scale[0, 0, 0])
        zero.append(block.zero[0, 0, 0])
        codes.append(block.codes[0, 0].t())
    sums = torch.stack([part.float().sum(-1) for part in codes], -1)
    return Partitioned(torch.cat(codes, -1).to(torch.int8), torch.stack(scale, -1), torch.stack(zero, -1), sums)


def size_of_terms(left, right, partition):
    """What equation (4) adds up, without signs: float64 [rows, rows]."""

    def sizes(part):
        length = part.codes.shape[-1]
        scale, zero = (number.double().abs().repeat_interleave(partition, -1)[..., :length] for number in (part.scale, part.zero))
        return part.codes.double().abs() * scale + zero

    return sizes(left) @ sizes(right).mT


def dequantized(rows, partition):
    """The rows that codes stand for: float32 [..., rows, length]."""
    scale, zero = (part.repeat_interleave(partition, -1)[..., : rows.codes.shape[-1]] for part in (rows.scale, rows.zero))
    return rows.codes.float() * scale + zero


def worst(left, right, partition):
    """The greatest error against dequantize-then-multiply, in shares of the absolute terms."""
    expected = dequantized(left, partition).double() @ dequantized(right, partition).double().mT
    return float(((product(left, right, partition) - expected).abs() / size_of_terms(left, right, partition).clamp(min=1e-30)).max())


@given(
    partition=st.sampled_from(PARTITIONS), length=st.integers(1, 300), bits=st.sampled_from([2, 4]), sizes=st.tuples(SIZES, SIZES),
    offsets=st.tuples(OFFSETS, OFFSETS), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_product_is_that_of_dequantized_operands(partition, length, bits, sizes, offsets, seed):
    left = quantize_partitions(matrix(5, length, sizes[0], offsets[0], seed), partition)
    right = in_bits(matrix(3, length, sizes[1], offsets[1], seed + 100), partition, bits, seed)
    assert left.scale.shape == (5, -(-length // partition)) and right.sums.shape == (3, -(-length // partition))
    assert worst(left, right, partition) < 1e-5


@given(partition=st.sampled_from(PARTITIONS), length=st.integers(1, 300), size=SIZES, offset=OFFSETS, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_eight_bits_are_within_half_a_step(partition, length, size, offset, seed):
    rows = matrix(4, length, size, offset, seed)
    found = quantize_partitions(rows, partition)
    bound = found.scale.repeat_interleave(partition, -1)[:, :length] * 0.5
    # Numbers themselves have 24 bits.
    assert ((dequantized(found, partition) - rows).abs() <= bound * (1 + 1e-4) + rows.abs() * 1e-6 + 1e-27).all()
    for index, part in enumerate(found.codes.split(partition, -1)):
        assert torch.equal(part.float().sum(-1), found.sums[:, index])


@given(partition=st.sampled_from(PARTITIONS), length=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_codes_of_weights_may_begin_at_zero(partition, length, seed):
    rows = matrix(4, length, 3.0, 0.0, seed).softmax(-1)
    found = quantize_partitions(rows, partition, from_zero=True)
    assert torch.allclose(found.zero, 128 * found.scale)
    scale = found.scale.repeat_interleave(partition, -1)[:, :length]
    assert ((dequantized(found, partition) - rows).abs() <= scale * 0.5 * (1 + 1e-4)).all()
    # The greatest weight of each partition has the last code.
    for codes, weights in zip(found.codes.split(partition, -1), rows.split(partition, -1)):
        assert (codes.gather(-1, weights.argmax(-1, keepdim=True)) == 127).all()


def test_a_constant_partition_is_exact():
    left = quantize_partitions(torch.full((2, 64), 3.25), 64)
    right = in_bits(torch.full((2, 64), -0.5), 64, 2)
    assert torch.allclose(product(left, right, 64), torch.full((2, 2), 64 * 3.25 * -0.5), rtol=1e-6)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_greatest_codes_of_the_longest_partition_are_summed_up_exactly(partition):
    codes = torch.full((1, partition), -128, dtype=torch.int8)
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    most = Partitioned(codes, one, none, torch.full((1, 1), -128.0 * partition))
    assert product(most, most, partition).item() == partition * 128**2


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_blocks_of_keys_and_values_are_operands(bits, partition):
    packs, noise = Hack(bits, partition=partition), torch.Generator().manual_seed(bits)
    numbers = torch.randn(2, 3, packs.block, 128, generator=noise)
    rows = torch.randn(2, 5, 128, generator=noise)
    keys = packs.quantize(numbers, packs.key_grid(128))
    found = product(quantize_partitions(rows, partition), partitions_of_keys(keys), partition)
    expected = dequantized(quantize_partitions(rows, partition), partition) @ whole(keys, packs.key_grid(128), None).flatten(1, 2).mT
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)
    values, weights = packs.quantize(numbers, packs.value_grid(128)), torch.rand(2, 5, 3 * packs.block, generator=noise)
    found = product(quantize_partitions(weights, partition), partitions_of_values(values), partition)
    expected = dequantized(quantize_partitions(weights, partition), partition) @ whole(values, packs.value_grid(128), None).flatten(1, 2)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("bits", [4, 2])
def test_queries_and_weights_in_eight_bits_cost_attention_less_than_a_hundredth(bits, partition):
    noise = torch.Generator().manual_seed(partition)
    buffers = KVBuffers((0,), (1.0,), *((torch.randn(3000, 2, 128, generator=noise),) for _ in "kv"))
    packing = Packing.for_pool(Hack(bits, partition=partition), buffers, 1)
    slots = torch.arange(2048, 2048 + packing.held_slots(1920))
    packing.write(buffers, torch.arange(1920).expand(1, 2, -1), torch.arange(1920), slots)
    row, queries = torch.cat([slots, torch.arange(1920, 2000)]), torch.randn(1, 8, 128, generator=noise)
    found = packed_attention(packing, queries, buffers.keys[0], buffers.values[0], row, len(slots), 128**-0.5)
    kinds = (buffers.keys[0], packing.keys), (buffers.values[0], packing.values)
    far = (whole(packing.read(kind, layout, slots), layout.grid, None).flatten(1, 2) for kind, layout in kinds)
    keys, values = (torch.cat([part, kind[1920:2000].transpose(0, 1)], 1).double() for part, (kind, _) in zip(far, kinds))
    expected = attention(queries, keys, values, 128**-0.5)
    worst = float((found - expected).abs().max() / expected.abs().max())
    assert worst < (1.5e-2 if (bits, partition) == (2, 128) else 1e-2)
