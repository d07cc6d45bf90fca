"""Prefill attention over a prompt's own codes on Hopper, in two kernels, with specialized warps. ``attend`` of integer_prefill.py uses it.

The first kernel is prefill_tiles (prefill_attention.py). It attends to exact tokens, and stores the query codes that the second kernel
needs. The second is the Gluon kernel of gluon/prefill_codes.py. It attends to codes, and adds its result to the output.
"""

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ext.layers.kernels.gluon.prefill_codes import prefill_codes
from sglang_ext.layers.kernels.gluon.prefill_steps import PARTITIONS, PROGRAM_ROWS, PrefillSteps
from sglang_ext.layers.kernels.hack.prompt_codes import PromptCodes, PromptBatch, padded_terms
from sglang_ext.layers.kernels.packed import packed_decode

# Pipeline stages that shared memory holds, by partition: 185 and 164 KiB.
STAGES = {64: 8, 128: 4}
# Major compute capability.
HOPPER = 9
NUMBERS = {torch.int8: gl.int8, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True)
class PrefillQueryCodes:
    """Query codes that the first kernel stores for the second. Each tensor begins with [tokens, heads].

    Attributes:
        codes: int8, one per channel.
        scales: float32, one per partition.
        terms: float16, factors of the keys' terms.
        sums: float32, log2 of the sum of exact tokens' weights.
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

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of the kernels' arguments."""
        return self.codes, self.scales, self.terms, self.sums


def is_supported_shape(capability: tuple[int, int] | None, partition: int, block: int, group: int) -> bool:
    """Whether the kernels support a shape: on Hopper, partitions of 64 or 128, and a block's rows that fill programs.

    Args:
        capability: Compute capability of an NVIDIA GPU; None for other devices.
        partition: Channels of a key that share a scale.
        block: Tokens that are packed as one block.
        group: Query heads that share a KV head.
    """
    return capability is not None and capability[0] == HOPPER and partition in PARTITIONS and block * group % PROGRAM_ROWS == 0


def is_supported(prompts: PromptBatch, queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernels support these prompts on their device (:func:`is_supported_shape`).

    Args:
        prompts: The prompts.
        queries: [tokens, heads, dim].
        keys: The layer's buffer, [slots, kv_heads, dim].
    """
    packing, group = prompts.packing, queries.shape[1] // keys.shape[1]
    return is_supported_shape(packed_decode.capability(keys), packing.keys.grid.channels, packing.block_tokens, group)


def attend_to_codes(prompts: PromptBatch, codes: PromptCodes, left: PrefillQueryCodes, out: torch.Tensor) -> None:
    """Add the attention over codes to an output over exact tokens. Does nothing without codes. Does not wait for the device.

    Args:
        prompts: The prompts.
        codes: Codes of their whole blocks.
        left: Query codes from the first kernel.
        out: [tokens, heads, dim of a value]. Holds the output over exact tokens, and receives the output over all tokens.
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
    """TMA descriptor of ``numbers`` as rows of ``columns``. One copy moves a box of ``shape``."""
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), NUMBERS[numbers.dtype])
    return TensorDescriptor.from_tensor(numbers.view(-1, columns), list(shape), layout)
