"""Launches the split kernels for rows with packed blocks, with tile sizes that fit the GPU. packed_decode.py calls it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

from sglang_ext.layers.kernels.gpu_launch import launch_first_fitting, padded_size, shape_name
from sglang_ext.layers.kernels.flash_decoding import SplitOutputs
from sglang_ext.layers.kernels.decode_tile_sizes import DecodeTile, tile_choices
from sglang_ext.layers.kernels.gluon.constants import PackedFragments
from sglang_ext.layers.kernels.gluon.packed_blocks import packed_splits_gluon
from sglang_ext.layers.kernels.packed.packed_attention import packed_splits
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, as_bytes

# Tuned on an H200: programs of one warp are fastest. Tokens per step: BY_TOKEN if a token's channels share a key scale, BY_CHANNEL if
# tokens of a channel do, EXACT for exact tokens.
BY_TOKEN, BY_CHANNEL, EXACT = 64, 32, 32
WARPS = 1
# Steps that are loaded ahead, and queries for which the registers of one warp suffice.
STAGES, PACKED_ROWS = 3, 16
# Options of the Gluon kernel's compiler.
GLUON_OPTIONS = {"num_warps": 1}


@dataclass(frozen=True)
class PackedAttentionCall:
    """Arguments of both kernels, from packed_decode.py.

    Attributes:
        rotated: Queries, rotated as the packed keys are.
        parts: Partial results of the splits.
    """

    packing: Packing
    queries: torch.Tensor
    rotated: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]
    scaling: float
    parts: SplitOutputs

    @property
    def group(self) -> int:
        """Queries that share a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Grid for programs of ``rows`` queries of a KV head."""
        return self.parts.num_splits, self.keys.shape[1] * triton.cdiv(self.group, rows), len(self.queries)

    def launch(self, name: str, choices: Sequence[DecodeTile], with_tile: Callable[[DecodeTile], None]) -> None:
        """Launch the kernel ``name`` with the first of ``choices`` that fits the GPU.

        Raises:
            OptionError: None fits.
        """
        packing, keys = self.packing, self.keys

        def what() -> str:
            method, about = type(packing.quantizer).__name__.lower(), shape_name(keys.shape[2], self.group, keys.dtype)
            return f"attention over tokens in {packing.keys.bits} bits ({method}) with {about}"

        key = (name, packing.keys, packing.values, self.group, keys.dtype, keys.device)
        launch_first_fitting(choices, with_tile, key, what, "pass --kv-compressor snapkv")

    @property
    def outcome(self) -> tuple[torch.Tensor, torch.Tensor, float, int, int, int, int]:
        """The output buffers of the splits and the arguments that follow them in both kernels."""
        steps = *self.keys.stride()[:2], *self.values.stride()[:2]
        return self.parts.partial, self.parts.lse, self.scaling, *steps


def launch_gluon(call: PackedAttentionCall, constants: PackedFragments) -> None:
    """Launch the kernel of gluon/packed_blocks.py. It needs little shared memory, so its sizes are the same for all GPUs."""
    keys, values = call.keys, call.values
    words, numbers = ([part.view(dtype) for part in (keys, values)] for dtype in (torch.int32, torch.float16))
    packed_splits_gluon[call.grid(call.group)](
        call.queries, call.rotated, keys, values, words[0], numbers[0], words[1], numbers[1], *call.rows, *call.outcome,
        *call.parts.splits, HEADS=keys.shape[1], BLOCK_SLOTS=call.packing.block_slots, F=constants, **GLUON_OPTIONS,
    )  # fmt: skip


def launch_triton(call: PackedAttentionCall, fast: bool) -> None:
    """Launch the kernel of packed_attention.py. ``fast`` sets FAST of :func:`~.packed_codes.dequantize`, if the method allows it."""
    keys, values, key, value = call.keys, call.values, call.packing.keys, call.packing.values
    dim, kv_heads, by_channel = call.queries.shape[2], keys.shape[1], max(key.grid.tokens, value.grid.tokens) > 1
    key_levels, value_levels = call.packing.levels(keys.device)
    table = key_levels is not None
    # Without a table the kernel does not read the levels. Any tensor will do.
    levels = (key_levels, value_levels) if table else (call.parts.lse, call.parts.lse)

    def with_tile(tile: DecodeTile) -> None:
        packed_splits[call.grid(tile.rows)](
            call.queries, call.rotated, keys, values, as_bytes(keys), keys.view(torch.float16), as_bytes(values),
            values.view(torch.float16), *levels, *call.rows, *call.outcome, HEADS=kv_heads, GROUP=call.group, M=tile.rows,
            DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), COLUMNS=padded_size(key.token_bytes),
            VALUE_COLUMNS=padded_size(value.token_bytes), BITS=key.bits, BLOCK_TOKENS=key.tokens,
            BLOCK_SLOTS=call.packing.block_slots, CODE_CELLS=key.code_cells, KEY_CELL=key.cell_bytes // 2,
            VALUE_CELL=value.cell_bytes // 2, KEY_TOKENS=key.grid.tokens, KEY_UNIT=key.grid.channels,
            VALUE_TOKENS=value.grid.tokens, VALUE_UNIT=value.grid.channels, TABLE=table,
            FAST=fast and key.bits < 8 and not table, STEP=tile.tokens, EXACT=call.parts.splits[1], N=min(EXACT, tile.tokens),
            num_warps=WARPS, num_stages=tile.stages, **call.parts.shape,
        )  # fmt: skip

    # If tokens share scales, a step has whole groups of them.
    choices = tile_choices(call.group, PACKED_ROWS, BY_CHANNEL if by_channel else BY_TOKEN, STAGES, fewest_rows=8)
    call.launch("packed", [tile for tile in choices if not by_channel or tile.tokens == BY_CHANNEL], with_tile)
