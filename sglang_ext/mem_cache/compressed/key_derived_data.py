"""Data beside the KV pool that follows its keys: codes of slots (``--kv-score-bits``), extremes of pages (Quest).

Each forward, in a CUDA graph or not, updates the data of the slots that it wrote, once for all layers, after its last layer has attended.
This happens on the model's stream, whichever request computes the keys. So a prefix hit finds the data, and the data of a draft token's
exact key replaces that of its draft key. So the data need not be tracked per request.

A selection on a second stream waits for the forward before it, and reads slots of tokens that no forward writes. Keys loaded from host
memory are processed when the prefix tree inserts them. Keys from another server would have no codes, so the combination is refused
(config/selection_options.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.selection.scoring_keys import KeyQuantizer, KeySpec, QuantizedKeys


class KeyDerivedData(ABC):
    """Data that each forward updates, once for all layers, after the last of ``layer_ids`` has attended. Layers attend in this order."""

    def __init__(self, layer_ids: Sequence[int]):
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


class SlotCodes(KeyDerivedData):
    """Keys of all slots in 8 or 4 bits (``held``, by slot), used for scoring only.

    ``keys`` are those of the pool's attention layers, [slots, kv_heads, head_dim] each. They must not move in memory.
    """

    def __init__(self, keys: Sequence[torch.Tensor], layer_ids: Sequence[int], bits: int):
        super().__init__(layer_ids)
        (slots, heads, dim), device = keys[0].shape, keys[0].device
        self.held = QuantizedKeys(KeySpec(len(keys), heads, dim, keys[0].dtype, bits), slots, device)
        self._quantizer = KeyQuantizer(keys, self.held)
        self.compile_kernels(device)

    def write(self, slots: torch.Tensor) -> None:
        self._quantizer.quantize(slots)


class PageExtremes(KeyDerivedData):
    """Smallest and largest key of each channel in each page of the KV pool: Quest's bounds of pages, an eighth of the keys' bytes.

    An update computes the extremes from all keys of the page. So overwritten keys, of rejected drafts or of earlier requests, no longer count.
    An incomplete page also has extremes of its other slots. No selection uses such a page.

    ``keys`` are those of the pool's attention layers, [slots, kv_heads, head_dim] each, with equal shapes. They must not move in memory.

    Attributes:
        held: [layers, pages, kv_heads, 2, head_dim], in the keys' dtype: the smallest number, then the largest.
        page: Tokens of a page.
    """

    def __init__(self, keys: Sequence[torch.Tensor], layer_ids: Sequence[int], page: int):
        super().__init__(layer_ids)
        (slots, heads, dim), device = keys[0].shape, keys[0].device
        self.layer_ids, self.page = tuple(layer_ids), page
        self.held = keys[0].new_zeros(len(keys), slots // page, heads, 2, dim)
        self._keys = tuple(keys)
        self._table = to_device([each.data_ptr() for each in keys], device)
        self.compile_kernels(device)

    def write(self, slots: torch.Tensor) -> None:
        if not len(slots):
            return
        if slots.is_cuda:
            from sglang_ext.layers.kernels.kv_copies import bound_pages

            bound_pages(self._table, self._keys[0], slots, self.held, self.page)
            return
        pages = (slots // self.page).unique()
        for keys, held in zip(self._keys, self.held):
            held[pages] = compute_extremes(keys, self.page, pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all extremes."""
        return self.held.nbytes


def compute_extremes(keys: torch.Tensor, page: int, pages: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Smallest and largest number of each channel in whole pages of ``keys``, [slots, kv_heads, dim]: [pages, kv_heads, 2, dim].

    ``pages``, int64, are the wanted ones; all by default.
    """
    paged = keys[: len(keys) // page * page].unflatten(0, (-1, page))[pages]
    return torch.stack([paged.amin(1), paged.amax(1)], dim=2)
