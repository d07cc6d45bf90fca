"""Prefill on quantized KV on a GPU: a kernel replaces SGLang's attention backend while prompts are computed.

The kernel computes the same as QuantizedPrefill.attend for one prompt after another (quantized_prefill.py).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sglang_ext.layers.attention.common import check_supported, write_kv
from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill
from sglang_ext.layers.kernels.hack.integer_prefill import check_prefill, integer_prefill
from sglang_ext.layers.kernels.hack.prompt_codes import PromptBatch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

REMEDY = "pass --kv-prefill exact"


class QuantizedExtend:
    """Replaces the ``forward_extend`` of an attention backend.

    Attributes:
        backend: SGLang's backend. Its own method still runs verifications, and runs while graphs are captured.
        prefill: Knows which prompts are computed, and how they are packed.

    Raises:
        OptionError: The kernels do not support the head dimensions or the dtype of the pool.
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
        keys, tokens = self._pool.get_key_buffer(0), min(self._table.req_to_token.shape[1], self.prefill.longest)
        seeds = torch.zeros(tokens, dtype=torch.int32, device=keys.device)
        queries = keys.new_zeros(tokens, self._query_heads, keys.shape[-1], dtype=self._dtype)
        prompts = PromptBatch(self.prefill.packing, self._table.req_to_token, [0], [0], [tokens], {0: seeds})
        integer_prefill(prompts, queries, keys, self._pool.get_value_buffer(0), 0, self.prefill.first_head, 1.0)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention", forward_batch: "ForwardBatch",
        save_kv_cache: bool = True, **kwargs,
    ) -> torch.Tensor:  # fmt: skip
        """Write the KV of the new tokens, then attend: [tokens, query_heads * value_dim].

        Raises:
            ValueError: The layer asks for an attention option other than a scale.
        """
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
        for prompts in self._prompts(forward_batch):
            end = start + prompts.computed
            found[start:end] = integer_prefill(
                prompts, queries[start:end], *buffers, layer.layer_id, self.prefill.first_head, layer.scaling
            )  # fmt: skip
            start = end
        return found.view(len(q), -1)

    def _prompts(self, forward_batch: "ForwardBatch") -> list[PromptBatch]:
        """The prompts of a forward, made in its first layer."""
        return self.prefill.prompts(lambda: list(self._grouped(forward_batch)))

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
