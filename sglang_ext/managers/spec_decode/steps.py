"""The forwards of a worker: steps of one token a request, verifications, each one forward over full KV, and prefills; how they are sampled.

A verification replays the narrowest captured graph that holds the drafts (verify_graphs.py), where there is one. What answers leaves
its queries to compressors that score by them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.layers import forward
from sglang_ext.layers.forward import BetweenSteps
from sglang_ext.managers.simulation import Simulation
from sglang_ext.managers.spec_decode.grammar import LONGEST_WALK, Walk
from sglang_ext.managers.spec_decode.penalties import RoundPenalties
from sglang_ext.managers.spec_decode.result import Answers, GatheredDrafts, Part
from sglang_ext.managers.spec_decode.round import Round
from sglang_ext.managers.spec_decode.sampling import Row, Sampled, Sampling, SamplingCache, sampling_batch
from sglang_ext.mem_cache.compressed.chosen_elsewhere import watch_step
from sglang_ext.mem_cache.compressed.due_copies import of_use
from sglang_ext.mem_cache.compressed.formats.rounding import token_seeds
from sglang_ext.mem_cache.compressed.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
    from sglang_ext.managers.worker import KVWorker


class Steps:
    """Runs forwards for a worker's rounds.

    Attributes:
        worker: whose states, views and queries these are.
        table: int32, SGLang's token table with the draft rows.
    """

    def __init__(self, worker: "KVWorker"):
        self.worker = worker
        self.table = worker.views.token_table
        self._samplings = SamplingCache(worker.model_runner)

    def slots(self, batch: "ScheduleBatch", width: int, starts: torch.Tensor) -> torch.Tensor:
        """Where the KV of ``width`` tokens of each request lies, from positions ``starts``, int64 [requests], on."""
        places = starts[:, None] + torch.arange(width, device=self.table.device)
        return self.table[batch.req_pool_indices[:, None], places].long()

    def extend_rows(self, batch: "ScheduleBatch", round_: Round, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the rows that a round reads lead to ``slots``, int64 [requests, width]; the rows, and tokens before."""
        if round_.on_full_kv and not any(round_.gathered):
            return batch.req_pool_indices, batch.seq_lens
        views, width = self.worker.views, slots.shape[1]
        rows, viewed = (to_device(values, slots.device) for values in (round_.rows, round_.viewed))
        places = viewed[:, None] + torch.arange(width, device=slots.device)
        self.table[rows[:, None], places] = slots.to(self.table.dtype)
        for state, row, start in zip(round_.states, round_.rows, round_.starts):
            if row != state.row:
                views.tail_written(state.row, start + width)
        return rows, viewed

    def forward(self, batch: "ScheduleBatch", inputs: forward.Inputs, on_full_kv: bool = True) -> LogitsProcessorOutput:
        """One forward, over rows of which none is a compressed copy's, or some are; see forward.py."""
        return forward.run(self.worker.model_runner, batch, inputs, self.worker.attentions.of(inputs.counts, on_full_kv))

    def verifying(self, batch: "ScheduleBatch", round_: Round, requests: list[int], width: int, walks: dict[int, Walk]) -> Sampling:
        """How ``width`` rows of each of some requests, by their places, are sampled: as the answers after their drafts.

        ``walks``: the grammars of those that have one, along their drafts.
        """

        def rows() -> list[Row]:
            pairs = ((i, j) for i in requests for j in range(width))
            return [Row.of(i, round_.states[i], walks[i].row(j) if i in walks else None) for i, j in pairs]

        return self._samplings.get(batch, round_.states, tuple(requests), width, batch.return_logprob, rows)

    def _stepping(self, batch: "ScheduleBatch", round_: Round) -> Sampling:
        """How the steps of a round are sampled: grammars mask answers, not drafts."""
        answering = set(round_.answering)

        def rows() -> list[Row]:
            walks = self.walks(batch, round_, round_.answering)
            return [
                Row.answer(i, state, walks.get(i)) if i in answering else Row.of(i, state)
                for i, state in enumerate(round_.states)
            ]

        logprobs = bool(answering) and batch.return_logprob
        return self._samplings.get(batch, round_.states, tuple(range(len(round_.states))), 1, logprobs, rows)

    def walks(
        self, batch: "ScheduleBatch", round_: Round, requests: list[int], drafts: torch.Tensor | None = None
    ) -> dict[int, Walk]:
        """The grammars of those of ``requests`` that have one, by place in the batch; waits for what they are to be walked along.

        Args:
            drafts: int64 [requests, drafts], that each grammar is walked along; None for none.
        """
        rows = [k for k, i in enumerate(requests) if batch.reqs[i].grammar is not None]
        if not rows:
            return {}
        known = [[]] * len(rows) if drafts is None else drafts[to_device(rows, drafts.device), :LONGEST_WALK].tolist()
        walks = {}
        for k, tokens in zip(rows, known):
            i = requests[k]
            req = batch.reqs[i]
            before = self.worker.new_tokens.before(req, round_.lengths[i])
            walks[i] = Walk(req.grammar, tokens[: round_.offered(i)], before)
        return walks

    def run(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        penalized: RoundPenalties,
    ) -> list[tuple[LogitsProcessorOutput, Sampled]]:
        """The steps of a round, one after another, over its rows.

        Args:
            batch: whose requests these are.
            round_: what they do.
            tokens: int64 [requests], the newest token of each.
            slots: int64 [requests, at least steps], where their KV is written, and that of what follows, which rows lead to as well.
            starts: int64 [requests], positions of ``tokens``.
            penalized: requests with penalties.
        """
        if self.worker.views.beside is not None:
            self.worker.views.beside.begun(round_.steps + len(round_.parts), round_.every)
        rows, viewed = self.extend_rows(batch, round_, slots)
        # Made for all steps at once: between the graphs of two steps each operation costs the device time.
        ahead = torch.arange(round_.steps, device=slots.device)[:, None]
        positions, lengths = starts + ahead, viewed + ahead + 1
        slots, viewed_cpu = slots[:, : round_.steps].T.contiguous(), torch.tensor(round_.viewed)
        sampling, done, choosing = self._stepping(batch, round_), [], self._choosing(round_)
        for index in range(round_.steps):
            inputs = forward.Inputs(
                tokens=tokens,
                positions=positions[index],
                slots=slots[index],
                rows=rows,
                lengths=lengths[index],
                lengths_cpu=viewed_cpu + index + 1,
                counts=[1] * len(round_.rows),
            )
            ends = {round_.states[i].row: round_.starts[i] + index + 1 for i in choosing}
            watch = watch_step(self.worker.views, ends, index + 1 < round_.steps)
            recorded = self._to_record(round_, index, choosing)
            on_full_kv = round_.on_full_kv and not self._needs_queries(recorded)
            if not on_full_kv:
                self.worker.queries.aim_step(recorded)
            with self.worker.queries.recording(recorded, watch):
                output = self.forward(batch, inputs, on_full_kv)
            self._choose(ends, round_.steps - index - 1, round_.every)
            penalized.step(index, tokens, output.next_token_logits)
            sampled = sampling.draw(output.next_token_logits, inputs.positions)
            tokens = sampled.tokens
            done.append((output, sampled))
        return done

    def _needs_queries(self, recorded: tuple[Recorded, ...]) -> bool:
        """Whether a step over full KV must leave queries: where nothing is verified, nothing else does before a first copy."""
        queries = self.worker.queries
        return queries.left_by_steps and self.worker.lossy and any(queries.open_to(row.key) for row in recorded)

    def _choose(self, ends: dict[int, int], following: int, every: int) -> None:
        """Let tokens be chosen for coming steps by the queries of one that was launched; ``following`` are left of its round.

        Args:
            ends: position after the step's token, by row, of those whose tokens are chosen.
            following: steps of the round that follow this one.
            every: selection interval, in steps.
        """
        views = self.worker.views
        if views.beside is not None:
            views.beside.stepped(views, ends, None if self.worker.lossy else following)
        elif following:
            # By the queries of the last step the next round chooses.
            for row, end in ends.items():
                views.choose_anew(row, end, every)

    def _choosing(self, round_: Round) -> list[int]:
        """Requests whose copies may be chosen anew between the round's steps."""
        method_of = self.worker.views.method
        return [i for i, state in enumerate(round_.states) if round_.on_copy(i) and method_of(state.row).compressor.every]

    def _to_record(self, round_: Round, index: int, choosing: list[int]) -> tuple[Recorded, ...]:
        """The queries of a step: of those who answer, and of those by which the next step is chosen."""
        wanted = sorted({*round_.answering, *choosing})
        states = [round_.states[i] for i in wanted]
        rows = (Recorded(state.row, i, i + 1, round_.starts[i] + index) for i, state in zip(wanted, states))
        return of_use(self.worker.views, states, rows)


class Verifier:
    """Verifies drafts for a worker's rounds.

    Attributes:
        worker: whose queries these are.
        steps: the forwards without a graph, and how they are sampled.
        graphs: captured verifications, None where CUDA graphs are off.
        simulation: forced acceptance, None outside benchmarks.
    """

    def __init__(self, worker: "KVWorker", steps: Steps, graphs: "VerifyGraphSet | None", simulation: Simulation | None):
        self.worker = worker
        self.steps = steps
        self.graphs = graphs
        self.simulation = simulation

    def verify(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        requests: list[int],
        newest: torch.Tensor,
        gathered: GatheredDrafts,
        penalized: RoundPenalties,
    ) -> Part:
        """Of some requests the drafts that full KV would have given, and the next token.

        Args:
            batch: of all requests.
            round_: what they did.
            requests: by their places in the batch.
            newest: int64 [all requests, steps], what the round's steps gave.
            gathered: the drafts of those that have some of earlier rounds, this round's among them.
            penalized: requests with penalties.
        """
        offered = [round_.offered(i) for i in requests]
        whole = len(requests) == len(batch.reqs)
        where = slice(None) if whole else to_device(requests, newest.device)
        part = batch if whole else forward.of_requests(batch, requests, where)
        # Of each, those count that it has.
        with_earlier = any(round_.gathered[i] for i in requests)
        drafts = gathered.of(part.req_pool_indices, max(offered)) if with_earlier else newest[where]
        tokens = torch.cat([batch.spec_info.bonus_tokens[where, None], drafts], 1)
        lengths = [round_.lengths[i] for i in requests]
        # The host waits for the drafts here, where a request has a grammar.
        walks = self.steps.walks(batch, round_, requests, drafts)
        output, positions = self._forward(part, [round_.states[i] for i in requests], lengths, tokens)
        penalized.verification(requests, tokens, output.next_token_logits)
        width = len(positions) // len(requests)
        sampled = self.steps.verifying(batch, round_, requests, width, walks).draw(output.next_token_logits, positions)
        answers = sampled.tokens.view(len(requests), width)
        # After a draft that a grammar refuses, or that ends it, rows are not masked; after the output's last token KV has no slots.
        most = [min(count, walks[i].answers - 1) if i in walks else count for i, count in zip(requests, offered)]
        most = [min(count, max(0, round_.left[i] - 1)) for i, count in zip(requests, most)]
        accepted = self._agreed(part, answers, drafts, most) + 1
        return Part(requests, Answers(answers, accepted, sampled))

    def _forward(
        self, batch: "ScheduleBatch", states: list[RequestState], lengths: list[int], tokens: torch.Tensor
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Forward ``tokens``, int64 [requests, width], after what each request has, over full KV.

        Returns:
            What the model gives, and the position of each token, int64 [requests * at least width].
        """
        width, count = tokens.shape[1], len(tokens)
        graphs = None if self.graphs is None else self.graphs.fit(count, width)
        if graphs is not None and width < graphs.width:
            # Graphs have few widths: what is beyond the drafts is computed and not looked at.
            tokens = torch.cat([tokens, tokens.new_zeros(count, graphs.width - width)], 1)
            width = graphs.width
        inputs = forward.Inputs(
            tokens=tokens.flatten(),
            positions=(batch.seq_lens[:, None] + torch.arange(width, device=tokens.device)).flatten(),
            slots=self.steps.slots(batch, width, batch.seq_lens).flatten(),
            rows=batch.req_pool_indices,
            lengths=batch.seq_lens + width,
            lengths_cpu=torch.tensor(lengths) + width,
            counts=[width] * count,
        )
        rows = (Recorded(state.row, k * width, (k + 1) * width, length) for k, (state, length) in enumerate(zip(states, lengths)))
        recorded = of_use(self.worker.views, states, rows)
        if graphs is not None:
            self.worker.queries.aim(recorded)
            return graphs.verify(batch, inputs), inputs.positions
        with self.worker.queries.recording(recorded):
            return self.steps.forward(batch, inputs), inputs.positions

    def _agreed(self, batch: "ScheduleBatch", answers: torch.Tensor, drafts: torch.Tensor, most: list[int]) -> torch.Tensor:
        """Drafts of each request that are the answers at their places, up to the first that is not: int64 [requests].

        Of each, its first ``most`` count.
        """
        width, device = drafts.shape[1], drafts.device
        if self.simulation is None:
            same = answers[:, :width] == drafts
        else:
            same = self.simulation.draw(drafts, to_device(self.simulation.probabilities(batch.reqs), device, torch.float32))
        if min(most) < width:
            same &= torch.arange(width, device=device) < to_device(most, device)[:, None]
        agreed = same.long().cumprod(1)
        if self.simulation is not None:
            # So that the output and the KV agree.
            answers[:, :width] = torch.where(agreed.bool(), drafts, answers[:, :width])
        return agreed.sum(1)


def prefill(worker: "KVWorker", batch: "ScheduleBatch", on_publish=None) -> GenerationBatchResult:
    """Admit a batch's requests, compute their prompts' KV, and sample the token after each.

    Args:
        worker: whose requests these become.
        batch: SGLang's, in extend mode.
        on_publish: tells SGLang's scheduler the new lengths, int64 [requests]; None where it does not wait for them.
    """
    # First, as queries are kept by the method that a request asks for.
    states = [worker.requests.admit(req, matched) for req, matched in zip(batch.reqs, batch.prefix_lens)]
    if on_publish is not None:
        # The lengths are known before the forward: the scheduler shall prepare the next round while it runs.
        on_publish(batch.seq_lens)
    if worker.quantized is not None and batch.tree_cache.codes is not None:
        begun = zip(batch.reqs, [state.matched for state in states], batch.prefix_lens)
        batch.tree_cache.codes.begin_prompts(begun)
    with worker.queries.recording(of_use(worker.views, states, _to_record(batch))), _on_quantized_kv(worker, batch, states):
        result = worker.target_worker.forward_batch_generation(batch, is_verify=True)
    result.next_token_ids = _first_tokens(worker, batch, states, result)
    worker.loop.interrupt()
    result.next_draft_input = BetweenSteps(result.next_token_ids)
    result.new_seq_lens = batch.seq_lens
    return result


def _on_quantized_kv(worker: "KVWorker", batch: "ScheduleBatch", states: list[RequestState]) -> AbstractContextManager[None]:
    """Let prompts attend to codes, where the server does so."""
    if worker.quantized is None:
        return nullcontext()
    lengths = [prefix + length for prefix, length in zip(batch.prefix_lens, batch.extend_lens)]
    device = batch.seq_lens.device
    seeds = {state.row: token_seeds(state.prompt, length, device) for state, length in zip(states, lengths)}
    codes = batch.tree_cache.codes
    found = {} if codes is None else {row: codes.stored(row) for row in seeds}
    return worker.quantized.of(seeds, {row: slots for row, slots in found.items() if slots is not None and len(slots)})


def _to_record(batch: "ScheduleBatch") -> Iterator[Recorded]:
    """The queries of all its tokens."""
    ends = accumulate(batch.extend_lens)
    parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, ends)
    return (Recorded(req.req_pool_idx, end - length, end, prefix) for req, prefix, length, end in parts)


def _first_tokens(
    worker: "KVWorker", batch: "ScheduleBatch", states: list[RequestState], result: GenerationBatchResult
) -> torch.Tensor:
    """Sample the token after each prompt.

    Writes the log-probabilities that requests ask for into ``result``. A batch of requests for 0 tokens gets token 0 instead of a
    sample, as in SGLang. A request with a grammar needs a sample. In the overlapped loop the next round starts before SGLang finishes
    the request, and walks the grammar along this token.

    Returns:
        int64 [requests].
    """
    # Outputs hold all that came before: SGLang prefills no request of whom a result is out.
    walks = [Walk(req.grammar) if req.grammar else None for req in batch.reqs]
    rows = [Row.answer(i, state, walk) for i, (state, walk) in enumerate(zip(states, walks))]
    output = result.logits_output
    if output.next_token_logits is not None:
        worker.loop.penalties.first(batch, output.next_token_logits)
    if all(req.sampling_params.max_new_tokens == 0 and req.grammar is None for req in batch.reqs):
        # As SGLang without speculation: nothing is drawn, and what was asked for is told whatever the temperature.
        if batch.return_logprob and output.next_token_logits is not None:
            asked = sampling_batch(batch, rows, batch.seq_lens.device, logprobs=True)
            worker.model_runner.compute_logprobs_only(output, asked)
        return batch.seq_lens.new_zeros(len(states), dtype=torch.int64)
    sampled = Sampling.of(worker.model_runner, batch, rows, batch.return_logprob).draw(
        output.next_token_logits, batch.seq_lens - 1
    )
    if batch.return_logprob:
        sampled.fill_logprobs(output, list(range(len(states))))
    return sampled.tokens
