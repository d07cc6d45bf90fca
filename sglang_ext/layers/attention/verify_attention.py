"""Attention backend of verifications.

:class:`VerifyAttention` is for the ``triton`` attention backend, and without graphs for ``fa3``.
SGLang's Triton kernel for several new tokens reads the whole context once per query head. This one reads it once for all query heads
that share a KV head, and plans nothing on the host. With ``--enable-deterministic-inference``, the attention of each token equals that
of SGLang's Triton decode bit for bit.
"""

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.utils import get_int_env_var

from sglang_ext.layers.forward import check_supported, write_kv
from sglang_ext.layers.kernels.verify_attention import (
    EXACT,
    ContextSplits,
    VerifyTile,
    VerifyTokens,
    fast_tile,
    partial_buffers,
    partial_numbers,
    verify_attention,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Bytes of partial results; more if one request needs more.
WORKSPACE_BYTES = 256 << 20
# Parts of all contexts together, KV heads counted, that keep a GPU busy; measured on an H200.
MIN_PARTS = 512
FEWEST_PARTS, MOST_PARTS = 4, 64


def context_splits(requests: int, kv_heads: int, longest: int, exact_tile: int) -> ContextSplits:
    """Parts of each context in a batch of ``requests`` requests; the longest context has ``longest`` tokens."""
    if exact_tile:
        return ContextSplits(-(-longest // exact_tile), exact_tile)
    wanted = MIN_PARTS // (requests * kv_heads)
    return ContextSplits(max(FEWEST_PARTS, min(MOST_PARTS, wanted)))


def workspace_size(query_heads: int, value_dim: int, tokens: int, splits: ContextSplits) -> int:
    """Size of a workspace in float32 numbers. It holds at least ``tokens`` tokens of a request."""
    return max(tokens * partial_numbers(query_heads, value_dim, splits), WORKSPACE_BYTES // 4)


def exact_tile() -> int:
    """Tokens in a part of SGLang's Triton decode, with ``--enable-deterministic-inference``."""
    return get_int_env_var("SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE", 256)


class VerifyAttention(AttentionBackend):
    """Causal attention of the new tokens of each request over its row of the token table; for ``TARGET_VERIFY`` only."""

    needs_cpu_seq_lens = False
    # What all layers of a forward share: new tokens, parts of contexts, tile, and buffers of partial results.
    metadata: tuple[VerifyTokens, ContextSplits, VerifyTile, tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, model_runner: "ModelRunner"):
        config, self.device = model_runner.model_config, model_runner.device
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.kv_heads, self.value_dim = self.token_to_kv_pool.get_value_buffer(0).shape[-2:]
        key = self.token_to_kv_pool.get_key_buffer(0)[0, 0]
        self.key_bytes = key.numel() * key.element_size()
        self.query_heads = config.num_attention_heads // model_runner.server_args.tp_size
        self.longest = model_runner.req_to_token_pool.req_to_token.shape[1]
        exact = model_runner.server_args.enable_deterministic_inference
        # If prefill and decode have different backends, SGLang's backend holds both.
        decode = getattr(model_runner.attn_backend, "decode_backend", model_runner.attn_backend)
        self.exact_tile: int = decode.split_tile_size if exact else 0
        # One workspace for all graphs, which keep its address.
        widest = model_runner.server_args.speculative_num_draft_tokens
        numbers = workspace_size(self.query_heads, self.value_dim, widest, self.splits(requests=1))
        self._workspace = torch.empty(numbers, dtype=torch.float32, device=self.device)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: graphs read the batch's own tensors and the workspace."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Tokens before the new ones, of a padding request in a batch."""
        return 1

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        """Prepare the metadata: the new tokens of each request, and the parts of contexts. Reads only the batch's tensors on the device."""
        *new, lengths = forward_batch.spec_info.new_tokens(forward_batch)
        splits, ends = self.splits(len(new[-1])), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        tokens = VerifyTokens(forward_batch.req_pool_indices, *new, ends=ends, parts=splits.count_for(lengths))
        rows = max(tokens.counts) * self.query_heads // self.kv_heads
        blocks = EXACT if self.exact_tile else fast_tile(rows, self.key_bytes)
        self.metadata = tokens, splits, blocks, partial_buffers(self._workspace, self.query_heads, self.value_dim, splits)

    def splits(self, requests: int) -> ContextSplits:
        """Parts of each context in a batch of ``requests`` requests."""
        return context_splits(requests, self.kv_heads, self.longest, self.exact_tile)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        """Write the KV of new tokens, then attend: [tokens, query_heads * value_dim]. Raises ValueError for options other than a scale and a cap."""
        where = "verifications with --attention-backend triton"
        check_supported(layer, kwargs, where, "use --attention-backend flashinfer, or --kv-mode full")
        pool = self.token_to_kv_pool
        if save_kv_cache:
            write_kv(pool, layer, forward_batch, k, v)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        verify_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            out,
            self.req_to_token_pool.req_to_token,
            *self.metadata,
            layer.scaling,
            layer.logit_cap,
        )
        return out.view(len(q), -1)
