"""Between host and device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Up to so many bytes CUDA takes from memory that is not pinned before the call returns, and sends them along with launches.
SENT_WITH_LAUNCHES = 64 << 10


def to_device(
    values: list, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Values on the device, without waiting for it; see :func:`sent`."""
    return sent(torch.tensor(values, dtype=dtype), torch.device(device))


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for it; itself where that is the host.

    A copy from pinned memory is a copy engine's, which serves one after the other: beside a load of full KV from the host it would wait
    for the end of that, and the stream with it (docs/results/tiers.md). So only what is large is pinned.
    """
    pinned = host.pin_memory() if device.type == "cuda" and host.nbytes > SENT_WITH_LAUNCHES else host
    return pinned.to(device, non_blocking=True)


@contextmanager
def coarse_products(device: torch.device) -> Iterator[None]:
    """On a GPU, products of float32 matrices inside this context take tensor cores: factors have 10 bits after the first (TF32)."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
