"""What kernels that pack blocks do alike: parameters as they are stored, and bytes to a head's cells."""

import triton
import triton.language as tl

# The greatest float16, and what rounds a small float32 that is added to it to an integer, ties to even: the lowest bits of the
# sum hold it.
LARGEST, ROUNDING = tl.constexpr(65504.0), tl.constexpr(1.5 * 2**23)


@triton.jit
def rounded(parameter):
    """Scales, zero points and what codes lack, as they are read again: of float16, finite."""
    return tl.minimum(tl.maximum(parameter, -LARGEST), LARGEST).to(tl.float16).to(tl.float32)


@triton.jit
def store_codes(codes, head_bytes, slots, slot_bytes, BITS: tl.constexpr, CELL: tl.constexpr):
    """Codes, int32 [tokens, dim], as bytes, into a head's cells in ``slots``."""
    TOKENS: tl.constexpr = codes.shape[0]
    PARTS: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = codes.shape[1] // PARTS
    shifts = tl.arange(0, PARTS) * BITS
    packed = tl.sum(tl.reshape(codes, (TOKENS, PARTS, BYTES)) << shifts[None, :, None], 1)
    token, column = tl.arange(0, TOKENS), tl.arange(0, BYTES)
    cell = head_bytes + tl.load(slots + token * BYTES // CELL) * slot_bytes + token * BYTES % CELL
    tl.store(cell[:, None] + column[None, :], packed.to(tl.uint8))


@triton.jit
def store_parameters(parameters, head_bytes, slots, slot_bytes, FIRST: tl.constexpr, CELL: tl.constexpr):
    """Numbers of one axis into a head's cells, beginning ``FIRST`` bytes after its first."""
    byte = FIRST + parameters.dtype.primitive_bitwidth // 8 * tl.arange(0, parameters.shape[0])
    cell = head_bytes + tl.load(slots + byte // CELL) * slot_bytes + byte % CELL
    tl.store(cell.to(tl.pointer_type(parameters.dtype)), parameters)
