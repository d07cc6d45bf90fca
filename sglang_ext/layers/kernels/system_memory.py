"""Ordered access to 64-bit words in memory shared by processes on several GPUs (PTX, scope ``sys``), and to counts that kernels of one
GPU await.

The functions use loads and stores, because GPUs joined by PCIe have no atomic operations on each other's memory. Triton's interpreter
runs no assembly. These functions contain all of it, so tests replace them.
"""

import triton
import triton.language as tl


@triton.jit
def load_acquire(pointer):
    """Load the word at a pointer. Its writer's earlier writes are visible afterwards."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def load_acquired_count(pointer):
    """Load the int32 at a pointer, written by a kernel of this GPU. That kernel's earlier writes are visible afterwards."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_release(pointer, word):
    """Store a word after all earlier writes, including those of earlier kernels of the stream, are visible."""
    tl.inline_asm_elementwise(
        "st.release.sys.global.b64 [$1], $2;\nmov.b64 $0, $2;", "=l,l,l", [pointer.to(tl.int64), word.to(tl.int64)], dtype=tl.int64,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def nanoseconds():
    """Return the device's clock in nanoseconds, from an arbitrary start."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
