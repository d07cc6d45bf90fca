"""The decode loop: runs the steps of all requests in a round, then the verifications that are scheduled.

A round is one call by SGLang's scheduler. Steps replay the target model's CUDA graphs of one token per request, verifications graphs of
their own (verify_graphs.py). The host does not wait for the device in a round, except for drafts under a grammar and for log-probabilities.

If the full KV is in host memory, drafts stay pending on the device. Verifications are spread over the rounds, so that the link is never
congested (VeriCache, section 5: cross-resource staggering).
"""

from collections.abc import Callable

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.config import options, selection_options
from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers.forward import select_requests
from sglang_ext.managers import integrity
from sglang_ext.managers.feature import Worker
from sglang_ext.managers.spec_decode.cost_model import RoundCosts
from sglang_ext.managers.spec_decode.draft import SimulatedAcceptance, StepRunner, Verifier, prefill
from sglang_ext.managers.spec_decode.penalties import Penalties, RoundPenalties
from sglang_ext.managers.spec_decode.planner import RoundPlan, RoundPlanner
from sglang_ext.managers.spec_decode.round_report import RoundReport
from sglang_ext.managers.spec_decode.round_result import KVDraftInput, OutputTokens, PendingDrafts, RoundResult, merge_outputs
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider, RoundSetup
from sglang_ext.managers.spec_decode.round_timer import DraftLength, RoundTimer, SelectionInterval
from sglang_ext.managers.spec_decode.sampling import SampledTokens, pick_requests

PublishLengths = Callable[[torch.Tensor], None]
DecodeBatch = Callable[[ScheduleBatch, PublishLengths | None], RoundResult]

# Rounds between two updates of the share of full KV that leaves the device: times, acceptance and the link change slowly.
PLACEMENT_INTERVAL = 8


class DecodeLoop:
    """Runs the decode rounds of a worker's batches."""

    def __init__(self, worker: Worker, round_timer: RoundTimer, steps: StepRunner, verifier: Verifier, setup: RoundSetup, report: RoundReport):
        self.worker = worker
        self.round_timer = round_timer
        self.steps = steps
        self.verifier = verifier
        self.setup = setup
        self.report = report
        self.provider = setup.provider
        # Check in each round that no slot has two owners, and that ranks plan alike.
        self.strict = bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())
        self.pending_drafts = PendingDrafts(worker.compressed_kv.rows, setup.planner.max_pending, steps.table.device)
        self.penalties = Penalties(steps.table.device)
        self._rounds = 0

    def forget(self, row: int) -> None:
        """Drop all state of the request in ``row``."""
        self.provider.forget(row)
        self.penalties.forget(row)

    def prefill(self, batch: ScheduleBatch, on_publish: PublishLengths | None) -> GenerationBatchResult:
        """Run a prefill as in SGLang."""
        result = prefill(self.worker, batch, self.penalties, on_publish)
        self.round_timer.interrupt()
        return result

    def decode(self, batch: ScheduleBatch, on_publish: PublishLengths | None = None) -> RoundResult:
        """Run one round of the unfinished requests of ``batch``. Loads of full KV are launched while it runs."""
        with self.provider.deferring_loads():
            return decode_unfinished(self._decode, batch, on_publish)

    def _decode(self, batch: ScheduleBatch, on_publish: PublishLengths | None) -> RoundResult:
        states = self.worker.requests.states_of(batch)
        plan = self._plan(batch, states)
        lengths = self._known_lengths(batch, plan)
        if lengths is not None and on_publish is not None:
            # Publish before the forwards: the scheduler prepares the next round while they run.
            on_publish(lengths)
        penalized = self.penalties.for_round(batch, plan)
        steps, tokens = self._step(batch, plan, penalized)
        self.round_timer.on_drafted()
        parts = [self.verifier.verify(batch, plan, part, tokens, self.pending_drafts, penalized) for part in plan.verify_batches]
        if plan.full_kv_reqs:
            parts.append(OutputTokens.from_steps(plan, steps, tokens))
        output = merge_outputs(parts, batch.seq_lens, batch.return_logprob)
        if penalized is not None:
            penalized.count_output(batch.spec_info.bonus_tokens, output)
        if lengths is None:
            lengths = batch.seq_lens + output.num_output
            # SGLang's event marks an earlier read of the token table than the last one of this round.
            self.worker.model_runner.war_fastpath_read_done_event = None
            if on_publish is not None:
                on_publish(lengths)
        result = RoundResult.from_outputs(self.worker.model_runner, batch, plan, output, lengths, steps[-1][0], self.round_timer.running)
        self.provider.on_round_launched()
        emitting = {*plan.verify_reqs, *plan.full_kv_reqs}
        for i, state in enumerate(states):
            state.num_pending = 0 if i in emitting else plan.num_draft_tokens(i)
            state.is_early &= state.num_pending > 0
        self.round_timer.on_launched()
        return result

    def _plan(self, batch: ScheduleBatch, states: list[RequestState]) -> RoundPlan:
        worker, lengths = self.worker, batch.seq_lens_cpu.tolist()
        for state, length in zip(states, lengths):
            # Drop the queries of rejected drafts here: graphs of steps, which may follow, would not overwrite them.
            worker.queries.drop_rejected(state.row, length)
            if state.early_drafts is not None:
                self._take_early_drafts(state, length)
        wanted, interval = self.round_timer.start_round(lengths, states)
        self._update_placement()
        seconds = worker.ranks.agree(self.round_timer.recent_rounds.seconds or None) if self.provider.policy is not None else None
        plan = self.setup.plan(batch, states, lengths, wanted, seconds, interval)
        self.round_timer.on_planned(plan)
        if self.strict:
            alike = (plan.num_steps, plan.rows, plan.row_lens, plan.num_pending, plan.fallbacks, plan.full_kv_reqs, plan.verify_batches)
            worker.ranks.check_equal("a round", alike)
            integrity.check_round(batch.reqs, plan, self.provider, worker.compressed_kv)
        return plan

    def _take_early_drafts(self, state: RequestState, length: int) -> None:
        """Make a request's early drafts its pending drafts, in its first round. ``length``: tokens of its prompt."""
        drafts, state.early_drafts = state.early_drafts, None
        state.num_pending, state.is_early = len(drafts.tokens) - 1, True
        self.pending_drafts.tokens[state.row, : state.num_pending] = drafts.tokens[1:]
        compressed_kv = self.worker.compressed_kv
        slots = compressed_kv.token_table[state.row, length : length + state.num_pending].long()
        for buffer, kv in zip((*compressed_kv.buffers.keys, *compressed_kv.buffers.values), drafts.kv, strict=True):
            buffer[slots] = kv

    def _update_placement(self) -> None:
        """Update how much full KV may leave the device, every PLACEMENT_INTERVAL rounds."""
        self._rounds += 1
        if self.provider.policy is None or self._rounds % PLACEMENT_INTERVAL:
            return
        worker, residency, acceptance = self.worker, self.provider.residency, self.worker.requests.overall_acceptance.probability
        found = self.provider.policy.choose(acceptance, residency.host.link.restored, worker.compressed_kv.share)
        residency.max_offloaded, self.provider.drafts_per_load = worker.ranks.agree(found)

    def _known_lengths(self, batch: ScheduleBatch, plan: RoundPlan) -> torch.Tensor | None:
        """Tokens of each request after the round, int64 [requests]; None if they depend on a verification."""
        if plan.verify_batches:
            return None
        full_kv_reqs = set(plan.full_kv_reqs)
        counts = [plan.num_output_tokens(i) * (i in full_kv_reqs) for i in range(len(plan.states))]
        return batch.seq_lens + to_device(counts, batch.seq_lens.device)

    def _step(
        self, batch: ScheduleBatch, plan: RoundPlan, penalized: RoundPenalties | None
    ) -> tuple[list[tuple[LogitsProcessorOutput, SampledTokens]], torch.Tensor]:
        """Run the steps of a round, and store drafts that stay pending. Returns the steps, and their tokens, int64 [requests, steps]."""
        own, last_tokens, starts, before = batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.seq_lens, None
        if penalized is not None:
            penalized.begin_steps(last_tokens, self.pending_drafts, own)
        if any(plan.num_pending):
            before = to_device(plan.num_pending, own.device)
            last_tokens, starts = self.pending_drafts.last_tokens(own, before, last_tokens), starts + before
        slots = self.steps.slots(batch, plan.width, starts)
        steps = self.steps.run(batch, plan, last_tokens, slots, starts, penalized, self.round_timer.on_first_step)
        tokens = torch.stack([sampled.tokens for _, sampled in steps], dim=1)
        if before is not None or len(plan.verify_reqs) + len(plan.full_kv_reqs) < len(plan.states):
            self.pending_drafts.put(own, torch.zeros_like(own) if before is None else before, tokens)
        return steps, tokens


def decode_unfinished(decode: DecodeBatch, batch: ScheduleBatch, on_publish: PublishLengths | None) -> RoundResult:
    """Run ``decode`` on the unfinished requests of ``batch``. The result names their positions.

    If a grammar cannot be walked (grammar.py), SGLang processes a result after it built the next batch. A request that finishes in it is
    still in the batch, but its row and slots are free. Tensors that SGLang relays between rounds are padded to the batch.
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
    bonus_tokens = result.next_draft_input.bonus_tokens
    result.next_draft_input = KVDraftInput(bonus_tokens.new_zeros(len(batch.reqs)).index_copy(0, where, bonus_tokens))
    result.positions = running
    return result


def select_batch(batch: ScheduleBatch, requests: list[int], where: torch.Tensor) -> ScheduleBatch:
    """A batch of the ``requests`` at these positions. ``where``: the same, int64 on the device."""
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


def create_decode_loop(worker: Worker, provider: FullKVProvider) -> DecodeLoop:
    """Create the decode loop of a worker whose compressed KV cache exists."""
    args, compressed_kv, steps = worker.server_args, worker.compressed_kv, StepRunner(worker)
    device, longest = torch.device(worker.model_runner.device), options.max_draft_length(args)
    # If compressed KV has an attention kernel of its own, its steps use that kernel for full KV, too.
    separates_full_kv = bool(args.enable_deterministic_inference) and worker.attentions.compressed is not None
    planner = RoundPlanner(worker.max_verify_tokens - 1, longest, worker.lossy, separates_full_kv)
    lengths = DraftLength(longest, is_fixed=args.kv_draft_length != "auto")
    interval = SelectionInterval(selection_options.selection_intervals(args)) if worker.methods.selection_interval else None
    costs = RoundCosts(
        weights=sum(each.nbytes for each in worker.model_runner.model.parameters()),
        token_bytes=compressed_kv.buffers.bytes_per_slot,
        share=compressed_kv.methods[0].share,
        widths=() if worker.graphs is None else options.verify_widths(args),
    )
    timeline, is_first = None, worker.ranks.first
    if args.kv_bench_timeline is not None and options.has_progressive_transfer(args) and is_first:
        from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline

        timeline = TransferTimeline(args.kv_bench_timeline, device)
    report = RoundReport(
        lengths, costs, worker.metrics, worker.requests, interval, reports_drafting=not worker.lossy, writes_log=is_first, timeline=timeline
    )
    round_timer = RoundTimer(
        lengths,
        device,
        worker.ranks,
        costs,
        compresses_each_round=any(method.compressor.each_round for method in compressed_kv.methods),
        selection_interval=interval,
        observers=[report.on_round_timed] if provider.policy is None else [provider.policy.observe, report.on_round_timed],
    )
    verifier = Verifier(worker, steps, worker.graphs, SimulatedAcceptance.of(args.kv_bench_acceptance, device))
    return DecodeLoop(worker, round_timer, steps, verifier, RoundSetup(planner, compressed_kv, provider), report)
