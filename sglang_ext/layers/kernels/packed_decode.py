"""Decode attention over rows that begin with packed blocks, split over the context (flash decoding).

Programs of a request's first splits read its packed blocks, those of the others its exact tokens; a second kernel joins what
they found by log-sum-exp. What comes of packed and of exact tokens is summed apart where the former has to be rotated
back. The splits' kernel is gluon/packed.py's where it takes the blocks (:func:`fragments`), whole_attention.py's where they hold
more than codes, scales and zero points, else packed_attention.py's.
"""

from dataclasses import dataclass

import torch
import triton

from sglang_ext.layers.kernels.flash_parts import Parts
from sglang_ext.layers.kernels.gluon import waves
from sglang_ext.layers.kernels.gluon.constants import Fragments
from sglang_ext.layers.kernels.gluon.fragments import TOKENS
from sglang_ext.layers.kernels.gluon.packed import packed_splits_gluon
from sglang_ext.layers.kernels.packed_attention import packed_splits
from sglang_ext.layers.kernels.whole_attention import whole_splits
from sglang_ext.layers.kernels.whole_blocks import polynomial
from sglang_ext.mem_cache.packing import Packing, as_bytes

# Found on an H200: programs of one warp do best, with so many tokens in a step where scales of keys are a token's, or are a
# channel's; and so many exact tokens. Not tried there: programs that make whole blocks at once, of four.
BY_TOKEN, BY_CHANNEL, EXACT = 64, 32, 32
WARPS = 1
WHOLE_WARPS = 4
# Tokens that share a channel's scale, sizes of a head, and most queries that share a KV head, in the Gluon kernel.
SHARED_TOKENS, DIMS, MOST_QUERIES = 32, (64, 128), 16
# Options of its compiler.
GLUON_OPTIONS = {"num_warps": 1}


def on_gpu(keys: torch.Tensor) -> bool:
    """Whether kernels run on the GPU that holds ``keys``, not in the interpreter."""
    return keys.is_cuda


def has_tensor_cores(keys: torch.Tensor) -> bool:
    """Whether ``keys`` lie on an NVIDIA GPU with the instructions of gluon/packed.py."""
    return keys.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(keys.device) >= (8, 0)


def fragments(packing: Packing, keys: torch.Tensor, values: torch.Tensor, group: int) -> Fragments | None:
    """The constants of the Gluon kernel; None where it does not take such blocks, or there is no GPU for it.

    It takes codes of all bits in pools of 16 bits, with heads of 64 or 128 channels, unless codes mean levels of a table.

    Args:
        packing: how blocks are packed.
        keys, values: a layer's buffers, [slots, kv_heads, dim].
        group: queries that share a KV head.
    """
    key, value = packing.keys, packing.values
    plain = key.plain and value.plain and packing.levels(keys.device) == (None, None)
    if not (plain and has_tensor_cores(keys)) or keys.element_size() != 2:
        return None
    if key.dim not in DIMS or (value.dim, value.bits, value.tokens) != (key.dim, key.bits, key.tokens) or key.tokens != TOKENS:
        return None
    if group > MOST_QUERIES or key.grid not in ((SHARED_TOKENS, 1), (1, key.dim)):
        return None
    made = Fragments(key.dim, group, key.bits, key.code_cells, value.grid.channels, by_channel=key.grid.channels == 1)
    whole_units = value.grid.channels == key.dim or made.bytes % value.grid.channels == 0
    return made if whole_units and made.value_unit >= 32 and made.groups <= 4 else None


def warps_at_once(packing: Packing, keys: torch.Tensor, values: torch.Tensor, group: int) -> int | None:
    """Programs of the Gluon kernel that run side by side; None where it does not take the blocks (:func:`fragments`)."""
    if fragments(packing, keys, values, group) is None:
        return None
    return torch.cuda.get_device_properties(keys.device).multi_processor_count * waves.RESIDENT


def _padded(count: int) -> int:
    """As many, or more, as a tile may have along an axis; 0 of none."""
    return max(16, triton.next_power_of_2(count)) if count else 0


@dataclass(frozen=True)
class _Call:
    """What both kernels take, as :func:`packed_decode` was given it.

    Attributes:
        rotated: queries as packed keys are.
        parts: what parts of rows give.
    """

    packing: Packing
    queries: torch.Tensor
    rotated: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]
    scaling: float
    parts: Parts

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs."""
        return self.parts.most, self.keys.shape[1], len(self.queries)

    @property
    def outcome(self) -> tuple[torch.Tensor, torch.Tensor, float, int, int, int, int]:
        """Where parts go, and what follows it in both kernels."""
        steps = *self.keys.stride()[:2], *self.values.stride()[:2]
        return self.parts.partial, self.parts.lse, self.scaling, *steps


def _launch_gluon(call: _Call, constants: Fragments) -> None:
    keys, values = call.keys, call.values
    words, numbers = ([part.view(dtype) for part in (keys, values)] for dtype in (torch.int32, torch.float16))
    packed_splits_gluon[call.grid](
        call.queries, call.rotated, keys, values, words[0], numbers[0], words[1], numbers[1], *call.rows, *call.outcome,
        *call.parts.splits, HEADS=keys.shape[1], BLOCK_SLOTS=call.packing.block_slots, F=constants, **GLUON_OPTIONS,
    )  # fmt: skip


def _launch_triton(call: _Call) -> None:
    keys, values, key, value = call.keys, call.values, call.packing.keys, call.packing.values
    (_, heads, dim), kv_heads = call.queries.shape, keys.shape[1]
    key_levels, value_levels = call.packing.levels(keys.device)
    table = key_levels is not None
    # Without a table the kernel reads none of it.
    levels = (key_levels, value_levels) if table else (call.parts.lse, call.parts.lse)
    packed_splits[call.grid](
        call.queries, call.rotated, keys, values, as_bytes(keys), keys.view(torch.float16), as_bytes(values),
        values.view(torch.float16), *levels, *call.rows, *call.outcome, HEADS=kv_heads, GROUP=heads // kv_heads,
        M=max(8, triton.next_power_of_2(heads // kv_heads)), DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        COLUMNS=_padded(key.token_bytes), VALUE_COLUMNS=_padded(value.token_bytes), BITS=key.bits, BLOCK_TOKENS=key.tokens,
        BLOCK_SLOTS=call.packing.block_slots, CODE_CELLS=key.code_cells, KEY_CELL=key.cell_bytes // 2,
        VALUE_CELL=value.cell_bytes // 2,
        KEY_GROUPS=key.groups[0] if key.grid.channels == 1 else 1, KEY_UNIT=key.grid.channels,
        VALUE_UNIT=value.grid.channels, TABLE=table,
        FAST=on_gpu(keys) and keys.dtype != torch.float32 and key.bits < 8 and not table,
        STEP=BY_CHANNEL if key.grid.channels == 1 else BY_TOKEN, EXACT=call.parts.splits[1], N=EXACT, num_warps=WARPS,
        **call.parts.shape,
    )  # fmt: skip


def _launch_whole(call: _Call) -> None:
    keys, values, packing, (_, heads, dim) = call.keys, call.values, call.packing, call.queries.shape
    key, value, rotary, kv_heads = packing.keys, packing.values, packing.rotary, keys.shape[1]
    group, fast = heads // kv_heads, on_gpu(keys) and keys.dtype != torch.float32
    # Without a rotary embedding the kernel reads no steps.
    steps = rotary.steps_on(keys.device, dim) if key.positions else call.parts.lse
    whole_splits[call.grid](
        call.queries, call.rotated, keys, values, as_bytes(keys), keys.view(torch.float16), keys.view(torch.int16),
        keys.view(torch.int32), as_bytes(values), values.view(torch.float16), values.view(torch.int16), steps,
        *polynomial(packing.quantizer, dim), *call.rows, *call.outcome, HEADS=kv_heads, GROUP=group,
        M=max(8, triton.next_power_of_2(group)), DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        COLUMNS=_padded(dim // 2), VALUE_COLUMNS=_padded(value.dim // 2), BITS=key.bits, TOKENS=key.tokens,
        BLOCK_SLOTS=packing.block_slots, CODE_CELLS=key.code_cells, KEY_CELL=key.cell_bytes, VALUE_CELL=value.cell_bytes,
        KEY_SHARING=key.grid.tokens, KEY_CHANNELS=key.grid.channels, VALUE_CHANNELS=value.grid.channels,
        OUTLIERS=key.outliers, VALUE_OUTLIERS=value.outliers, PLACES=_padded(key.outliers), VALUE_PLACES=_padded(value.outliers),
        PAIRS=len(rotary.frequencies) if key.positions else 0, INTERLEAVED=key.positions and rotary.interleaved, FAST=fast,
        EXACT=call.parts.splits[1], N=EXACT, num_warps=WHOLE_WARPS, **call.parts.shape,
    )  # fmt: skip


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
        packing: how blocks are packed.
        queries: [requests, heads, dim].
        keys, values: a layer's buffers, [slots, kv_heads, dim].
        token_table: int32 [rows, width]; a row leads to its blocks' slots, then to those of exact tokens.
        rows: int64 [requests], rows of the table.
        lengths: int64 [requests], slots of each row.
        packed_slots: int32 [rows], of these, those with blocks; 0 for none.
        scaling: factor on query-key products, positive.
        splits: parts of the blocks, and of the exact tokens, that are read at the same time.
    """
    to_keys, to_values = packing.rotations(queries.device)
    queries = queries.contiguous()
    rotated = queries if to_keys is None else queries.float() @ to_keys
    table = token_table, token_table.stride(0), rows, lengths, packed_slots
    parts = Parts(queries, values.shape[2], splits)
    call = _Call(packing, queries, rotated, keys, values, table, scaling, parts)
    constants = fragments(packing, keys, values, queries.shape[1] // keys.shape[1])
    if constants is not None:
        _launch_gluon(call, constants)
    elif packing.keys.plain and packing.values.plain:
        _launch_triton(call)
    else:
        _launch_whole(call)
    if to_values is None:
        return parts.joined()
    far, near = parts.apart()
    return (far @ to_values.t() + near).to(queries.dtype)
