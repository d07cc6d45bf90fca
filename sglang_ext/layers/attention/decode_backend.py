"""Base of the attention backends for draft steps on a GPU: one token per request, over rows that may begin with compressed KV.

The backends plan nothing on the host. A kernel reads from the token table, and from a table beside it, what the beginning of a row holds.
So one captured graph serves requests with and without compressed KV.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_ext.core import OptionError
from sglang_ext.layers.forward import check_supported, write_kv
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Head dimensions that fit the kernels' tiles.
SMALLEST_HEAD, LARGEST_HEAD = 16, 256
# Limits of the parts into which a row is split. EXACT_PARTS of them read its exact tokens: the most recent tokens that compression left
# out, and the tokens since then.
FEWEST_PARTS, MOST_PARTS = 8, 64
EXACT_PARTS = 4


class CompressedDecode(AttentionBackend):
    """Attention of the newest token of each request over its row of the token table; for ``DECODE`` only.

    Attributes:
        compressed_kv_name: Name of the compressed KV, for messages.
        remedy: What the user can do if it is not supported.
        min_parts: Parts of all rows together, KV heads counted, that keep a GPU busy.

    Raises:
        OptionError: The kernel does not support the head dimensions or the dtype of the pool.
    """

    compressed_kv_name: ClassVar[str]
    remedy: ClassVar[str]
    min_parts: ClassVar[int] = 512
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: "ModelRunner", layout: KVLayout):
        self.layout = layout
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        keys, values = self.token_to_kv_pool.get_key_buffer(0), self.token_to_kv_pool.get_value_buffer(0)
        check_heads(keys, values, self.compressed_kv_name, self.remedy)
        self.kv_heads = keys.shape[1]
        self.query_heads = model_runner.model_config.num_attention_heads // model_runner.server_args.tp_size
        self.dtype = model_runner.dtype

    @abstractmethod
    def attend(
        self, layer_id: int, queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scaling: float, splits: tuple[int, int]
    ) -> torch.Tensor:
        """Attention of one token per request: [requests, query_heads, value_dim]. The host reads nothing from the device.

        ``queries``: [requests, query_heads, dim]. ``rows``, ``lengths``: int64 [requests], rows of the token table, and slots of each row.
        ``splits``: parts of a row's compressed KV, and of the tokens after it.
        """

    def compile_kernels(self) -> None:
        """Run once with each number of parts, in row 0, which no request has, so that no request waits for compilers."""
        keys = self.token_to_kv_pool.get_key_buffer(0)
        fewest = {self.splits(requests): requests for requests in range(self.min_parts, 0, -1)}
        for splits, requests in fewest.items():
            queries = keys.new_zeros(requests, self.query_heads, keys.shape[-1], dtype=self.dtype)
            rows = torch.zeros(requests, dtype=torch.int64, device=keys.device)
            self.attend(0, queries, rows, rows + 1, 1.0, splits)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: graphs read the batch's own tensors, the token table and the table beside it."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding request in a batch."""
        return 1

    def splits(self, requests: int) -> tuple[int, int]:
        """Parts of each request's compressed KV, and of its exact tokens, in a batch."""
        return split_counts(requests * self.kv_heads, self.min_parts)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        """Write the KV of new tokens, then attend: [requests, query_heads * value_dim]. Raises ValueError for options other than a scale."""
        asked = {**kwargs, "a cap of logits": layer.logit_cap or None}
        check_supported(layer, asked, f"drafts on {self.compressed_kv_name}", self.remedy)
        if save_kv_cache:
            write_kv(self.token_to_kv_pool, layer, forward_batch, k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        read = forward_batch.req_pool_indices, forward_batch.seq_lens
        return self.attend(layer.layer_id, queries, *read, layer.scaling, self.splits(len(q))).view(len(q), -1)


def split_counts(rows: int, min_parts: int) -> tuple[int, int]:
    """Parts of each row's compressed KV, and of its exact tokens. The sum is a power of 2, because each sum has its own kernel.

    ``rows``: rows of a batch, KV heads counted. ``min_parts``: parts of all rows together that keep a GPU busy.
    """
    wanted = max(FEWEST_PARTS, min(MOST_PARTS, min_parts // rows))
    return (1 << (wanted.bit_length() - 1)) - EXACT_PARTS, EXACT_PARTS


def check_heads(keys: torch.Tensor, values: torch.Tensor, compressed_kv_name: str, remedy: str) -> None:
    """Check that kernels support a layer's buffers, [slots, kv_heads, dim]. Raises OptionError: the dtype or dimension, and the allowed ones."""
    for kind, buffer in (("keys", keys), ("values", values)):
        if buffer.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise OptionError(f"the KV pool holds {kind} as {buffer.dtype}; {compressed_kv_name} is stored in {allowed}: {remedy}")
        if not SMALLEST_HEAD <= buffer.shape[-1] <= LARGEST_HEAD:
            raise OptionError(
                f"the model's {kind} have {buffer.shape[-1]} channels a head; {compressed_kv_name} is read with "
                f"{SMALLEST_HEAD} to {LARGEST_HEAD}: {remedy}"
            )
