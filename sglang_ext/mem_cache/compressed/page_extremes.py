"""Smallest and largest key of each channel in each page of the KV pool: Quest's bounds of pages, an eighth of the keys' bytes.

They follow the keys as codes do (slot_codes.py). Each forward, in a CUDA graph or not, updates the pages whose slots it wrote, once for
all layers, after its last layer has attended. An update reads all keys of a page again. Keys of rejected drafts, or of another request,
therefore disappear when they are overwritten, and no record of filled slots is needed. An incomplete page also has extremes of its other
slots. No selection uses such a page.
"""

from collections.abc import Sequence

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.compressed.key_derived_data import KeyDerivedData


class PageExtremes(KeyDerivedData):
    """Extremes of all pages.

    Args:
        keys: Keys of the pool's attention layers, [slots, kv_heads, head_dim] each; equal shapes. They must not move in memory.
        layer_ids: Index of each layer in the model.
        page: Tokens of a page.

    Attributes:
        held: [layers, pages, kv_heads, 2, head_dim], in the keys' dtype: the smallest number, then the largest.
        layer_ids: Index of each layer in the model.
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
        """Update the extremes of the slots' pages, as :meth:`KeyDerivedData.write`."""
        if not len(slots):
            return
        if slots.is_cuda:
            from sglang_ext.layers.kernels.quest_pages import bound_pages

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
    """Smallest and largest number of each channel in whole pages of a pool: [pages, kv_heads, 2, dim].

    Args:
        keys: [slots, kv_heads, dim].
        page: Tokens of a page.
        pages: int64, selected pages; all by default.
    """
    paged = keys[: len(keys) // page * page].unflatten(0, (-1, page))[pages]
    return torch.stack([paged.amin(1), paged.amax(1)], dim=2)
