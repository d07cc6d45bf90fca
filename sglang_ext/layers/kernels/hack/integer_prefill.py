"""Attention of prompts on their own codes, on a GPU: what layers/attention/quantized_prefill.py gives in PyTorch (HACK, arXiv 2502.03589).

Three launches a layer, for all prompts of a forward: one quantizes the keys and values of whole blocks (prompt_codes.py), one attends to
exact tokens (prefill_attention.py), one to codes (specialized_prefill.py). Where that one does not take them, the second attends to all.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Literal

import torch
import triton

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.gpu_launch import launch_first_fitting, shape_name
from sglang_ext.layers.kernels.hack import specialized_prefill
from sglang_ext.layers.kernels.hack.prefill_attention import prefill_tiles
from sglang_ext.layers.kernels.hack.prompt_codes import PromptCodes, PromptBatch, prompt_codes
from sglang_ext.layers.kernels.packed.packed_decode import check_readable
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

# What the kernels take.
DIMS, DTYPES = (64, 128), (torch.bfloat16, torch.float16, torch.float32)
# What attends: one kernel in Triton, or that one and one in Gluon for Hopper (specialized_prefill.py).
Kernel = Literal["tiles", "specialized"]
# Sinks of a step at most.
SINK_STEP = 64


@dataclass(frozen=True)
class PrefillTile:
    """Sizes of a program's work.

    Attributes:
        rows: queries.
        warps: of a program.
        stages: of the pipeline that loads codes.
    """

    rows: int
    warps: int
    stages: int


# Those preferred first. All scores of a step are in the registers of a warp group. Two programs of 64 rows fit on a processor, and wait
# for their products at different times; one of 128 reads half as much. On an H100 16k tokens take 7.0 and 8.8 ms in partitions of 64.
TILES = (PrefillTile(64, 4, 3), PrefillTile(64, 4, 2), PrefillTile(64, 4, 1), PrefillTile(32, 4, 1), PrefillTile(16, 4, 1))
# Of partitions of 128, whose steps are as long: 6.1 ms instead of 7.3.
LONG_TILES = (PrefillTile(128, 8, 2), *TILES)


def check_prefill(packing: Packing, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise where the kernels do not take such heads and numbers.

    Args:
        packing: how blocks are packed.
        keys, values: a layer's buffers, [slots, kv_heads, dim].

    Raises:
        OptionError: names what they are, what is allowed, and what to do.
    """
    remedy = "pass --kv-prefill exact"
    for kind, buffer in (("keys", keys), ("values", values)):
        if buffer.shape[-1] not in DIMS:
            allowed = " or ".join(map(str, DIMS))
            raise OptionError(
                f"the model's {kind} have {buffer.shape[-1]} channels a head; prompts attend to codes with {allowed}: {remedy}"
            )
        if buffer.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise OptionError(f"the KV pool holds {kind} as {buffer.dtype}; prompts attend to codes of {allowed}: {remedy}")
    check_readable(packing, keys)


def integer_prefill(
    prompts: PromptBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, first_head: int, scaling: float
) -> torch.Tensor:
    """Causal attention of prompts' newest tokens; does not wait for the device.

    Args:
        prompts: whose, and how their codes are made.
        queries: [tokens, heads, dim], of the newest tokens of each prompt, one after another.
        keys, values: the layer's buffers, [slots, kv_heads, dim], with those tokens'.
        layer, first_head: which of the model's, by which noise is drawn.
        scaling: factor on query-key products, positive.

    Returns:
        [tokens, heads, dim of a value], in the dtype of the queries.

    Raises:
        OptionError: no tiles of such heads fit the GPU.
    """
    codes = prompt_codes(prompts, keys, values, layer, first_head)
    return attend(prompts, codes, queries, keys, values, scaling)


def attend(
    prompts: PromptBatch, codes: PromptCodes, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float,
    stored_sums: bool = True, kernel: Kernel | None = None,
) -> torch.Tensor:  # fmt: skip
    """:func:`integer_prefill` after its first kernel; for benchmarks also as asked.

    Args:
        stored_sums: as launch_integers' (integer_decode.py).
        kernel: where None, the specialized one where it takes such prompts.

    Raises:
        OptionError: no tiles of such heads fit the GPU.
        ValueError: the specialized kernel is asked for, and does not take these.
    """
    queries = queries.contiguous()
    out = queries.new_empty(*queries.shape[:2], values.shape[2])
    given = prompts, codes, queries, out, keys, values, scaling, stored_sums
    taken = stored_sums and specialized_prefill.is_supported(prompts, queries, keys)
    if kernel == "specialized" and not taken:
        raise ValueError(
            f"kernel is 'specialized', stored_sums {stored_sums}, with {queries.shape[1] // keys.shape[1]} query heads a KV head on "
            f"{keys.device}, which specialized_prefill.py does not take: pass 'tiles'"
        )
    if taken and kernel != "tiles":
        left = specialized_prefill.PrefillQueryCodes.empty(queries, codes)
        _launch_tiles(*given, left)
        specialized_prefill.attend_to_codes(prompts, codes, left, out)
    else:
        _launch_tiles(*given, None)
    return out


def _launch_tiles(
    prompts: PromptBatch, codes: PromptCodes, queries: torch.Tensor, out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    scaling: float, stored_sums: bool, left: specialized_prefill.PrefillQueryCodes | None,
) -> None:  # fmt: skip
    """Attend to all tokens, or to exact ones, and leave the rest to another kernel."""
    packing, kv_heads = prompts.packing, keys.shape[1]
    group, block, sinks = queries.shape[1] // kv_heads, packing.block_tokens, packing.sinks

    def with_tile(tile: PrefillTile) -> None:
        prefill_tiles[(prompts.most_blocks * triton.cdiv(block * group, tile.rows), kv_heads, len(prompts.rows))](
            queries, out, keys, values, *codes.parts, prompts.table, prompts.table.stride(0), prompts.numbers, len(prompts.rows),
            prompts.total, scaling * log2(e), *keys.stride()[:2], *values.stride()[:2], left and left.parts, HEADS=kv_heads, GROUP=group,
            M=tile.rows, DIM=packing.keys.dim, VALUE_DIM=packing.values.dim, PARTITION=packing.keys.grid.channels, BLOCK=block,
            SINKS=sinks, SINK_STEP=min(SINK_STEP, max(16, triton.next_power_of_2(sinks))), COLUMNS=codes.key_terms.shape[2],
            ZEROS=codes.value_zeros.shape[2], STAGES=tile.stages, WARPS=tile.warps, STORED=stored_sums,
            PRECISION="tf32x3" if keys.dtype == torch.float32 else "tf32", num_warps=tile.warps,
        )  # fmt: skip

    def what() -> str:
        return f"attention of prompts to codes of {packing.keys.bits} bits with {shape_name(packing.keys.dim, group, keys.dtype)}"

    key = ("prefill", packing.keys, packing.values, group, keys.dtype, keys.device, stored_sums, left is None)
    tiles = LONG_TILES if packing.keys.grid.channels == 128 and left is None else TILES
    launch_first_fitting(tiles, with_tile, key, what, "pass --kv-prefill exact")
