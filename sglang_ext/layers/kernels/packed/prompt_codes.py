"""Codes of prompts' keys and values for prefill attention (integer_prefill.py): the first kernel.

The codes equal those of compressed KV (packed/pack_blocks.py), byte for byte. They exist for one layer and one forward only. Their layout
suits tensor cores: one code per byte, keys partition by partition, values with the tokens of a partition next to each other. The tokens
are in the order in which a thread holds their weights.

The zero-point terms of equation (4) of HACK (arXiv 2502.03589) have rank two per partition. Float16 products compute them too. A zero
point is a float16. A term that is not is split into a sum of two float16. Weights have zero point 0, so that only one term with the values'
zero points remains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.device import to_device
from sglang_ext.layers.kernels.packed.pack_blocks import quantize_stochastic, token_noise
from sglang_ext.mem_cache.compressed.layouts import block_layout
from sglang_ext.mem_cache.compressed.layouts.block_layout import Quantized
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

# Terms per partition of channels: its zero point twice, the high part of its scaled sum of codes twice, and the low part of that sum.
TERMS = tl.constexpr(5)
# Rows of a float16 product for the values' zero points. The first half repeats the zero points. From SUM_ROW on follow the high and the
# low part of the values' scaled sums of codes, then the zero points again. These rows add what int8 weight codes lack (SHIFT).
ZEROS, SUM_ROW = tl.constexpr(16), tl.constexpr(8)
# Weight codes begin with 0. Products take int8, which are SHIFT less.
SHIFT = tl.constexpr(128)
# Factor of a value's mean in float16, which has few digits below and overflows above.
MEANS = tl.constexpr(16)
# Warps of a program, by tokens of a block. Registers suffice for them.
WARPS = {64: 4, 128: 8}


@dataclass(frozen=True)
class PromptBatch:
    """The requests whose newest tokens are computed in one forward.

    Attributes:
        packing: Defines the codes.
        table, rows: int32 [rows, width], SGLang's token table, and the row of each request.
        known, lengths: Tokens of each request before the computed ones, and including them.
        seeds: int32 [tokens] by row, seeds of a request's tokens (layouts/block_layout.py).
        stored: By row, int64 slots of a request's first blocks that are stored in the pool. They are not computed from full KV.
    """

    packing: Packing
    table: torch.Tensor
    rows: Sequence[int]
    known: Sequence[int]
    lengths: Sequence[int]
    seeds: Mapping[int, torch.Tensor]
    stored: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """Number of tokens that are computed."""
        return sum(self.lengths) - sum(self.known)

    @cached_property
    def blocks(self) -> list[int]:
        """Number of blocks of each request that its last token attends to."""
        return [max(0, length - 1 - self.packing.sinks) // self.packing.block_tokens for length in self.lengths]

    @cached_property
    def most_blocks(self) -> int:
        """Maximum number of a request's blocks with computed tokens. Blocks are counted from one that ends where the sinks end."""
        block, sinks = self.packing.block_tokens, self.packing.sinks
        return max(1 + (end - 1 - sinks) // block - (start - sinks) // block for start, end in zip(self.known, self.lengths))

    @cached_property
    def total(self) -> int:
        """Number of blocks of all requests."""
        return sum(self.blocks)

    @cached_property
    def numbers(self) -> torch.Tensor:
        """int32 [7, requests]: rows; known tokens; lengths; first query, first block and first seed of each request; stored blocks."""
        firsts = []
        for counts in ([end - start for start, end in zip(self.known, self.lengths)], self.blocks, self.lengths):
            firsts.extend([0, *torch.tensor(counts).cumsum(0).tolist()[:-1]])
        stored = [len(self.stored.get(row, ())) // self.packing.block_slots for row in self.rows]
        flat = [*self.rows, *self.known, *self.lengths, *firsts, *stored]
        return to_device(flat, self.table.device, torch.int32).view(7, len(self.rows))

    @cached_property
    def flat_seeds(self) -> torch.Tensor:
        """Seeds of all requests' tokens, int32 [tokens], one request after another."""
        return torch.cat([self.seeds[row][:length] for row, length in zip(self.rows, self.lengths)])


class PromptCodes(NamedTuple):
    """Codes of one layer's keys and values of whole blocks, one request after another. ``tokens`` is the number of all tokens.

    Attributes:
        keys: int8 [kv_heads, partitions of channels, tokens, partition]; ``key_scales``: float32, without the last dimension.
        key_terms: float16 [kv_heads, tokens, padded terms]: TERMS of each partition, then zeros.
        values: int8 [kv_heads, partitions of tokens, dim, partition]. The pairs of each 16 tokens are in the order 0, 4, 1, 5, 2, 6, 3, 7.
        value_scales: float32 [kv_heads, partitions of tokens, dim].
        value_zeros: float16 [kv_heads, partitions of tokens, ZEROS, dim]. Rows before SUM_ROW: the zero points. Then, times MEANS: the high
            part and the low part of the mean of codes times scales, and the zero points. The remaining rows are 0.
    """

    keys: torch.Tensor
    key_scales: torch.Tensor
    key_terms: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor
    value_zeros: torch.Tensor

    @classmethod
    def empty(cls, packing: Packing, kv_heads: int, blocks: int, device: torch.device) -> "PromptCodes":
        """Uninitialized buffers for ``blocks`` blocks."""
        partition, tokens, count = packing.keys.grid.channels, blocks * packing.block_tokens, packing.keys.groups[1]
        parts = tokens // partition
        return cls(
            torch.empty(kv_heads, count, tokens, partition, dtype=torch.int8, device=device),
            torch.empty(kv_heads, count, tokens, device=device),
            torch.empty(kv_heads, tokens, padded_terms(count), dtype=torch.float16, device=device),
            torch.empty(kv_heads, parts, packing.values.dim, partition, dtype=torch.int8, device=device),
            torch.empty(kv_heads, parts, packing.values.dim, device=device),
            torch.empty(kv_heads, parts, ZEROS.value, packing.values.dim, dtype=torch.float16, device=device),
        )

    def read(self, packing: Packing, first: int, keys: Quantized, values: Quantized) -> None:
        """Copy the codes of a request's first blocks, which are stored in the pool, to the blocks from ``first`` on."""
        heads, partition, begin = len(keys.codes), packing.keys.grid.channels, first * packing.block_tokens
        tokens = slice(begin, begin + keys.codes.shape[1] * packing.block_tokens)
        parts = slice(tokens.start // partition, tokens.stop // partition)
        self.keys[:, :, tokens] = keys.codes.reshape(heads, -1, self.keys.shape[1], partition).transpose(1, 2).to(torch.int8)
        scale, zero, sums = (each.flatten(1, 2).float() for each in (keys.scale, keys.zero, keys.sums))
        self.key_scales[:, :, tokens] = scale.mT
        mean = scale * sums * (1.0 / partition)
        high = mean.half()
        terms = torch.stack([zero.half(), zero.half(), high, high, (mean - high.float()).half()], -1).flatten(2)
        self.key_terms[:, tokens] = torch.nn.functional.pad(terms, (0, self.key_terms.shape[2] - terms.shape[2]))
        ordered = values.codes.reshape(heads, -1, partition // 16, 2, 4, 2, self.values.shape[2]).transpose(3, 4)
        self.values[:, parts] = ordered.reshape(heads, -1, partition, self.values.shape[2]).mT.to(torch.int8)
        scale, zero, sums = (each.flatten(1, 2).float() for each in (values.scale, values.zero, values.sums))
        self.value_scales[:, parts] = scale
        mean = scale * sums * (MEANS.value / partition)
        high, zero = mean.half(), zero.half()
        rows = [*[zero] * SUM_ROW.value, high, (mean - high.float()).half(), zero * MEANS.value]
        rows += [torch.zeros_like(zero)] * (ZEROS.value - len(rows))
        self.value_zeros[:, parts] = torch.stack(rows, 2)

    @staticmethod
    def token_bytes(dim: int, value_dim: int, partition: int) -> int:
        """Bytes of a token's key and value of one KV head."""
        count = dim // partition
        return dim + 4 * count + 2 * padded_terms(count) + value_dim + (4 + 2 * ZEROS.value) * value_dim // partition


def padded_terms(count: int) -> int:
    """Columns of the terms of ``count`` partitions, padded for a float16 product."""
    return max(16, triton.next_power_of_2(count * TERMS.value))


@triton.jit
def high_and_low(numbers):
    """Split float32 into a sum of two float16."""
    high = numbers.to(tl.float16)
    return high, (numbers - high.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=("count", "key_lane", "value_lane", "blocks"), do_not_specialize_on_alignment=("drawn",))
def quantize_prompts(
    keys, values, table, table_row, requests, count, drawn, key_lane, value_lane, codes, scales, terms, value_codes, value_scales,
    value_zeros, blocks, key_slot, key_head, value_slot, value_head, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PARTITION: tl.constexpr,
    BLOCK: tl.constexpr, SINKS: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize a block of one KV head of a request. ``blocks`` counts all requests' blocks. ``requests`` is ``PromptBatch.numbers``."""
    tokens = blocks * BLOCK
    block, head, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    COUNT: tl.constexpr = DIM // PARTITION
    PARTS: tl.constexpr = BLOCK // PARTITION
    length = tl.load(requests + 2 * count + request)
    if block >= tl.maximum(length - 1 - SINKS, 0) // BLOCK:
        return
    if block < tl.load(requests + 6 * count + request):
        return
    token, channel, part = tl.arange(0, BLOCK), tl.arange(0, DIM), tl.arange(0, COUNT)
    place = SINKS + block * BLOCK + token
    row = tl.load(requests + request).to(tl.int64)
    slot = tl.load(table + row * table_row + place).to(tl.int64)
    first = (tl.load(requests + 4 * count + request) + block) * BLOCK
    seeds = tl.load(drawn + tl.load(requests + 5 * count + request) + place)
    noise = token_noise(seeds, key_lane + 2 * tl.program_id(1), DIM)
    numbers = tl.load(keys + head * key_head + (slot * key_slot)[:, None] + channel[None, :]).to(tl.float32)
    groups = tl.reshape(numbers, (BLOCK, 1, COUNT, PARTITION))
    found, scale, zero = quantize_stochastic(groups, tl.reshape(noise, (BLOCK, 1, COUNT, PARTITION)), (1 << BITS) - 1)
    at = (head * COUNT + channel // PARTITION)[None, :] * tokens + (first + token)[:, None]
    tl.store(codes + at * PARTITION + (channel % PARTITION)[None, :], tl.reshape(found, (BLOCK, DIM)).to(tl.int8))
    scale, zero = tl.reshape(scale, (BLOCK, COUNT)), tl.reshape(zero, (BLOCK, COUNT))
    sums = tl.reshape(tl.sum(found, 3), (BLOCK, COUNT))
    tl.store(scales + (head * COUNT + part)[None, :] * tokens + (first + token)[:, None], scale)
    # Divided by their number, the sums are as small as keys.
    high, low = high_and_low(scale * sums.to(tl.float32) * (1.0 / PARTITION))
    at = terms + (head * tokens + first + token)[:, None] * COLUMNS + part[None, :] * TERMS
    zero = zero.to(tl.float16)
    tl.store(at, zero)
    tl.store(at + 1, zero)
    tl.store(at + 2, high)
    tl.store(at + 3, high)
    tl.store(at + 4, low)
    rest = tl.arange(0, COLUMNS)
    at = terms + (head * tokens + first + token)[:, None] * COLUMNS + rest[None, :]
    tl.store(at, tl.zeros((BLOCK, COLUMNS), tl.float16), mask=(rest >= COUNT * TERMS)[None, :])
    column, step = tl.arange(0, VALUE_DIM), tl.arange(0, PARTS)
    seeds = tl.load(drawn + tl.load(requests + 5 * count + request) + place)
    noise = token_noise(seeds, value_lane + 2 * tl.program_id(1), VALUE_DIM)
    numbers = tl.load(values + head * value_head + (slot * value_slot)[:, None] + column[None, :]).to(tl.float32)
    groups = tl.reshape(numbers, (PARTS, PARTITION, VALUE_DIM, 1))
    found, scale, zero = quantize_stochastic(groups, tl.reshape(noise, (PARTS, PARTITION, VALUE_DIM, 1)), (1 << BITS) - 1)
    sums = tl.reshape(tl.sum(found, 1), (PARTS, VALUE_DIM)).to(tl.float32)
    at = (head * (tokens // PARTITION) + (first + token) // PARTITION)[None, :] * VALUE_DIM + column[:, None]
    # Permute in registers to the order of storage. Otherwise a thread would store byte by byte.
    paired = tl.permute(tl.reshape(found.to(tl.int8), (BLOCK // 16, 2, 4, 2, VALUE_DIM)), (4, 0, 2, 1, 3))
    tl.store(value_codes + at * PARTITION + (token % PARTITION)[None, :], tl.reshape(paired, (VALUE_DIM, BLOCK)))
    scale, zero = tl.reshape(scale, (PARTS, VALUE_DIM)), tl.reshape(zero, (PARTS, VALUE_DIM))
    part = head * (tokens // PARTITION) + first // PARTITION + step
    tl.store(value_scales + part[:, None] * VALUE_DIM + column[None, :], scale)
    zero = zero.to(tl.float16)
    high, low = high_and_low(scale * sums * (MEANS / PARTITION))
    at = value_zeros + part[:, None] * ZEROS * VALUE_DIM + column[None, :]
    for row in tl.static_range(SUM_ROW):
        tl.store(at + row * VALUE_DIM, zero)
    tl.store(at + SUM_ROW * VALUE_DIM, high)
    tl.store(at + (SUM_ROW + 1) * VALUE_DIM, low)
    tl.store(at + (SUM_ROW + 2) * VALUE_DIM, zero * MEANS)
    for row in tl.static_range(SUM_ROW + 3, ZEROS):
        tl.store(at + row * VALUE_DIM, tl.zeros_like(zero))


def prompt_codes(prompts: PromptBatch, keys: torch.Tensor, values: torch.Tensor, layer: int, first_head: int) -> PromptCodes:
    """Quantize the whole blocks of prompts in one layer, with buffers [slots, kv_heads, dim]. Does not wait for the device.

    ``layer`` and ``first_head``, indices in the model, determine the rounding noise.
    """
    packing = prompts.packing
    made = PromptCodes.empty(packing, keys.shape[1], prompts.total, keys.device)
    if not prompts.total:
        return made
    lanes = [block_layout.lane(layer, first_head, is_value) for is_value in (False, True)]
    quantize_prompts[(max(prompts.blocks), keys.shape[1], len(prompts.rows))](
        keys, values, prompts.table, prompts.table.stride(0), prompts.numbers, len(prompts.rows), prompts.flat_seeds, *lanes, *made,
        prompts.total, *keys.stride()[:2], *values.stride()[:2], DIM=packing.keys.dim, VALUE_DIM=packing.values.dim,
        PARTITION=packing.keys.grid.channels, BLOCK=packing.block_tokens, SINKS=packing.sinks, BITS=packing.keys.bits,
        COLUMNS=made.key_terms.shape[2], num_warps=WARPS[packing.block_tokens], enable_fp_fusion=False,
    )  # fmt: skip
    first = 0
    for row, blocks in zip(prompts.rows, prompts.blocks):
        if len(slots := prompts.stored.get(row, ())):
            made.read(packing, first, packing.read(keys, packing.keys, slots), packing.read(values, packing.values, slots))
        first += blocks
    return made
