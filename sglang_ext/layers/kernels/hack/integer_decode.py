"""Decode attention over rows whose first blocks are multiplied as integers, split over the context (HACK, arXiv 2502.03589).

The first splits of a request read its partitions. The other splits read its exact tokens, including those that do not fill a
partition of values yet. :class:`~sglang_ext.layers.kernels.flash_decoding.SplitOutputs` merges the splits.
"""

from math import gcd

import torch
import triton

from sglang_ext.layers.kernels.decode_tile_sizes import DecodeTile, tile_choices
from sglang_ext.layers.kernels.gluon.integer_blocks import integer_splits_gluon
from sglang_ext.layers.kernels.gluon.integer_fragments import IntegerFragments
from sglang_ext.layers.kernels.hack.integer_attention import integer_splits
from sglang_ext.layers.kernels.hack.int8_codes import query_codes
from sglang_ext.layers.kernels.packed.launches import EXACT, GLUON_OPTIONS, PACKED_ROWS, PackedAttentionCall
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import as_bytes

# Minimum bytes of an int8 product along its inner dimension, and minimum channels along another dimension.
INNER, OUTER = 32, 16
# Tokens of a step per warp.
WARP_TOKENS = 64


def launch_integers(call: PackedAttentionCall, stored_sums: bool = True, exact_tail: bool = True) -> None:
    """Launch the Triton kernel that reads the splits.

    Args:
        call: The arguments of the attention.
        stored_sums: Read the stored sums of codes. If false, each step computes them (for benchmarks).
        exact_tail: Read tokens after the blocks exactly. If false, each step quantizes their values (for benchmarks).
    """
    keys, values, key, value = call.keys, call.values, call.packing.keys, call.packing.values
    partition, dim = key.grid.channels, key.dim
    # Channels that are in one part of bytes and in one partition.
    width = gcd(partition, key.token_bytes)
    views = [(as_bytes(kind), kind.view(torch.float16), kind.view(torch.int16)) for kind in (keys, values)]
    codes, parameters = query_codes(call.queries, partition, call.scaling)

    def with_tile(tile: DecodeTile) -> None:
        integer_splits[call.grid(tile.rows)](
            call.queries, codes, parameters, keys, values, *views[0], *views[1], *call.rows, *call.outcome,
            HEADS=keys.shape[1], GROUP=call.group, M=tile.rows, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), PARTITION=partition,
            WIDTH=width, COLUMNS=max(INNER, width), VALUE_COLUMNS=max(OUTER, triton.next_power_of_2(value.token_bytes)),
            BITS=key.bits, BLOCK_TOKENS=key.tokens, BLOCK_SLOTS=call.packing.block_slots, CODE_CELLS=key.code_cells,
            KEY_CELL=key.cell_bytes // 2, VALUE_CELL=value.cell_bytes // 2, EXACT=call.parts.splits[1],
            N=min(EXACT, tile.tokens), STORED=stored_sums, EXACT_TAIL=exact_tail, num_warps=max(1, partition // WARP_TOKENS),
            num_stages=tile.stages, **call.parts.shape,
        )  # fmt: skip

    # A step is one partition of values.
    choices = [tile for tile in tile_choices(call.group, PACKED_ROWS, partition, STAGES, fewest_rows=8) if tile.tokens == partition]
    call.launch("integers", choices, with_tile)


def launch_gluon_integers(call: PackedAttentionCall, constants: IntegerFragments) -> None:
    """Launch the kernel of gluon/integer_blocks.py, whose sizes are the same for all GPUs."""
    keys, values = call.keys, call.values
    words, numbers = ([part.view(dtype) for part in (keys, values)] for dtype in (torch.int32, torch.float16))
    integer_splits_gluon[call.grid(call.group)](
        call.queries, keys, values, words[0], numbers[0], words[1], numbers[1], *call.rows, *call.outcome,
        *call.parts.splits, HEADS=keys.shape[1], BLOCK_SLOTS=call.packing.block_slots, F=constants, **GLUON_OPTIONS,
    )  # fmt: skip
