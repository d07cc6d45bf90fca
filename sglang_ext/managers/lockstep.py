"""Lockstep scheduling: all requests draft together, then verify together, in one iteration.

A round is one call of SGLang's scheduler: drafts replay the target model's graphs of one token a request,
the verification replays a graph of its own (verify_graphs.py). Nothing in a round waits for the device, so
SGLang's scheduler stays overlapped: it prepares the next round while one runs. A request that has no copy
drafts on its full KV, and loses nothing by it. Where nothing is drafted (round_plan.py), a round is a few
steps of plain decoding; their number is known before they run, so that the next round is launched while
they do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers import forward, integrity, meta_info
from sglang_ext.managers.checked_drafts import CheckedDrafts
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.planner import renew_at
from sglang_ext.managers.round_plan import Round, RoundPlanner
from sglang_ext.managers.sampling import Sampled, Sampling
from sglang_ext.managers.simulation import Simulation
from sglang_ext.managers.steps import Drafted, Steps, agreeing
from sglang_ext.mem_cache.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
    from sglang_ext.managers.verifications import Verifications
    from sglang_ext.managers.worker import KVWorker


@dataclass
class RoundResult(GenerationBatchResult):
    """SGLang's result, with the round that it is of.

    Attributes:
        round: what the requests did.
        drafted: what they drafted; None where nothing was.
        counted: its counts on the host; None where they are the round's.
    """

    round: Round | None = None
    drafted: Drafted | None = None
    counted: Drafted | None = None

    def copy_to_cpu(self, *args, **kwargs) -> None:
        """The counts of drafts, then SGLang's copies, at whose end it sets the mark for all."""
        if self.drafted is not None and self.drafted.offered is not None:
            self.counted = self.drafted.to_host()
        super().copy_to_cpu(*args, **kwargs)


class Lockstep:
    """Runs the rounds of a worker's running batches.

    Attributes:
        worker: whose states, views and queries these are.
        graphs: captured verifications, None where CUDA graphs are off.
        simulation: forced acceptance, None outside benchmarks.
        pace: chooses draft lengths, and keeps the times of rounds.
        steps: the forwards.
        checked: drafts that n-grams propose; None where drafts come one by one.
        verifications: whose turn it is; None where all verify together.
    """

    verifications: "Verifications | None" = None

    def __init__(
        self,
        worker: "KVWorker",
        graphs: "VerifyGraphSet | None",
        simulation: Simulation | None,
        pace: Pace,
        steps: Steps,
        checked: CheckedDrafts | None = None,
    ):
        self.worker = worker
        self.graphs = graphs
        self.simulation = simulation
        self.pace = pace
        self.steps = steps
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
        output, sampled = self._verify(batch, round_, torch.cat([bonus[:, None], drafted.tokens], 1), slots)
        answers, accepted = self._accept(batch, drafted, sampled)
        lengths = batch.seq_lens + accepted
        self._publish(lengths, on_publish)
        result = self._result(batch, round_, answers, accepted, lengths, sampled, output)
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
        answers = torch.stack([sampled.tokens for _, sampled in steps], dim=1)
        accepted = torch.full_like(batch.seq_lens, round_.steps)
        output, sampled = steps[-1]
        return self._result(batch, round_, answers, accepted, lengths, sampled, output)

    def _verify(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        sampling: Callable[[int], Sampling] | None = None,
    ) -> tuple[LogitsProcessorOutput, Sampled]:
        """Forward ``tokens``, int64 [requests, 1 + drafts], over full KV and sample after each.

        ``sampling`` says how, for so many tokens of each request; None: as the batch does.
        """
        width, count = tokens.shape[1], len(tokens)
        graphs = None if self.graphs is None else self.graphs.fit(count, width)
        if graphs is not None and width < graphs.width:
            # Graphs have few widths: what is beyond the drafts is computed and not looked at.
            spare = graphs.width - width
            tokens = torch.cat([tokens, tokens.new_zeros(count, spare)], 1)
            slots, width = self.steps.slots(batch, graphs.width), graphs.width
        inputs = self._inputs(batch, round_, tokens, slots)
        rows = tuple(
            Recorded(state.row, i * width, (i + 1) * width, length)
            for i, (state, length) in enumerate(zip(round_.states, round_.lengths))
            if self._copy_is_near(state, length)
        )
        if graphs is not None:
            output = graphs.verify(batch, inputs)
            self.worker.queries.keep_replayed(rows)
        else:
            with self.worker.queries.recording(rows):
                output = self.steps.forward(batch, inputs)
        ready = sampling(width) if sampling else self.steps.sampling(batch, round_, width, batch.return_logprob)
        return output, ready.draw(output.next_token_logits, inputs.positions)

    def _copy_is_near(self, state: RequestState, length: int) -> bool:
        """Whether a copy may be made before as many queries follow as are kept; those before need not be."""
        views = self.worker.views
        view = views.get(state.row)
        return view is None or length + 2 * self.worker.queries.span >= renew_at(view, views.method(state.row).compressor.each_round)

    def _inputs(
        self, batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor
    ) -> forward.Inputs:
        """Tokens int64 [requests, width] after what each request has, over full KV."""
        width, device = tokens.shape[1], tokens.device
        return forward.Inputs(
            tokens=tokens.flatten(),
            positions=(batch.seq_lens[:, None] + torch.arange(width, device=device)).flatten(),
            slots=slots.flatten(),
            rows=batch.req_pool_indices,
            lengths=batch.seq_lens + width,
            lengths_cpu=torch.tensor(round_.lengths) + width,
            counts=[width] * len(tokens),
        )

    def _accept(
        self, batch: "ScheduleBatch", drafted: Drafted, sampled: Sampled
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers, int64 [requests, width], and how many of them count: agreeing drafts and the next token."""
        answers = sampled.tokens.view(len(drafted.tokens), -1)
        if self.simulation is None:
            agreed = agreeing(answers, drafted.tokens)
        else:
            asked = to_device(self.simulation.probabilities(batch.reqs), answers.device, torch.float32)
            agreed = self.simulation.accept(answers, drafted.tokens, asked)
        if drafted.offered is not None:
            agreed = torch.minimum(agreed, drafted.offered)
        return answers, agreed + 1

    def _result(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        answers: torch.Tensor,
        accepted: torch.Tensor,
        lengths: torch.Tensor,
        sampled: Sampled,
        output: LogitsProcessorOutput,
    ) -> RoundResult:
        """SGLang's result: ``answers``, int64 [requests, width], of which the first ``accepted`` count."""
        width = answers.shape[1]
        if self.checked is not None:
            following = batch.seq_lens[:, None] + torch.arange(1, width + 1, device=answers.device)
            self.checked.history.put(batch.req_pool_indices, following, answers)
        shown = LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            sampled.fill_logprobs(shown, list(range(answers.numel())), stride=width)
        shown.hidden_states = output.hidden_states
        return RoundResult(
            logits_output=shown,
            next_token_ids=answers.flatten(),
            accept_lens=accepted,
            new_seq_lens=lengths,
            next_draft_input=BetweenSteps(answers.gather(1, accepted[:, None] - 1)[:, 0]),
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=self.worker.model_runner.decode_cuda_graph_runner is not None,
            round=round_,
        )
