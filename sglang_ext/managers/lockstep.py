"""Lockstep scheduling: all requests draft together, then verify together, in one iteration.

A round is one call of SGLang's scheduler: drafts replay the target model's graphs of one token a request,
the verification replays a graph of its own (verify_graphs.py). Nothing in a round waits for the device, so
SGLang's scheduler stays overlapped: it prepares the next round while one runs. A request that has no copy
drafts on its full KV, and loses nothing by it. Where nothing is drafted (round_plan.py), a round is a few
steps of plain decoding; their number is known before they run, so that the next round is launched while
they do.
"""

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.managers import integrity, meta_info
from sglang_ext.managers.answers import Answers
from sglang_ext.managers.checked_drafts import CheckedDrafts
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.round_plan import Round, RoundPlanner
from sglang_ext.managers.round_result import RoundResult
from sglang_ext.managers.steps import Steps
from sglang_ext.managers.verify_pass import VerifyPass

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.managers.verifications import Verifications
    from sglang_ext.managers.worker import KVWorker


class Lockstep:
    """Runs the rounds of a worker's running batches.

    Attributes:
        worker: whose states, views and queries these are.
        pace: chooses draft lengths, and keeps the times of rounds.
        steps: the forwards of drafts and of plain decoding.
        verify_pass: the verifications.
        checked: drafts that n-grams propose; None where drafts come one by one.
        verifications: whose turn it is; None where all verify together.
    """

    verifications: "Verifications | None" = None

    def __init__(
        self,
        worker: "KVWorker",
        pace: Pace,
        steps: Steps,
        verify_pass: VerifyPass,
        checked: CheckedDrafts | None = None,
    ):
        self.worker = worker
        self.pace = pace
        self.steps = steps
        self.verify_pass = verify_pass
        self.checked = checked
        self.planner = RoundPlanner(worker.views, worker.stride, worker.lossy)

    def begin(self, states: list[RequestState], tokens: torch.Tensor) -> None:
        """A prefill ran. Its first tokens need not be kept: the scheduler relays them on the device."""
        self.pace.interrupt()

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""

    def decode(
        self, batch: "ScheduleBatch", states: list[RequestState], on_publish=None
    ) -> GenerationBatchResult:
        """One round of all requests."""
        lengths = self._lengths(batch, states)
        round_ = self.planner.plan(batch, states, lengths, self.pace.begin(lengths, states))
        self.pace.planned(round_)
        bonus, slots = batch.spec_info.bonus_tokens, self.steps.slots(batch, round_.width)
        if self.worker.strict:
            self.worker.ranks.check_alike("a round", (round_.width, round_.rows, round_.viewed, round_.fallbacks))
            exact = {state.row: range(length) for state, length in zip(states, round_.lengths)}
            integrity.check(exact, slots.flatten(), self.worker.views)
        if self.checked is not None:
            self.checked.history.put(batch.req_pool_indices, batch.seq_lens[:, None], bonus[:, None])
        run = self._draft_and_verify if round_.drafts else self._decode_plainly
        result = run(batch, round_, bonus, slots, on_publish)
        self.pace.ended()
        return result

    def _lengths(self, batch: "ScheduleBatch", states: list[RequestState]) -> list[int]:
        """Tokens of each request whose full KV is known; the queries of drafts that were rejected are dropped."""
        lengths = batch.seq_lens_cpu.tolist()
        for state, length in zip(states, lengths):
            # Graphs of plain steps, which may follow, would not overwrite them.
            self.worker.queries.drop_rejected(state.row, length)
        return lengths

    def _publish(self, lengths: torch.Tensor, on_publish) -> None:
        """Tell SGLang's scheduler the new lengths, int64 [requests], of a round that ended with a verification."""
        # The event marks an earlier read of the token table than the round's last one.
        self.worker.model_runner.war_fastpath_read_done_event = None
        if on_publish is not None:
            on_publish(lengths)

    def account(self, batch: "ScheduleBatch", result: RoundResult) -> None:
        """Count a round's outcome, once it is on the host."""
        metrics, round_ = self.worker.metrics, result.round
        offered = forwards = [round_.drafts] * len(round_.states)
        if result.counted is not None:
            offered, forwards = result.counted.offered.tolist(), result.counted.forwards.tolist()
            self.checked.observe(sum(offered), sum(forwards))
        accepted = result.accept_lens.tolist()
        outcome = zip(batch.reqs, round_.states, round_.fallbacks, offered, forwards, accepted)
        for req, state, fallback, drafts, taken, answers in outcome:
            if req.finished() or req.is_retracted:
                continue  # the scheduler drops what came after
            if fallback:
                metrics.count_fallback(fallback, answers)
            elif round_.drafts:
                state.count_verify(drafts, answers - 1)
                metrics.count_drafts(drafts, taken)
                metrics.count_verify(answers)
                self.worker.requests.typical.observe(drafts, answers - 1)
            state.fallback = fallback
            meta_info.fill(req, state)
        metrics.observe_pool(self.worker.views)

    def _draft_and_verify(
        self, batch: "ScheduleBatch", round_: Round, bonus: torch.Tensor, slots: torch.Tensor, on_publish
    ) -> RoundResult:
        """Drafts, their verification, and of both the longest prefix that full KV would have given."""
        drafted = (self.checked or self.steps).draft(batch, round_, bonus, slots)
        self.pace.drafted()
        tokens = torch.cat([bonus[:, None], drafted.tokens], 1)
        output, sampled = self.verify_pass.forward(batch, round_, tokens, slots)
        answers = self.verify_pass.accept(batch, drafted, sampled)
        lengths = batch.seq_lens + answers.accepted
        self._publish(lengths, on_publish)
        result = self._result(batch, round_, answers, lengths, output)
        result.drafted = drafted
        return result

    def _decode_plainly(
        self, batch: "ScheduleBatch", round_: Round, bonus: torch.Tensor, slots: torch.Tensor, on_publish
    ) -> RoundResult:
        """A few tokens of each request, one by one over its full KV, or in lossy mode over its copy."""
        lengths = batch.seq_lens + round_.steps
        if on_publish is not None:
            on_publish(lengths)
        steps = self.steps.one_by_one(batch, round_, round_.steps, bonus, slots)
        self.pace.drafted()
        output, _ = steps[-1]
        return self._result(batch, round_, Answers.of_steps(steps), lengths, output)

    def _result(
        self, batch: "ScheduleBatch", round_: Round, answers: Answers, lengths: torch.Tensor, output: LogitsProcessorOutput
    ) -> RoundResult:
        """SGLang's result; what n-grams are looked for in takes the answers, too."""
        if self.checked is not None:
            following = batch.seq_lens[:, None] + torch.arange(1, answers.width + 1, device=lengths.device)
            self.checked.history.put(batch.req_pool_indices, following, answers.tokens)
        newest = answers.tokens.gather(1, answers.accepted[:, None] - 1)[:, 0]
        return RoundResult.of(self.worker.model_runner, batch, round_, answers, lengths, newest, output.hidden_states)
