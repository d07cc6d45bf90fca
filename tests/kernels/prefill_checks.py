"""Checks of attention of prompts on their own codes, against what PyTorch gives for one prompt after another."""

import dataclasses

import torch
from hopper_emulator import Emulated
from packed_helpers import packed_pool

from sglang_ext_bench.attention.arms import launch_dequantize
from sglang_ext.layers.kernels.packed import integer_prefill, packed_decode
from sglang_ext.layers.kernels.packed.prompt_codes import PromptBatch, prompt_codes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.catalogue import quantizer

LAYER, FIRST_HEAD = 3, 2
# Of two partitions that attend and one that loads: which go first.
ORDERS = ((2, 0, 1), (0, 1, 2), (1, 2, 0))
# Bits, partition, channels of a head, KV heads, queries of each, page size, dtype, and tokens before and in all of each prompt.
CASES = (
    (4, 64, 128, 1, 4, 1, torch.float32, ((0, 150), (100, 201), (3, 4))),
    (2, 32, 64, 2, 3, 16, torch.float32, ((0, 90), (70, 140))),
    (4, 128, 128, 1, 5, 1, torch.float16, ((140, 280),)),
    (4, 64, 64, 1, 1, 128, torch.float16, ((0, 70), (120, 260))),
    (4, 64, 128, 2, 4, 1, torch.bfloat16, ((0, 500), (37, 333))),
)  # fmt: skip


class Batch:
    """Prompts in scattered slots of one layer's pool."""

    def __init__(self, bits, partition, dim, heads, group, page, dtype, spans, device):
        noise = torch.Generator().manual_seed(bits + partition + dim)
        spread = 1 + 3 * torch.rand(dim, generator=noise)
        total, longest = sum(end for _, end in spans), max(end for _, end in spans)
        # Of as many blocks as there are, stored ones lie after all tokens.
        pools = [(torch.randn(2 * total + 9, heads, dim, generator=noise) * spread).to(dtype).to(device) for _ in "kv"]
        self.keys, self.values = pools
        self.queries = torch.randn(sum(b - a for a, b in spans), heads * group, dim, generator=noise).to(dtype).to(device)
        self.packing = Packing.for_pool(quantizer("hack", bits, partition), KVBuffers((LAYER,), (0.1,), (pools[0],), (pools[1],)), page)
        self.rows, self.spans = [2 * i + 1 for i in range(len(spans))], spans
        table, order = torch.zeros(2 * len(spans) + 1, longest, dtype=torch.int32), torch.randperm(total, generator=noise).int() + 1
        for row, slots in zip(self.rows, order.split([end for _, end in spans])):
            table[row, : len(slots)] = slots
        self.table = table.to(device)
        self.seeds = {row: token_seeds(list(range(row, end + row)), end, self.table.device) for row, (_, end) in zip(self.rows, spans)}
        self.prompts = PromptBatch(self.packing, self.table, self.rows, *map(list, zip(*spans)), self.seeds)

    def store(self):
        """Pack of each prompt the whole blocks before its newest tokens, and let nothing else be left of them."""
        first, stored, packing = int(self.table.max()) + 1, {}, self.packing
        buffers = KVBuffers((LAYER,), (0.1,), (self.keys,), (self.values,), first_head=FIRST_HEAD)
        for row, (known, end) in zip(self.rows, self.spans):
            covered = packing.sinks + max(0, known - packing.sinks) // packing.block_tokens * packing.block_tokens
            stored[row] = torch.arange(first, first + packing.packed_slots(covered - packing.sinks), device=self.table.device)
            first += len(stored[row])
            kept, slots = torch.arange(packing.sinks, covered, device=self.table.device), self.table[row, :covered].long()
            if len(kept):
                packing.write(buffers, kept.expand(1, self.keys.shape[1], -1), slots, stored[row], self.seeds[row][:covered])
            for pool in (self.keys, self.values):
                pool[slots[packing.sinks :]] = torch.nan
            self.table[row, packing.sinks : covered] = 0
        self.prompts = dataclasses.replace(self.prompts, stored=stored)
        return sum(map(len, stored.values()))

    def on_pytorch(self):
        """The same attention without kernels; it loads SGLang, which takes longer than most checks do."""
        from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill

        return QuantizedPrefill(self.packing, FIRST_HEAD)

    def expected(self):
        """What PyTorch gives, in float32 of the pool's numbers: [tokens, heads, dim]."""
        prefill, found, start = self.on_pytorch(), [], 0
        with prefill.computing_prompts(self.seeds):
            for row, (known, end) in zip(self.rows, self.spans):
                mine, slots = self.queries[start : start + end - known], self.table[row, :end].long()
                found.append(prefill.attend(LAYER, row, mine.float(), self.keys.float(), self.values.float(), slots, 0.1))
                start += end - known
        return torch.cat(found)

    def codes(self):
        """The first kernel's, of one prompt after another, and what PyTorch makes of the same tokens: pairs of tensors."""
        made = prompt_codes(self.prompts, self.keys, self.values, LAYER, FIRST_HEAD)
        prefill, first = self.on_pytorch(), 0
        partition, block = self.packing.keys.grid.channels, self.packing.block_tokens
        for row, blocks in zip(self.rows, self.prompts.blocks):
            tokens, at = blocks * block, first * block
            slots = self.table[row, self.packing.sinks : self.packing.sinks + tokens].long()
            with prefill.computing_prompts(self.seeds):
                keys, values = (prefill._codes(LAYER, row, pool, slots, bool(kind)) for kind, pool in enumerate((self.keys, self.values)))
            yield made.keys[:, :, at : at + tokens].transpose(1, 2).flatten(2), keys.codes
            yield made.key_scales[:, :, at : at + tokens].mT, keys.scale
            parts = slice(at // partition, (at + tokens) // partition)
            # In the tensor cores' order of weights, pairs of tokens of each eight.
            ordered = made.values[:, parts].unflatten(-1, (-1, 4, 2, 2)).transpose(-2, -3).flatten(-4)
            yield ordered.transpose(1, 2).flatten(2), values.codes
            yield made.value_scales[:, parts].mT, values.scale
            yield made.value_zeros[:, parts, 0].float().mT, values.zero
            zeros, means = made.value_zeros[:, parts].float().split((8, 8), 2)
            assert torch.equal(zeros, zeros[:, :, :1].expand(-1, -1, 8, -1))
            assert torch.equal(means[:, :, 2:], torch.nn.functional.pad(16 * zeros[:, :, :1], (0, 0, 0, 5)))
            of_sums = values.scale * values.sums.float() * 16 / partition
            torch.testing.assert_close(means[:, :, :2].sum(2).mT, of_sums, rtol=1e-6, atol=1e-7)
            first += blocks


def check_prefill(device):
    """All bits, partitions, groups and dtypes; prompts of several lengths, whose beginnings are there; codes are PyTorch's."""
    for bits, partition, dim, heads, group, page, dtype, spans in CASES:
        if device == "cpu" and dtype == torch.bfloat16:
            # The interpreter has no products of bfloat16.
            continue
        batch = Batch(bits, partition, dim, heads, group, page, dtype, spans, device)
        for found, expected in batch.codes():
            assert torch.equal(found, expected), (bits, partition, dim)
        given = batch.queries, batch.keys, batch.values
        codes = prompt_codes(batch.prompts, *given[1:], LAYER, FIRST_HEAD)
        found = integer_prefill.attend(batch.prompts, codes, *given, 0.1, kernel="tiles")
        expected = batch.expected()
        assert found.dtype == dtype
        worst = float((found.float() - expected).abs().max() / expected.abs().max())
        # A weight between two codes may get the other one.
        tolerance = 5e-3 if dtype != torch.bfloat16 else 3e-2
        assert worst < tolerance, (bits, partition, dim, group, worst)
        if batch.store():
            read = prompt_codes(batch.prompts, *given[1:], LAYER, FIRST_HEAD)
            assert all(torch.equal(part, same) for part, same in zip(read, codes)), "codes in the pool are those of full KV"


# The same, where Hopper's kernel takes them: it leaves half of a last program's rows, and rows of several requests, to nobody.
SPECIALIZED = (
    (4, 64, 128, 2, 4, 1, torch.float16, ((0, 330), (37, 260), (3, 4))),
    (4, 128, 128, 1, 3, 1, torch.float16, ((140, 420),)),
    (2, 64, 64, 1, 2, 1, torch.float16, ((0, 70), (130, 270))),
    (4, 64, 128, 1, 8, 1, torch.bfloat16, ((0, 1200), (37, 333))),
    (4, 128, 128, 2, 4, 1, torch.bfloat16, ((0, 1500), (37, 333))),
)  # fmt: skip


def check_specialized_prefill(device):
    """Kernels with specialized warps give what PyTorch does, whichever of their warps go first."""
    launched = integer_prefill.prefill_codes
    for number, (bits, partition, dim, heads, group, page, dtype, spans) in enumerate(SPECIALIZED):
        if device == "cpu":
            if dtype == torch.bfloat16:
                # The interpreter has no products of bfloat16.
                continue
            launched = integer_prefill.prefill_codes = Emulated("prefill_codes", ORDERS[number % len(ORDERS)])
            packed_decode.capability = lambda keys: (9, 0)
            # So few that stages are filled again.
            integer_prefill.STAGES = {64: 2, 128: 2}
        batch = Batch(bits, partition, dim, heads, group, page, dtype, spans, device)
        given = batch.queries, batch.keys, batch.values
        assert integer_prefill.is_supported(batch.prompts, *given[:2])
        codes = prompt_codes(batch.prompts, *given[1:], LAYER, FIRST_HEAD)
        found = integer_prefill.attend(batch.prompts, codes, *given, 0.1, kernel="specialized")
        expected = batch.expected()
        worst = float((found.float() - expected).abs().max() / expected.abs().max())
        assert worst < (5e-3 if dtype != torch.bfloat16 else 3e-2), (bits, partition, dim, group, worst)
        assert device != "cpu" or launched.launches == 1, "it was launched"


def check_whole_blocks(device):
    """What bench attention compares with makes blocks whole."""
    for name, bits, dim in (("hack", 4, 128), ("kivi", 2, 64), ("kivi", 4, 128)):
        pool = packed_pool(name, bits, 3, 0, dim=dim, dtype=torch.float16)
        slots = pool.row[: pool.packed].to(device)
        for buffer, layout in ((pool.buffers.keys[0], pool.packing.keys), (pool.buffers.values[0], pool.packing.values)):
            expected = pool.packing.dequantize(pool.packing.read(buffer, layout, slots.cpu()), layout, None).transpose(0, 1)
            out = torch.empty(expected.shape, dtype=torch.float16, device=device)
            launch_dequantize(pool.packing, buffer.to(device), layout, slots, out)
            torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-3, atol=1e-6)
