"""Staggered scheduling: requests at different phases of their rounds share each forward.

In one iteration some requests verify while the others draft one token (VeriCache, section 5). What each
does is decided from the outcome of the iteration before, so SGLang's scheduler is not overlapped, and the
forwards are ragged, so they run without CUDA graphs.
"""

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState, Step
from sglang_ext.managers import forward, integrity, meta_info, results
from sglang_ext.managers.planner import CURABLE, Planner
from sglang_ext.managers.sampling import Sampling
from sglang_ext.managers.sampling_rows import Row
from sglang_ext.mem_cache.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.managers.worker import KVWorker


class Staggered:
    """Runs the iterations of a worker's running batches.

    Attributes:
        worker: whose states, views and queries these are.
        verifications: None, as full KV stays on the device.
    """

    verifications = None

    def __init__(self, worker: "KVWorker"):
        self.worker = worker
        self.planner = Planner(worker.views, worker.stride - 1, worker.lossy)

    def begin(self, states: list[RequestState], tokens: torch.Tensor) -> None:
        """Take the first token of each request's output: int64 [requests]."""
        for state, token in zip(states, tokens.tolist()):
            state.bonus = token

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone; what is kept of it lies in its state."""

    def decode(
        self, batch: "ScheduleBatch", states: list[RequestState], on_publish=None
    ) -> GenerationBatchResult:
        """One iteration: a step of each request."""
        worker = self.worker
        steps = self.planner.plan(batch.reqs, states, batch.seq_lens.tolist())
        inputs = forward.lay_out(steps, worker.views.token_table)
        starts = [0, *accumulate(inputs.counts[:-1])]
        if worker.strict:
            exact = {step.state.row: range(step.exact) for step in steps}
            integrity.check(exact, inputs.slots, worker.views)
        with worker.queries.recording(_to_record(steps, starts)):
            attention = worker.attentions.of(inputs.counts, all(step.row == step.state.row for step in steps))
            output = forward.run(worker.model_runner, batch, inputs, attention)
        rows = [
            Row.of(i, step.state, step.drafts_before(j))
            for i, step in enumerate(steps)
            for j in range(len(step.tokens))
        ]
        sampled = Sampling.of(worker.model_runner, batch, rows, batch.return_logprob).draw(
            output.next_token_logits, inputs.positions
        )
        answers = sampled.tokens.tolist()
        outcomes = [
            results.accept(step, start, answers, req.grammar)
            for req, step, start in zip(batch.reqs, steps, starts)
        ]
        for req, step, outcome in zip(batch.reqs, steps, outcomes):
            self._account(req, step, outcome)
        worker.metrics.observe_pool(worker.views)
        return results.batch_result(batch, outcomes, sampled, output, worker.stride)

    def _account(self, req: "Req", step: Step, outcome: results.Accepted) -> None:
        state, metrics, answers = step.state, self.worker.metrics, len(outcome.tokens)
        if not step.emits:
            metrics.count_drafts(1, 1)
            return
        meta_info.fill(req, state)
        if state.fallback:
            metrics.count_fallback(state.fallback, answers)
        elif len(step.tokens) > 1:
            metrics.count_verify(answers)


def _to_record(steps: list[Step], starts: list[int]) -> tuple[Recorded, ...]:
    """Queries over exact KV; in lossy mode there are none after the prompt, so all."""
    return tuple(
        Recorded(step.state.row, start, start + len(step.tokens), step.position)
        for step, start in zip(steps, starts)
        if step.emits and step.state.fallback in CURABLE
    )
