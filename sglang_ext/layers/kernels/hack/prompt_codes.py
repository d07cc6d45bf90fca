"""Codes of prompts' keys and values, as attention of prompts reads them (integer_prefill.py): the first of its two kernels.

They are those that copies hold (packed/pack_blocks.py), byte for byte, but lie for one layer and one forward only, and as tensor cores take
them: a code a byte, keys partition by partition, values with the tokens of a partition next to each other, in the order in which a
thread has their weights. What equation (4) of HACK (arXiv 2502.03589) adds to the product of codes is of rank two a partition. It is
computed by products of float16, too: a zero point is one, and what is not is the sum of two. Weights have the zero point 0, so that of
values one term is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
import triton.language as tl

from sglang_ext.device import to_device
from sglang_ext.layers.kernels.packed.pack_blocks import quantize_stochastic, token_noise
from sglang_ext.mem_cache.compressed.layouts import rounding
from sglang_ext.mem_cache.compressed.layouts.block_layout import Quantized
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

# Terms of a partition of channels: twice its zero point, twice the higher part of what the sum of its codes means, and the lower part.
TERMS = tl.constexpr(5)
# Rows that a product of float16 takes. The first half has the zero points of values; what sums of their codes mean, SHIFT_PART of which is
# in a higher and a lower part, and the zero points again, follow, with what int8 codes of weights lack.
ZEROS, SUM_ROW = tl.constexpr(16), tl.constexpr(8)
# By which codes of weights, that begin with 0, are above the int8 which products take.
SHIFT = tl.constexpr(128)
# Factor of a value's mean in float16, which has few digits below it and overflows above.
MEANS = tl.constexpr(16)
# Warps of a program, for a block of so many tokens: registers suffice.
WARPS = {64: 4, 128: 8}


@dataclass(frozen=True)
class PromptBatch:
    """Requests whose newest tokens are computed in one forward.

    Attributes:
        packing: gives the codes.
        table: int32 [rows, width], SGLang's token table.
        rows: of it, one for each request.
        known: tokens of each request before those that are computed.
        lengths: tokens of each request, with those.
        seeds: int32 [tokens] by row, of a request's tokens (layouts/rounding.py); None rounds to the nearest code.
        stored: by row, int64 slots of a request's first blocks that lie in the pool, which are not made of full KV.
    """

    packing: Packing
    table: torch.Tensor
    rows: Sequence[int]
    known: Sequence[int]
    lengths: Sequence[int]
    seeds: Mapping[int, torch.Tensor] | None
    stored: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """Tokens that are computed."""
        return sum(self.lengths) - sum(self.known)

    @cached_property
    def blocks(self) -> list[int]:
        """Blocks of each request that its last token attends to."""
        return [max(0, length - 1 - self.packing.sinks) // self.packing.block_tokens for length in self.lengths]

    @cached_property
    def most_blocks(self) -> int:
        """Blocks with tokens of a request that are computed, counted from one that ends where the sinks do, at most."""
        block, sinks = self.packing.block_tokens, self.packing.sinks
        return max(1 + (end - 1 - sinks) // block - (start - sinks) // block for start, end in zip(self.known, self.lengths))

    @cached_property
    def total(self) -> int:
        """Blocks of all requests."""
        return sum(self.blocks)

    @cached_property
    def numbers(self) -> torch.Tensor:
        """int32 [7, requests]: rows; tokens before; tokens in all; the first query, the first block and the first seed of each; blocks
        that are stored."""
        firsts = []
        for counts in ([end - start for start, end in zip(self.known, self.lengths)], self.blocks, self.lengths):
            firsts.extend([0, *torch.tensor(counts).cumsum(0).tolist()[:-1]])
        stored = [len(self.stored.get(row, ())) // self.packing.block_slots for row in self.rows]
        flat = [*self.rows, *self.known, *self.lengths, *firsts, *stored]
        return to_device(flat, self.table.device, torch.int32).view(7, len(self.rows))

    @cached_property
    def flat_seeds(self) -> torch.Tensor | None:
        """int32 [tokens of all requests]: their seeds, one request after another."""
        if self.seeds is None:
            return None
        return torch.cat([self.seeds[row][:length] for row, length in zip(self.rows, self.lengths)])


@dataclass(frozen=True)
class PromptCodes:
    """Codes of one layer's keys and values of whole blocks, one request's after another's; ``tokens`` in all.

    Attributes:
        keys: int8 [kv_heads, partitions of channels, tokens, partition].
        key_scales: float32 [kv_heads, partitions of channels, tokens].
        key_terms: float16 [kv_heads, tokens, padded terms]: TERMS of each partition, then zeros.
        values: int8 [kv_heads, partitions of tokens, dim, partition]. Of each 16 tokens the pairs come in the order 0, 4, 1, 5, 2, 6, 3, 7.
        value_scales: float32 [kv_heads, partitions of tokens, dim].
        value_zeros: float16 [kv_heads, partitions of tokens, ZEROS, dim]: the zero points in each row before SUM_ROW. From there on, times
            MEANS, the higher and the lower part of a mean of codes times scales, and the zero points; then zeros.
    """

    keys: torch.Tensor
    key_scales: torch.Tensor
    key_terms: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor
    value_zeros: torch.Tensor

    @classmethod
    def empty(cls, packing: Packing, kv_heads: int, blocks: int, device: torch.device) -> "PromptCodes":
        """Room for so many blocks."""
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
        """Lay out a request's first blocks, which lie in the pool, from block ``first`` of all on."""
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

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """As kernels take them."""
        return self.keys, self.key_scales, self.key_terms, self.values, self.value_scales, self.value_zeros


def padded_terms(count: int) -> int:
    """Columns of terms of ``count`` partitions, as a product of float16 takes them."""
    return max(16, triton.next_power_of_2(count * TERMS.value))


@triton.jit
def high_and_low(numbers):
    """float32 as the sum of two float16."""
    high = numbers.to(tl.float16)
    return high, (numbers - high.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=("count", "key_lane", "value_lane", "blocks"), do_not_specialize_on_alignment=("drawn",))
def quantize_prompts(
    keys, values, table, table_row, requests, count, drawn, key_lane, value_lane, codes, scales, terms, value_codes, value_scales,
    value_zeros, blocks, key_slot, key_head, value_slot, value_head, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PARTITION: tl.constexpr,
    BLOCK: tl.constexpr, SINKS: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of one KV head of a request; ``blocks`` are those of all, ``requests`` what Prompts.numbers are."""
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
    noise = tl.full((BLOCK, DIM), 0.5, tl.float32)
    if drawn is not None:
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
    # Divided by their number, they are as small as keys are.
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
    noise = tl.full((BLOCK, VALUE_DIM), 0.5, tl.float32)
    if drawn is not None:
        seeds = tl.load(drawn + tl.load(requests + 5 * count + request) + place)
        noise = token_noise(seeds, value_lane + 2 * tl.program_id(1), VALUE_DIM)
    numbers = tl.load(values + head * value_head + (slot * value_slot)[:, None] + column[None, :]).to(tl.float32)
    groups = tl.reshape(numbers, (PARTS, PARTITION, VALUE_DIM, 1))
    found, scale, zero = quantize_stochastic(groups, tl.reshape(noise, (PARTS, PARTITION, VALUE_DIM, 1)), (1 << BITS) - 1)
    sums = tl.reshape(tl.sum(found, 1), (PARTS, VALUE_DIM)).to(tl.float32)
    at = (head * (tokens // PARTITION) + (first + token) // PARTITION)[None, :] * VALUE_DIM + column[:, None]
    # In registers they come in the order in which they are stored, or a thread would store them byte by byte.
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
    """Quantize what the whole blocks of prompts hold in one layer; does not wait for the device.

    Args:
        prompts: whose.
        keys, values: the layer's buffers, [slots, kv_heads, dim].
        layer, first_head: which of the model's, by which noise is drawn.
    """
    packing = prompts.packing
    made = PromptCodes.empty(packing, keys.shape[1], prompts.total, keys.device)
    if not prompts.total:
        return made
    lanes = [rounding.lane(layer, first_head, is_value) for is_value in (False, True)]
    quantize_prompts[(max(prompts.blocks), keys.shape[1], len(prompts.rows))](
        keys, values, prompts.table, prompts.table.stride(0), prompts.numbers, len(prompts.rows), prompts.flat_seeds, *lanes, *made.parts,
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
