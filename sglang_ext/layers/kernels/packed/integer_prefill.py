"""Prefill attention of prompts over their own codes, on a GPU (HACK, arXiv 2502.03589).

layers/attention/quantized_prefill.py is the PyTorch version. Each layer has three launches for all prompts of a forward:

1. prompt_codes.py quantizes the keys and values of whole blocks.
2. prefill_attention.py attends to exact tokens. On Hopper it stores the query codes that the third launch needs.
3. gluon/prefill_codes.py attends to codes on Hopper, with specialized warps. It adds its result to the output. If it does not support
   the prompts, the second kernel attends to all tokens.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Literal, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.gluon.prefill_codes import prefill_codes
from sglang_ext.layers.kernels.gluon.prefill_steps import PARTITIONS, PROGRAM_ROWS, PrefillSteps
from sglang_ext.layers.kernels.gpu_launch import HOPPER, launch_first_fitting, shape_name
from sglang_ext.layers.kernels.packed import packed_decode
from sglang_ext.layers.kernels.packed.packed_decode import check_readable
from sglang_ext.layers.kernels.packed.prefill_attention import prefill_tiles
from sglang_ext.layers.kernels.packed.prompt_codes import PromptBatch, PromptCodes, padded_terms, prompt_codes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

# Pipeline stages that shared memory holds, by partition: 185 and 164 KiB.
STAGES = {64: 8, 128: 4}
NUMBERS = {torch.int8: gl.int8, torch.float16: gl.float16, torch.float32: gl.float32}


class PrefillQueryCodes(NamedTuple):
    """Query codes that the first kernel stores for the second. Each tensor begins with [tokens, heads].

    ``codes``: int8, one per channel. ``scales``: float32, one per partition. ``terms``: float16, factors of the keys' terms. ``sums``: float32, log2
    of the sum of exact tokens' weights.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    terms: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, queries: torch.Tensor, codes: PromptCodes) -> "PrefillQueryCodes":
        """Uninitialized buffers for ``queries``, [tokens, heads, dim]."""
        heads = queries.shape[:2]
        return cls(
            torch.empty_like(queries, dtype=torch.int8),
            queries.new_empty(*heads, codes.key_scales.shape[1], dtype=torch.float32),
            queries.new_empty(*heads, codes.key_terms.shape[2], dtype=torch.float16),
            queries.new_empty(heads, dtype=torch.float32),
        )

    @staticmethod
    def query_bytes(dim: int, partition: int) -> int:
        """Bytes of one head's query."""
        count = dim // partition
        return dim + 4 * count + 2 * padded_terms(count) + 4


def is_supported_shape(capability: tuple[int, int] | None, partition: int, block: int, group: int) -> bool:
    """Whether the kernels support a shape: on Hopper, partitions of 64 or 128, and a block's rows that fill programs.

    ``capability``: None for other devices. ``block``: tokens of a block. ``group``: query heads that share a KV head.
    """
    return capability is not None and capability[0] == HOPPER[0] and partition in PARTITIONS and block * group % PROGRAM_ROWS == 0


def is_supported(prompts: PromptBatch, queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernels support prompts of ``queries``, [tokens, heads, dim], and a layer's ``keys``, [slots, kv_heads, dim]."""
    packing, group = prompts.packing, queries.shape[1] // keys.shape[1]
    return is_supported_shape(packed_decode.capability(keys), packing.keys.grid.channels, packing.block_tokens, group)


def attend_to_codes(prompts: PromptBatch, codes: PromptCodes, left: PrefillQueryCodes, out: torch.Tensor) -> None:
    """Add the attention over codes to ``out``, [tokens, heads, dim of a value], which holds that over exact tokens. ``left``: codes of queries."""
    if not prompts.total:
        return
    packing, (kv_heads, _, _, partition) = prompts.packing, codes.keys.shape
    steps = PrefillSteps(
        partition, packing.keys.dim, packing.values.dim, kv_heads, out.shape[1] // kv_heads, packing.block_tokens, packing.sinks,
        codes.key_terms.shape[2], codes.value_zeros.shape[2], STAGES[partition],
    )  # fmt: skip
    tile = steps.tile
    boxes = (
        _box(codes.keys, partition, (tile, partition)), _box(codes.key_scales, tile, (1, tile)),
        _box(codes.key_terms, steps.columns, (tile, steps.columns)), _box(codes.values, partition, (steps.value_dim, tile)),
        _box(codes.value_scales, steps.value_dim, (1, steps.value_dim)),
        _box(codes.value_zeros, steps.value_dim, (steps.zeros, steps.value_dim)),
    )  # fmt: skip
    prefill_codes[(prompts.most_blocks * steps.tiles, kv_heads, len(prompts.rows))](
        *boxes, tuple(left), out, prompts.numbers, len(prompts.rows), prompts.total, F=steps, num_warps=4
    )


def _box(numbers: torch.Tensor, columns: int, shape: tuple[int, int]) -> TensorDescriptor:
    """TMA descriptor of ``numbers`` as rows of ``columns``. One copy moves a box of ``shape``."""
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), NUMBERS[numbers.dtype])
    return TensorDescriptor.from_tensor(numbers.view(-1, columns), list(shape), layout)


# Supported channels of a head, and dtypes of a pool.
DIMS, DTYPES = (64, 128), (torch.bfloat16, torch.float16, torch.float32)
# The attention kernels: one Triton kernel, or that kernel and a Gluon kernel for Hopper (gluon/prefill_codes.py).
Kernel = Literal["tiles", "specialized"]
# Maximum sinks of a step.
SINK_STEP = 64


@dataclass(frozen=True)
class PrefillTile:
    """Sizes of one program's work: queries, warps, and pipeline stages of the loads of codes."""

    rows: int
    warps: int
    stages: int


# In order of preference. All scores of a step are in the registers of a warp group. Two programs of 64 rows fit on a multiprocessor, and
# wait for their products at different times. A program of 128 rows reads half as much. On an H100, 16k tokens take 7.0 ms with 64 rows and
# 8.8 ms with 128, for partitions of 64.
TILES = (PrefillTile(64, 4, 3), PrefillTile(64, 4, 2), PrefillTile(64, 4, 1), PrefillTile(32, 4, 1), PrefillTile(16, 4, 1))
# For partitions of 128, whose steps have 128 tokens: 6.1 ms instead of 7.3.
LONG_TILES = (PrefillTile(128, 8, 2), *TILES)


def check_prefill(packing: Packing, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Check channels and dtypes of a layer's buffers, [slots, kv_heads, dim]. Raises OptionError with the value, the allowed ones, and the remedy."""
    remedy = "pass --kv-prefill exact"
    for kind, buffer in (("keys", keys), ("values", values)):
        if buffer.shape[-1] not in DIMS:
            allowed = " or ".join(map(str, DIMS))
            raise OptionError(
                f"the model's {kind} have {buffer.shape[-1]} channels a head; prefill on quantized KV supports {allowed}: {remedy}"
            )
        if buffer.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise OptionError(f"the KV pool stores {kind} as {buffer.dtype}; prefill on quantized KV supports {allowed}: {remedy}")
    check_readable(packing, keys)


def integer_prefill(
    prompts: PromptBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, first_head: int, scaling: float
) -> torch.Tensor:
    """Causal attention of prompts' newest tokens: [tokens, heads, dim of a value], in the dtype of the queries. Does not wait for the device.

    ``queries``: [tokens, heads, dim], of the newest tokens of each prompt, one prompt after another. ``keys``, ``values``: the layer's buffers,
    [slots, kv_heads, dim], which contain these tokens. ``layer``, ``first_head``: indices in the model, which determine the rounding noise.
    ``scaling`` is positive.

    Raises:
        OptionError: No tile sizes for these heads fit the GPU.
    """
    codes = prompt_codes(prompts, keys, values, layer, first_head)
    return attend(prompts, codes, queries, keys, values, scaling)


def attend(
    prompts: PromptBatch, codes: PromptCodes, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float,
    kernel: Kernel | None = None,
) -> torch.Tensor:  # fmt: skip
    """The second part of :func:`integer_prefill`, after the codes are computed.

    Benchmarks pass ``kernel``; None selects the specialized kernel if it supports the prompts.

    Raises:
        OptionError: No tile sizes for these heads fit the GPU.
        ValueError: ``kernel`` is "specialized", which does not support the prompts.
    """
    queries = queries.contiguous()
    out = queries.new_empty(*queries.shape[:2], values.shape[2])
    given = prompts, codes, queries, out, keys, values, scaling
    taken = is_supported(prompts, queries, keys)
    if kernel == "specialized" and not taken:
        raise ValueError(
            f"kernel is 'specialized', with {queries.shape[1] // keys.shape[1]} query heads a KV head on {keys.device}, which the specialized "
            "kernel does not support: pass 'tiles'"
        )
    if taken and kernel != "tiles":
        left = PrefillQueryCodes.empty(queries, codes)
        _launch_tiles(*given, left)
        attend_to_codes(prompts, codes, left, out)
    else:
        _launch_tiles(*given, None)
    return out


def _launch_tiles(
    prompts: PromptBatch, codes: PromptCodes, queries: torch.Tensor, out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    scaling: float, left: PrefillQueryCodes | None,
) -> None:  # fmt: skip
    """Attend to all tokens. With ``left``, attend to exact tokens only, and store there the query codes for the other kernel."""
    packing, kv_heads = prompts.packing, keys.shape[1]
    group, block, sinks = queries.shape[1] // kv_heads, packing.block_tokens, packing.sinks

    def with_tile(tile: PrefillTile) -> None:
        prefill_tiles[(prompts.most_blocks * triton.cdiv(block * group, tile.rows), kv_heads, len(prompts.rows))](
            queries, out, keys, values, *codes, prompts.table, prompts.table.stride(0), prompts.numbers, len(prompts.rows),
            prompts.total, scaling * log2(e), *keys.stride()[:2], *values.stride()[:2], left and tuple(left), HEADS=kv_heads, GROUP=group,
            M=tile.rows, DIM=packing.keys.dim, VALUE_DIM=packing.values.dim, PARTITION=packing.keys.grid.channels, BLOCK=block,
            SINKS=sinks, SINK_STEP=min(SINK_STEP, max(16, triton.next_power_of_2(sinks))), COLUMNS=codes.key_terms.shape[2],
            ZEROS=codes.value_zeros.shape[2], STAGES=tile.stages, WARPS=tile.warps,
            PRECISION="tf32x3" if keys.dtype == torch.float32 else "tf32", num_warps=tile.warps,
        )  # fmt: skip

    def what() -> str:
        return f"prefill on KV quantized to {packing.keys.bits} bits with {shape_name(packing.keys.dim, group, keys.dtype)}"

    key = ("prefill", packing.keys, packing.values, group, keys.dtype, keys.device, left is None)
    tiles = LONG_TILES if packing.keys.grid.channels == 128 and left is None else TILES
    launch_first_fitting(tiles, with_tile, key, what, "pass --kv-prefill exact")
