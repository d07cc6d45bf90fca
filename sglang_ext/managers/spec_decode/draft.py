"""Runs and samples a worker's forwards: draft steps of one token per request, verifications over the full KV, and prefills.

Forwards over the full KV record queries for compressors that score keys by them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.config.options import QUANTIZED
from sglang_ext.config.request_params import request_acceptance
from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers import forward
from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
from sglang_ext.managers.feature import Worker
from sglang_ext.managers.spec_decode.grammar import GrammarWalk
from sglang_ext.managers.spec_decode.penalties import Penalties, RoundPenalties
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.round_result import KVDraftInput, OutputTokens, PendingDrafts
from sglang_ext.managers.spec_decode.sampling import LogitRow, RowSampler, SampledTokens, SamplerCache, grammar_walks, sampling_batch
from sglang_ext.mem_cache.compressed.policy import observe_step, rows_to_record
from sglang_ext.mem_cache.compressed.queries import RecordedRows


class StepRunner:
    """Runs the steps of a worker's rounds."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.table = worker.compressed_kv.token_table
        self.samplers = SamplerCache(worker.model_runner)

    def slots(self, batch: ScheduleBatch, width: int, starts: torch.Tensor) -> torch.Tensor:
        """Slots of ``width`` tokens per request from positions ``starts``, int64 [requests], on."""
        places = starts[:, None] + torch.arange(width, device=self.table.device)
        return self.table[batch.req_pool_indices[:, None], places].long()

    def extend_rows(self, batch: ScheduleBatch, plan: RoundPlan, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``slots``, int64 [requests, width], to the rows that a round reads. Returns the rows, and their tokens before."""
        if plan.on_full_kv and not any(plan.num_pending):
            return batch.req_pool_indices, batch.seq_lens
        compressed_kv, width = self.worker.compressed_kv, slots.shape[1]
        rows, row_lens = (to_device(values, slots.device) for values in (plan.rows, plan.row_lens))
        places = row_lens[:, None] + torch.arange(width, device=slots.device)
        self.table[rows[:, None], places] = slots.to(self.table.dtype)
        for state, row, start in zip(plan.states, plan.rows, plan.starts):
            if row != state.row:
                compressed_kv.mark_tail_written(state.row, start + width)
        return rows, row_lens

    def forward(self, batch: ScheduleBatch, inputs: forward.ForwardInputs, on_full_kv: bool = True) -> LogitsProcessorOutput:
        """Run one forward. ``on_full_kv``: no row begins with compressed KV."""
        return forward.run(self.worker.model_runner, batch, inputs, self.worker.attentions.select(inputs.counts, on_full_kv))

    def _step_sampler(self, batch: ScheduleBatch, plan: RoundPlan) -> RowSampler:
        """The sampler of a round's steps. Grammars mask output tokens, not drafts."""
        walks = grammar_walks(self.worker.requests.unprocessed_tokens, batch, plan, plan.full_kv_reqs)
        logprobs = bool(plan.full_kv_reqs) and batch.return_logprob
        return self.samplers.get(batch, plan.states, range(len(plan.states)), 1, walks, logprobs)

    def run(
        self,
        batch: ScheduleBatch,
        plan: RoundPlan,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        penalized: RoundPenalties | None,
        on_first_step: Callable[[], None],
    ) -> list[tuple[LogitsProcessorOutput, SampledTokens]]:
        """Run the steps of a round. ``tokens``: int64 [requests], the last of each, at positions ``starts``.

        ``slots``: int64 [requests, at least steps], for the KV of the steps and of later tokens; all are written to the rows.
        ``on_first_step``: called after the launch of the first step, if there are others.
        """
        if (selector := self.worker.compressed_kv.async_selector) is not None:
            selector.on_round_start(plan.num_steps + len(plan.verify_batches), plan.selection_interval)
        rows, row_lens = self.extend_rows(batch, plan, slots)
        # Compute these for all steps at once: each operation between the graphs of two steps costs device time.
        ahead = torch.arange(plan.num_steps, device=slots.device)[:, None]
        positions, lengths = starts + ahead, row_lens + ahead + 1
        slots, row_lens_cpu = slots[:, : plan.num_steps].T.contiguous(), torch.tensor(plan.row_lens)
        sampling, step_outputs, selecting = self._step_sampler(batch, plan), [], self._selecting_reqs(plan)
        for index in range(plan.num_steps):
            inputs = forward.ForwardInputs(
                tokens=tokens,
                positions=positions[index],
                slots=slots[index],
                rows=rows,
                lengths=lengths[index],
                lengths_cpu=row_lens_cpu + index + 1,
                counts=[1] * len(plan.rows),
            )
            ends, following = {plan.states[i].row: plan.starts[i] + index + 1 for i in selecting}, plan.num_steps - index - 1
            observer = observe_step(self.worker.compressed_kv, ends, None if self.worker.lossy else following)
            recorded = self._recorded_queries(plan, index, selecting)
            on_full_kv = plan.on_full_kv and not self._needs_queries(recorded)
            if self.worker.queries.has_step_queries and not on_full_kv:
                self.worker.queries.set_targets(recorded)
            with self.worker.queries.recording(recorded, observer):
                output = self.forward(batch, inputs, on_full_kv)
            self._select_tokens(ends, following, plan.selection_interval)
            if penalized is not None:
                penalized.penalize_step(index, tokens, output.next_token_logits)
            sampled = sampling.draw(output.next_token_logits, inputs.positions)
            tokens = sampled.tokens
            step_outputs.append((output, sampled))
            if index == 0 and plan.num_steps > 1:
                on_first_step()
        return step_outputs

    def _needs_queries(self, recorded: tuple[RecordedRows, ...]) -> bool:
        """Whether a step over the full KV must record queries: in lossy mode nothing else does before the first compression."""
        queries = self.worker.queries
        return queries.has_step_queries and self.worker.lossy and any(queries.can_record(row.row) for row in recorded)

    def _select_tokens(self, ends: dict[int, int], following: int, selection_interval: int) -> None:
        """Select by the queries of a launched step. ``ends``: by row, position after its token. ``following``: steps after it."""
        compressed_kv = self.worker.compressed_kv
        if compressed_kv.async_selector is not None:
            compressed_kv.async_selector.on_step_end(compressed_kv, ends, None if self.worker.lossy else following)
        elif following:
            # After the last step, the next round selects by its queries.
            for row, end in ends.items():
                compressed_kv.reselect(row, end, selection_interval)

    def _selecting_reqs(self, plan: RoundPlan) -> list[int]:
        """Requests whose selection may be refreshed between the steps of the round."""
        method_of = self.worker.compressed_kv.method
        return [i for i, state in enumerate(plan.states) if plan.reads_compressed(i) and method_of(state.row).compressor.every]

    def _recorded_queries(self, plan: RoundPlan, index: int, selecting: list[int]) -> tuple[RecordedRows, ...]:
        """The queries that a step records: of requests on the full KV, and of requests whose next selection uses them."""
        wanted = sorted({*plan.full_kv_reqs, *selecting})
        states = [plan.states[i] for i in wanted]
        rows = (RecordedRows(state.row, i, i + 1, plan.starts[i] + index) for i, state in zip(wanted, states))
        return rows_to_record(self.worker.compressed_kv, states, rows)


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Accepts drafts at random instead of by comparison with the full KV, for benchmarks (``--kv-bench-acceptance``).

    Drafting, verification and the roll-back of rejected drafts stay real. ``meta_info`` marks the useless output (hooks/frontend.py).
    ``probability``, from 0 to 1, is that of a draft's acceptance if the ones before it are accepted. A request may ask for another one with
    ``"custom_params": {"kv_acceptance": 0.95}``. ``noise`` is equal on all ranks.
    """

    probability: float
    noise: torch.Generator

    @classmethod
    def of(cls, probability: float | None, device: torch.device) -> "SimulatedAcceptance | None":
        """What ``--kv-bench-acceptance`` asks for; None if drafts are really verified."""
        return None if probability is None else cls(probability, torch.Generator(device).manual_seed(0))

    def probabilities(self, reqs: Sequence[Req]) -> list[float]:
        """The probability that each request asks for, or :attr:`probability`. The frontend refuses other values."""
        return [request_acceptance(self.probability, req.sampling_params.custom_params) for req in reqs]

    def draw(self, drafts: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """Whether each of ``drafts`` is accepted if the ones before it are: bool [requests, drafts]. ``probabilities``: float [requests]."""
        return torch.rand(drafts.shape, generator=self.noise, device=drafts.device) < probabilities[:, None]


class Verifier:
    """Verifies the drafts of a worker's rounds, with captured ``graphs`` if there are any. ``simulation`` is None outside benchmarks."""

    def __init__(self, worker: Worker, steps: StepRunner, graphs: VerifyGraphSet | None, simulation: SimulatedAcceptance | None):
        self.worker = worker
        self.steps = steps
        self.graphs = graphs
        self.simulation = simulation

    def verify(
        self,
        batch: ScheduleBatch,
        plan: RoundPlan,
        requests: list[int],
        step_tokens: torch.Tensor,
        pending_drafts: PendingDrafts,
        penalized: RoundPenalties | None,
    ) -> OutputTokens:
        """Verify the drafts of some requests with the full KV. Returns the accepted tokens and the bonus token of each.

        ``step_tokens``: int64 [all requests, steps], tokens of the round's steps.
        """
        num_drafts = [plan.num_draft_tokens(i) for i in requests]
        whole = len(requests) == len(batch.reqs)
        where = slice(None) if whole else to_device(requests, step_tokens.device)
        part = batch if whole else forward.select_requests(batch, requests, where)
        # Each request's own number of drafts counts; the rest is padding. Pending drafts include those of this round.
        with_earlier = any(plan.num_pending[i] for i in requests)
        drafts = pending_drafts.first(part.req_pool_indices, max(num_drafts)) if with_earlier else step_tokens[where]
        tokens = torch.cat([batch.spec_info.bonus_tokens[where, None], drafts], 1)
        lengths = [plan.lengths[i] for i in requests]
        # The host waits for the drafts here if a request has a grammar.
        walks = grammar_walks(self.worker.requests.unprocessed_tokens, batch, plan, requests, drafts)
        output, positions = self._forward(part, [plan.states[i] for i in requests], lengths, tokens)
        if penalized is not None:
            penalized.penalize_verify(requests, tokens, output.next_token_logits)
        width = len(positions) // len(requests)
        sampler = self.steps.samplers.get(batch, plan.states, requests, width, walks, batch.return_logprob)
        sampled = sampler.draw(output.next_token_logits, positions)
        target_tokens = sampled.tokens.view(len(requests), width)
        # Tokens after the output's end have no slots. The grammar does not mask rows after a refused or final draft.
        max_accepted = [min(count, max(0, plan.remaining[i] - 1)) for i, count in zip(requests, num_drafts)]
        max_accepted = [min(count, walks[i].num_masked_rows - 1) if i in walks else count for i, count in zip(requests, max_accepted)]
        accepted = self._accepted_counts(part, target_tokens, drafts, max_accepted) + 1
        return OutputTokens(requests, target_tokens, accepted, sampled)

    def _forward(
        self, batch: ScheduleBatch, states: list[RequestState], lengths: list[int], tokens: torch.Tensor
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Forward ``tokens``, int64 [requests, width], over the full KV. Returns the output, and int64 positions of the rows."""
        width, count = tokens.shape[1], len(tokens)
        graphs = None if self.graphs is None else self.graphs.fit(count, width)
        if graphs is not None and width < graphs.width:
            # Graphs have few widths. Pad to the graph's width; the results of the padding are ignored.
            tokens = torch.cat([tokens, tokens.new_zeros(count, graphs.width - width)], 1)
            width = graphs.width
        inputs = forward.ForwardInputs(
            tokens=tokens.flatten(),
            positions=(batch.seq_lens[:, None] + torch.arange(width, device=tokens.device)).flatten(),
            slots=self.steps.slots(batch, width, batch.seq_lens).flatten(),
            rows=batch.req_pool_indices,
            lengths=batch.seq_lens + width,
            lengths_cpu=torch.tensor(lengths) + width,
            counts=[width] * count,
        )
        rows = (RecordedRows(state.row, k * width, (k + 1) * width, length) for k, (state, length) in enumerate(zip(states, lengths)))
        recorded = rows_to_record(self.worker.compressed_kv, states, rows)
        if graphs is not None:
            self.worker.queries.set_targets(recorded)
            return graphs.verify(batch, inputs), inputs.positions
        with self.worker.queries.recording(recorded):
            return self.steps.forward(batch, inputs), inputs.positions

    def _accepted_counts(self, batch: ScheduleBatch, target_tokens: torch.Tensor, drafts: torch.Tensor, max_accepted: list[int]) -> torch.Tensor:
        """Accepted draft tokens of each request, int64 [requests], at most ``max_accepted``: those before the first that differs."""
        width, device = drafts.shape[1], drafts.device
        if self.simulation is None:
            same = target_tokens[:, :width] == drafts
        else:
            same = self.simulation.draw(drafts, to_device(self.simulation.probabilities(batch.reqs), device, torch.float32))
        if min(max_accepted) < width:
            same &= torch.arange(width, device=device) < to_device(max_accepted, device)[:, None]
        agreed = same.long().cumprod(1)
        if self.simulation is not None:
            # Output the accepted drafts, because the KV holds them.
            target_tokens[:, :width] = torch.where(agreed.bool(), drafts, target_tokens[:, :width])
        return agreed.sum(1)


def prefill(
    worker: Worker, batch: ScheduleBatch, penalties: Penalties, on_publish: Callable[[torch.Tensor], None] | None = None
) -> GenerationBatchResult:
    """Admit a batch's requests, compute the KV of their prompts, and sample the token after each prompt."""
    # Admit first: which queries are recorded depends on the method that a request asks for.
    states = [worker.requests.admit(req, matched) for req, matched in zip(batch.reqs, batch.prefix_lens)]
    if on_publish is not None:
        # The lengths are known before the forward, so the scheduler can prepare the next round while it runs.
        on_publish(batch.seq_lens)
    attention: AbstractContextManager[None] = nullcontext()
    if worker.server_args.kv_prefill == QUANTIZED:
        from sglang_ext.managers.quantized_attention import QuantizedAttention

        attention = worker.feature(QuantizedAttention).computing_prompts(batch, states)
    parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, accumulate(batch.extend_lens))
    rows = (RecordedRows(req.req_pool_idx, end - length, end, prefix) for req, prefix, length, end in parts)
    recorded = rows_to_record(worker.compressed_kv, states, rows)
    with worker.queries.recording(recorded), attention:
        result = worker.target_worker.forward_batch_generation(batch, is_verify=True)
    result.next_token_ids = _first_tokens(worker, batch, states, result, penalties)
    result.next_draft_input = KVDraftInput(result.next_token_ids)
    result.new_seq_lens = batch.seq_lens
    return result


def _first_tokens(
    worker: Worker, batch: ScheduleBatch, states: list[RequestState], result: GenerationBatchResult, penalties: Penalties
) -> torch.Tensor:
    """Sample the token after each prompt, int64 [requests]. Writes the log-probabilities that requests ask for into ``result``."""
    # The outputs are complete here: SGLang does not prefill a request while a result of it is unprocessed.
    walks = [GrammarWalk(req.grammar) if req.grammar else None for req in batch.reqs]
    rows = [LogitRow.from_state(i, state, walk) for i, (state, walk) in enumerate(zip(states, walks))]
    output = result.logits_output
    if output.next_token_logits is not None:
        penalties.penalize_prefill(batch, output.next_token_logits)
    if all(req.sampling_params.max_new_tokens == 0 and req.grammar is None for req in batch.reqs):
        # As SGLang without speculation: sample nothing, and return the requested log-probabilities whatever the temperature. A request with
        # a grammar needs a sample: in the overlapped loop the next round walks the grammar along it before SGLang finishes the request.
        if batch.return_logprob and output.next_token_logits is not None:
            asked = sampling_batch(batch, rows, batch.seq_lens.device, logprobs=True)
            worker.model_runner.compute_logprobs_only(output, asked)
        return batch.seq_lens.new_zeros(len(states), dtype=torch.int64)
    sampler = RowSampler.from_rows(worker.model_runner, batch, rows, batch.return_logprob)
    sampled = sampler.draw(output.next_token_logits, batch.seq_lens - 1)
    if batch.return_logprob:
        sampled.fill_logprobs(output)
    return sampled.tokens
