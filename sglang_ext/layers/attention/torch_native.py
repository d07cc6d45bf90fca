"""The ``torch_native`` attention backend with an extend path that computes only the new rows.

SGLang's own extend path pads the queries to the length of the whole context, so that verifying a few tokens costs as much as a prefill.
Here, rows of the token table may also begin with compressed KV that does not consist of plain tokens (compressed/).
"""

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, PlainLayout

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill


class RaggedTorchNativeBackend(TorchNativeAttnBackend):
    """SGLang's ``torch_native`` backend, with an extend path that is linear in the context. The worker sets its attributes.

    Attributes:
        layout: Layout of the compressed KV at the beginning of rows.
        prefill: Attention of prompts on quantized KV; None if it is exact.
    """

    layout: KVLayout = PlainLayout()
    prefill: "QuantizedPrefill | None" = None

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention", *given, **named) -> torch.Tensor:
        """Store the layer, which SGLang does not pass to :meth:`_run_sdpa_forward_extend`, and call SGLang's method."""
        self._layer = layer.layer_id
        return super().forward_extend(q, k, v, layer, *given, **named)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """Attend over each request's row of the table. The last of ``extend_seq_lens[i]`` queries attends to ``seq_lens[i]`` tokens."""
        start = 0
        rows = req_pool_indices
        lengths = zip(rows.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), self.layout.compressed_lengths(rows))
        for row, length, count, begun in lengths:
            slots, queries = req_to_token[row, :length], query[start : start + count]
            if begun:
                from sglang_ext.layers.attention.decode_graphs import LAYOUT_READERS

                result = LAYOUT_READERS[type(self.layout)].attend(self.layout, row, begun, queries, k_cache, v_cache, slots, scaling)
            elif self.prefill is not None and row in self.prefill.rows:
                result = self.prefill.attend(self._layer, row, queries, k_cache, v_cache, slots, scaling)
            else:
                result = _dense_attention(queries, k_cache[slots], v_cache[slots], causal, scaling, enable_gqa)
            output[start : start + count] = result
            start += count
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options,
    ) -> torch.Tensor:
        """As SGLang's if all rows hold plain tokens; otherwise as an extend of one token per request."""
        shared = query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens
        if not any(self.layout.compressed_lengths(req_pool_indices)):
            return super()._run_sdpa_forward_decode(*shared, encoder_lens, **options)
        counts = torch.ones_like(seq_lens)
        return self._run_sdpa_forward_extend(*shared, seq_lens - counts, counts, encoder_lens, **options)


def _dense_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scaling: float | None, enable_gqa: bool
) -> torch.Tensor:
    """Attention of the newest tokens, [count, heads, dim], over all tokens: ``keys`` and ``values`` [length, kv_heads, dim]."""
    count, length = len(queries), len(keys)
    mask = None
    if 1 < count < length:
        mask = torch.arange(length, device=queries.device) <= torch.arange(length - count, length, device=queries.device)[:, None]
    result = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0).to(queries.dtype),
        values.transpose(0, 1).unsqueeze(0).to(queries.dtype),
        attn_mask=mask,
        is_causal=causal and count == length,
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    return result.squeeze(0).transpose(0, 1)


def register() -> None:
    """Replace ``torch_native`` in SGLang's attention registry."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(RaggedTorchNativeBackend)
