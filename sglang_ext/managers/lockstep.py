"""Lockstep scheduling: all requests draft together, then verify together, in one iteration.

A round is one call of SGLang's scheduler: drafts replay the target model's graphs of one token a request,
the verification replays a graph of its own (verify_graphs.py). Nothing in a round waits for the device, so
SGLang's scheduler stays overlapped: it prepares the next round while one runs. A request that has no copy
drafts on its full KV, and loses nothing by it. Where nothing is drafted (round_plan.py), a round is a few
steps of plain decoding; their number is known before they run, so that the next round is launched while
they do.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers import forward, integrity, meta_info
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.planner import CURABLE
from sglang_ext.managers.round_plan import Round, RoundPlanner
from sglang_ext.managers.sampling import Row, Sampled, Sampling, SamplingCache
from sglang_ext.managers.simulation import Simulation
from sglang_ext.mem_cache.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphs
    from sglang_ext.managers.worker import KVWorker


@dataclass
class RoundResult(GenerationBatchResult):
    """SGLang's result, with the round that it is of."""

    round: Round | None = None


class Lockstep:
    """Runs the rounds of a worker's running batches.

    Attributes:
        worker: whose states, views and queries these are.
        graphs: captured verifications, None where CUDA graphs are off.
        simulation: forced acceptance, None outside benchmarks.
        pace: chooses draft lengths, and keeps the times of rounds.
    """

    def __init__(
        self,
        worker: "KVWorker",
        graphs: "VerifyGraphs | None",
        simulation: Simulation | None,
        pace: Pace,
    ):
        self.worker = worker
        self.graphs = graphs
        self.simulation = simulation
        self.pace = pace
        self.table = worker.views.token_table
        self.planner = RoundPlanner(worker.views, worker.stride, worker.lossy)
        self._samplings = SamplingCache(worker.model_runner)
        # When the plan that was written last was taken from pinned memory.
        self._plan_taken: torch.cuda.Event | None = None

    def begin(self, states: list[RequestState], tokens: torch.Tensor) -> None:
        """A prefill ran. Its first tokens need not be kept: the scheduler relays them on the device."""
        self.pace.interrupt()

    def decode(
        self, batch: "ScheduleBatch", states: list[RequestState], on_publish=None
    ) -> GenerationBatchResult:
        """One round of all requests."""
        lengths = batch.seq_lens_cpu.tolist()
        round_ = self.planner.plan(batch, states, lengths, self.pace.begin(lengths, states))
        self.pace.planned(round_)
        bonus, slots = batch.spec_info.bonus_tokens, self._slots(batch, round_.width)
        if self.worker.strict:
            self.worker.ranks.check_alike("a round", (round_.width, round_.rows, round_.viewed, round_.fallbacks))
            exact = {state.row: length for state, length in zip(states, round_.lengths)}
            integrity.check(exact, slots.flatten(), self.worker.views)
        run = self._draft_and_verify if round_.drafts else self._decode_plainly
        result = run(batch, round_, bonus, slots, on_publish)
        self.pace.ended()
        return result

    def account(self, batch: "ScheduleBatch", result: RoundResult) -> None:
        """Count a round's outcome, once it is on the host."""
        metrics, round_ = self.worker.metrics, result.round
        outcome = zip(batch.reqs, round_.states, round_.fallbacks, result.accept_lens.tolist())
        for req, state, fallback, answers in outcome:
            if req.finished() or req.is_retracted:
                continue  # the scheduler drops what came after
            if fallback:
                metrics.count_fallback(fallback, answers)
            elif round_.drafts:
                state.count_verify(round_.drafts, answers - 1)
                metrics.count_drafts(round_.drafts)
                metrics.count_verify(answers)
                self.worker.typical.observe(round_.drafts, answers - 1)
            state.fallback = fallback
            meta_info.fill(req, state)
        metrics.observe_pool(self.worker.views)

    def _slots(self, batch: "ScheduleBatch", width: int) -> torch.Tensor:
        """Where the KV of each request's next ``width`` tokens lies: int64 [requests, width]."""
        places = batch.seq_lens[:, None] + torch.arange(width, device=self.table.device)
        return self.table[batch.req_pool_indices[:, None], places].long()

    def _draft_and_verify(
        self, batch: "ScheduleBatch", round_: Round, bonus: torch.Tensor, slots: torch.Tensor, on_publish
    ) -> RoundResult:
        """Drafts, their verification, and of both the longest prefix that full KV would have given."""
        steps = self._steps(batch, round_, round_.drafts, bonus, slots)
        drafted = torch.stack([sampled.tokens for _, sampled in steps], dim=1)
        self.pace.drafted()
        output, sampled = self._verify(batch, round_, torch.cat([bonus[:, None], drafted], 1), slots)
        answers, accepted = self._accept(batch, drafted, sampled)
        lengths = batch.seq_lens + accepted
        # The event marks an earlier read of the token table than the round's last one.
        self.worker.model_runner.war_fastpath_read_done_event = None
        if on_publish is not None:
            on_publish(lengths)
        return self._result(batch, round_, answers, accepted, lengths, sampled, output)

    def _decode_plainly(
        self, batch: "ScheduleBatch", round_: Round, bonus: torch.Tensor, slots: torch.Tensor, on_publish
    ) -> RoundResult:
        """A few tokens of each request, one by one over its full KV, or in lossy mode over its copy."""
        lengths = batch.seq_lens + round_.steps
        if on_publish is not None:
            on_publish(lengths)
        steps = self._steps(batch, round_, round_.steps, bonus, slots)
        self.pace.drafted()
        answers = torch.stack([sampled.tokens for _, sampled in steps], dim=1)
        accepted = torch.full_like(batch.seq_lens, round_.steps)
        output, sampled = steps[-1]
        return self._result(batch, round_, answers, accepted, lengths, sampled, output)

    def _steps(
        self, batch: "ScheduleBatch", round_: Round, count: int, tokens: torch.Tensor, slots: torch.Tensor
    ) -> list[tuple[LogitsProcessorOutput, Sampled]]:
        """``count`` tokens of each request, one after another, over the rows of the round.

        Args:
            batch: whose requests these are.
            round_: what they do.
            count: tokens of each.
            tokens: int64 [requests], the newest token of each.
            slots: int64 [requests, at least count], where their KV is written.
        """
        rows, viewed = self._extend_rows(batch, round_, slots)
        viewed_cpu = torch.tensor(round_.viewed)
        plain = not round_.drafts
        sampling = self._sampling(batch, round_, 1, plain and batch.return_logprob)
        done = []
        for index in range(count):
            inputs = forward.Inputs(
                tokens=tokens,
                positions=batch.seq_lens + index,
                slots=slots[:, index].contiguous(),
                rows=rows,
                lengths=viewed + index + 1,
                lengths_cpu=viewed_cpu + index + 1,
                counts=[1] * len(round_.rows),
            )
            with self.worker.queries.recording(_to_record(round_, index) if plain else ()):
                output = self._forward(batch, inputs)
            sampled = sampling.draw(output.next_token_logits, inputs.positions)
            tokens = sampled.tokens
            done.append((output, sampled))
        return done

    def _forward(self, batch: "ScheduleBatch", inputs: forward.Inputs) -> LogitsProcessorOutput:
        """One forward; the plan of the graph before has been taken from the memory that the next is written to."""
        runner = self.worker.model_runner
        if self._plan_taken is not None:
            self._plan_taken.synchronize()
        output = forward.run(runner, batch, inputs, self.worker.verifier)
        self._plan_taken = getattr(runner, "war_fastpath_read_done_event", None)
        return output

    def _extend_rows(
        self, batch: "ScheduleBatch", round_: Round, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the rows that a round reads lead to ``slots``, int64 [requests, width]; the rows, and tokens before."""
        if round_.on_full_kv:
            return batch.req_pool_indices, batch.seq_lens
        views, width = self.worker.views, slots.shape[1]
        rows, viewed = (to_device(values, slots.device) for values in (round_.rows, round_.viewed))
        places = viewed[:, None] + torch.arange(width, device=slots.device)
        self.table[rows[:, None], places] = slots.to(self.table.dtype)
        for state, row, length in zip(round_.states, round_.rows, round_.lengths):
            if row != state.row:
                views.tail_written(state.row, length + width)
        return rows, viewed

    def _verify(
        self, batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor
    ) -> tuple[LogitsProcessorOutput, Sampled]:
        """Forward ``tokens``, int64 [requests, 1 + drafts], over full KV and sample after each."""
        width, count = tokens.shape[1], len(tokens)
        graphs = self.graphs if self.graphs is not None and self.graphs.fits(count) else None
        if graphs is not None and width < graphs.width:
            # A graph has one width: what is beyond the drafts is computed and not looked at.
            spare = graphs.width - width
            tokens = torch.cat([tokens, tokens.new_zeros(count, spare)], 1)
            slots, width = self._slots(batch, graphs.width), graphs.width
        inputs = self._inputs(batch, round_, tokens, slots)
        rows = tuple(
            Recorded(state.row, i * width, (i + 1) * width, length)
            for i, (state, length) in enumerate(zip(round_.states, round_.lengths))
        )
        if graphs is not None:
            output = graphs.verify(batch, inputs)
            self.worker.queries.keep_replayed(rows)
        else:
            with self.worker.queries.recording(rows):
                output = self._forward(batch, inputs)
        sampling = self._sampling(batch, round_, width, batch.return_logprob)
        return output, sampling.draw(output.next_token_logits, inputs.positions)

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

    def _sampling(self, batch: "ScheduleBatch", round_: Round, width: int, logprobs: bool) -> Sampling:
        """How the rows of ``width`` tokens of each request are sampled."""

        def rows() -> list[Row]:
            states = enumerate(round_.states)
            return [self.worker.sampling_row(i, state) for i, state in states for _ in range(width)]

        return self._samplings.get(batch, round_.states, width, logprobs, rows)

    def _accept(
        self, batch: "ScheduleBatch", drafted: torch.Tensor, sampled: Sampled
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers, int64 [requests, width], and how many of them count: agreeing drafts and the next token."""
        answers = sampled.tokens.view(len(drafted), -1)
        drafts = drafted.shape[1]
        if self.simulation is None:
            agreed = (answers[:, :drafts] == drafted).long().cumprod(1).sum(1)
        else:
            asked = to_device(self.simulation.probabilities(batch.reqs), drafted.device, torch.float32)
            agreed = self.simulation.accept(answers, drafted, asked)
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
            can_run_cuda_graph=self.graphs is not None,
            round=round_,
        )


def _to_record(round_: Round, index: int) -> tuple[Recorded, ...]:
    """The queries of a plain step; those of requests that are never drafted are of no use."""
    return tuple(
        Recorded(state.row, i, i + 1, length + index)
        for i, (state, length) in enumerate(zip(round_.states, round_.lengths))
        if state.fallback in CURABLE
    )
