"""Between host and device."""

import torch


def to_device(
    values: list, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Values on the device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    return host.to(device, non_blocking=True)
