"""Lockstep scheduling: all requests draft together, then verify together, in one iteration.

A round is one call of SGLang's scheduler: drafts replay the target model's graphs of one token a request,
the verification replays a graph of its own (verify_graphs.py). Nothing in a round waits for the device, so
SGLang's scheduler stays overlapped: it prepares the next round while one runs. A request that has no copy
drafts on its full KV, and loses nothing by it. Where a request in the batch cannot be drafted exactly, all
decode one token with full KV.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers import forward, integrity, meta_info
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.planner import CURABLE, NEIGHBOUR, SLOWER, ensure_copy
from sglang_ext.managers.sampling import Sampled, Sampling, to_device
from sglang_ext.managers.simulation import Simulation
from sglang_ext.mem_cache.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphs
    from sglang_ext.managers.worker import KVWorker


@dataclass(frozen=True)
class Round:
    """What the requests of a batch do in one iteration.

    Attributes:
        states: draft states of the requests.
        drafts: tokens that each drafts before the verification; 0 for one token without drafts.
        lengths: tokens of each request whose full KV is in the pool.
        rows: row of the token table that each request's drafts read.
        viewed: tokens in that row before the round.
        fallbacks: why each request is served with full KV in this round; 0 where it is not.
    """

    states: list[RequestState]
    drafts: int
    lengths: list[int]
    rows: list[int]
    viewed: list[int]
    fallbacks: list[int]


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

    def begin(self, states: list[RequestState], tokens: torch.Tensor) -> None:
        """A prefill ran. Its first tokens need not be kept: the scheduler relays them on the device."""
        self.pace.interrupt()

    def decode(
        self, batch: "ScheduleBatch", states: list[RequestState], on_publish=None
    ) -> GenerationBatchResult:
        """One round of all requests."""
        round_ = self._plan(batch, states, self.pace.begin(states))
        self.pace.planned(len(states), round_.drafts)
        bonus = batch.spec_info.bonus_tokens
        slots = self._slots(batch, round_.drafts + 1)
        if self.worker.strict:
            exact = {state.row: length for state, length in zip(states, round_.lengths)}
            integrity.check(exact, slots.flatten(), self.worker.views)
        drafted = self._draft(batch, round_, bonus, slots)
        self.pace.drafted()
        if round_.drafts:
            output, sampled = self._verify(batch, round_, torch.cat([bonus[:, None], drafted], 1), slots)
        else:
            output, sampled = self._decode_one(batch, round_, bonus, slots)
        return self._result(batch, round_, drafted, output, sampled, on_publish)

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
            state.fallback = fallback
            meta_info.fill(req, state)
        metrics.observe_pool(self.worker.views)

    def _plan(self, batch: "ScheduleBatch", states: list[RequestState], wanted: int) -> Round:
        """Copies are made or renewed, draft rows written; ``wanted`` tokens are drafted at most."""
        views, lengths = self.worker.views, batch.seq_lens_cpu.tolist()
        longest = max(r.sampling_params.max_new_tokens - len(r.output_ids) for r in batch.reqs) - 1
        drafts = max(0, min(wanted, longest))
        able = all(self._can_draft(req, state) for req, state in zip(batch.reqs, states))
        headroom = 2 * self.worker.stride * len(states)
        rows, viewed, fallbacks = [], [], []
        for state, length in zip(states, lengths):
            incurable = state.fallback not in CURABLE
            reason = state.fallback if incurable else NEIGHBOUR
            if able:
                useful = wanted or self.worker.lossy
                reason = ensure_copy(views, state, length, headroom) if useful else SLOWER
            view = None if reason else views.get(state.row)
            if view is not None:
                views.write_tail(state.row, length)
            rows.append(state.row if view is None else views.draft_row(state.row))
            viewed.append(length if view is None else view.kept + length - view.covered)
            fallbacks.append(reason)
        if self.worker.lossy or all(fallbacks):
            drafts = 0
        return Round(states, drafts, lengths, rows, viewed, fallbacks)

    def _can_draft(self, req, state: RequestState) -> bool:
        return state.fallback in CURABLE and req.grammar is None

    def _slots(self, batch: "ScheduleBatch", width: int) -> torch.Tensor:
        """Where the KV of each request's next ``width`` tokens lies: int64 [requests, width]."""
        places = batch.seq_lens[:, None] + torch.arange(width, device=self.table.device)
        return self.table[batch.req_pool_indices[:, None], places].long()

    def _draft(
        self, batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """The drafts of a round: int64 [requests, drafts]."""
        if not round_.drafts:
            return tokens.new_empty(len(tokens), 0)
        rows, viewed = self._extend_rows(round_, slots)
        viewed_cpu = torch.tensor(round_.viewed)
        sampling = self._sampling(batch, round_, 1, logprobs=False)
        drafted = []
        for count in range(round_.drafts):
            self._await_plan()
            inputs = forward.Inputs(
                tokens=tokens,
                positions=batch.seq_lens + count,
                slots=slots[:, count].contiguous(),
                rows=rows,
                lengths=viewed + count + 1,
                lengths_cpu=viewed_cpu + count + 1,
                counts=[1] * len(round_.rows),
            )
            output = forward.run(self.worker.model_runner, batch, inputs)
            tokens = sampling.draw(output.next_token_logits, inputs.positions).tokens
            drafted.append(tokens)
        return torch.stack(drafted, dim=1)

    def _extend_rows(self, round_: Round, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the rows that drafts read lead to ``slots``, int64 [requests, width]; the rows, and tokens before."""
        views, width = self.worker.views, slots.shape[1]
        rows, viewed = (to_device(values, slots.device) for values in (round_.rows, round_.viewed))
        places = viewed[:, None] + torch.arange(width, device=slots.device)
        self.table[rows[:, None], places] = slots.to(self.table.dtype)
        for state, length, reason in zip(round_.states, round_.lengths, round_.fallbacks):
            if not reason:
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
        self._await_plan()
        if graphs is not None:
            output = graphs.verify(batch, inputs)
            self.worker.queries.keep_replayed(rows)
        else:
            with self.worker.queries.recording(rows):
                output = forward.run(self.worker.model_runner, batch, inputs, self.worker.verifier)
        sampling = self._sampling(batch, round_, width, batch.return_logprob)
        return output, sampling.draw(output.next_token_logits, inputs.positions)

    def _decode_one(
        self, batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor
    ) -> tuple[LogitsProcessorOutput, Sampled]:
        """One token of each request, over its full KV, or in lossy mode over its copy."""
        inputs = self._inputs(batch, round_, tokens[:, None], slots)
        rows = tuple(
            Recorded(state.row, i, i + 1, length)
            for i, (state, length) in enumerate(zip(round_.states, round_.lengths))
            if state.fallback in CURABLE
        )
        self._await_plan()
        with self.worker.queries.recording(rows):
            output = forward.run(self.worker.model_runner, batch, inputs)
        sampling = self._sampling(batch, round_, 1, batch.return_logprob)
        return output, sampling.draw(output.next_token_logits, inputs.positions)

    def _inputs(
        self, batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor
    ) -> forward.Inputs:
        """Tokens int64 [requests, width] after what each request has: all over full KV but in lossy mode."""
        width, device = tokens.shape[1], tokens.device
        lossy = self.worker.lossy
        rows, lengths = self._extend_rows(round_, slots) if lossy else (batch.req_pool_indices, batch.seq_lens)
        return forward.Inputs(
            tokens=tokens.flatten(),
            positions=(batch.seq_lens[:, None] + torch.arange(width, device=device)).flatten(),
            slots=slots.flatten(),
            rows=rows,
            lengths=lengths + width,
            lengths_cpu=torch.tensor(round_.viewed if lossy else round_.lengths) + width,
            counts=[width] * len(tokens),
        )

    def _sampling(self, batch: "ScheduleBatch", round_: Round, width: int, logprobs: bool) -> Sampling:
        rows = [
            self.worker.sampling_row(i, state) for i, state in enumerate(round_.states) for _ in range(width)
        ]
        return Sampling.of(self.worker.model_runner, batch, rows, logprobs)

    def _await_plan(self) -> None:
        """Let the graph before take its plan from the pinned memory that the next plan is written to."""
        event = getattr(self.worker.model_runner, "war_fastpath_read_done_event", None)
        if event is not None:
            event.synchronize()

    def _result(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        drafted: torch.Tensor,
        output: LogitsProcessorOutput,
        sampled: Sampled,
        on_publish,
    ) -> RoundResult:
        """Accept the longest prefix of the drafts that full KV would have given, and its next token."""
        answers = sampled.tokens.view(len(drafted), -1)
        width, drafts = answers.shape[1], round_.drafts
        agreed = (answers[:, :drafts] == drafted).long().cumprod(1).sum(1)
        if self.simulation is not None and drafts:
            asked = to_device(self.simulation.probabilities(batch.reqs), drafted.device, torch.float32)
            agreed = self.simulation.accept(answers, drafted, asked)
        accepted = agreed + 1
        lengths = batch.seq_lens + accepted
        # The event marks an earlier read of the token table than the round's last one.
        self.worker.model_runner.war_fastpath_read_done_event = None
        if on_publish is not None:
            on_publish(lengths)
        shown = LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            sampled.fill_logprobs(shown, list(range(answers.numel())), stride=width)
        shown.hidden_states = output.hidden_states
        return RoundResult(
            logits_output=shown,
            next_token_ids=answers.flatten(),
            accept_lens=accepted,
            new_seq_lens=lengths,
            next_draft_input=BetweenSteps(answers.gather(1, agreed[:, None])[:, 0]),
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=self.graphs is not None,
            round=round_,
        )
