"""Shared parts of kernels: launches with tile sizes that fit the GPU, tests for features of NVIDIA GPUs, pointers, and ordered access.

A launch uses the largest tile sizes for which the GPU has enough shared memory. One program may use 227 KiB on an H100 or B200, 163 KiB on
an A100, and 99 KiB on an L40S or RTX 5090. Only the compiler knows how much a kernel uses.

Ordered access is to 64-bit words in memory shared by processes on several GPUs (PTX, scope ``sys``), and to counts that kernels of one GPU
await. It uses loads and stores, because GPUs joined by PCIe have no atomic operations on each other's memory.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from sglang_ext.core import OptionError

Choice = TypeVar("Choice")
# Compute capabilities of an A100 and of an H100.
AMPERE, HOPPER = (8, 0), (9, 0)
# Index of the choice that the last launch of each key used. Earlier choices do not fit.
_TAKEN: dict[Hashable, int] = {}


def launch_first_fitting(
    choices: Sequence[Choice], launch: Callable[[Choice], object], key: Hashable, what: Callable[[], str], remedy: str
) -> None:
    """Launch a kernel with the first of ``choices`` that fits the GPU. Later launches for ``key`` start at that choice.

    It is safe during the capture of a CUDA graph, because choices that do not fit are never launched. ``choices``: tile sizes, in order of
    preference. ``key``: all other values that determine the kernel's shared memory. ``what`` returns the kernel's work and shape.

    Raises:
        OptionError: No choice fits. The message names the shape, the GPU and the remedy.
    """
    for index in range(_TAKEN.get(key, 0), len(choices)):
        try:
            launch(choices[index])
        except OutOfResources as error:
            refused = error
            continue
        _TAKEN[key] = index
        return
    raise OptionError(
        f"{what()} takes {refused.required} of {refused.name}, and {gpu_name()} has {refused.limit}: {remedy}"
    ) from refused


def has_ptx(keys: torch.Tensor) -> bool:
    """Whether ``keys`` are on an NVIDIA GPU, so that kernels may use PTX. False for other GPUs and for the interpreter."""
    return keys.is_cuda and torch.version.hip is None


def capability(keys: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU that holds ``keys``. None on other devices."""
    return torch.cuda.get_device_capability(keys.device) if has_ptx(keys) else None


def has_tensor_cores(keys: torch.Tensor) -> bool:
    """Whether ``keys`` are on an NVIDIA GPU with the instructions of gluon/packed_blocks.py."""
    found = capability(keys)
    return found is not None and found >= AMPERE


def multiplies_integers(keys: torch.Tensor) -> bool:
    """Whether Triton compiles integer products on the device of ``keys``. False for NVIDIA GPUs below 8.0."""
    found = capability(keys)
    return found is None or found >= AMPERE


def pdl_options(keys: torch.Tensor) -> dict[str, bool]:
    """Launch options for a kernel that can start before the previous kernel ends (CUDA's programmatic dependent launch).

    ``EARLY``, set if the GPU that holds ``keys`` supports it, tells the kernel to wait for the previous kernel itself.
    """
    found = capability(keys)
    return {"EARLY": True, "launch_pdl": True} if found is not None and found >= HOPPER else {"EARLY": False}


def gpu_name() -> str:
    """Name of the current GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this GPU"


def shape_name(dim: int, group: int, dtype: torch.dtype) -> str:
    """Text that describes an attention shape: channels per head, query heads per KV head, and dtype of the KV pool."""
    return f"{dim} channels a head, {group} query heads a KV head and KV in {dtype_name(dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as flags spell it, for example bfloat16."""
    return str(dtype).removeprefix("torch.")


def padded_size(count: int) -> int:
    """Size to which ``count`` channels or bytes are padded for a matrix product: a power of 2, at least 16."""
    return max(16, triton.next_power_of_2(count))


def halvings(most: int, least: int = 16) -> tuple[int, ...]:
    """``most``, ``most / 2`` and so on, down to ``least``. Both are powers of 2."""
    return tuple(most >> step for step in range(max(1, most.bit_length() - least.bit_length() + 1)))


@triton.jit
def pointer_at(address, KIND: tl.constexpr):
    """Pointer to an address that is a multiple of 16 bytes. The hint lets the compiler vectorize loads and stores."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def buffer_pointer(table, number, KIND: tl.constexpr):
    """Pointer to the buffer whose address is entry ``number`` of the table. The address is a multiple of 16 bytes."""
    return pointer_at(tl.load(table + number), KIND)


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
