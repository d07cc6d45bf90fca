"""The steps of a round, forwards of one token a request, and how what they give is sampled."""

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.device import to_device
from sglang_ext.layers import forward
from sglang_ext.managers.spec_decode.copy_policy import CURABLE
from sglang_ext.managers.spec_decode.grammar import Walk
from sglang_ext.managers.spec_decode.round import Round
from sglang_ext.managers.spec_decode.sampling import Row, Sampled, Sampling, SamplingCache
from sglang_ext.mem_cache.compressed.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

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
            pairs = enumerate(zip(round_.states, batch.reqs))
            return [Row.answer(i, state, req) if i in answering else Row.of(i, state) for i, (state, req) in pairs]

        logprobs = bool(answering) and batch.return_logprob
        return self._samplings.get(batch, round_.states, tuple(range(len(round_.states))), 1, logprobs, rows)

    def run(
        self, batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor
    ) -> list[tuple[LogitsProcessorOutput, Sampled]]:
        """The steps of a round, one after another, over its rows.

        Args:
            batch: whose requests these are.
            round_: what they do.
            tokens: int64 [requests], the newest token of each.
            slots: int64 [requests, at least steps], where their KV is written, and that of what follows, which rows lead to as well.
            starts: int64 [requests], positions of ``tokens``.
        """
        rows, viewed = self.extend_rows(batch, round_, slots)
        # Made for all steps at once: between the graphs of two steps each operation costs the device time.
        ahead = torch.arange(round_.steps, device=slots.device)[:, None]
        positions, lengths = starts + ahead, viewed + ahead + 1
        slots, viewed_cpu = slots[:, : round_.steps].T.contiguous(), torch.tensor(round_.viewed)
        sampling, done = self._stepping(batch, round_), []
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
            with self.worker.queries.recording(_to_record(round_, index)):
                output = self.forward(batch, inputs, round_.on_full_kv)
            sampled = sampling.draw(output.next_token_logits, inputs.positions)
            tokens = sampled.tokens
            done.append((output, sampled))
        return done


def _to_record(round_: Round, index: int) -> tuple[Recorded, ...]:
    """The queries of a step that gives answers; those of requests that are never drafted are of no use."""
    found = ((i, round_.states[i], round_.lengths[i]) for i in round_.answering)
    return tuple(Recorded(state.row, i, i + 1, length + index) for i, state, length in found if state.fallback in CURABLE)
