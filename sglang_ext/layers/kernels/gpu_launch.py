"""What fits a GPU: of a kernel's tile sizes the largest for which its shared memory suffices, and what NVIDIA's alone can do.

GPUs differ: a program may have 227 KiB on an H100 or B200, 163 KiB on an A100, 99 KiB on an L40S or RTX 5090. What a kernel takes
the compiler alone knows; Triton compares it with the device's ``shared_memory_per_block_optin`` before anything runs.
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
# Which of its choices a launch took last, by what it was launched for. Those before it do not fit.
_TAKEN: dict[Hashable, int] = {}


def launch_first_fitting(
    choices: Sequence[Choice], launch: Callable[[Choice], object], key: Hashable, what: Callable[[], str], remedy: str
) -> None:
    """Launch with the first of ``choices`` that fits the GPU; later launches for ``key`` begin with it.

    Captures of CUDA graphs may do so: what does not fit is not launched.

    Args:
        choices: tile sizes, those preferred first.
        launch: launches a kernel with one of them.
        key: all that the kernel's shared memory depends on besides.
        what: names the kernel's work and the shape, where a message needs it.
        remedy: what to do where none fits.

    Raises:
        OptionError: none fits; names the shape, the GPU, and what to do instead.
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
    """Whether ``keys`` lie on an NVIDIA GPU, for which kernels may have assembly; not on another's, or in the interpreter."""
    return keys.is_cuda and torch.version.hip is None


def capability(keys: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU on which ``keys`` lie; None elsewhere."""
    return torch.cuda.get_device_capability(keys.device) if has_ptx(keys) else None


def pdl_options(keys: torch.Tensor) -> dict[str, bool]:
    """How a kernel is launched that waits by itself until the one before has ended, where it is ``EARLY``: while that one ends, by CUDA's
    programmatic dependent launch, where the GPU on which ``keys`` lie has it."""
    found = capability(keys)
    return {"EARLY": True, "launch_pdl": True} if found is not None and found >= HOPPER else {"EARLY": False}


def gpu_name() -> str:
    """Of the current device."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this GPU"


def shape_name(dim: int, group: int, dtype: torch.dtype) -> str:
    """A shape of attention in words: channels of a head, query heads a KV head, and the KV pool's dtype."""
    return f"{dim} channels a head, {group} query heads a KV head and KV in {dtype_name(dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """As flags name it, for example bfloat16."""
    return str(dtype).removeprefix("torch.")


def padded_size(count: int) -> int:
    """The power of 2 to which what has so many channels or bytes is filled up in a matrix product, which has at least 16."""
    return max(16, triton.next_power_of_2(count))


def halvings(most: int, least: int = 16) -> tuple[int, ...]:
    """``most``, its half, and so on down to ``least``; both powers of 2."""
    return tuple(most >> step for step in range(max(1, most.bit_length() - least.bit_length() + 1)))
