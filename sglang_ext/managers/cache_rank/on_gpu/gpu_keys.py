"""Keys that a cache rank on a GPU holds, exact or quantized, with exact keys and values if rows are sent; and their copy from the
exchange buffer."""

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
        store: The rank's key store.
        scaling: Factor on query-key products, by layer.
        device: Device of the keys.

    Attributes:
        buffers: Buffers that the selection reads, like those of a KV pool. For quantized keys: the source block and the codes.
        sent: Exact keys and values of all blocks; None if only positions are sent.
    """

    def __init__(self, store: KeyStore, scaling: tuple[float, ...], device: torch.device):
        held, rows, layers = store.held, store.rows, tuple(range(len(scaling)))
        exact, codes = held if rows is None else rows.keys, held if isinstance(held, QuantizedKeys) else None
        # None if only codes are stored: keys are then quantized from one block.
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
        """Copy tokens from staging slots into the store. ``pulls``: each names its first slot here.

        All blocks are copied at once, or one after another if only quantized keys are stored.
        """
        if self._exact is None:
            for place, tokens, first in pulls:
                memory.pull([StagedTokens(place, tokens, 0)], self._block)
                self._coder.code(self._first[:tokens], first)
            return
        for some in split_by_block(pulls):
            memory.pull(some, self._exact.whole)
            if self._coder is not None:
                self._coder.code(_target_slots(some, self._device))
            if self._rows is not None:
                memory.pull(some, self._rows.values.whole, values=True)

    def clear(self, tokens: int) -> None:
        """Set the first ``tokens`` slots to zero."""
        self._held.clear(tokens)


def _target_slots(pulls: Sequence[StagedTokens], device: torch.device) -> torch.Tensor:
    """Return the target slots of the tokens, int64 [tokens], on a device."""
    _, tokens, first = torch.tensor(pulls).unbind(1)
    inside = torch.arange(BLOCK)
    return sent((first[:, None] + inside)[inside < tokens[:, None]], device)


def split_by_block(pulls: Sequence[StagedTokens]) -> Iterator[list[StagedTokens]]:
    """Split ``pulls`` into groups without a common target block. A block that is reused by another request is thus written in the order
    of sending."""
    some: dict[int, StagedTokens] = {}
    for each in pulls:
        if each.first // BLOCK in some:
            yield [*some.values()]
            some = {}
        some[each.first // BLOCK] = each
    if some:
        yield [*some.values()]
