"""Prefill on quantized KV: in PyTorch, and for quantized_extend.py whose prompts they are. Each token attends to what decoding would find at
its place (HACK, arXiv 2502.03589).

Keys and values of the whole blocks before a token's own are codes, the same that a copy of the prompt holds, and are multiplied as
integers by queries and weights in 8 bits (equation 4). Its own block is not full yet, and is read as it is (requantization
elimination), as are the prompt's first tokens, the sinks. So what a token attends to depends on the tokens before it alone: neither on
chunks, nor on how much of the prompt is cached. Codes that lie in the pool already are read there; the others are made of full KV, for
one forward.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from sglang_ext.layers.attention.compressed.packed import group_by_kv_head, ungroup_heads, attend_packed_and_exact, partitions_of_keys, partitions_of_values
from sglang_ext.layers.kernels.hack.product import Partitioned, quantize_partitions, product
from sglang_ext.layers.kernels.hack.prompt_codes import PromptBatch
from sglang_ext.mem_cache.compressed.layouts.block_layout import Quantized
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing


class QuantizedPrefill:
    """Attention of the prompts that are computed.

    Attributes:
        packing: gives the codes; its quantizer stores their sums.
        first_head: the first of this rank's KV heads, of all of the model's.
    """

    def __init__(self, packing: Packing, first_head: int) -> None:
        self.packing = packing
        self.first_head = first_head
        self._seeds: Mapping[int, torch.Tensor] = {}
        self._stored: Mapping[int, torch.Tensor] = {}
        self._prompts: list[PromptBatch] | None = None

    @property
    def rows(self) -> Mapping[int, torch.Tensor]:
        """Of the token table, those whose prompts are computed now, in the batch's order; seeds of each."""
        return self._seeds

    @property
    def longest(self) -> int:
        """Tokens of a prompt of which each kind is attended to: sinks, a block, and a token after it."""
        return self.packing.sinks + self.packing.block_tokens + 1

    @property
    def stored(self) -> Mapping[int, torch.Tensor]:
        """By row, int64 slots of blocks from the sinks on that lie in the pool; of none where nothing is said."""
        return self._stored

    @contextmanager
    def computing_prompts(self, seeds: Mapping[int, torch.Tensor], stored: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
        """Meanwhile prompts are computed.

        Args:
            seeds: int32 [tokens] of each, of its tokens (layouts/rounding.py), by its row of the token table.
            stored: as :attr:`stored`: there rows need not lead to full KV. They end before the first token that is computed.
        """
        self._seeds, self._stored = seeds, stored or {}
        try:
            yield
        finally:
            self._seeds, self._stored, self._prompts = {}, {}, None

    def prompts(self, make: Callable[[], list[PromptBatch]]) -> list[PromptBatch]:
        """What ``make`` gives, once for all layers of a forward."""
        if self._prompts is None:
            self._prompts = make()
        return self._prompts

    def is_computing(self, row: int) -> bool:
        """Whether a row's prompt is computed now."""
        return row in self._seeds

    def attend(
        self, layer: int, row: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Causal attention of a prompt's newest tokens.

        Args:
            layer: its number in the model.
            row: of the token table.
            queries: [count, heads, dim], of the last ``count`` tokens.
            keys, values: the layer's buffers, [slots, kv_heads, dim].
            slots: int64 [tokens], of all tokens until the last.
            scaling: factor on query-key products.

        Returns:
            float32 [count, heads, dim of a value].
        """
        sinks, block, tokens, count = self.packing.sinks, self.packing.block_tokens, len(slots), len(queries)
        known = tokens - count
        # Where the blocks of the first and of the last token begin; the first block is read with the sinks.
        first, last = (max(0, place - sinks) // block * block for place in (known, tokens - 1))
        before = slots[sinks : sinks + last]
        of_keys, of_values = (self._codes(layer, row, kind, before, bool(is_value)) for is_value, kind in enumerate((keys, values)))
        found = []
        for begin in range(first, last + 1, block):
            start, end = sinks + begin if begin else 0, sinks + begin + block
            near = torch.cat([slots[: sinks if begin else 0], slots[start:end]])
            asked = queries[max(0, start - known) : end - known]
            found.append(self._of_block(asked, begin, of_keys, of_values, keys[near], values[near], scaling))
        return torch.cat(found)

    def _of_block(
        self, queries: torch.Tensor, begin: int, of_keys: Partitioned, of_values: Partitioned, keys: torch.Tensor, values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """That of a block's last tokens, over the sinks and the block, ``keys`` and ``values`` [tokens, kv_heads, dim], and ``begin`` codes."""
        channels, tokens = self.packing.keys.grid.channels, self.packing.values.grid.tokens
        rows = group_by_kv_head(queries, keys.shape[1], scaling)
        before = Partitioned(*(part[:, :begin] for part in of_keys))
        far = product(quantize_partitions(rows, channels), before, channels)

        def far_sums(weights: torch.Tensor) -> torch.Tensor:
            if not begin:
                return weights.new_zeros(())
            summed = Partitioned(of_values.codes[..., :begin], *(part[..., : begin // tokens] for part in of_values[1:]))
            return product(quantize_partitions(weights, tokens, from_zero=True), summed, tokens)

        return ungroup_heads(attend_packed_and_exact(rows, far, far_sums, keys, values, len(queries)), len(queries))

    def _codes(self, layer: int, row: int, buffer: torch.Tensor, slots: torch.Tensor, is_value: bool) -> Partitioned:
        """Of whole blocks after the sinks, in ``slots``, int64 [tokens], of a layer's buffer but for what is stored: keys as rows of
        tokens, values as rows of channels."""
        packing, heads, stored = self.packing, buffer.shape[1], self._stored.get(row, slots[:0])
        layout, first = packing.values if is_value else packing.keys, len(stored) // packing.block_slots * packing.block_tokens
        positions = torch.arange(packing.sinks + first, packing.sinks + len(slots), device=slots.device)
        numbers, seeds = buffer[slots[first:]].float().transpose(0, 1), self._seeds[row][positions].expand(heads, -1)
        made = packing.codes(numbers, positions.expand(heads, -1), is_value, layer, self.first_head, seeds)
        block = concat_blocks(packing.read(buffer, layout, stored), made) if len(stored) else made
        return partitions_of_values(block) if is_value else partitions_of_keys(block)


def concat_blocks(first: Quantized, rest: Quantized) -> Quantized:
    """Blocks one after another, without outliers and positions."""
    parts = (torch.cat([getattr(part, name) for part in (first, rest)], 1) for name in ("codes", "scale", "zero", "sums"))
    codes, scale, zero, sums = parts
    return Quantized(codes, scale, zero, sums=sums)
