"""Prefill on quantized KV (HACK, arXiv 2502.03589): in PyTorch, and on a GPU with kernels.

Each token of a prompt attends to the same KV that decoding would read at its position. Keys and values of whole blocks before the token's
own block are codes, the same as in the compressed KV of the prompt. They are multiplied as integers, with queries and weights in 8 bits
(equation 4). The token's own block is not full yet, and is read unquantized (requantization elimination), as are the prompt's sinks.

So the result for a token depends only on the tokens before it, not on chunks, nor on how much of the prompt is cached. Codes that are
stored in the pool are read there. The other codes are made from full KV, for one forward.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sglang_ext.layers.attention.packed import attend_packed_and_exact, group_by_kv_head, partitions_of_keys, partitions_of_values, ungroup_heads
from sglang_ext.layers.forward import check_supported, write_kv
from sglang_ext.layers.kernels.packed.integer_attention import Partitioned, product, quantize_partitions
from sglang_ext.layers.kernels.packed.integer_prefill import check_prefill, integer_prefill
from sglang_ext.layers.kernels.packed.prompt_codes import PromptBatch
from sglang_ext.mem_cache.compressed.layouts.block_layout import Quantized
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class QuantizedPrefill:
    """Attention of the prompts that are computed in a forward.

    Attributes:
        packing: Makes the codes; its quantizer stores their sums.
        first_head: Index, among the model's KV heads, of the first that this rank holds.
        rows: Rows of the token table whose prompts are computed now, in the batch's order, with the seeds of each.
        stored: By row, int64 slots of the blocks from the sinks on that are stored in the pool; none for rows without an entry.
    """

    def __init__(self, packing: Packing, first_head: int) -> None:
        self.packing = packing
        self.first_head = first_head
        self.rows: Mapping[int, torch.Tensor] = {}
        self.stored: Mapping[int, torch.Tensor] = {}
        self._prompts: list[PromptBatch] | None = None

    @contextmanager
    def computing_prompts(self, seeds: Mapping[int, torch.Tensor], stored: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
        """A context in which prompts are computed.

        ``seeds``: by row of the token table, int32 [tokens], seed of each token of the prompt (layouts/block_layout.py). ``stored``: as
        :attr:`stored`. Its rows need no full KV for these tokens. The blocks end before the first token that is computed.
        """
        self.rows, self.stored = seeds, stored or {}
        try:
            yield
        finally:
            self.rows, self.stored, self._prompts = {}, {}, None

    def prompts(self, make: Callable[[], list[PromptBatch]]) -> list[PromptBatch]:
        """Return the prompts that ``make`` creates; they are created once for all layers of a forward."""
        if self._prompts is None:
            self._prompts = make()
        return self._prompts

    def attend(
        self, layer: int, row: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Causal attention of a prompt's newest tokens: float32 [count, heads, value_dim].

        ``layer``: index in the model. ``queries``: [count, heads, dim], of the last ``count`` tokens. ``keys``, ``values``: the layer's buffers,
        [slots, kv_heads, dim]. ``slots``: int64 [tokens], slots of all tokens of ``row`` up to the last.
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
        """Codes of whole blocks after the sinks: rows of tokens for keys, rows of channels for values. Stored blocks are read."""
        packing, heads, stored = self.packing, buffer.shape[1], self.stored.get(row, slots[:0])
        layout, first = packing.values if is_value else packing.keys, len(stored) // packing.block_slots * packing.block_tokens
        positions = torch.arange(packing.sinks + first, packing.sinks + len(slots), device=slots.device)
        numbers, seeds = buffer[slots[first:]].float().transpose(0, 1), self.rows[row][positions].expand(heads, -1)
        made = packing.codes(numbers, positions.expand(heads, -1), is_value, layer, self.first_head, seeds)
        block = made
        if len(stored):
            both = packing.read(buffer, layout, stored), made
            codes, scale, zero, sums = (torch.cat([getattr(part, name) for part in both], 1) for name in ("codes", "scale", "zero", "sums"))
            block = Quantized(codes, scale, zero, sums=sums)
        return partitions_of_values(block) if is_value else partitions_of_keys(block)


REMEDY = "pass --kv-prefill exact"


class QuantizedExtend:
    """Replaces the ``forward_extend`` of SGLang's attention backend, whose own method still runs verifications and captures of graphs.

    Its kernels compute the same as :meth:`QuantizedPrefill.attend`. Raises OptionError if they do not support the pool's heads or dtype.
    """

    def __init__(self, model_runner: "ModelRunner", prefill: QuantizedPrefill) -> None:
        self.backend: AttentionBackend = model_runner.attn_backend
        self.prefill = prefill
        self._exact = self.backend.forward_extend
        self._pool, self._table = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self._query_heads = model_runner.model_config.num_attention_heads // model_runner.server_args.tp_size
        self._dtype = model_runner.dtype
        check_prefill(prefill.packing, self._pool.get_key_buffer(0), self._pool.get_value_buffer(0))

    def install(self) -> None:
        """Replace the backend's own method, and compile the kernels in row 0, which no request has."""
        self.backend.forward_extend = self
        keys, packing = self._pool.get_key_buffer(0), self.prefill.packing
        # A prompt that attends to each kind of token: sinks, a block, and a token after it.
        tokens = min(self._table.req_to_token.shape[1], packing.sinks + packing.block_tokens + 1)
        seeds = torch.zeros(tokens, dtype=torch.int32, device=keys.device)
        queries = keys.new_zeros(tokens, self._query_heads, keys.shape[-1], dtype=self._dtype)
        prompts = PromptBatch(packing, self._table.req_to_token, [0], [0], [tokens], {0: seeds})
        integer_prefill(prompts, queries, keys, self._pool.get_value_buffer(0), 0, self.prefill.first_head, 1.0)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention", forward_batch: "ForwardBatch",
        save_kv_cache: bool = True, **kwargs,
    ) -> torch.Tensor:  # fmt: skip
        """Write the KV of new tokens, then attend: [tokens, query_heads * value_dim]. Raises ValueError for options other than a scale."""
        if not self.prefill.rows:
            return self._exact(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        window = layer.sliding_window_size if layer.sliding_window_size is not None and layer.sliding_window_size > -1 else None
        asked = {**kwargs, "a cap of logits": layer.logit_cap or None, "a window": window}
        check_supported(layer, asked, "prompts that attend to codes", REMEDY)
        if save_kv_cache and k is not None:
            write_kv(self._pool, layer, forward_batch, k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        buffers = self._pool.get_key_buffer(layer.layer_id), self._pool.get_value_buffer(layer.layer_id)
        # Padding requests of a batch get zeros.
        found, start = queries.new_zeros(len(queries), layer.tp_q_head_num, layer.v_head_dim), 0
        for prompts in self.prefill.prompts(lambda: list(self._grouped(forward_batch))):
            end = start + prompts.computed
            found[start:end] = integer_prefill(
                prompts, queries[start:end], *buffers, layer.layer_id, self.prefill.first_head, layer.scaling
            )  # fmt: skip
            start = end
        return found.view(len(q), -1)

    def _grouped(self, forward_batch: "ForwardBatch") -> Iterator[PromptBatch]:
        """Split the prompts into groups whose quantized KV fits the memory for it, which is that of the longest context."""
        known, rows = list(forward_batch.extend_prefix_lens_cpu), list(self.prefill.rows)
        lengths = [prefix + count for prefix, count in zip(known, forward_batch.extend_seq_lens_cpu)]
        most, table = self._table.req_to_token.shape[1], self._table.req_to_token
        first = taken = 0
        for index, length in enumerate([*lengths, most + 1]):
            if taken + length > most and index > first:
                group = slice(first, index)
                rest = known[group], lengths[group], self.prefill.rows, self.prefill.stored
                yield PromptBatch(self.prefill.packing, table, rows[group], *rest)
                first, taken = index, 0
            taken += length
