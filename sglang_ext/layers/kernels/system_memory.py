"""Words of 64 bits in memory that processes on several GPUs share: read and written in an order that all of them see (PTX, scope ``sys``);
and counts that kernels of one GPU wait for.

They are loads and stores, as GPUs that are joined by PCIe have no atomic operations on each other's memory. Triton's interpreter runs no
assembly: tests put others in the place of these functions, which are all that has any.
"""

import triton
import triton.language as tl


@triton.jit
def load_acquire(pointer):
    """The word at a pointer; what its writer wrote before it is there afterwards."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def load_acquired_count(pointer):
    """The int32 at a pointer, which a kernel of this GPU writes; what it wrote before is there afterwards."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_release(pointer, word):
    """Write a word once all that was written before it, by earlier kernels of the stream too, can be seen."""
    tl.inline_asm_elementwise(
        "st.release.sys.global.b64 [$1], $2;\nmov.b64 $0, $2;", "=l,l,l", [pointer.to(tl.int64), word.to(tl.int64)], dtype=tl.int64,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def nanoseconds():
    """Of the device's clock, which begins anywhere."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
