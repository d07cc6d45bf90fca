"""Data beside the KV pool that follows its keys: codes of slots (slot_codes.py), extremes of pages (page_extremes.py)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class KeyDerivedData(ABC):
    """Data that each forward updates, once for all layers, after its last layer has attended.

    Args:
        layer_ids: Index of each layer in the model.
    """

    def __init__(self, layer_ids: Sequence[int]):
        # Layers attend in the order of their indices.
        self._last = max(layer_ids)

    def compile_kernels(self, device: torch.device) -> None:
        """Compile kernels before a request needs them. No request owns slot 0."""
        self.write(torch.zeros(1, dtype=torch.int64, device=device))

    def on_keys_written(self, layer_id: int, slots: torch.Tensor) -> None:
        """Handle that a layer's keys were written to ``slots``, int64 [tokens], after those of all earlier layers of the forward."""
        if layer_id == self._last:
            self.write(slots)

    @abstractmethod
    def write(self, slots: torch.Tensor) -> None:
        """Update the data of ``slots``, int64 [tokens], in all layers, without waiting for the device."""
