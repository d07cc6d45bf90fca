"""Least and largest number of each channel of the keys in each page of the KV pool, by which Quest bounds pages: an eighth of their bytes.

They follow the keys as codes do (slot_codes.py). Each forward, in a CUDA graph or not, brings the pages up to date whose slots it wrote,
once for all layers, when its last layer has attended: all keys that are in a page then are read again. So what a draft left, or another
request, is gone as soon as it is written over, and nobody has to remember how far a page is filled. A page that is not whole has
extremes of whatever was in its other slots; nothing is chosen from it.
"""

from collections.abc import Sequence

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.compressed.key_sidecar import KeySidecar


class PageExtremes(KeySidecar):
    """Extremes of all pages.

    Args:
        keys: of all attention layers of the pool, [slots, kv_heads, head_dim] each; all alike, and where they are as long as this is used.
        layer_ids: index of each layer in the model.
        page: tokens of a page.

    Attributes:
        held: [layers, pages, kv_heads, 2, head_dim], in the keys' dtype; the least number, then the largest.
        layer_ids: of the layers.
        page: tokens of a page.
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
        """As :meth:`KeySidecar.write`: bound the pages of the slots."""
        if not len(slots):
            return
        if slots.is_cuda:
            from sglang_ext.layers.kernels.selection.quest_pages import bound_pages

            bound_pages(self._table, self._keys[0], slots, self.held, self.page)
            return
        pages = (slots // self.page).unique()
        for keys, held in zip(self._keys, self.held):
            held[pages] = compute_extremes(keys, self.page, pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.held.nbytes


def compute_extremes(keys: torch.Tensor, page: int, pages: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """The least and largest number of each channel in whole pages of a pool: [pages, kv_heads, 2, dim].

    Args:
        keys: [slots, kv_heads, dim].
        page: tokens of a page.
        pages: int64, some of them; all by default.
    """
    paged = keys[: len(keys) // page * page].unflatten(0, (-1, page))[pages]
    return torch.stack([paged.amin(1), paged.amax(1)], dim=2)
