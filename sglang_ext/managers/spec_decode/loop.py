"""The one loop of verified and lossy decoding: steps of all requests, then the verifications of those whose turn it is.

A round is one call of SGLang's scheduler. Its steps replay the target model's graphs of one token a request, its verifications
graphs of their own (verify_graphs.py). Nothing in a round waits for the device, but for drafts under a grammar and for
log-probabilities, so SGLang's scheduler stays overlapped: it prepares the next round while one runs. Drafts that are not verified
in their round gather on the device; where full KV is in host memory, verifications are spread over the rounds, so that the link is
never congested (VeriCache, section 5: cross-resource staggering).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.config import options, selection_options
from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers.forward import BetweenSteps, of_requests
from sglang_ext.managers import integrity
from sglang_ext.managers.disaggregation.timeline import Timeline
from sglang_ext.managers.offload.policy import OffloadPolicy
from sglang_ext.managers.spec_decode.draft_length import DraftLength, FixedLength
from sglang_ext.managers.spec_decode.draft_report import DraftReport
from sglang_ext.managers.spec_decode.pace import Pace
from sglang_ext.managers.spec_decode.penalties import Penalties, RoundPenalties
from sglang_ext.managers.spec_decode.requests import end_of_answer, fill
from sglang_ext.managers.spec_decode.result import Answers, GatheredDrafts, Part, RoundResult, together
from sglang_ext.managers.spec_decode.round import Round, RoundPlanner
from sglang_ext.managers.spec_decode.round_costs import RoundCosts
from sglang_ext.managers.spec_decode.sampling import Sampled, pick_requests
from sglang_ext.managers.spec_decode.selection_interval import SelectionInterval
from sglang_ext.managers.spec_decode.steps import Steps, Verifier
from sglang_ext.managers.spec_decode.turns import OnDevice

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.managers.offload.verifications import Verifications
    from sglang_ext.managers.worker import KVWorker

Publish = Callable[[torch.Tensor], None]
Decode = Callable[["ScheduleBatch", Publish | None], RoundResult]

# Rounds after which the optimum of what leaves the device is looked for again: times, acceptance and the link change slowly.
PLACE_AFTER = 8


class DecodeLoop:
    """Runs the rounds of a worker's running batches.

    Attributes:
        worker: whose states, views and queries these are.
        pace: chooses draft lengths, and keeps the times of rounds.
        steps: forwards of one token a request.
        verifier: the verifications.
        planner: who does what.
        turns: whose full KV is there for a verification.
        policy: how much full KV may leave the device, and how long drafts gather; None where none may.
        timeline: where a benchmark asks for one.
        gathered: the drafts of each row since its last verification.
        penalties: what requests have counted of their outputs.
    """

    def __init__(
        self,
        worker: "KVWorker",
        pace: Pace,
        steps: Steps,
        verifier: Verifier,
        planner: RoundPlanner,
        policy: OffloadPolicy | None = None,
        timeline: Timeline | None = None,
    ):
        self.worker = worker
        self.pace = pace
        self.steps = steps
        self.verifier = verifier
        self.planner = planner
        self.turns: "OnDevice | Verifications" = planner.turns
        self.policy = policy
        self.timeline = timeline
        if policy is not None:
            pace.watch = policy.observe
        self.gathered = GatheredDrafts(worker.views.rows, planner.longest, steps.table.device)
        self.penalties = Penalties(steps.table.device)
        self._rounds = 0

    def interrupt(self) -> None:
        """A prefill ran: what passes from now on is not the time of a round."""
        self.pace.interrupt()

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
        self.turns.forget(row)
        self.penalties.forget(row)

    def decode(self, batch: "ScheduleBatch", on_publish: Publish | None = None) -> RoundResult:
        """One round of the requests of ``batch`` that still run; loads of full KV are launched while it runs."""
        with self.turns.launching():
            return decode_running(self._decode, batch, on_publish)

    def _decode(self, batch: "ScheduleBatch", on_publish: Publish | None) -> RoundResult:
        states = self.worker.requests.of(batch)
        round_ = self._plan(batch, states)
        lengths = self._known_lengths(batch, round_)
        if lengths is not None and on_publish is not None:
            # Before the forwards: the scheduler shall prepare the next round while they run.
            on_publish(lengths)
        penalized = self.penalties.of(batch, round_)
        steps, tokens = self._step(batch, round_, penalized)
        self.pace.drafted()
        parts = [self.verifier.verify(batch, round_, part, tokens, self.gathered, penalized) for part in round_.parts]
        if round_.answering:
            counts = [round_.answers(i) for i in round_.answering]
            parts.append(Part(round_.answering, Answers.of_steps(steps, tokens, round_.answering, counts)))
        answers = together(parts, batch.seq_lens, batch.return_logprob)
        penalized.count(batch.spec_info.bonus_tokens, answers)
        if lengths is None:
            lengths = batch.seq_lens + answers.accepted
            # The event marks an earlier read of the token table than the round's last one.
            self.worker.model_runner.war_fastpath_read_done_event = None
            if on_publish is not None:
                on_publish(lengths)
        result = RoundResult.of(self.worker.model_runner, batch, round_, answers, lengths, steps[-1][0], self.pace.running)
        self.turns.end()
        answered = {*round_.due, *round_.answering}
        for i, state in enumerate(states):
            state.gathered = 0 if i in answered else round_.offered(i)
        self.pace.ended()
        return result

    def _plan(self, batch: "ScheduleBatch", states: list[RequestState]) -> Round:
        worker, lengths = self.worker, batch.seq_lens_cpu.tolist()
        for state, length in zip(states, lengths):
            # Graphs of steps, which may follow, would not overwrite the queries of drafts that were rejected.
            worker.queries.drop_rejected(state.row, length)
        wanted = self.pace.begin(lengths, states)
        self._place()
        seconds = worker.ranks.agree(self.pace.rounds.seconds or None) if self.policy is not None else None
        round_ = self.planner.plan(batch, states, lengths, wanted, seconds, self.pace.every)
        self.pace.planned(round_)
        if worker.strict:
            alike = (round_.steps, round_.rows, round_.viewed, round_.gathered, round_.fallbacks, round_.answering, round_.parts)
            worker.ranks.check_alike("a round", alike)
            self._check(batch, round_)
        return round_

    def _place(self) -> None:
        """Choose anew how much full KV may leave the device, now and then."""
        self._rounds += 1
        if self.policy is None or self._rounds % PLACE_AFTER:
            return
        worker, residency = self.worker, self.turns.residency
        found = self.policy.choose(worker.requests.typical.probability, residency.tree.reloads.link.restored, worker.views.share)
        residency.most, self.turns.drafts = worker.ranks.agree(found)

    def _check(self, batch: "ScheduleBatch", round_: Round) -> None:
        """Strict mode: no slot has two owners."""
        table, due = self.steps.table, set(round_.due)
        written, exact = [], {}
        for i, (req, state, start) in enumerate(zip(batch.reqs, round_.states, round_.starts)):
            # What lies beyond the answer's end is written to SGLang's padding page.
            length, end = round_.lengths[i], min(start + round_.steps + (i in due), end_of_answer(req))
            written.append(table[state.row, length if i in due else start : end].long())
            exact[state.row] = range(self.turns.exact_from(state.row, req.cache_protected_len), length)
        integrity.check(exact, torch.cat(written), self.worker.views)

    def _known_lengths(self, batch: "ScheduleBatch", round_: Round) -> torch.Tensor | None:
        """Tokens of each request after the round, int64 [requests]; None where a verification decides."""
        if round_.parts:
            return None
        answering = set(round_.answering)
        answers = [round_.answers(i) * (i in answering) for i in range(len(round_.states))]
        return batch.seq_lens + to_device(answers, batch.seq_lens.device)

    def _step(
        self, batch: "ScheduleBatch", round_: Round, penalized: RoundPenalties
    ) -> tuple[list[tuple[LogitsProcessorOutput, Sampled]], torch.Tensor]:
        """The round's steps, and their tokens, int64 [requests, steps]; drafts that gather are kept behind those of earlier rounds."""
        own, newest, starts, before = batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.seq_lens, None
        penalized.begin_steps(newest, self.gathered, own)
        if any(round_.gathered):
            before = to_device(round_.gathered, own.device)
            newest, starts = self.gathered.newest(own, before, newest), starts + before
        steps = self.steps.run(batch, round_, newest, self.steps.slots(batch, round_.width, starts), starts, penalized)
        tokens = torch.stack([sampled.tokens for _, sampled in steps], dim=1)
        if before is not None or len(round_.due) + len(round_.answering) < len(round_.states):
            self.gathered.put(own, torch.zeros_like(own) if before is None else before, tokens)
        return steps, tokens

    def account(self, batch: "ScheduleBatch", result: RoundResult) -> None:
        """Count a round's outcome, once it is on the host."""
        metrics, round_, report, tokens = self.worker.metrics, result.round, self.pace.report, 0
        due, answering = set(round_.due), set(round_.answering)
        for i, (req, state, answers) in enumerate(zip(batch.reqs, round_.states, result.accept_lens.tolist())):
            if req.finished() or req.is_retracted:
                continue  # the scheduler drops what came after
            tokens += answers
            if round_.fallbacks[i]:
                metrics.count_fallback(round_.fallbacks[i], answers)
                if report is not None:
                    report.fell_back(round_.fallbacks[i], answers)
            elif round_.is_draft(i) and i not in answering:
                metrics.count_drafts(round_.steps)
                if i in due:
                    # A draft after the end of the output was not wrong.
                    offered = answers - 1 if i in result.ended else min(round_.offered(i), round_.left[i] - 1)
                    self.worker.requests.count_verify(state, offered, answers - 1)
                    self.pace.interval.observe(round_.every, offered, answers - 1)
                    metrics.count_verify(answers)
                    if report is not None:
                        report.verified(offered, answers - 1)
            state.fallback = round_.fallbacks[i]
            fill(req, state)
            if self.timeline is not None:
                self._note(req.bootstrap_room, result, i, answers)
        if report is not None and tokens:
            report.ended(round_, tokens)
        self.observe_pool()

    def _note(self, room: int, result: RoundResult, i: int, answers: int) -> None:
        """Tell the timeline what a round gave a request."""
        round_, timeline = result.round, self.timeline
        drafted, ended = (timeline.at(mark) for mark in (result.timed.drafted, result.timed.ended))
        if i in round_.answering:
            timeline.note(room, "answered", drafted, answers)
            return
        timeline.note(room, "drafted", drafted, round_.offered(i), round_.steps, early=i in round_.early)
        if i in round_.due:
            timeline.note(room, "verified", ended, answers - 1, round_.offered(i), early=i in round_.early)

    def observe_pool(self) -> None:
        """Report what the pool holds, and where full KV lies."""
        self.worker.metrics.observe_pool(self.worker.views, None if self.policy is None else self.turns)


def decode_running(decode: Decode, batch: "ScheduleBatch", on_publish: Publish | None) -> RoundResult:
    """What ``decode`` gives for the requests of ``batch`` that did not finish; the result says which they are.

    Under the overlapped loop SGLang builds a batch before it has the result of the last one. Where a request has a grammar that
    cannot be walked (grammar.py) it then processes that result before it launches the batch: who finishes in it is in the batch
    still, but its row and its slots are free. A round of the others is run, and what SGLang relays from round to round is made as long
    as the batch again.

    Args:
        decode: runs a round of all requests of a batch.
        batch: SGLang's, in decode mode.
        on_publish: as of the worker's ``forward_batch_generation``.
    """
    running = [i for i, req in enumerate(batch.reqs) if not req.finished()]
    if len(running) == len(batch.reqs):
        return decode(batch, on_publish)
    where = to_device(running, batch.seq_lens.device)

    def publish(lengths: torch.Tensor) -> None:
        on_publish(batch.seq_lens.index_copy(0, where, lengths))

    if not running:
        result = RoundResult.of_nobody(batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
    else:
        result = decode(part_of(batch, running, where), publish if on_publish is not None else None)
    newest = result.next_draft_input.bonus_tokens
    result.next_draft_input = BetweenSteps(newest.new_zeros(len(batch.reqs)).index_copy(0, where, newest))
    result.requests = running
    return result


def part_of(batch: "ScheduleBatch", requests: list[int], where: torch.Tensor) -> "ScheduleBatch":
    """A batch of some requests of another one: what rounds read of it. The other stays as it is.

    Args:
        requests: their places.
        where: the same, int64 on the device.
    """
    part = of_requests(batch, requests, where)
    part.seq_lens_cpu = batch.seq_lens_cpu[requests]
    part.spec_info = BetweenSteps(batch.spec_info.bonus_tokens[where])
    part.sampling_info = pick_requests(batch.sampling_info, requests, where.device)
    part.return_logprob = any(req.return_logprob for req in part.reqs)
    if part.return_logprob:
        part.top_logprobs_nums = [batch.top_logprobs_nums[i] for i in requests]
        part.token_ids_logprobs = [batch.token_ids_logprobs[i] for i in requests]
    part.return_hidden_states = any(req.return_hidden_states for req in part.reqs)
    return part


def decode_loop(worker: "KVWorker", turns: "OnDevice | Verifications", policy: OffloadPolicy | None) -> DecodeLoop:
    """That of a worker whose views are built.

    Args:
        turns: whose turn it is to verify.
        policy: how much full KV leaves the device, where some does.
    """
    args, steps = worker.server_args, Steps(worker)
    longest = options.longest_draft(args)
    # Steps over such copies have an attention of their own, for all that they read.
    apart = bool(args.enable_deterministic_inference) and worker.attentions.copies is not None
    planner = RoundPlanner(worker.views, turns, worker.stride - 1, longest, worker.lossy, worker.queries.open_to, apart)
    lengths = DraftLength(longest) if args.kv_draft_length == "auto" else FixedLength(longest)
    costs = RoundCosts(
        weights=sum(each.nbytes for each in worker.model_runner.model.parameters()),
        token_bytes=worker.views.buffers.bytes_per_slot,
        share=worker.views.methods[0].share,
        widths=() if worker.graphs is None else options.verify_widths(args),
    )
    renews = any(method.compressor.each_round for method in worker.views.methods)
    device = torch.device(worker.model_runner.device)
    interval = SelectionInterval(selection_options.intervals(args))
    chooses_interval = len(interval.intervals) > 1
    report = None if worker.lossy else DraftReport(lengths, costs, worker.metrics, worker.ranks.first, chooses_interval)
    pace = Pace(lengths, device, worker.metrics, worker.ranks, costs, renews, interval=interval, report=report)
    verifier = Verifier(worker, steps, worker.graphs, worker.simulation)
    asked = args.kv_bench_timeline if options.transfers(args) and worker.ranks.first else None
    return DecodeLoop(worker, pace, steps, verifier, planner, policy, Timeline.of(asked, device))
