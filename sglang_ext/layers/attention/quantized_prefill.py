"""Prefill on quantized KV (HACK, arXiv 2502.03589): in PyTorch, and the state of prompts for quantized_extend.py.

Each token of a prompt attends to the same KV that decoding would read at its position:

- Keys and values of whole blocks before the token's own block are codes, the same as in the compressed KV of the prompt. They are
  multiplied as integers, with queries and weights in 8 bits (equation 4).
- The token's own block is not full yet, and is read unquantized (requantization elimination). So are the prompt's first tokens, the
  sinks.

So the result for a token depends only on the tokens before it, not on chunks, nor on how much of the prompt is cached. Codes that are
stored in the pool are read there. The other codes are made from full KV, for one forward.
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
    """Attention of the prompts that are computed in a forward.

    Attributes:
        packing: Makes the codes; its quantizer stores their sums.
        first_head: Index, among the model's KV heads, of the first that this rank holds.
    """

    def __init__(self, packing: Packing, first_head: int) -> None:
        self.packing = packing
        self.first_head = first_head
        self._seeds: Mapping[int, torch.Tensor] = {}
        self._stored: Mapping[int, torch.Tensor] = {}
        self._prompts: list[PromptBatch] | None = None

    @property
    def rows(self) -> Mapping[int, torch.Tensor]:
        """Rows of the token table whose prompts are computed now, in the batch's order, with the seeds of each."""
        return self._seeds

    @property
    def longest(self) -> int:
        """Tokens of a prompt that attends to each kind of token: sinks, a block, and a token after it."""
        return self.packing.sinks + self.packing.block_tokens + 1

    @property
    def stored(self) -> Mapping[int, torch.Tensor]:
        """By row, int64 slots of the blocks from the sinks on that are stored in the pool; none for rows without an entry."""
        return self._stored

    @contextmanager
    def computing_prompts(self, seeds: Mapping[int, torch.Tensor], stored: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
        """A context in which prompts are computed.

        Args:
            seeds: By row of the token table, int32 [tokens], seed of each token of the prompt (layouts/rounding.py).
            stored: As :attr:`stored`. Rows may lack full KV there. The blocks end before the first token that is computed.
        """
        self._seeds, self._stored = seeds, stored or {}
        try:
            yield
        finally:
            self._seeds, self._stored, self._prompts = {}, {}, None

    def prompts(self, make: Callable[[], list[PromptBatch]]) -> list[PromptBatch]:
        """Return the prompts that ``make`` creates; they are created once for all layers of a forward."""
        if self._prompts is None:
            self._prompts = make()
        return self._prompts

    def is_computing(self, row: int) -> bool:
        """Whether the prompt of a row is computed now."""
        return row in self._seeds

    def attend(
        self, layer: int, row: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Causal attention of a prompt's newest tokens.

        Args:
            layer: Index of the layer in the model.
            row: Row of the token table.
            queries: [count, heads, dim], queries of the last ``count`` tokens.
            keys, values: The layer's buffers, [slots, kv_heads, dim].
            slots: int64 [tokens], slots of all tokens up to the last.
            scaling: Factor on query-key products.

        Returns:
            float32 [count, heads, value_dim].
        """
        sinks, block, tokens, count = self.packing.sinks, self.packing.block_tokens, len(slots), len(queries)
        known = tokens - count
        # Beginnings of the blocks of the first and of the last token. The first block is read together with the sinks.
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
        """Attention of a block's last tokens over ``begin`` codes, the sinks and the block; keys, values [tokens, kv_heads, dim]."""
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
        """Codes of whole blocks after the sinks, in ``slots``, int64 [tokens], of a layer's buffer; stored blocks are read.

        Keys are rows of tokens, values are rows of channels.
        """
        packing, heads, stored = self.packing, buffer.shape[1], self._stored.get(row, slots[:0])
        layout, first = packing.values if is_value else packing.keys, len(stored) // packing.block_slots * packing.block_tokens
        positions = torch.arange(packing.sinks + first, packing.sinks + len(slots), device=slots.device)
        numbers, seeds = buffer[slots[first:]].float().transpose(0, 1), self._seeds[row][positions].expand(heads, -1)
        made = packing.codes(numbers, positions.expand(heads, -1), is_value, layer, self.first_head, seeds)
        block = concat_blocks(packing.read(buffer, layout, stored), made) if len(stored) else made
        return partitions_of_values(block) if is_value else partitions_of_keys(block)


def concat_blocks(first: Quantized, rest: Quantized) -> Quantized:
    """Concatenate blocks without outliers and positions."""
    parts = (torch.cat([getattr(part, name) for part in (first, rest)], 1) for name in ("codes", "scale", "zero", "sums"))
    codes, scale, zero, sums = parts
    return Quantized(codes, scale, zero, sums=sums)
