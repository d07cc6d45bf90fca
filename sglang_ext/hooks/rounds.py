"""Hooks for the scheduler's view of rounds: slots for the next round, the results of a round, and the end of an output.

*Slots.* SGLang reserves slots for two rounds. A prompt that barely fits the pool would then fail, because no request could be retracted. So
the reservation ends at the end of the output. In a full pool compressed KV is freed before requests are retracted.

*Results.* The scheduler sees the requests with output tokens, and the requests that were aborted. If a grammar cannot be walked, the
scheduler processes a result before it launches the next round.

*End.* For several new tokens, SGLang checks the length first, then stop strings in their given order, then stop tokens. If two ends apply, it
may use the later one. So the tokens after the first end are removed before SGLang's check, and the check sees the last token only.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from sglang_ext.device import to_device
from sglang_ext.managers.spec_decode.grammar import can_walk
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.managers.spec_decode.round_result import RoundResult
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import lost_requests


def cap_slot_reservation(original: Callable, batch: ScheduleBatch) -> None:
    """Hook around ``eagle_prepare_for_decode``, which reserves slots. Ends the reservation at the end of each output.

    A round may continue after the end of its shorter requests. Their rows point to SGLang's padding page there.
    """
    with capped_committed_lens(batch.reqs) as near:
        original(batch)
    if not near:
        return
    rows = to_device([req.req_pool_idx for req in near], batch.device)
    ends = to_device([req.kv.kv_allocated_len for req in near], batch.device)
    places = ends[:, None] + torch.arange(get_alloc_reserve_per_decode(), device=batch.device)
    batch.req_to_token_pool.req_to_token[rows[:, None], places] = 0


def free_compressed_kv_when_full(original: Callable, batch: ScheduleBatch, selected_indices: list[int] | None = None) -> bool:
    """Hook around ``ScheduleBatch.check_decode_mem``: frees compressed KV before it retracts requests. Lost ones are retracted at once."""
    if selected_indices is None and lost_requests(batch):
        return False
    with capped_committed_lens(batch.reqs):
        fits = original(batch, selected_indices)
        compressed_kv = batch.tree_cache.compressed_kv
        while not fits and compressed_kv is not None and (row := compressed_kv.largest_releasable_row()) is not None:
            compressed_kv.release_compressed_kv(row)
            fits = original(batch, selected_indices)
    if batch.tree_cache.residency is not None or batch.tree_cache.freed_full_kv is not None:
        # SGLang looks for free slots again only when a request finishes. Here slots are also freed when full KV leaves the device.
        batch.batch_is_full = False
    return fits


@contextmanager
def capped_committed_lens(reqs: list[Req]) -> Iterator[list[Req]]:
    """Limit SGLang's reservation to the end of each output, inside the context. Yields the requests that end before it."""
    reserve = get_alloc_reserve_per_decode()
    near = [req for req in reqs if req.kv_committed_len + reserve > output_end(req)]
    committed = [req.kv_committed_len for req in near]
    for req in near:
        req.kv_committed_len = output_end(req) - reserve
    try:
        yield near
    finally:
        for req, count in zip(near, committed):
            req.kv_committed_len = count


def needs_grammar_sync(original: Callable, batch: ScheduleBatch) -> bool:
    """Hook around ``grammar_needs_sync``: only grammars that cannot be rolled back need it. Rounds walk the others."""
    return original(batch) and not all(can_walk(req.grammar) for req in batch.reqs)


def process_output_tokens(original: Callable, processor, batch: ScheduleBatch, result) -> None:
    """Hook around ``process_batch_result_decode``: passes on only the requests with output tokens."""
    if result.accept_lens is None:
        return original(processor, batch, result)
    if result.copy_done is not None:
        result.copy_done.synchronize()
    if isinstance(result, RoundResult) and result.positions is not None:
        batch = _subset(batch, result.positions)
    _truncate_at_finish(batch, result)
    processor.model_worker.account(batch, result)
    _finish_aborted(processor, batch, result)
    counts = result.accept_lens.tolist()
    emitting = [i for i, count in enumerate(counts) if count > 0]
    if not emitting:
        return None
    if isinstance(result, RoundResult) and result.plan is not None:
        count_plain_steps(processor.metrics_reporter, result.plan, counts)
    if len(emitting) < len(batch.reqs):
        batch, result = _subset(batch, emitting), _result_subset(result, emitting)
    return _advance_grammars_last(original, processor, batch, result)


def count_plain_steps(reporter: SchedulerMetricsReporter, done: RoundPlan, counts: Sequence[int]) -> None:
    """Count each output token of plain steps as a forward. SGLang takes all tokens of a round but the first for accepted drafts."""
    reporter.spec_num_forward_ct += sum(max(0, counts[i] - 1) for i in done.full_kv_reqs)


def _truncate_at_finish(batch: ScheduleBatch, result) -> None:
    """Remove a round's tokens after the end of an output, so that they are neither read, kept nor counted."""
    stride = result.speculative_num_draft_tokens
    for i, (req, count) in enumerate(zip(batch.reqs, result.accept_lens.tolist())):
        if count <= 1 or req.finished() or req.is_retracted:
            continue
        kept = count_tokens_to_finish(req, result.next_token_ids[i * stride : i * stride + count].tolist())
        if kept < count:
            result.accept_lens[i] = kept
            result.finished_early.add(i)


def _finish_aborted(processor, batch: ScheduleBatch, result) -> None:
    """Finish aborted requests with pending drafts. Their next output token may take long."""
    ended = []
    for i, (req, count) in enumerate(zip(batch.reqs, result.accept_lens.tolist())):
        if count == 0 and req.to_finish and not req.finished() and not req.is_retracted:
            req.update_finish_state(0)
            processor._handle_finish_state_updated_req(req, batch, result, i, result.logits_output)
            ended.append(req)
    if ended:
        processor.output_streamer.stream_output(ended, batch.return_logprob)


def _advance_grammars_last(original: Callable, processor, batch: ScheduleBatch, result) -> None:
    """Process the result, then advance grammars. SGLang does it before, and would end a request with ``ignore_eos`` where its grammar ends."""
    stride = result.speculative_num_draft_tokens
    tokens = result.next_token_ids.view(-1, stride).tolist()
    tokens = [row[:count] for row, count in zip(tokens, result.accept_lens.tolist())]
    result.grammar_advanced, result.grammar_retained_tokens = True, tokens
    # Tokens of a retracted request are dropped, and decoded again.
    open_grammars = [(req, row) for req, row in zip(batch.reqs, tokens) if req.grammar is not None and not req.finished() and not req.is_retracted]
    original(processor, batch, result)
    for req, row in open_grammars:
        processor._accept_grammar_tokens(req, row)
        req.grammar.finished = req.finished()


def _subset(batch: ScheduleBatch, indices: list[int]) -> ScheduleBatch:
    part = copy.copy(batch)
    part.reqs = [batch.reqs[i] for i in indices]
    part.return_logprob = any(req.return_logprob for req in part.reqs)
    return part


def _result_subset(result: GenerationBatchResult, indices: list[int]) -> GenerationBatchResult:
    part, stride = copy.copy(result), result.speculative_num_draft_tokens
    part.accept_lens = result.accept_lens[indices]
    part.next_token_ids = result.next_token_ids.view(-1, stride)[indices].flatten()
    output = part.logits_output = copy.copy(result.logits_output)
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs[indices]
    places = [i * stride + j for i in indices for j in range(stride)]
    for kind in ("top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val", "token_ids_logprobs_idx"):
        if (values := getattr(output, f"next_token_{kind}")) is not None:
            setattr(output, f"next_token_{kind}", [values[place] for place in places])
    if output.hidden_states is not None:
        output.hidden_states = output.hidden_states[places]
    return part


def check_finish_at_last_token(original: Callable, req: Req, new_accepted_len: int = 1) -> None:
    """Hook around ``update_finish_state``: checks the last of several new tokens, as if it came alone. No token before it ends the output."""
    # An abort that arrived in between ends an output that has no other end.
    if new_accepted_len <= 1:
        original(req, new_accepted_len)
        return
    abort, req.to_finish = req.to_finish, None
    original(req, 1)
    if abort and not req.finished():
        req.to_finish = abort
        original(req, 1)


def count_tokens_to_finish(req: Req, tokens: list[int]) -> int:
    """Count the tokens up to the first that ends the output, or all. The request is not changed."""
    before, abort, req.to_finish = len(req.output_ids), req.to_finish, None
    for token in tokens:
        req.output_ids.append(token)
        req.update_finish_state(1)
        if req.finished():
            break
    count = len(req.output_ids) - before
    del req.output_ids[before:]
    req.finished_reason = req.finished_len = None
    req.to_finish = abort
    return count
