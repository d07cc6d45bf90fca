"""One ragged forward over views: some requests bring one token, others a whole verification.

SGLang's forward mode for this is ``TARGET_VERIFY``: attention reads the token table, every token's
logits are kept. :class:`ViewsInput` is its speculative input and tells backends the true lengths.
"""

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


class ViewsInput(SpecInput):
    """Lengths of a ragged forward.

    Attributes:
        lengths: int64 [batch], tokens that each request's last query attends to.
        query_lengths: int64 [batch], new tokens of each request.
    """

    def __init__(self, lengths: torch.Tensor, query_lengths: torch.Tensor):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.lengths = lengths
        self.query_lengths = query_lengths
        self.capture_hidden_mode = CaptureHiddenMode.NULL

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Index pointers for FlashInfer's paged prefill: ragged queries, causal, no mask.

        Returns:
            kv_indices int32 [sum of lengths], kv_indptr int32 [batch + 1], qo_indptr int32
            [batch + 1], no custom mask.
        """
        columns = torch.arange(int(self.lengths.max()), device=req_to_token.device)
        table = req_to_token[req_pool_indices.long()[:, None], columns[None, :]]
        kv_indices = table[columns[None, :] < self.lengths[:, None]].to(torch.int32)
        return kv_indices, _pointers(self.lengths), _pointers(self.query_lengths), None

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Nothing to filter: it lives for one forward."""

    def merge_batch(self, spec_info: "ViewsInput") -> None:
        """Nothing to merge: it lives for one forward."""


def _pointers(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


@dataclass
class BetweenSteps:
    """Stands in for a draft input between iterations; all state is kept by request in the worker."""

    future_indices: torch.Tensor | None = None
    dsa_topk_indices: torch.Tensor | None = None
    future_dsa_topk_indices_available: bool = False

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Nothing is kept by batch position."""

    def merge_batch(self, spec_info: "BetweenSteps") -> None:
        """Nothing is kept by batch position."""
