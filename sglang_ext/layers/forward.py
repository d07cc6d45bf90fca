"""Forwards of the target model over views: the input tokens, where they lie, what they attend to."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_ext.layers.attention.views import RaggedViews

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner


@dataclass(frozen=True)
class Attention:
    """What a forward attends with in the place of the model's own.

    Attributes:
        backend: computes it.
        graphs: forwards of one token a request that were captured with it; None to run without.
    """

    backend: AttentionBackend
    graphs: "DecodeCudaGraphRunner | None" = None


@dataclass(frozen=True)
class Attentions:
    """Which attention a forward takes; None stands for the model's own.

    Attributes:
        verifier: of several tokens a request.
        copies: of one token a request, over rows of which some may begin with packed blocks, or with cells of uneven heads.
    """

    verifier: Attention | None = None
    copies: Attention | None = None

    def of(self, counts: list[int], on_full_kv: bool) -> Attention | None:
        """That of a forward of so many tokens of each request; ``on_full_kv``: no request reads a compressed copy."""
        if max(counts) > 1:
            return self.verifier
        return None if on_full_kv else self.copies


@dataclass(frozen=True)
class Inputs:
    """One forward's inputs, request by request, on the device where not said otherwise.

    Attributes:
        tokens: int64 [total], input tokens.
        positions: int64 [total], absolute positions.
        slots: int64 [total], where their KV is written.
        rows: int64 [batch], rows of the token table that attention reads.
        lengths: int64 [batch], tokens that each request's last query attends to.
        lengths_cpu: the same on the host.
        counts: tokens of each request.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    counts: list[int]


def run(
    model_runner: "ModelRunner", batch: "ScheduleBatch", inputs: Inputs, attention: Attention | None = None
) -> LogitsProcessorOutput:
    """Forward the inputs; logits for each token: float [total, vocabulary].

    Args:
        model_runner: the target's.
        batch: whose requests these are.
        inputs: what to forward.
        attention: what the model attends with; None for its own.
    """
    with attending(model_runner, attention):
        return model_runner.forward(build(model_runner, batch, inputs)).logits_output


@contextmanager
def attending(model_runner: "ModelRunner", attention: Attention | None) -> Iterator[None]:
    """Let the model attend with ``attention``, and replay what was captured with it; with its own for None."""
    own = Attention(model_runner.attn_backend, model_runner.decode_cuda_graph_runner)
    chosen = attention or own
    model_runner.attn_backend, model_runner.decode_cuda_graph_runner = chosen.backend, chosen.graphs
    try:
        yield
    finally:
        model_runner.attn_backend, model_runner.decode_cuda_graph_runner = own.backend, own.graphs


def build(model_runner: "ModelRunner", batch: "ScheduleBatch", inputs: Inputs) -> ForwardBatch:
    """SGLang's forward batch: a plain decode when each request has one token, else a ragged verify."""
    forward = base(batch, inputs)
    counts = inputs.counts
    if max(counts) > 1:
        query_lengths = torch.tensor(counts, dtype=torch.int64).to(inputs.tokens.device, non_blocking=True)
        forward.forward_mode = ForwardMode.TARGET_VERIFY
        forward.spec_info = RaggedViews(forward.seq_lens, query_lengths, counts)
        forward.spec_info.capture_hidden_mode = forward.capture_hidden_mode
        forward.extend_seq_lens = query_lengths
        forward.extend_prefix_lens = forward.seq_lens - query_lengths
        forward.extend_seq_lens_cpu = counts
        forward.extend_prefix_lens_cpu = (inputs.lengths_cpu - torch.tensor(counts)).tolist()
        forward.extend_num_tokens = len(inputs.tokens)
        forward.extend_start_loc = query_lengths.cumsum(0) - query_lengths
    if model_runner.server_args.enable_lora:
        prepare_lora(model_runner, forward, counts)
    return forward


def base(batch: "ScheduleBatch", inputs: Inputs) -> ForwardBatch:
    """A decode of the inputs, as if each token were a request's."""
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(inputs.counts),
        input_ids=inputs.tokens,
        req_pool_indices=inputs.rows,
        seq_lens=inputs.lengths,
        out_cache_loc=inputs.slots,
        seq_lens_sum=int(inputs.lengths_cpu.sum()),
        orig_seq_lens=inputs.lengths.to(torch.int32),
        seq_lens_cpu=inputs.lengths_cpu,
        positions=inputs.positions,
        spec_algorithm=batch.spec_algorithm,
        sampling_info=batch.sampling_info,
        capture_hidden_mode=CaptureHiddenMode.FULL if batch.return_hidden_states else CaptureHiddenMode.NULL,
        lora_ids=[req.lora_id for req in batch.reqs],
        rids=[req.rid for req in batch.reqs],
        num_token_non_padded_cpu=len(inputs.tokens),
    )


def of_requests(batch: "ScheduleBatch", requests: list[int], where: torch.Tensor) -> "ScheduleBatch":
    """What a forward reads of a batch, of some of its requests; the batch itself stays as it is.

    Args:
        requests: their places.
        where: the same, int64 on the device.
    """
    part = copy.copy(batch)
    part.reqs = [batch.reqs[i] for i in requests]
    part.seq_lens, part.req_pool_indices = batch.seq_lens[where], batch.req_pool_indices[where]
    return part


def prepare_lora(model_runner: "ModelRunner", forward: ForwardBatch, counts: list[int]) -> None:
    """Fetch the batch's adapters and tell SGLang's LoRA layers the adapter of each token.

    SGLang's LoRA backends take a verification for one of equal lengths. They see a decode instead, in
    which each token is a request: any lengths fit, and no logits are pruned.

    Args:
        forward: the batch, with the adapter of each request in ``lora_ids``.
        counts: tokens of each request.
    """
    manager = model_runner.lora_manager
    if not model_runner.server_args.enable_lora_overlap_loading:
        manager.fetch_new_loras(set(forward.lora_ids))
    adapters = [adapter for adapter, count in zip(forward.lora_ids, counts) for _ in range(count)]
    manager.prepare_lora_batch(
        replace(
            forward, forward_mode=ForwardMode.DECODE, batch_size=len(adapters), lora_ids=adapters
        )
    )
