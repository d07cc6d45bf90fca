"""FlashInfer's attention backend of verifications. Only servers with ``--attention-backend flashinfer`` import it."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, fast_prefill_plan

from sglang_ext.layers.forward import index_pointers

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class VerifyFlashInfer(FlashInferAttnBackend):
    """SGLang's ``flashinfer`` backend, for the graphs of verify_graphs.py.

    FlashInfer's own plan reads the lengths from the device, and so waits for all launched work. SGLang has a plan without this wait for
    its draft models. This class passes the lengths of a verification to it, in which the new tokens count.
    """

    _lengths: torch.Tensor
    _width: int

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None) -> None:
        """Allocate buffers for graphs of ``max_bs`` requests.

        SGLang allocates one context per token. Two contexts hold a request with its new tokens, unless these are longer than a context.
        """
        contexts = 1 + -(-max_num_tokens // max_bs // self.max_context_len)
        super().init_cuda_graph_state(max_bs, contexts * max_bs, kv_indices_buf)

    def fits_workspace(self, requests: int, width: int) -> bool:
        """Whether FlashInfer's workspace fits the partial results of ``requests`` requests with ``width`` tokens each; otherwise its plan fails."""
        updater = self.indices_updater_prefill
        needed = self._full_cg_prefill_workspace_bytes(
            requests, requests * width, num_qo_heads=updater.num_qo_heads, num_kv_heads=updater.num_kv_heads, head_dim=updater.head_dim,
            device=self.workspace_buffer.device,
        )  # fmt: skip
        return needed <= self.workspace_buffer.numel()

    def init_forward_metadata_out_graph(self, forward_batch: "ForwardBatch", in_capture: bool = False) -> None:
        """Plan. SGLang's buffers of a batch are wrappers, which are planned again before each replay."""
        batch = forward_batch.batch_size
        self._width = forward_batch.spec_info.width
        if not in_capture:
            # Tokens that each request's last query attends to, padding included.
            self._lengths = (forward_batch.seq_lens_cpu[:batch] + self._width).to(torch.int32)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture and self.prefill_backend == "fa2" and self.dispatch_reason is None:
            # FlashInfer's own first plan has created the state that the fast plan needs.
            for wrapper in self.prefill_cuda_graph_metadata[batch]:
                wrapper.begin_forward = partial(self._plan, wrapper)

    def _plan(self, wrapper, *args, **kwargs) -> None:
        """SGLang's plan without reads from the device, with the lengths of this verification."""
        count = len(self._lengths)
        fast_prefill_plan(
            wrapper,
            *args,
            **kwargs,
            qo_indptr_host=torch.arange(count + 1, dtype=torch.int32) * self._width,
            kv_indptr_host=index_pointers(self._lengths),
            kv_lens_host=self._lengths,
            max_q_len=self._width,
            max_kv_len=int(self._lengths.max()),
        )
