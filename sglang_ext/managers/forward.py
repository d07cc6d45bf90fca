"""Run one forward of the target model over the steps of an iteration."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_ext.core import Step
from sglang_ext.layers.attention.views import ViewsInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class Layout:
    """Where the steps' tokens lie in the forward's token dimension, host and device copies.

    Attributes:
        starts: first token of each step.
        tokens: int64 [total], input tokens.
        positions: int64 [total], absolute positions.
        slots: int64 [total], where their KV is written.
    """

    starts: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def lay_out(steps: list[Step], token_table: torch.Tensor) -> Layout:
    """Concatenate the steps' tokens; KV goes to the slots of the request's own row."""
    device = token_table.device
    tokens, positions, rows, starts = [], [], [], []
    for step in steps:
        starts.append(len(tokens))
        tokens += step.tokens
        positions += range(step.position, step.position + len(step.tokens))
        rows += [step.state.row] * len(step.tokens)
    place = torch.tensor(positions, dtype=torch.int64, device=device)
    return Layout(
        starts=starts,
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=place,
        slots=token_table[torch.tensor(rows, device=device), place].long(),
    )


def run(
    model_runner: "ModelRunner", batch: "ScheduleBatch", steps: list[Step], layout: Layout
) -> LogitsProcessorOutput:
    """Forward the steps; logits for each token: float [total, vocabulary]."""
    return model_runner.forward(build(model_runner, batch, steps, layout)).logits_output


def build(
    model_runner: "ModelRunner", batch: "ScheduleBatch", steps: list[Step], layout: Layout
) -> ForwardBatch:
    """SGLang's forward batch: a plain decode when each step has one token, else a ragged verify."""
    device = layout.tokens.device
    lengths = torch.tensor([step.length for step in steps], dtype=torch.int64)
    counts = [len(step.tokens) for step in steps]
    ragged = max(counts) > 1
    hidden = CaptureHiddenMode.FULL if batch.return_hidden_states else CaptureHiddenMode.NULL
    forward = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if ragged else ForwardMode.DECODE,
        batch_size=len(steps),
        input_ids=layout.tokens,
        req_pool_indices=torch.tensor([step.row for step in steps], dtype=torch.int64, device=device),
        seq_lens=lengths.to(device),
        out_cache_loc=layout.slots,
        seq_lens_sum=int(lengths.sum()),
        orig_seq_lens=lengths.to(device, torch.int32),
        seq_lens_cpu=lengths,
        positions=layout.positions,
        spec_algorithm=batch.spec_algorithm,
        sampling_info=batch.sampling_info,
        capture_hidden_mode=hidden,
        lora_ids=[req.lora_id for req in batch.reqs],
        rids=[step.state.rid for step in steps],
        num_token_non_padded_cpu=len(layout.tokens),
    )
    if ragged:
        query_lengths = torch.tensor(counts, dtype=torch.int64, device=device)
        forward.spec_info = ViewsInput(forward.seq_lens, query_lengths)
        forward.spec_info.capture_hidden_mode = hidden
        forward.extend_seq_lens = query_lengths
        forward.extend_prefix_lens = forward.seq_lens - query_lengths
        forward.extend_seq_lens_cpu = counts
        forward.extend_prefix_lens_cpu = (lengths - torch.tensor(counts)).tolist()
        forward.extend_num_tokens = len(layout.tokens)
        forward.extend_start_loc = query_lengths.cumsum(0) - query_lengths
    if model_runner.server_args.enable_lora:
        prepare_lora(model_runner, forward, counts)
    return forward


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
