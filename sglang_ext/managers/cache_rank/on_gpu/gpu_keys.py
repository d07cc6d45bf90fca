"""Keys that a cache rank on a GPU holds, as they are or in few bits, with exact keys and values where rows are sent, and how they come out of
the arena."""

from collections.abc import Iterator, Sequence

import torch

from sglang_ext.device import sent
from sglang_ext.managers.cache_rank.key_store import KeyStore
from sglang_ext.managers.cache_rank.on_gpu.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import BLOCK, StagedTokens
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, ExactKeys, KeyQuantizer


class GpuKeys:
    """The keys of all blocks.

    Args:
        store: what the rank holds.
        scaling: factor on query-key products, by layer.
        device: that it is on.

    Attributes:
        buffers: by which is chosen, in the place of a pool's; of keys in few bits what they are coded out of, beside the codes of all.
        sent: exact keys and values of all; None where positions alone are sent.
    """

    def __init__(self, store: KeyStore, scaling: tuple[float, ...], device: torch.device):
        held, rows, layers = store.held, store.rows, tuple(range(len(scaling)))
        exact, codes = held if rows is None else rows.keys, held if isinstance(held, QuantizedKeys) else None
        # None where codes alone are held: keys are coded out of one block then.
        self._exact = exact if isinstance(exact, ExactKeys) else None
        if self._exact is None:
            sizes = held.sizes
            self._block = torch.empty(sizes.layers, BLOCK, sizes.kv_heads, sizes.dim, dtype=sizes.dtype, device=device)
        keys = self._block.unbind() if self._exact is None else self._exact.of_layers()
        self._held, self._rows, self._device, self._first = held, rows, device, torch.arange(BLOCK, device=device)
        self._coder = None if codes is None else KeyQuantizer(keys, codes)
        self.buffers = KVBuffers(layers, scaling, keys, keys, codes=codes)
        self.sent = None if rows is None else KVBuffers(layers, scaling, keys, rows.values.of_layers())

    def pull(self, memory: MappedExchangeBuffer, pulls: Sequence[StagedTokens]) -> None:
        """Hold tokens of places of the arena, each from its first place here on: all blocks at once, but one after another where keys are held in
        few bits alone."""
        if self._exact is None:
            for place, tokens, first in pulls:
                memory.pull([StagedTokens(place, tokens, 0)], self._block)
                self._coder.code(self._first[:tokens], first)
            return
        for some in split_by_block(pulls):
            memory.pull(some, self._exact.whole)
            if self._coder is not None:
                self._coder.code(_places(some, self._device))
            if self._rows is not None:
                memory.pull(some, self._rows.values.whole, values=True)

    def clear(self, tokens: int) -> None:
        """Let the first places hold zeros."""
        self._held.clear(tokens)


def _places(pulls: Sequence[StagedTokens], device: torch.device) -> torch.Tensor:
    """Where their tokens go, int64 [tokens], on a device."""
    _, tokens, first = torch.tensor(pulls).unbind(1)
    inside = torch.arange(BLOCK)
    return sent((first[:, None] + inside)[inside < tokens[:, None]], device)


def split_by_block(pulls: Sequence[StagedTokens]) -> Iterator[list[StagedTokens]]:
    """As many at once as go to blocks of their own: a block that was another request's is written in the order in which it was sent."""
    some: dict[int, StagedTokens] = {}
    for each in pulls:
        if each.first // BLOCK in some:
            yield [*some.values()]
            some = {}
        some[each.first // BLOCK] = each
    if some:
        yield [*some.values()]
