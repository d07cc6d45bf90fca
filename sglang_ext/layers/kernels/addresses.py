"""What begins at an address: kernels of many layers take a table of their buffers' addresses, or an address of another GPU's memory."""

import triton
import triton.language as tl


@triton.jit
def pointer_at(address, KIND: tl.constexpr):
    """What begins at an address, a multiple of 16 bytes: else the compiler takes its numbers for scattered ones."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def buffer_pointer(table, number, KIND: tl.constexpr):
    """The buffer whose address is so many addresses behind the first of a table, a multiple of 16 bytes."""
    return pointer_at(tl.load(table + number), KIND)
