"""A prefill, or a chunk of one: SGLang's own forward, with its queries kept and its first tokens sampled like all others."""

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers.spec_decode.copy_policy import of_use
from sglang_ext.managers.spec_decode.sampling import Row, Sampling, sampling_batch
from sglang_ext.mem_cache.compressed.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.managers.worker import KVWorker


def prefill(worker: "KVWorker", batch: "ScheduleBatch", on_publish=None) -> GenerationBatchResult:
    """Admit a batch's requests, compute their prompts' KV, and sample the token after each.

    Args:
        worker: whose requests these become.
        batch: SGLang's, in extend mode.
        on_publish: tells SGLang's scheduler the new lengths, int64 [requests]; None where it does not wait for them.
    """
    # First, as queries are kept by the method that a request asks for.
    states = [worker.requests.admit(req, matched) for req, matched in zip(batch.reqs, batch.prefix_lens)]
    if on_publish is not None:
        # The lengths are known before the forward: the scheduler shall prepare the next round while it runs.
        on_publish(batch.seq_lens)
    with worker.queries.recording(of_use(worker.views, states, _to_record(batch))):
        result = worker.target_worker.forward_batch_generation(batch, is_verify=True)
    result.next_token_ids = _first_tokens(worker, batch, states, result)
    worker.loop.interrupt()
    result.next_draft_input = BetweenSteps(result.next_token_ids)
    result.new_seq_lens = batch.seq_lens
    return result


def _to_record(batch: "ScheduleBatch") -> Iterator[Recorded]:
    """The queries of all its tokens."""
    ends = accumulate(batch.extend_lens)
    parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, ends)
    return (Recorded(req.req_pool_idx, end - length, end, prefix) for req, prefix, length, end in parts)


def _first_tokens(
    worker: "KVWorker", batch: "ScheduleBatch", states: list[RequestState], result: GenerationBatchResult
) -> torch.Tensor:
    """The token after each prompt, int64 [requests]; log-probabilities are written into the result where asked for."""
    rows = [Row.answer(i, state, req) for i, (state, req) in enumerate(zip(states, batch.reqs))]
    output = result.logits_output
    if all(req.sampling_params.max_new_tokens == 0 for req in batch.reqs):
        # As SGLang without speculation: nothing is drawn, and what was asked for is told whatever the temperature.
        if batch.return_logprob and output.next_token_logits is not None:
            asked = sampling_batch(batch, rows, batch.seq_lens.device, logprobs=True)
            worker.model_runner.compute_logprobs_only(output, asked)
        return batch.seq_lens.new_zeros(len(states), dtype=torch.int64)
    sampled = Sampling.of(worker.model_runner, batch, rows, batch.return_logprob).draw(
        output.next_token_logits, batch.seq_lens - 1
    )
    if batch.return_logprob:
        sampled.fill_logprobs(output, list(range(len(states))))
    return sampled.tokens
