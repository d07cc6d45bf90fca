"""Attention of prompts on their own codes on Hopper, in two kernels, by warps with different work: for integer_prefill.py's ``attend``.

The first is prefill_tiles (prefill_attention.py), which attends to exact tokens and leaves what the second, in Gluon, needs of queries
(gluon/prefill_codes.py): that one attends to codes, and adds what it finds.
"""

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ext.layers.kernels.gluon.prefill_codes import prefill_codes
from sglang_ext.layers.kernels.gluon.prefill_steps import PARTITIONS, PROGRAM_ROWS, PrefillSteps
from sglang_ext.layers.kernels.hack.prompt_codes import PromptCodes, PromptBatch, padded_terms
from sglang_ext.layers.kernels.packed import packed_decode

# Steps that shared memory holds, by partition: 185 and 164 KiB.
STAGES = {64: 8, 128: 4}
# Compute capability, the first number.
HOPPER = 9
NUMBERS = {torch.int8: gl.int8, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True)
class PrefillQueryCodes:
    """What the first kernel leaves of each query, [tokens, heads] and more.

    Attributes:
        codes: int8, of its channels.
        scales: float32, of its partitions.
        terms: float16, what keys' terms are multiplied with.
        sums: float32, logarithms of base 2 of the sums of exact tokens' weights.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    terms: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, queries: torch.Tensor, codes: PromptCodes) -> "PrefillQueryCodes":
        """Room for those of ``queries``, [tokens, heads, dim]."""
        heads = queries.shape[:2]
        return cls(
            torch.empty_like(queries, dtype=torch.int8),
            queries.new_empty(*heads, codes.key_scales.shape[1], dtype=torch.float32),
            queries.new_empty(*heads, codes.key_terms.shape[2], dtype=torch.float16),
            queries.new_empty(heads, dtype=torch.float32),
        )

    @staticmethod
    def query_bytes(dim: int, partition: int) -> int:
        """Bytes of a query of one head."""
        count = dim // partition
        return dim + 4 * count + 2 * padded_terms(count) + 4

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """As kernels take them."""
        return self.codes, self.scales, self.terms, self.sums


def is_supported_shape(capability: tuple[int, int] | None, partition: int, block: int, group: int) -> bool:
    """Whether the kernels take prompts: on Hopper, in partitions of 64 or 128, if a block's rows fill programs.

    Args:
        capability: compute capability of an NVIDIA GPU; None where there is none.
        partition: channels of a key that share a scale.
        block: tokens that are packed together.
        group: query heads that share a KV head.
    """
    return capability is not None and capability[0] == HOPPER and partition in PARTITIONS and block * group % PROGRAM_ROWS == 0


def is_supported(prompts: PromptBatch, queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether they :func:`fit <fits>` such prompts where they lie.

    Args:
        prompts: whose.
        queries: [tokens, heads, dim].
        keys: the layer's buffer, [slots, kv_heads, dim].
    """
    packing, group = prompts.packing, queries.shape[1] // keys.shape[1]
    return is_supported_shape(packed_decode.capability(keys), packing.keys.grid.channels, packing.block_tokens, group)


def attend_to_codes(prompts: PromptBatch, codes: PromptCodes, left: PrefillQueryCodes, out: torch.Tensor) -> None:
    """Add to means of exact tokens' values those of codes, where there are some; does not wait for the device.

    Args:
        prompts: whose.
        codes: of their whole blocks.
        left: of the queries.
        out: [tokens, heads, dim of a value], of exact tokens; becomes that of all.
    """
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
        *boxes, left.parts, out, prompts.numbers, len(prompts.rows), prompts.total, F=steps, num_warps=4
    )


def _box(numbers: torch.Tensor, columns: int, shape: tuple[int, int]) -> TensorDescriptor:
    """Of numbers as rows of so many, of which a box of that shape is copied at once."""
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), NUMBERS[numbers.dtype])
    return TensorDescriptor.from_tensor(numbers.view(-1, columns), list(shape), layout)
