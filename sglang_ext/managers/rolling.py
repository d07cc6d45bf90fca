"""Rolling rounds: all requests draft, and in turn some verify, as their full KV comes from the host.

As in lockstep.py a round is one call of SGLang's scheduler, and its steps replay CUDA graphs. But drafts gather over several
rounds: their tokens stay on the device, by row of the token table. Verifications are spread over the rounds, so that
the link to the host is never congested (VeriCache, section 5: cross-resource staggering).
"""

import copy
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.managers import integrity, meta_info
from sglang_ext.managers.answers import Answers, Part, together
from sglang_ext.managers.gathered_drafts import GatheredDrafts
from sglang_ext.managers.lockstep import Lockstep
from sglang_ext.managers.offload_policy import OffloadPolicy
from sglang_ext.managers.rolling_plan import RollingPlanner, RollingRound
from sglang_ext.managers.round_plan import Round
from sglang_ext.managers.round_result import RoundResult
from sglang_ext.managers.sampling import Sampled, Sampling
from sglang_ext.managers.steps import Drafted, Steps

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.managers.pace import Pace
    from sglang_ext.managers.verifications import Verifications
    from sglang_ext.managers.verify_pass import VerifyPass
    from sglang_ext.managers.worker import KVWorker

# Rounds after which the optimum is looked for again: times, acceptance and the link change slowly.
PLACE_AFTER = 8


class Rolling(Lockstep):
    """Runs the rounds of a worker's running batches while full KV may be on the host.

    Attributes:
        verifications: whose turn it is.
        policy: how much full KV may leave the device, and how long drafts gather.
        gathered: the drafts of each row since its last verification.
    """

    def __init__(
        self,
        worker: "KVWorker",
        pace: "Pace",
        steps: Steps,
        verify_pass: "VerifyPass",
        verifications: "Verifications",
        policy: OffloadPolicy,
    ):
        super().__init__(worker, pace, steps, verify_pass)
        self.policy = policy
        self._rounds = 0
        pace.watch = policy.observe
        longest = worker.stride - 1
        self.verifications = verifications
        self.planner = RollingPlanner(worker.views, verifications, longest)
        self.gathered = GatheredDrafts(worker.views.rows, longest, steps.table.device)

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
        self.verifications.forget(row)
        self.verifications.residency.forget(row)

    def decode(
        self, batch: "ScheduleBatch", states: list[RequestState], on_publish=None
    ) -> GenerationBatchResult:
        """One round of all requests; loads are launched while it runs."""
        with self.verifications.residency.tree.host_tier.deferred():
            return self._decode(batch, states, on_publish)

    def _decode(self, batch: "ScheduleBatch", states: list[RequestState], on_publish) -> RoundResult:
        lengths = self._lengths(batch, states)
        wanted = self.pace.begin(lengths, states)
        self._place()
        seconds = self.worker.ranks.agree(self.pace.rounds.seconds or None)
        round_ = self.planner.plan(batch, states, lengths, wanted, seconds)
        self.pace.planned(round_)
        if self.worker.strict:
            alike = (round_.drafts, round_.steps, round_.rows, round_.viewed, round_.due, round_.gathered, round_.fallbacks)
            self.worker.ranks.check_alike("a round", alike)
            self._check(batch, round_)
        run = self._draft_and_verify_some if round_.drafts else self._decode_all_plainly
        result = run(batch, round_, on_publish)
        self.verifications.end()
        for i, state in enumerate(states):
            answered = i in round_.due or i in round_.answering
            state.gathered = 0 if answered or self.verifications.waits(state.row) else round_.offered[i]
        self.pace.ended()
        return result

    def _decode_all_plainly(self, batch: "ScheduleBatch", round_: RollingRound, on_publish) -> RoundResult:
        """A few tokens of each request over its full KV; their number is published before they are known."""
        slots = self.steps.slots(batch, round_.steps)
        return self._decode_plainly(batch, round_, batch.spec_info.bonus_tokens, slots, on_publish)

    def _draft_and_verify_some(self, batch: "ScheduleBatch", round_: RollingRound, on_publish) -> RoundResult:
        """Steps of all requests, then the verifications of those that are due."""
        steps = self._step(batch, round_)
        self.pace.drafted()
        parts = [self._verify_part(batch, round_, requests) for requests in round_.verified_together]
        if round_.answering:
            # Those that decode on their full KV: their steps are answers.
            parts.append(Answers.of_steps(steps).part(round_.answering))
        return self._answer(batch, round_, parts, steps[-1][0], on_publish)

    def _place(self) -> None:
        """Choose anew how much full KV may leave the device, now and then."""
        self._rounds += 1
        if self._rounds % PLACE_AFTER:
            return
        worker, residency = self.worker, self.verifications.residency
        found = self.policy.choose(worker.requests.typical.probability, residency.tree.link.bandwidth, worker.views.share)
        residency.most, self.verifications.drafts = worker.ranks.agree(found)

    def account(self, batch: "ScheduleBatch", result: RoundResult) -> None:
        """Count a round's outcome, once it is on the host."""
        metrics, round_ = self.worker.metrics, result.round
        accepted = result.accept_lens.tolist()
        for i, (req, state, answers) in enumerate(zip(batch.reqs, round_.states, accepted)):
            if req.finished() or req.is_retracted:
                continue  # the scheduler drops what came after
            if i in round_.due:
                state.count_verify(round_.offered[i], answers - 1)
                metrics.count_verify(answers)
                self.worker.requests.typical.observe(round_.offered[i], answers - 1)
            if round_.rows[i] != state.row:
                metrics.count_drafts(round_.drafts, round_.drafts)
            elif round_.fallbacks[i]:
                metrics.count_fallback(round_.fallbacks[i], answers)
            state.fallback = round_.fallbacks[i]
            meta_info.fill(req, state)
        metrics.observe_pool(self.worker.views, self.verifications)

    def _check(self, batch: "ScheduleBatch", round_: RollingRound) -> None:
        """Strict mode: no slot has two owners."""
        table, residency = self.steps.table, self.verifications.residency
        written, exact = [], {}
        for i, (req, state, start) in enumerate(zip(batch.reqs, round_.states, round_.starts)):
            length, end = round_.lengths[i], start + (round_.drafts or round_.steps)
            written.append(table[state.row, length if i in round_.due else start : end + (i in round_.due)].long())
            exact[state.row] = range(req.cache_protected_len if residency.is_stale(state.row) else 0, length)
        integrity.check(exact, torch.cat(written), self.worker.views)

    def _step(self, batch: "ScheduleBatch", round_: RollingRound) -> list[tuple[LogitsProcessorOutput, Sampled]]:
        """The round's steps; what they draw is kept behind the drafts of earlier rounds."""
        own, before = batch.req_pool_indices, to_device(round_.gathered, batch.seq_lens.device)
        tokens = self.gathered.newest(own, before, batch.spec_info.bonus_tokens)
        starts = batch.seq_lens + before
        slots = self.steps.slots(batch, round_.drafts, starts)
        steps = self.steps.one_by_one(batch, round_, round_.drafts, tokens, slots, starts)
        self.gathered.put(own, before, torch.stack([sampled.tokens for _, sampled in steps], dim=1))
        return steps

    def _verify_part(self, batch: "ScheduleBatch", round_: RollingRound, requests: list[int]) -> Part:
        """Verify all drafts of some requests over their full KV."""
        where = to_device(requests, batch.seq_lens.device)
        part = copy.copy(batch)
        part.reqs = [batch.reqs[i] for i in requests]
        part.seq_lens, part.req_pool_indices = batch.seq_lens[where], batch.req_pool_indices[where]
        states, lengths = ([values[i] for i in requests] for values in (round_.states, round_.lengths))
        offered = [round_.offered[i] for i in requests]
        width = max(offered) + 1
        drafts = self.gathered.of(part.req_pool_indices, width - 1)
        tokens = torch.cat([batch.spec_info.bonus_tokens[where, None], drafts], 1)
        small = Round(states, width - 1, 0, lengths, [], [], [])

        def sampling(width: int) -> Sampling:
            return self.steps.sampling(batch, round_, width, batch.return_logprob, requests)

        _, sampled = self.verify_pass.forward(part, small, tokens, self.steps.slots(part, width), sampling)
        drafted = Drafted(drafts, to_device(offered, where.device))
        return Part(requests, self.verify_pass.accept(part, drafted, sampled))

    def _answer(
        self,
        batch: "ScheduleBatch",
        round_: RollingRound,
        parts: list[Part],
        output: LogitsProcessorOutput,
        on_publish,
    ) -> RoundResult:
        """The answers of those that verified or decoded on their full KV; the others have none yet."""
        answers = together(parts, batch.seq_lens, batch.return_logprob)
        accepted, hidden_states = answers.accepted, output.hidden_states
        lengths = batch.seq_lens + accepted
        self._publish(lengths, on_publish)
        if hidden_states is not None:
            # Of those that decode one token on their full KV; nobody else asks for them.
            hidden_states = hidden_states.repeat_interleave(answers.width, 0)
        last = answers.tokens.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        newest = torch.where(accepted > 0, last, batch.spec_info.bonus_tokens)
        return RoundResult.of(self.worker.model_runner, batch, round_, answers, lengths, newest, hidden_states)
