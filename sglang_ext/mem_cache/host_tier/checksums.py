"""A checksum of each page of KV, over all layers. It detects loads that differ from the stored KV.

Rows of keys and values are read as integers, words. A page's checksum is the sum, modulo 2^64, of word times weight of its column times
weight of its token. Tokens have different weights in each layer, and for keys and values. Weights are odd, so that any single flipped bit
changes the sum. They are random, so that exchanged tokens, layers, or keys and values change it too, except with a probability of about
2^-32 or less.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# At most 32 bits: in a 64-bit sum, even the highest bit of two words must not cancel out.
SUMMED_WORD = 4
# Index of the first token weight in the sequence of weights. No row has as many columns.
FIRST_TOKEN = 1 << 32
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def as_words(buffer: torch.Tensor, widest: int) -> torch.Tensor:
    """View rows as integers of the widest size that divides a row: [slots, words].

    Args:
        buffer: [slots, kv_heads, head_dim], of any dtype, contiguous.
        widest: Maximum bytes of a word, 8, 4, 2 or 1.
    """
    row = buffer[0].numel() * buffer.element_size()
    size = next(size for size in _WORDS if size <= widest and row % size == 0)
    # A view from its own dtype may not exist at this width. A view from bytes always does.
    return buffer.flatten(1).view(torch.uint8).view(_WORDS[size])


def odd_weights(first: int, count: int) -> torch.Tensor:
    """Weights ``first`` to ``first + count`` of the sequence: int64 [count], odd.

    The mixing function of SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195, figure 14).
    """
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))


@dataclass(frozen=True)
class PageChecksums:
    """Checksums of pages of device slots.

    Attributes:
        buffers: All layers. Contiguous, of one shape and dtype.
        page_size: Tokens per page.
    """

    buffers: KVBuffers
    page_size: int

    @cached_property
    def column_weights(self) -> torch.Tensor:
        """int64 [words of a row]."""
        key = self.buffers.keys[0]
        return odd_weights(0, as_words(key, SUMMED_WORD).shape[1]).to(key.device)

    @cached_property
    def token_weights(self) -> torch.Tensor:
        """int64 [layers, 2, page_size]: weights for keys, then for values."""
        shape = len(self.buffers.keys), 2, self.page_size
        return odd_weights(FIRST_TOKEN, shape[0] * 2 * self.page_size).view(shape).to(self.buffers.keys[0].device)

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Checksums of the pages in ``slots``, int64 [pages * page_size]: int64 [pages], on the buffers' device."""
        buffers = self.buffers
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.pages import page_checksum

            words = as_words(buffers.keys[0], SUMMED_WORD)
            tables = buffers.key_table, buffers.value_table
            return page_checksum(*tables, words, slots, self.token_weights, self.column_weights)
        sums = slots.new_zeros(len(slots) // self.page_size)
        for layer, pair in enumerate(zip(buffers.keys, buffers.values)):
            for weights, buffer in zip(self.token_weights[layer], pair):
                words = as_words(buffer, SUMMED_WORD)[slots].long()
                of_token = (words * self.column_weights).sum(1).view(-1, self.page_size)
                sums += (of_token * weights).sum(1)
        return sums
