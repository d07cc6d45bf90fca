"""A prompt of which nothing is known, by the ways to attend that are compared (arms.py)."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill
from sglang_ext.layers.kernels.hack.integer_prefill import attend, integer_prefill
from sglang_ext.layers.kernels.hack.prompt_codes import (
    PromptBatch,
    PromptCodes,
    prompt_codes,
)
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext_bench.attention.arms import FULL, HACK, WORKSPACE_BYTES, Arm, sdpa
from sglang_ext_bench.attention.setting import Full, exactly

# The newest tokens, whose outputs are compared.
COMPARED = 16


def prefills(full: Full, bits: int, partition: int) -> Iterator[Arm]:
    """Of the only request of ``full``. The first arm is what others are compared with."""
    shape, tokens, pools = full.shape, full.slots.shape[1], (full.keys, full.values)
    queries, size = shape.queries(tokens), tokens * shape.token_bytes(full.keys.element_size())
    newest = queries[-COMPARED:]
    yield Arm(FULL, _whole(full, queries), size, lambda: exactly(newest, *full.first(), shape.scaling))
    buffers = KVBuffers((0,), (shape.scaling,), *((pool[:1],) for pool in pools))
    packing = Packing.for_pool(quantizer(HACK, bits, partition), buffers, 1)
    seeds = {0: torch.arange(tokens, dtype=torch.int32, device=shape.device)}

    def in_pytorch(asked: torch.Tensor) -> torch.Tensor:
        prefill = QuantizedPrefill(packing, 0)
        with prefill.computing_prompts(seeds):
            return prefill.attend(0, 0, asked, *pools, full.slots[0], shape.scaling)

    def expected() -> torch.Tensor:
        last = prefix(packing, tokens)
        asked = newest[-min(COMPARED, tokens - packing.sinks - last) :]
        return exactly(asked, *_meaning(full, packing, seeds[0], last), shape.scaling)

    made = PromptCodes.token_bytes(shape.dim, shape.dim, partition) * shape.kv_heads * tokens
    if not full.keys.is_cuda:
        yield Arm(HACK, partial(in_pytorch, queries), size, expected)
        return
    prompts = PromptBatch(packing, full.slots.int(), [0], [0], [tokens], seeds)
    # Made before a graph is captured, as they are before the first layer.
    assert prompts.numbers.is_cuda and prompts.flat_seeds is not None
    yield Arm(HACK, lambda: integer_prefill(prompts, queries, *pools, 0, 0, shape.scaling), size + 2 * made, expected)
    codes = prompt_codes(prompts, *pools, 0, 0)
    yield Arm("hack, attention alone", lambda: attend(prompts, codes, queries, *pools, shape.scaling), made, expected)
    yield Arm("hack, SE off, alone", lambda: attend(prompts, codes, queries, *pools, shape.scaling, stored_sums=False), made, expected)


def prefix(packing: Packing, tokens: int) -> int:
    """Tokens of blocks that the last of so many attends to."""
    return max(0, tokens - 1 - packing.sinks) // packing.block_tokens * packing.block_tokens


def _meaning(full: Full, packing: Packing, seeds: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the newest tokens attend to them, ``last`` in blocks: float64 [kv_heads, tokens, dim]."""
    slots, heads, found = full.slots[0], full.shape.kv_heads, []
    sinks, end = packing.sinks, packing.sinks + last
    places = torch.arange(sinks, end, device=slots.device).expand(heads, -1)
    for is_value, pool in enumerate((full.keys, full.values)):
        exact = pool[slots].transpose(0, 1).double()
        layout = packing.values if is_value else packing.keys
        block = packing.codes(exact[:, sinks:end].float(), places, bool(is_value), 0, 0, seeds[sinks:end].expand(heads, -1))
        found.append(torch.cat([exact[:, :sinks], packing.dequantize(block, layout, None).double(), exact[:, end:]], 1))
    return tuple(found)


def _whole(full: Full, queries: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Attention over tokens as they are: FlashInfer's, and on a CPU PyTorch's."""
    shape, slots = full.shape, full.slots[0]
    if not full.keys.is_cuda:
        return lambda: sdpa(queries, full.keys[slots], full.values[slots], shape.scaling)
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
    starts = torch.tensor([0, len(slots)], dtype=torch.int32, device=shape.device)
    last = torch.ones(1, dtype=torch.int32, device=shape.device)
    wrapper.plan(
        starts, starts, slots.int(), last, shape.heads, shape.kv_heads, shape.dim, 1, causal=True, q_data_type=queries.dtype,
        kv_data_type=full.keys.dtype,
    )  # fmt: skip
    paged = full.keys.unsqueeze(1), full.values.unsqueeze(1)
    return lambda: wrapper.run(queries, paged)
