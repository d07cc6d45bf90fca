"""What attention backends are told of a forward over views.

SGLang's forward mode for several tokens a request is ``TARGET_VERIFY``: attention reads the token table,
every token's logits are kept. Its speculative input tells backends the true lengths.
"""

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass(frozen=True)
class NewTokens:
    """How the new tokens of a forward are laid out.

    Attributes:
        prefixes: int64 [batch], tokens before each request's new ones.
        starts: int64 [batch + 1], first of each request's new tokens among all.
        counts: new tokens of each request, on the host.
        lengths: int64 [tokens], tokens of its row that each new token attends to; a draft row is shorter than the
            positions in it.
    """

    prefixes: torch.Tensor
    starts: torch.Tensor
    counts: list[int]
    lengths: torch.Tensor


class RaggedViews(SpecInput):
    """Lengths of a forward in which some requests bring one token, others a whole verification.

    Attributes:
        lengths: int64 [batch], tokens that each request's last query attends to.
        query_lengths: int64 [batch], new tokens of each request.
        counts: the same on the host.
    """

    def __init__(self, lengths: torch.Tensor, query_lengths: torch.Tensor, counts: list[int]):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.lengths = lengths
        self.query_lengths = query_lengths
        self.counts = counts
        # Captured graphs are as wide as one token; SGLang runs what is wider without them.
        self.num_tokens_per_req = max(counts)
        self.capture_hidden_mode = CaptureHiddenMode.NULL

    def new_tokens(self, forward_batch: ForwardBatch) -> NewTokens:
        """For verify_attention.py."""
        prefixes, total = self.lengths - self.query_lengths, sum(self.counts)
        starts = torch.nn.functional.pad(self.query_lengths.cumsum(0), (1, 0))
        # What lies before a request's tokens in its row, less what lies before them in the forward.
        before = torch.repeat_interleave(prefixes - starts[:-1], self.query_lengths, output_size=total)
        lengths = before + torch.arange(1, total + 1, device=before.device)
        return NewTokens(prefixes, starts, self.counts, lengths)

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
        return kv_indices, pointers(self.lengths), pointers(self.query_lengths), None


class EvenVerify(SpecInput):
    """Lengths of a verification in which each request brings ``width`` tokens; CUDA graphs take it.

    As in SGLang's own verifications, the batch's ``seq_lens`` do not count the new tokens.

    Attributes:
        width: new tokens of each request.
    """

    # Read by SGLang's backends: a chain of drafts, causal, without a mask.
    custom_mask = None
    topk = 1

    def __init__(self, width: int):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.width = self.draft_token_num = self.num_tokens_per_req = width
        self.capture_hidden_mode = CaptureHiddenMode.NULL

    def new_tokens(self, forward_batch: ForwardBatch) -> NewTokens:
        """For verify_attention.py; reads nothing but ``seq_lens`` on the device."""
        prefixes, batch = forward_batch.seq_lens, forward_batch.batch_size
        starts = torch.arange(batch + 1, device=prefixes.device) * self.width
        lengths = prefixes[:, None] + torch.arange(1, self.width + 1, device=prefixes.device)
        return NewTokens(prefixes, starts, [self.width] * batch, lengths.flatten())

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Index pointers for FlashInfer's paged prefill, as :meth:`RaggedViews.generate_attn_arg_prefill`.

        Args:
            req_pool_indices: int64 [batch], rows of the token table.
            paged_kernel_lens: [batch], tokens before the new ones.
            paged_kernel_lens_sum: their sum.
            req_to_token: int32, the token table.
        """
        from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton

        batch, device = len(req_pool_indices), req_to_token.device
        lengths = paged_kernel_lens + self.width
        kv_indptr = pointers(lengths)
        kv_indices = torch.empty(
            paged_kernel_lens_sum + batch * self.width, dtype=torch.int32, device=device
        )
        create_flashinfer_kv_indices_triton[(batch,)](
            req_to_token, req_pool_indices, lengths, kv_indptr, None, kv_indices, req_to_token.shape[1]
        )
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * self.width
        return kv_indices, kv_indptr, qo_indptr, None


def pointers(lengths: torch.Tensor) -> torch.Tensor:
    """Running sum of ``lengths`` from 0: int32 [batch + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


@dataclass
class BetweenSteps:
    """A batch's draft input between iterations.

    SGLang's overlapped scheduler relays ``bonus_tokens`` from one iteration to the next on the device, by
    row of the token table (``future_indices``). The other fields are those that it reads of any draft
    input; all further state is kept by request in the worker.

    Attributes:
        bonus_tokens: int64 [batch], newest token of each output; its KV is not computed yet.
        future_indices: int64 [batch], rows under which the scheduler relays; it sets them.
    """

    bonus_tokens: torch.Tensor
    future_indices: torch.Tensor | None = None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    dsa_topk_indices: torch.Tensor | None = None
    future_dsa_topk_indices_available: bool = False

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices.to(self.bonus_tokens.device)]

    def merge_batch(self, spec_info: "BetweenSteps") -> None:
        """Append another batch's requests."""
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])
