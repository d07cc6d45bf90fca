"""``torch_native`` attention for views: each query attends once, whatever the prefix.

SGLang's own extend path pads the queries to the length of the whole context, which makes verifying a
few tokens as dear as a prefill. This computes the new rows alone.
"""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class RaggedTorchNativeBackend(TorchNativeAttnBackend):
    """SGLang's ``torch_native`` backend with an extend path linear in the context."""

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
        """Attention of ``query`` [tokens, heads, head_dim] over each request's row of the table.

        The last of a request's ``extend_seq_lens[i]`` queries attends to ``seq_lens[i]`` tokens.
        """
        start = 0
        lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist())
        for row, length, count in lengths:
            slots = req_to_token[row, :length]
            queries = query[start : start + count].transpose(0, 1)
            result = scaled_dot_product_attention(
                queries.unsqueeze(0),
                k_cache[slots].transpose(0, 1).unsqueeze(0).to(query.dtype),
                v_cache[slots].transpose(0, 1).unsqueeze(0).to(query.dtype),
                attn_mask=_causal(count, length, query.device) if 1 < count < length else None,
                is_causal=causal and count == length,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[start : start + count] = result.squeeze(0).transpose(0, 1)
            start += count
        return output


def _causal(count: int, length: int, device: torch.device) -> torch.Tensor:
    """Which of ``length`` keys each of the last ``count`` queries sees: bool [count, length]."""
    newest = torch.arange(length - count, length, device=device)
    return torch.arange(length, device=device)[None, :] <= newest[:, None]


def register() -> None:
    """Take the place of ``torch_native`` in SGLang's attention registry."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(RaggedTorchNativeBackend)
