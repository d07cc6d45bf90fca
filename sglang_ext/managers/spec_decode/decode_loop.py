"""The decode loop: runs the steps of all requests in a round, then the verifications that are scheduled.

A round is one call by SGLang's scheduler. Steps replay the target model's CUDA graphs of one token per request. Verifications replay
graphs of their own (verify_graphs.py). The host does not wait for the device in a round, except for drafts under a grammar and for
log-probabilities. So SGLang's overlapped scheduler prepares the next round while one runs.

Drafts that are not verified in their round stay pending on the device. If the full KV is in host memory, verifications are spread over
the rounds, so that the link is never congested (VeriCache, section 5: cross-resource staggering).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.config import options, selection_options
from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers.forward import KVDraftInput, select_requests
from sglang_ext.managers.spec_decode.draft_length import DraftLength, FixedDraftLength
from sglang_ext.managers.spec_decode.draft_report import DraftReport
from sglang_ext.managers.spec_decode.round_timer import RoundTimer
from sglang_ext.managers.spec_decode.penalties import Penalties, RoundPenalties
from sglang_ext.managers.spec_decode.request_states import output_end, write_counters
from sglang_ext.managers.spec_decode.round_result import OutputTokens, PendingDrafts, PartialOutput, RoundResult, merge_outputs
from sglang_ext.managers.spec_decode.planner import RoundPlan, RoundPlanner
from sglang_ext.managers.spec_decode.round_setup import RoundSetup
from sglang_ext.managers.spec_decode.cost_model import RoundCosts
from sglang_ext.managers.spec_decode.sampling import SampledTokens, pick_requests
from sglang_ext.managers.spec_decode.draft import StepRunner, Verifier
from sglang_ext.managers.spec_decode.full_kv import ResidentFullKV

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_ext.managers.feature import Worker
    from sglang_ext.managers.kv_offload.offloaded_full_kv import OffloadedFullKV
    from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
    from sglang_ext.managers.simulated_acceptance import SimulatedAcceptance
    from sglang_ext.managers.spec_decode.selection_interval import SelectionInterval

PublishLengths = Callable[[torch.Tensor], None]
DecodeBatch = Callable[["ScheduleBatch", PublishLengths | None], RoundResult]

# Rounds between two updates of the share of full KV that leaves the device: times, acceptance and the link change slowly.
PLACEMENT_INTERVAL = 8


class DecodeLoop:
    """Runs the decode rounds of a worker's batches.

    Attributes:
        worker: Owns the draft states, the compressed KV and the recorded queries.
        round_timer: Chooses draft lengths, and measures rounds.
        steps: Runs forwards of one token per request.
        verifier: Runs verifications.
        setup: Plans rounds, and compresses and loads the KV that they need.
        full_kv: Says when the full KV of a request is ready for a verification.
        policy: Chooses how much full KV may leave the device, and how many drafts are pending per load; None if none may leave. It belongs
            to the provider.
        strict: Whether to check in each round that no slot has two owners, and that ranks plan alike.
        timeline: Records events for a benchmark; None otherwise.
        gathered: Pending drafts of each row.
        penalties: Token counts of the outputs that have penalties.
    """

    def __init__(
        self,
        worker: "Worker",
        round_timer: RoundTimer,
        steps: StepRunner,
        verifier: Verifier,
        setup: RoundSetup,
        timeline: "TransferTimeline | None" = None,
    ):
        self.worker = worker
        self.round_timer = round_timer
        self.steps = steps
        self.verifier = verifier
        self.setup = setup
        self.full_kv: "ResidentFullKV | OffloadedFullKV" = setup.full_kv
        self.policy = self.full_kv.policy
        self.strict = bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())
        self.timeline = timeline
        if self.policy is not None:
            round_timer.on_round_timed = self.policy.observe
        self.gathered = PendingDrafts(worker.compressed_kv.rows, setup.planner.max_pending, steps.table.device)
        self.penalties = Penalties(steps.table.device)
        self._rounds = 0

    def interrupt(self) -> None:
        """End the timing of the running round, because a prefill ran."""
        self.round_timer.interrupt()

    def forget(self, row: int) -> None:
        """Drop all state of the request in ``row``."""
        self.full_kv.forget(row)
        self.penalties.forget(row)

    def decode(self, batch: "ScheduleBatch", on_publish: PublishLengths | None = None) -> RoundResult:
        """Run one round of the unfinished requests of ``batch``. Loads of full KV are launched while it runs."""
        with self.full_kv.deferring_loads():
            return decode_unfinished(self._decode, batch, on_publish)

    def _decode(self, batch: "ScheduleBatch", on_publish: PublishLengths | None) -> RoundResult:
        states = self.worker.requests.of(batch)
        plan = self._plan(batch, states)
        lengths = self._known_lengths(batch, plan)
        if lengths is not None and on_publish is not None:
            # Publish before the forwards: the scheduler prepares the next round while they run.
            on_publish(lengths)
        penalized = self.penalties.for_round(batch, plan)
        steps, tokens = self._step(batch, plan, penalized)
        self.round_timer.on_drafted()
        parts = [self.verifier.verify(batch, plan, part, tokens, self.gathered, penalized) for part in plan.verify_batches]
        if plan.full_kv_reqs:
            counts = [plan.num_output_tokens(i) for i in plan.full_kv_reqs]
            parts.append(PartialOutput(plan.full_kv_reqs, OutputTokens.from_steps(steps, tokens, plan.full_kv_reqs, counts)))
        output = merge_outputs(parts, batch.seq_lens, batch.return_logprob)
        penalized.count_output(batch.spec_info.bonus_tokens, output)
        if lengths is None:
            lengths = batch.seq_lens + output.num_output
            # SGLang's event marks an earlier read of the token table than the last one of this round.
            self.worker.model_runner.war_fastpath_read_done_event = None
            if on_publish is not None:
                on_publish(lengths)
        result = RoundResult.from_outputs(self.worker.model_runner, batch, plan, output, lengths, steps[-1][0], self.round_timer.running)
        self.full_kv.on_round_launched()
        emitting = {*plan.verify_reqs, *plan.full_kv_reqs}
        for i, state in enumerate(states):
            state.num_pending = 0 if i in emitting else plan.num_draft_tokens(i)
        self.round_timer.on_launched()
        return result

    def _plan(self, batch: "ScheduleBatch", states: list[RequestState]) -> RoundPlan:
        worker, lengths = self.worker, batch.seq_lens_cpu.tolist()
        for state, length in zip(states, lengths):
            # Drop the queries of rejected drafts here: graphs of steps, which may follow, would not overwrite them.
            worker.queries.drop_rejected(state.row, length)
        wanted = self.round_timer.start_round(lengths, states)
        self._update_placement()
        seconds = worker.ranks.agree(self.round_timer.recent_rounds.seconds or None) if self.policy is not None else None
        plan = self.setup.plan(batch, states, lengths, wanted, seconds, self.round_timer.every)
        self.round_timer.on_planned(plan)
        if self.strict:
            alike = (plan.num_steps, plan.rows, plan.row_lens, plan.num_pending, plan.fallbacks, plan.full_kv_reqs, plan.verify_batches)
            worker.ranks.check_equal("a round", alike)
            self._check(batch, plan)
        return plan

    def _update_placement(self) -> None:
        """Update how much full KV may leave the device, every PLACEMENT_INTERVAL rounds."""
        self._rounds += 1
        if self.policy is None or self._rounds % PLACEMENT_INTERVAL:
            return
        worker, residency = self.worker, self.full_kv.residency
        found = self.policy.choose(worker.requests.overall_acceptance.probability, residency.host.link.restored, worker.compressed_kv.share)
        residency.max_offloaded, self.full_kv.drafts_per_load = worker.ranks.agree(found)

    def _check(self, batch: "ScheduleBatch", plan: RoundPlan) -> None:
        """Check in strict mode that no slot has two owners."""
        from sglang_ext.managers import integrity

        table, verify_reqs = self.steps.table, set(plan.verify_reqs)
        written, exact = [], {}
        for i, (req, state, start) in enumerate(zip(batch.reqs, plan.states, plan.starts)):
            # KV after the end of the output is written to SGLang's padding page.
            length, end = plan.lengths[i], min(start + plan.num_steps + (i in verify_reqs), output_end(req))
            written.append(table[state.row, length if i in verify_reqs else start : end].long())
            exact[state.row] = range(self.full_kv.full_kv_start(state.row, req.cache_protected_len), length)
        integrity.check(exact, torch.cat(written), self.worker.compressed_kv)

    def _known_lengths(self, batch: "ScheduleBatch", plan: RoundPlan) -> torch.Tensor | None:
        """Tokens of each request after the round, int64 [requests]; None if they depend on a verification."""
        if plan.verify_batches:
            return None
        full_kv_reqs = set(plan.full_kv_reqs)
        counts = [plan.num_output_tokens(i) * (i in full_kv_reqs) for i in range(len(plan.states))]
        return batch.seq_lens + to_device(counts, batch.seq_lens.device)

    def _step(
        self, batch: "ScheduleBatch", plan: RoundPlan, penalized: RoundPenalties
    ) -> tuple[list[tuple[LogitsProcessorOutput, SampledTokens]], torch.Tensor]:
        """Run the steps of a round. Returns them and their tokens, int64 [requests, steps].

        Drafts that stay pending are stored after those of earlier rounds.
        """
        own, newest, starts, before = batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.seq_lens, None
        penalized.begin_steps(newest, self.gathered, own)
        if any(plan.num_pending):
            before = to_device(plan.num_pending, own.device)
            newest, starts = self.gathered.newest(own, before, newest), starts + before
        slots = self.steps.slots(batch, plan.width, starts)
        steps = self.steps.run(batch, plan, newest, slots, starts, penalized, self.round_timer.on_first_step)
        tokens = torch.stack([sampled.tokens for _, sampled in steps], dim=1)
        if before is not None or len(plan.verify_reqs) + len(plan.full_kv_reqs) < len(plan.states):
            self.gathered.put(own, torch.zeros_like(own) if before is None else before, tokens)
        return steps, tokens

    def account(self, batch: "ScheduleBatch", result: "GenerationBatchResult") -> None:
        """Count the outcome of a round, once it is on the host. Does nothing for a prefill."""
        if not isinstance(result, RoundResult):
            return
        metrics, plan, report, tokens = self.worker.metrics, result.plan, self.round_timer.report, 0
        verify_reqs, full_kv_reqs = set(plan.verify_reqs), set(plan.full_kv_reqs)
        for i, (req, state, num_tokens) in enumerate(zip(batch.reqs, plan.states, result.accept_lens.tolist())):
            if req.finished() or req.is_retracted:
                continue  # the scheduler drops tokens after the end
            tokens += num_tokens
            if plan.fallbacks[i]:
                metrics.count_fallback(plan.fallbacks[i], num_tokens)
                if report is not None:
                    report.count_fallback(plan.fallbacks[i], num_tokens)
            elif plan.can_be_rejected(i) and i not in full_kv_reqs:
                metrics.count_drafts(plan.num_steps)
                if i in verify_reqs:
                    # Drafts after the end of the output were not rejected.
                    offered = num_tokens - 1 if i in result.finished_early else min(plan.num_draft_tokens(i), plan.remaining[i] - 1)
                    self.worker.requests.count_verify(state, offered, num_tokens - 1)
                    if self.round_timer.selection_interval is not None:
                        self.round_timer.selection_interval.observe(plan.selection_interval, offered, num_tokens - 1)
                    metrics.count_verify(num_tokens)
                    if report is not None:
                        report.count_verify(offered, num_tokens - 1)
            state.fallback = plan.fallbacks[i]
            write_counters(req, state)
            if self.timeline is not None:
                self._record_timeline(req.bootstrap_room, result, i, num_tokens)
        if report is not None and tokens:
            report.on_round_end(plan, tokens)
        self.observe_pool()

    def _record_timeline(self, room: int, result: RoundResult, i: int, num_tokens: int) -> None:
        """Record the events of one request's round in the timeline."""
        plan, timeline = result.plan, self.timeline
        drafted, ended = (timeline.at(mark) for mark in (result.marks.drafted, result.marks.ended))
        if i in plan.full_kv_reqs:
            timeline.add_event(room, "answered", drafted, num_tokens)
            return
        timeline.add_event(room, "drafted", drafted, plan.num_draft_tokens(i), plan.num_steps, early=i in plan.early_reqs)
        if i in plan.verify_reqs:
            timeline.add_event(room, "verified", ended, num_tokens - 1, plan.num_draft_tokens(i), early=i in plan.early_reqs)

    def observe_pool(self) -> None:
        """Report the contents of the pool, and where full KV is stored."""
        values = (value for feature in self.worker.features for value in feature.metrics(self.worker))
        self.worker.metrics.observe_pool(self.worker.compressed_kv, values)


def decode_unfinished(decode: DecodeBatch, batch: "ScheduleBatch", on_publish: PublishLengths | None) -> RoundResult:
    """Run ``decode`` on the unfinished requests of ``batch``. The result names their positions.

    Under the overlapped loop, SGLang builds a batch before it has the result of the last one. If a request has a grammar that cannot be
    walked (grammar.py), SGLang processes that result before it launches the batch. A request that finishes in it is still in the batch,
    but its row and its slots are free. So only the other requests run. The tensors that SGLang relays from round to round are padded to
    the length of the batch.

    Args:
        decode: Runs a round of all requests of a batch.
        batch: SGLang's batch, in decode mode.
        on_publish: As in the worker's ``forward_batch_generation``.
    """
    running = [i for i, req in enumerate(batch.reqs) if not req.finished()]
    if len(running) == len(batch.reqs):
        return decode(batch, on_publish)
    where = to_device(running, batch.seq_lens.device)

    def publish(lengths: torch.Tensor) -> None:
        on_publish(batch.seq_lens.index_copy(0, where, lengths))

    if not running:
        result = RoundResult.empty(batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
    else:
        result = decode(select_batch(batch, running, where), publish if on_publish is not None else None)
    newest = result.next_draft_input.bonus_tokens
    result.next_draft_input = KVDraftInput(newest.new_zeros(len(batch.reqs)).index_copy(0, where, newest))
    result.positions = running
    return result


def select_batch(batch: "ScheduleBatch", requests: list[int], where: torch.Tensor) -> "ScheduleBatch":
    """A batch of some requests of another batch, with the fields that rounds read. The other batch does not change.

    Args:
        requests: Positions of the requests in the batch.
        where: The same, int64 on the device.
    """
    part = select_requests(batch, requests, where)
    part.seq_lens_cpu = batch.seq_lens_cpu[requests]
    part.spec_info = KVDraftInput(batch.spec_info.bonus_tokens[where])
    part.sampling_info = pick_requests(batch.sampling_info, requests, where.device)
    part.return_logprob = any(req.return_logprob for req in part.reqs)
    if part.return_logprob:
        part.top_logprobs_nums = [batch.top_logprobs_nums[i] for i in requests]
        part.token_ids_logprobs = [batch.token_ids_logprobs[i] for i in requests]
    part.return_hidden_states = any(req.return_hidden_states for req in part.reqs)
    return part


def decode_loop(worker: "Worker", full_kv: "ResidentFullKV | OffloadedFullKV") -> DecodeLoop:
    """Create the decode loop of a worker whose compressed KV cache exists. ``full_kv`` says when full KV is ready for a verification."""
    args, steps = worker.server_args, StepRunner(worker)
    longest = options.max_draft_length(args)
    # If compressed KV has an attention kernel of its own, its steps use that kernel for full KV, too.
    separates_full_kv = bool(args.enable_deterministic_inference) and worker.attentions.compressed is not None
    planner = RoundPlanner(worker.max_verify_tokens - 1, longest, worker.lossy, separates_full_kv)
    setup = RoundSetup(planner, worker.compressed_kv, full_kv, worker.queries.can_record)
    lengths = DraftLength(longest) if args.kv_draft_length == "auto" else FixedDraftLength(longest)
    costs = RoundCosts(
        weights=sum(each.nbytes for each in worker.model_runner.model.parameters()),
        token_bytes=worker.compressed_kv.buffers.bytes_per_slot,
        share=worker.compressed_kv.methods[0].share,
        widths=() if worker.graphs is None else options.verify_widths(args),
    )
    compresses_each_round = any(method.compressor.each_round for method in worker.compressed_kv.methods)
    device = torch.device(worker.model_runner.device)
    interval = _selection_interval(worker)
    chooses_interval = interval is not None and len(interval.intervals) > 1
    report = None if worker.lossy else DraftReport(lengths, costs, worker.metrics, worker.ranks.first, chooses_interval)
    round_timer = RoundTimer(lengths, device, worker.metrics, worker.ranks, costs, compresses_each_round, selection_interval=interval, report=report)
    verifier = Verifier(worker, steps, worker.graphs, _simulation(worker))
    return DecodeLoop(worker, round_timer, steps, verifier, setup, _timeline(worker))


def _selection_interval(worker: "Worker") -> "SelectionInterval | None":
    """Chooses the selection interval; None if no method selects by the queries of steps."""
    if not worker.methods.every:
        return None
    from sglang_ext.managers.spec_decode.selection_interval import SelectionInterval

    return SelectionInterval(selection_options.selection_intervals(worker.server_args))


def _simulation(worker: "Worker") -> "SimulatedAcceptance | None":
    """Acceptance that a benchmark simulates; None otherwise."""
    if worker.server_args.kv_bench_acceptance is None:
        return None
    from sglang_ext.managers.simulated_acceptance import SimulatedAcceptance

    return SimulatedAcceptance.of(worker.server_args.kv_bench_acceptance, torch.device(worker.model_runner.device))


def _timeline(worker: "Worker") -> "TransferTimeline | None":
    """The timeline that a benchmark of KV transfers asks for; None otherwise."""
    args = worker.server_args
    if args.kv_bench_timeline is None or not options.has_progressive_transfer(args) or not worker.ranks.first:
        return None
    from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline

    return TransferTimeline.of(args.kv_bench_timeline, torch.device(worker.model_runner.device))
