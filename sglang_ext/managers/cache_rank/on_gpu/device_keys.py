"""Keys that a cache rank on a GPU holds, as they are or in few bits, with exact keys and values where rows are sent, and how they come out of
the arena."""

import torch

from sglang_ext.managers.cache_rank.keys import KeyStore
from sglang_ext.managers.cache_rank.on_gpu.mapped_arena import MappedArena
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.held_keys import CodedKeys, KeyCoder


class DeviceKeys:
    """The keys of all blocks.

    Args:
        store: what the rank holds.
        scaling: factor on query-key products, by layer.
        device: that it is on.

    Attributes:
        buffers: by which is chosen, in the place of a pool's; of keys in few bits those of one block, beside the codes of all.
        sent: exact keys and values of all; None where positions alone are sent.
    """

    def __init__(self, store: KeyStore, scaling: tuple[float, ...], device: torch.device):
        self._held, self._rows, self._coder, codes = store.held, store.rows, None, None
        layers = tuple(range(len(scaling)))
        if isinstance(self._held, CodedKeys):
            sizes, codes = self._held.sizes, self._held
            self._block = torch.empty(sizes.layers, BLOCK, sizes.kv_heads, sizes.dim, dtype=sizes.dtype, device=device)
            self._places = torch.arange(BLOCK, device=device)
            keys = self._block.unbind()
            self._coder = KeyCoder(keys, self._held)
        else:
            keys = self._held.of_layers()
        self.buffers = KVBuffers(layers, scaling, keys, keys, codes=codes)
        rows = self._rows
        self.sent = None if rows is None else KVBuffers(layers, scaling, rows.keys.of_layers(), rows.values.of_layers())

    def pull(self, memory: MappedArena, place: int, tokens: int, start: int) -> None:
        """Hold the first tokens of a place of the arena from place ``start`` on."""
        end, rows = start + tokens, self._rows
        if self._coder is None:
            memory.pull_keys(place, tokens, self._held.between(start, end))
        else:
            memory.pull_keys(place, tokens, self._block[:, :tokens])
            self._coder.code(self._places[:tokens], start)
            if rows is not None:
                rows.keys.between(start, end).copy_(self._block[:, :tokens])
        if rows is not None:
            memory.pull_keys(place, tokens, rows.values.between(start, end), values=True)

    def clear(self, tokens: int) -> None:
        """Let the first places hold zeros."""
        self._held.clear(tokens)
