"""Prompts attend to what decoding would find at each of their places, however they are cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import attention

from sglang_ext.layers.attention import packed
from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill
from sglang_ext.layers.kernels.packed.integer_attention import quantize_partitions
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.integer_quantizers import Hack

DIM, HEADS, GROUP, TOKENS, LAYER, ROW = 64, 2, 3, 210, 7, 5
SCALING = DIM**-0.5
# A weight between two codes may get the other one where products are added up in another order; codes cost some 0.05.
NEAR = {"rtol": 0.0, "atol": 1e-3}


class Prompt:
    """Of ``TOKENS`` tokens, in scattered slots of a pool that has room for its copy."""

    def __init__(self, bits: int = 4, partition: int = 32, first_head: int = 0, heads: slice = slice(None)) -> None:
        drawn = torch.Generator().manual_seed(bits + partition)
        pools = (torch.randn(2 * TOKENS + 64, HEADS, DIM, generator=drawn)[:, heads].contiguous() for _ in "kv")
        self.buffers = KVBuffers((LAYER,), (SCALING,), *((pool,) for pool in pools), first_head=first_head)
        self.keys, self.values = self.buffers.keys[0], self.buffers.values[0]
        self.slots = torch.randperm(TOKENS, generator=drawn) + 1
        self.queries = torch.randn(TOKENS, HEADS, GROUP, DIM, generator=drawn)[:, heads].flatten(1, 2)
        self.packing = Packing.for_pool(Hack(bits, partition=partition), self.buffers, 1)
        self.seeds = token_seeds(list(range(TOKENS)), TOKENS, self.slots.device)
        self.prefill = QuantizedPrefill(self.packing, first_head)

    def attend(self, begin: int = 0, end: int = TOKENS) -> torch.Tensor:
        """What its tokens [begin, end) give."""
        with self.prefill.computing_prompts({ROW: self.seeds[:end]}):
            assert ROW in self.prefill.rows and ROW + 1 not in self.prefill.rows
            return self.prefill.attend(LAYER, ROW, self.queries[begin:end], self.keys, self.values, self.slots[:end], SCALING)

    def decode(self, place: int) -> torch.Tensor:
        """What the token at ``place`` gives after a copy of the whole blocks before its own."""
        sinks, block = self.packing.sinks, self.packing.block_tokens
        whole = (place - sinks) // block * block
        copied = torch.arange(TOKENS + 1, TOKENS + 1 + self.packing.held_slots(whole))
        kept = torch.arange(sinks, sinks + whole).expand(1, self.keys.shape[1], -1)
        self.packing.write(self.buffers, kept, self.slots[: sinks + whole], copied, self.seeds[: sinks + whole])
        row = torch.cat([copied, self.slots[:sinks], self.slots[sinks + whole : place + 1]])
        return packed_attention(self.packing, self.queries[place : place + 1], self.keys, self.values, row, len(copied), SCALING)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("partition", [32, 64])
def test_a_token_of_the_prompt_attends_to_what_decoding_finds_at_its_place(
    bits: int, partition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(bits, partition)
    whole = prompt.attend()
    assert (prompt.packing.sinks, prompt.packing.block_tokens) == (4, 64)
    places = (68, 69, 131, 132, TOKENS - 1)
    for place in places:
        assert torch.allclose(whole[place : place + 1], prompt.decode(place), rtol=0.0, atol=2e-2), place
    # That far apart are roundings of weights alone, whose codes begin at a partition's least weight in decoding, and at 0 in prompts.
    monkeypatch.setattr(packed, "quantize_partitions", lambda rows, size: quantize_partitions(rows, size, from_zero=bool((rows >= 0).all())))
    for place in places:
        assert torch.allclose(whole[place : place + 1], prompt.decode(place), **NEAR), place


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_codes_that_lie_in_the_pool_are_read_there(bits: int, blocks: int) -> None:
    prompt = Prompt(bits)
    sinks, end = prompt.packing.sinks, prompt.packing.sinks + blocks * prompt.packing.block_tokens
    expected = prompt.attend(end)
    stored = torch.arange(TOKENS + 1, TOKENS + 1 + prompt.packing.packed_slots(end - sinks))
    kept = torch.arange(sinks, end).expand(1, HEADS, -1)
    prompt.packing.write(prompt.buffers, kept, prompt.slots[:end], stored, prompt.seeds[:end])
    # Full KV of these is gone, and their row leads to nobody's.
    prompt.keys[0] = prompt.values[0] = torch.nan
    prompt.slots[sinks:end] = 0
    with prompt.prefill.computing_prompts({ROW: prompt.seeds}, {ROW: stored}):
        found = prompt.prefill.attend(LAYER, ROW, prompt.queries[end:], prompt.keys, prompt.values, prompt.slots, SCALING)
    assert torch.equal(found, expected)


@given(ends=st.lists(st.integers(1, TOKENS), unique=True, max_size=5).map(sorted))
@settings(max_examples=30, deadline=None)
def test_chunks_change_nothing(ends: list[int]) -> None:
    prompt = Prompt()
    ends = [*ends, TOKENS] if TOKENS not in ends else ends
    parts = [prompt.attend(begin, end) for begin, end in zip([0, *ends], ends)]
    assert torch.allclose(torch.cat(parts), prompt.attend(), **NEAR)


@pytest.mark.parametrize("end", [1, 4, 5, 68])
def test_the_first_block_and_the_sinks_are_exact(end: int) -> None:
    prompt = Prompt()
    keys, values = (kind[prompt.slots[:end]].transpose(0, 1).double() for kind in (prompt.keys, prompt.values))
    expected = attention(prompt.queries[end - 1 : end], keys, values, SCALING)
    assert torch.allclose(prompt.attend(0, end)[-1:].double(), expected.view(1, -1, DIM), atol=1e-5)


def test_codes_change_little_and_fewer_bits_change_more() -> None:
    worst = []
    for bits in (4, 2):
        prompt = Prompt(bits)
        keys, values = (kind[prompt.slots].transpose(0, 1).double() for kind in (prompt.keys, prompt.values))
        exact = attention(prompt.queries[-1:], keys, values, SCALING).view(1, -1, DIM)
        worst.append(float((prompt.attend()[-1:] - exact).norm() / exact.norm()))
    assert 1e-3 < worst[0] < 0.2 and 2 * worst[0] < worst[1]


def test_a_rank_with_some_of_the_heads_draws_their_codes() -> None:
    whole = Prompt().attend().unflatten(1, (HEADS, GROUP))
    for head in range(HEADS):
        part = Prompt(first_head=head, heads=slice(head, head + 1)).attend()
        assert torch.allclose(part, whole[:, head], **NEAR)
