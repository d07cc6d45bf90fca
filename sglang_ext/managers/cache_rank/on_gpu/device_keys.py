"""Keys that a cache rank on a GPU holds, as they are or in few bits, and how they come out of the arena."""

import torch

from sglang_ext.managers.cache_rank.on_gpu.mapped_arena import MappedArena
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.held_keys import CodedKeys, ExactKeys, KeyCoder


class DeviceKeys:
    """The keys of all blocks.

    Args:
        held: where they lie.
        scaling: factor on query-key products, by layer.
        device: that they are on.

    Attributes:
        buffers: in the place of a pool's; of keys in few bits those of one block, beside the codes of all.
    """

    def __init__(self, held: ExactKeys | CodedKeys, scaling: tuple[float, ...], device: torch.device):
        self._held, self._coder, codes = held, None, None
        if isinstance(held, CodedKeys):
            sizes, codes = held.sizes, held
            self._block = torch.empty(sizes.layers, BLOCK, sizes.kv_heads, sizes.dim, dtype=sizes.dtype, device=device)
            self._places = torch.arange(BLOCK, device=device)
            keys = self._block.unbind()
            self._coder = KeyCoder(keys, held)
        else:
            keys = held.of_layers()
        self.buffers = KVBuffers(tuple(range(len(keys))), scaling, keys, keys, codes=codes)

    def pull(self, memory: MappedArena, place: int, tokens: int, start: int) -> None:
        """Hold the first keys of a place of the arena from place ``start`` on."""
        if self._coder is None:
            memory.pull_keys(place, tokens, self._held.between(start, start + tokens))
            return
        memory.pull_keys(place, tokens, self._block[:, :tokens])
        self._coder.code(self._places[:tokens], start)

    def clear(self, tokens: int) -> None:
        """Let the first places hold zeros."""
        self._held.clear(tokens)
