"""Pointers from addresses. Kernels over many layers take a table of buffer addresses, or an address in another GPU's memory."""

import triton
import triton.language as tl


@triton.jit
def pointer_at(address, KIND: tl.constexpr):
    """Pointer to an address that is a multiple of 16 bytes. The hint lets the compiler vectorize loads and stores."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def buffer_pointer(table, number, KIND: tl.constexpr):
    """Pointer to the buffer whose address is entry ``number`` of the table. The address is a multiple of 16 bytes."""
    return pointer_at(tl.load(table + number), KIND)
