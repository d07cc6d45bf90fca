"""Launches Triton kernels with tile sizes that fit the GPU, and tests for features of NVIDIA GPUs.

A launch uses the largest tile sizes for which the GPU has enough shared memory. One program may use 227 KiB on an H100 or B200, 163 KiB on
an A100, and 99 KiB on an L40S or RTX 5090. Only the compiler knows how much a kernel uses. Triton compares that size with the
device's ``shared_memory_per_block_optin`` before the kernel runs.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from sglang_ext.core import OptionError

Choice = TypeVar("Choice")
# Compute capability of an H100.
HOPPER = (9, 0)
# Index of the choice that the last launch of each key used. Earlier choices do not fit.
_TAKEN: dict[Hashable, int] = {}


def launch_first_fitting(
    choices: Sequence[Choice], launch: Callable[[Choice], object], key: Hashable, what: Callable[[], str], remedy: str
) -> None:
    """Launch a kernel with the first of ``choices`` that fits the GPU. Later launches for ``key`` start at that choice.

    It is safe during the capture of a CUDA graph, because choices that do not fit are never launched.

    Args:
        choices: Tile sizes, in order of preference.
        launch: Launches the kernel with one choice.
        key: All other values that determine the kernel's shared memory.
        what: Returns the kernel's work and shape for the error message.
        remedy: What the user can do if no choice fits.

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


def pdl_options(keys: torch.Tensor) -> dict[str, bool]:
    """Launch options for a kernel that can start before the previous kernel ends.

    The kernel uses CUDA's programmatic dependent launch if the GPU that holds ``keys`` supports it. ``EARLY`` tells the kernel to wait
    for the previous kernel itself.
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
