"""Decode attention over rows that begin with packed blocks, split over the context (flash decoding).

The first splits of a request read its packed blocks, the others its exact tokens. A second kernel merges them by log-sum-exp. It keeps
the outputs of packed and of exact tokens apart if the former must be rotated back. Blocks with sums of codes are multiplied as integers
(HACK, arXiv 2502.03589) by gluon/integer_blocks.py if :func:`integer_fragments` accepts them, else by integer_attention.py. Other blocks are
read by gluon/packed_blocks.py if :func:`fragments` accepts them, else by packed_attention.py. Some have no kernel (:func:`check_readable`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.flash_decoding import DecodeTile, RowSplits, tile_choices
from sglang_ext.layers.kernels.gluon.fragments import TOKENS, PackedFragments
from sglang_ext.layers.kernels.gluon.integer_blocks import integer_splits_gluon
from sglang_ext.layers.kernels.gluon.integer_fragments import PARTITIONS, IntegerFragments
from sglang_ext.layers.kernels.gluon.packed_blocks import packed_splits_gluon
from sglang_ext.layers.kernels.gpu_launch import (
    capability,
    gpu_name,
    has_ptx,
    has_tensor_cores,
    multiplies_integers,
    padded_size,
)
from sglang_ext.layers.kernels.packed.integer_attention import integer_splits, query_codes
from sglang_ext.layers.kernels.packed.packed_attention import packed_splits
from sglang_ext.mem_cache.compressed.layouts.block_layout import as_bytes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

# Tuned on an H200: programs of one warp are fastest. Tokens per step: BY_TOKEN if a token's channels share a key scale, BY_CHANNEL if
# tokens of a channel do, EXACT for exact tokens.
BY_TOKEN, BY_CHANNEL, EXACT = 64, 32, 32
WARPS = 1
# Steps that are loaded ahead, and queries for which the registers of one warp suffice.
STAGES, PACKED_ROWS = 3, 16
# Options of the Gluon kernel's compiler.
GLUON_OPTIONS = {"num_warps": 1}


@dataclass(frozen=True)
class PackedAttentionCall(RowSplits):
    """Arguments of all kernels over packed blocks.

    Attributes:
        rotated: Queries, rotated as the packed keys are.
        rows: Token table and its row stride, row of each request, slots of each, and slots with blocks by row.
    """

    packing: Packing
    rotated: torch.Tensor
    rows: tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]
    scaling: float

    def launch_packed(self, name: str, choices: Sequence[DecodeTile], with_tile: Callable[[DecodeTile], None]) -> None:
        """Launch the kernel ``name`` with the first of ``choices`` that fits the GPU. Raises OptionError if none fits."""
        packing = self.packing

        def work() -> str:
            return f"attention over tokens in {packing.keys.bits} bits ({type(packing.quantizer).__name__.lower()})"

        self.launch((name, packing.keys, packing.values), choices, with_tile, work, "pass --kv-compressor snapkv")

    @property
    def outcome(self) -> tuple[torch.Tensor, torch.Tensor, float, *tuple[int, ...]]:
        """The output buffers of the splits and the arguments that follow them in all kernels."""
        return self.partial, self.lse, self.scaling, *self.strides

    def block_constants(self, tile: DecodeTile) -> dict[str, int]:
        """Constants and options for the Triton kernels."""
        key, value = self.packing.keys, self.packing.values
        blocks = {"BITS": key.bits, "BLOCK_TOKENS": key.tokens, "BLOCK_SLOTS": self.packing.block_slots, "CODE_CELLS": key.code_cells}
        cells = {"KEY_CELL": key.cell_bytes // 2, "VALUE_CELL": value.cell_bytes // 2}
        return {"EXACT": self.splits[1], "N": min(EXACT, tile.tokens), **blocks, **cells, **self.constants(tile)}


def launch_gluon(call: PackedAttentionCall, constants: PackedFragments | IntegerFragments) -> None:
    """Launch a Gluon kernel: integer_blocks.py or packed_blocks.py. It needs little shared memory, so its sizes are the same for all GPUs."""
    keys, values, is_integer = call.keys, call.values, isinstance(constants, IntegerFragments)
    words, numbers = ([part.view(dtype) for part in (keys, values)] for dtype in (torch.int32, torch.float16))
    kernel, queries = (integer_splits_gluon, (call.queries,)) if is_integer else (packed_splits_gluon, (call.queries, call.rotated))
    kernel[call.grid(call.group)](
        *queries, keys, values, words[0], numbers[0], words[1], numbers[1], *call.rows, *call.outcome,
        *call.splits, HEADS=keys.shape[1], BLOCK_SLOTS=call.packing.block_slots, F=constants, **GLUON_OPTIONS,
    )  # fmt: skip


def launch_triton(call: PackedAttentionCall, fast: bool) -> None:
    """Launch the kernel of packed_attention.py. ``fast`` sets FAST of ``dequantize``, if the method allows it."""
    keys, values, key, value = call.keys, call.values, call.packing.keys, call.packing.values
    by_channel = max(key.grid.tokens, value.grid.tokens) > 1
    key_levels, value_levels = call.packing.levels(keys.device)
    table = key_levels is not None
    # Without a table the kernel does not read the levels. Any tensor will do.
    levels = (key_levels, value_levels) if table else (call.lse, call.lse)

    def with_tile(tile: DecodeTile) -> None:
        packed_splits[call.grid(tile.rows)](
            call.queries, call.rotated, keys, values, as_bytes(keys), keys.view(torch.float16), as_bytes(values),
            values.view(torch.float16), *levels, *call.rows, *call.outcome, COLUMNS=padded_size(key.token_bytes),
            VALUE_COLUMNS=padded_size(value.token_bytes), KEY_TOKENS=key.grid.tokens, KEY_UNIT=key.grid.channels,
            VALUE_TOKENS=value.grid.tokens, VALUE_UNIT=value.grid.channels, TABLE=table,
            FAST=fast and key.bits < 8 and not table, STEP=tile.tokens, num_warps=WARPS, **call.block_constants(tile),
        )  # fmt: skip

    # If tokens share scales, a step has whole groups of them.
    choices = tile_choices(call.group, PACKED_ROWS, BY_CHANNEL if by_channel else BY_TOKEN, STAGES, fewest_rows=8)
    call.launch_packed("packed", [tile for tile in choices if not by_channel or tile.tokens == BY_CHANNEL], with_tile)


# Minimum bytes of an int8 product along its inner dimension, and minimum channels along another dimension.
INNER, OUTER = 32, 16
# Tokens of a step per warp.
WARP_TOKENS = 64


def launch_integers(call: PackedAttentionCall) -> None:
    """Launch the Triton kernel of integer_attention.py."""
    keys, values, key, value = call.keys, call.values, call.packing.keys, call.packing.values
    partition = key.grid.channels
    # Channels that are in one part of bytes and in one partition.
    width = gcd(partition, key.token_bytes)
    views = [(as_bytes(kind), kind.view(torch.float16), kind.view(torch.int16)) for kind in (keys, values)]
    codes, parameters = query_codes(call.queries, partition, call.scaling)

    def with_tile(tile: DecodeTile) -> None:
        integer_splits[call.grid(tile.rows)](
            call.queries, codes, parameters, keys, values, *views[0], *views[1], *call.rows, *call.outcome,
            PARTITION=partition, WIDTH=width, COLUMNS=max(INNER, width),
            VALUE_COLUMNS=max(OUTER, triton.next_power_of_2(value.token_bytes)), num_warps=max(1, partition // WARP_TOKENS),
            **call.block_constants(tile),
        )  # fmt: skip

    # A step is one partition of values.
    choices = [tile for tile in tile_choices(call.group, PACKED_ROWS, partition, STAGES, fewest_rows=8) if tile.tokens == partition]
    call.launch_packed("integers", choices, with_tile)


# Programs of one warp per multiprocessor: two in each of its four partitions, which have 16,384 registers.
RESIDENT = 8
MOST_PARTS = 128
# One of this many splits of a row reads exact tokens, because a context's exact tokens are few compared to its blocks.
PARTS_TO_AN_EXACT_ONE = 16
# Fixed cost of a split relative to the time of a whole row, by bits of a code. Measured on an H100 with 8 and 16 requests of 32,768 tokens.
# With 2 bits, time is mostly computation, which needs all multiprocessors. With more bits it is reading, which a second wave only delays.
OVERHEAD = {2: 0.005, 4: 0.03, 8: 0.03}


@cache
def choose_splits(rows: int, room: int, bits: int) -> tuple[int, int]:
    """Numbers of splits of each row's blocks, and of its exact tokens, with the shortest total time.

    All splits take the same time. The total depends on the number of waves, of ``room`` programs at a time, and the duration of a split.
    ``rows``: rows of the batch, times KV heads. ``bits``: bits of a code.
    """

    def time(parts: int) -> float:
        return -(-rows * parts // room) * (1 / (parts - _exact(parts)) + OVERHEAD[bits])

    best = min(range(2, MOST_PARTS + 1), key=time)
    return best - _exact(best), _exact(best)


def _exact(parts: int) -> int:
    return max(1, parts // PARTS_TO_AN_EXACT_ONE)


# Gluon kernel: tokens that share a channel's scale, sizes of a head, and maximum queries that share a KV head.
SHARED_TOKENS, DIMS, MOST_QUERIES = 32, (64, 128), 16
# Integer kernel: (channels of a head, bits of a code), and maximum queries for partitions of 64 and of 128.
INTEGERS, MOST_INTEGER_QUERIES, MOST_HALVED_QUERIES = ((128, 4), (128, 2), (64, 4)), 8, 4


def fragments(packing: Packing, keys: torch.Tensor, group: int) -> PackedFragments | None:
    """The constants of the Gluon kernel for ``group`` queries per KV head. None if it does not support the blocks or the device.

    It supports codes of all bits in 16-bit pools, with heads of 64 or 128 channels. It does not support codes that index a table of
    levels, or values whose tokens share scales. ``keys`` is a layer's buffer, [slots, kv_heads, dim].
    """
    key, value = packing.keys, packing.values
    plain = key.plain and value.plain and packing.levels(keys.device) == (None, None)
    if not (plain and has_tensor_cores(keys)) or keys.element_size() != 2:
        return None
    if key.dim not in DIMS or (value.dim, value.bits, value.tokens) != (key.dim, key.bits, key.tokens) or key.tokens != TOKENS:
        return None
    if group > MOST_QUERIES or key.grid not in ((SHARED_TOKENS, 1), (1, key.dim)) or value.grid.tokens > 1:
        return None
    made = PackedFragments(key.dim, group, key.bits, key.code_cells, value.grid.channels, by_channel=key.grid.channels == 1)
    whole_units = value.grid.channels == key.dim or made.bytes % value.grid.channels == 0
    return made if whole_units and made.value_unit >= 32 and made.groups <= 4 else None


def integer_fragments(packing: Packing, keys: torch.Tensor, group: int) -> IntegerFragments | None:
    """The constants of the Gluon kernel for integer products. None if it does not support the blocks or the device.

    It supports 16-bit pools. Partitions of 64: heads of 128 channels in 4 or 2 bits, or of 64 channels in 4 bits, with up to 8 queries per
    KV head. Partitions of 128: heads of 128 channels, with up to 4 queries. Arguments are those of :func:`fragments`.
    """
    key, value = packing.keys, packing.values
    if not (key.sums and value.sums and key.plain and value.plain and has_tensor_cores(keys)) or keys.element_size() != 2:
        return None
    if (key.dim, key.bits) not in INTEGERS or (value.dim, value.bits, value.tokens) != (key.dim, key.bits, key.tokens):
        return None
    partition = key.tokens
    if partition not in PARTITIONS or key.grid != (1, partition) or value.grid != (partition, 1) or partition > key.dim:
        return None
    if group > (MOST_INTEGER_QUERIES if partition == TOKENS else MOST_HALVED_QUERIES):
        return None
    return IntegerFragments(key.dim, group, key.bits, key.code_cells * TOKENS // partition, partition)


def max_resident_programs(packing: Packing, keys: torch.Tensor, group: int) -> int | None:
    """Programs of a Gluon kernel that run at the same time. None if neither Gluon kernel supports the blocks."""
    if not (fragments(packing, keys, group) or integer_fragments(packing, keys, group)):
        return None
    return torch.cuda.get_device_properties(keys.device).multi_processor_count * RESIDENT


def check_readable(packing: Packing, keys: torch.Tensor) -> None:
    """Check that a kernel reads such blocks of a layer's buffer ``keys``.

    Raises:
        OptionError: The blocks hold more than codes, scales, zero points and sums, their scales are shared in an unsupported way, or
            their kernel does not compile for the GPU.
    """
    name = type(packing.quantizer).__name__.lower()
    if not (packing.keys.plain and packing.values.plain):
        raise OptionError(
            f"blocks of {name} hold outliers, or keys from before rotary embedding, which no "
            "kernel reads: pass --kv-compressor kivi, or --device cpu"
        )
    if packing.keys.sums:
        if not multiplies_integers(keys):
            major, minor = capability(keys)
            raise OptionError(
                f"blocks of {name} are multiplied as integers, which needs a GPU of compute capability 8.0 or more; {gpu_name()} has "
                f"{major}.{minor}: pass --kv-compressor kivi"
            )
        return
    of_token = (packing.keys.grid == (1, packing.keys.dim), packing.values.grid.tokens == 1)
    for kind, layout, by_token in zip(("keys", "values"), (packing.keys, packing.values), of_token):
        tokens, channels = layout.grid
        if not by_token and (channels > 1 or (BY_CHANNEL % tokens and tokens % BY_CHANNEL)):
            raise OptionError(
                f"{kind} of {name} share scales over {tokens} tokens and {channels} channels, which no kernel reads; kernels "
                f"support groups of tokens in one channel (a divisor or a multiple of {BY_CHANNEL} tokens), whole keys of one token, and "
                "channels of one token's values: use such grids, or pass --device cpu"
            )


def packed_decode(
    packing: Packing,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    packed_slots: torch.Tensor,
    scaling: float,
    splits: tuple[int, int] = (16, 4),
) -> torch.Tensor:
    """Attention of one token of each request over its row of the table: [requests, heads, dim of a value].

    ``queries``: [requests, heads, dim]. ``keys``, ``values``: one layer's buffers, [slots, kv_heads, dim]. ``token_table``: int32 [rows, width]; a
    row holds the slots of its blocks, then those of its exact tokens. ``rows``, ``lengths``: int64 [requests], rows of the table, and slots of
    each. ``packed_slots``: int32 [rows], slots with blocks at the start of each row; 0 for none. ``scaling`` is positive. ``splits``: number of
    splits of the blocks, and of the exact tokens, which are read in parallel.

    Raises:
        OptionError: No tile sizes for these heads fit the GPU, or no kernel reads such blocks (:func:`check_readable`).
    """
    check_readable(packing, keys)
    to_keys, to_values = packing.rotations(queries.device)
    queries = queries.contiguous()
    rotated = queries if to_keys is None else queries.float() @ to_keys
    table = token_table, token_table.stride(0), rows, lengths, packed_slots
    call = PackedAttentionCall(queries, keys, values, splits, packing, rotated, table, scaling)
    constants = integer_fragments(packing, keys, call.group) or fragments(packing, keys, call.group)
    if constants is not None:
        launch_gluon(call, constants)
    elif packing.keys.sums:
        launch_integers(call)
    else:
        launch_triton(call, fast=has_ptx(keys) and keys.element_size() == 2)
    if to_values is None:
        return call.merged_output()
    far, near = call.separate_outputs()
    return (far @ to_values.t() + near).to(queries.dtype)
