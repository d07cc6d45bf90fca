"""What lies beside the KV pool and follows its keys: codes of slots (slot_codes.py), extremes of pages (page_extremes.py)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class KeySidecar(ABC):
    """Brought up to date by each forward, once for all layers, when its last layer has attended.

    Args:
        layer_ids: index of each layer in the model.
    """

    def __init__(self, layer_ids: Sequence[int]):
        # Layers attend in the order of their indices.
        self._last = max(layer_ids)

    def compile_kernels(self, device: torch.device) -> None:
        """Before a request waits for it; slot 0 is nobody's."""
        self.write(torch.zeros(1, dtype=torch.int64, device=device))

    def written(self, layer_id: int, slots: torch.Tensor) -> None:
        """A layer's keys were written to ``slots``, int64 [tokens], as those of the layers before it in the same forward were."""
        if layer_id == self._last:
            self.write(slots)

    @abstractmethod
    def write(self, slots: torch.Tensor) -> None:
        """Bring what belongs to ``slots``, int64 [tokens], up to date in all layers, without waiting for the device."""
