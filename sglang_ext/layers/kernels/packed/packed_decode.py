"""Decode attention over rows that begin with packed blocks, split over the context (flash decoding).

The first splits of a request read its packed blocks. The other splits read its exact tokens. A second kernel merges the splits by
log-sum-exp. It keeps the outputs of packed and of exact tokens apart if the former must be rotated back.

The kernel for the splits depends on the blocks. For blocks with sums of codes it is gluon/integer_blocks.py if :func:`integer_fragments`
accepts them, else hack/integer_attention.py. For other blocks it is gluon/packed_blocks.py if :func:`fragments` accepts them, else
packed_attention.py. No kernel reads blocks that hold more than codes, scales, zero points and sums (:func:`check_readable`). No kernel
reads blocks whose scales are shared by both tokens and channels.
"""

import torch

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.gpu_launch import capability, gpu_name, has_ptx
from sglang_ext.layers.kernels.flash_decoding import SplitOutputs
from sglang_ext.layers.kernels.gluon.occupancy import RESIDENT
from sglang_ext.layers.kernels.gluon.constants import PackedFragments
from sglang_ext.layers.kernels.gluon.fragments import TOKENS
from sglang_ext.layers.kernels.gluon.integer_fragments import PARTITIONS, IntegerFragments
from sglang_ext.layers.kernels.hack.integer_decode import launch_gluon_integers, launch_integers
from sglang_ext.layers.kernels.packed.launches import BY_CHANNEL, PackedAttentionCall, launch_gluon, launch_triton
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

# Gluon kernel: tokens that share a channel's scale, sizes of a head, and maximum queries that share a KV head.
SHARED_TOKENS, DIMS, MOST_QUERIES = 32, (64, 128), 16
# Integer kernel: (channels of a head, bits of a code), and maximum queries for partitions of 64 and of 128.
INTEGERS, MOST_INTEGER_QUERIES, MOST_HALVED_QUERIES = ((128, 4), (128, 2), (64, 4)), 8, 4
# Compute capability of an A100.
AMPERE = (8, 0)


def has_tensor_cores(keys: torch.Tensor) -> bool:
    """Whether ``keys`` are on an NVIDIA GPU with the instructions of gluon/packed_blocks.py."""
    found = capability(keys)
    return found is not None and found >= AMPERE


def multiplies_integers(keys: torch.Tensor) -> bool:
    """Whether Triton compiles integer products on the device of ``keys``. False for NVIDIA GPUs below 8.0."""
    found = capability(keys)
    return found is None or found >= AMPERE


def fragments(packing: Packing, keys: torch.Tensor, values: torch.Tensor, group: int) -> PackedFragments | None:
    """The constants of the Gluon kernel. None if it does not support the blocks or the device.

    It supports codes of all bits in 16-bit pools, with heads of 64 or 128 channels. It does not support codes that index a table of
    levels, or values whose tokens share scales.

    Args:
        packing: How blocks are packed.
        keys, values: One layer's buffers, [slots, kv_heads, dim].
        group: Queries that share a KV head.
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


def integer_fragments(packing: Packing, keys: torch.Tensor, values: torch.Tensor, group: int) -> IntegerFragments | None:
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


def max_resident_programs(packing: Packing, keys: torch.Tensor, values: torch.Tensor, group: int) -> int | None:
    """Programs of a Gluon kernel that run at the same time. None if neither Gluon kernel supports the blocks."""
    if fragments(packing, keys, values, group) is None and integer_fragments(packing, keys, values, group) is None:
        return None
    return torch.cuda.get_device_properties(keys.device).multi_processor_count * RESIDENT


def check_readable(packing: Packing, keys: torch.Tensor) -> None:
    """Check that a kernel reads such blocks.

    Args:
        packing: How blocks are packed.
        keys: One layer's buffer.

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

    Args:
        packing: How blocks are packed.
        queries: [requests, heads, dim].
        keys, values: One layer's buffers, [slots, kv_heads, dim].
        token_table: int32 [rows, width]. A row holds the slots of its blocks, then those of its exact tokens.
        rows: int64 [requests], rows of the table.
        lengths: int64 [requests], slots of each row.
        packed_slots: int32 [rows], slots with blocks at the start of each row; 0 for none.
        scaling: Factor on query-key products, positive.
        splits: Number of splits of the blocks, and of the exact tokens. They are read in parallel.

    Raises:
        OptionError: No tile sizes for these heads fit the GPU, or no kernel reads such blocks (:func:`check_readable`).
    """
    check_readable(packing, keys)
    to_keys, to_values = packing.rotations(queries.device)
    queries = queries.contiguous()
    rotated = queries if to_keys is None else queries.float() @ to_keys
    table = token_table, token_table.stride(0), rows, lengths, packed_slots
    parts = SplitOutputs(queries, values.shape[2], splits)
    call = PackedAttentionCall(packing, queries, rotated, keys, values, table, scaling, parts)
    constants = fragments(packing, keys, values, call.group)
    integers = integer_fragments(packing, keys, values, call.group)
    if integers is not None:
        launch_gluon_integers(call, integers)
    elif packing.keys.sums:
        launch_integers(call)
    elif constants is not None:
        launch_gluon(call, constants)
    else:
        launch_triton(call, fast=has_ptx(keys) and keys.element_size() == 2)
    if to_values is None:
        return parts.merged_output()
    far, near = parts.separate_outputs()
    return (far @ to_values.t() + near).to(queries.dtype)
