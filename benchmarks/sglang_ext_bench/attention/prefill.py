"""The compared variants of prefill attention over a prompt without a cached prefix."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill
from sglang_ext.layers.kernels.packed.integer_prefill import attend, integer_prefill
from sglang_ext.layers.kernels.packed.prompt_codes import PromptBatch, PromptCodes, prompt_codes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext_bench.attention.arms import FULL, HACK, WORKSPACE_BYTES, AttentionVariant, sdpa
from sglang_ext_bench.attention.setting import FullKV, exactly

COMPARED = 16
"""Newest tokens, whose outputs are compared."""


def prefills(full: FullKV, bits: int, partition: int) -> Iterator[AttentionVariant]:
    """Yield the variants of the prefill of one request. The others are compared with the first one.

    Args:
        full: The full KV of the request.
        bits: Bits of a code.
        partition: Numbers with a common scale in HACK.
    """
    shape, tokens, pools = full.shape, full.slots.shape[1], (full.keys, full.values)
    queries, size = shape.queries(tokens), tokens * shape.token_bytes(full.keys.element_size())
    newest = queries[-COMPARED:]
    yield AttentionVariant(FULL, _whole(full, queries), size, lambda: exactly(newest, *full.first_request(), shape.scaling))
    buffers = KVBuffers((0,), (shape.scaling,), *((pool[:1],) for pool in pools))
    packing = Packing.for_pool(quantizer(HACK, bits, partition), buffers, 1)
    seeds = {0: torch.arange(tokens, dtype=torch.int32, device=shape.device)}

    def prefill_in_pytorch(chunk: torch.Tensor) -> torch.Tensor:
        prefill = QuantizedPrefill(packing, 0)
        with prefill.computing_prompts(seeds):
            return prefill.attend(0, 0, chunk, *pools, full.slots[0], shape.scaling)

    def expected() -> torch.Tensor:
        block_tokens = prefix(packing, tokens)
        compared = newest[-min(COMPARED, tokens - packing.sinks - block_tokens) :]
        return exactly(compared, *_meaning(full, packing, seeds[0], block_tokens), shape.scaling)

    code_bytes = PromptCodes.token_bytes(shape.dim, shape.dim, partition) * shape.kv_heads * tokens
    if not full.keys.is_cuda:
        yield AttentionVariant(HACK, partial(prefill_in_pytorch, queries), size, expected)
        return
    prompts = PromptBatch(packing, full.slots.int(), [0], [0], [tokens], seeds)
    # These properties are computed before a graph is captured. A server computes them before the first layer.
    assert prompts.numbers.is_cuda and prompts.flat_seeds is not None

    def attend_to_codes() -> torch.Tensor:
        return attend(prompts, codes, queries, *pools, shape.scaling)

    yield AttentionVariant(HACK, lambda: integer_prefill(prompts, queries, *pools, 0, 0, shape.scaling), size + 2 * code_bytes, expected)
    codes = prompt_codes(prompts, *pools, 0, 0)
    yield AttentionVariant("hack, attention alone", attend_to_codes, code_bytes, expected)


def prefix(packing: Packing, tokens: int) -> int:
    """Number of tokens in blocks that the last of ``tokens`` tokens attends to."""
    return max(0, tokens - 1 - packing.sinks) // packing.block_tokens * packing.block_tokens


def _meaning(full: FullKV, packing: Packing, seeds: torch.Tensor, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the newest tokens attend to, with ``block_tokens`` tokens in blocks: float64 [kv_heads, tokens, dim]."""
    slots, heads, result = full.slots[0], full.shape.kv_heads, []
    sinks, end = packing.sinks, packing.sinks + block_tokens
    positions = torch.arange(sinks, end, device=slots.device).expand(heads, -1)
    for is_value, pool in enumerate((full.keys, full.values)):
        exact = pool[slots].transpose(0, 1).double()
        layout = packing.values if is_value else packing.keys
        block = packing.codes(exact[:, sinks:end].float(), positions, bool(is_value), 0, 0, seeds[sinks:end].expand(heads, -1))
        result.append(torch.cat([exact[:, :sinks], packing.dequantize(block, layout, None).double(), exact[:, end:]], 1))
    return tuple(result)


def _whole(full: FullKV, queries: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of prefill attention over full KV: FlashInfer on a GPU, PyTorch on a CPU."""
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
