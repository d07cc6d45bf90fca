"""The forwards of a lockstep round, and how what they give is sampled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.device import to_device
from sglang_ext.managers import forward
from sglang_ext.managers.planner import CURABLE, NO_QUERIES
from sglang_ext.managers.round_plan import Round
from sglang_ext.managers.sampling import Sampled, Sampling
from sglang_ext.managers.sampling_cache import SamplingCache
from sglang_ext.managers.sampling_rows import Row
from sglang_ext.mem_cache.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.managers.worker import KVWorker


@dataclass
class Drafted:
    """What the requests of a round drafted.

    Attributes:
        tokens: int64 [requests, drafts].
        offered: int64 [requests], how many of them count; None where all do.
        forwards: int64 [requests], forwards that gave them; None where that is one each.
    """

    tokens: torch.Tensor
    offered: torch.Tensor | None = None
    forwards: torch.Tensor | None = None

    def to_host(self) -> "Drafted":
        """Copies of the counts on the host, once the current stream reached them; the tokens stay."""
        return Drafted(self.tokens, *(t.to("cpu", non_blocking=True) for t in (self.offered, self.forwards)))


def agreeing(answers: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Drafts of each request that are the answers at their places, up to the first that is not: int64 [requests].

    Args:
        answers: int64 [requests, at least drafts].
        drafts: int64 [requests, drafts].
    """
    return (answers[:, : drafts.shape[1]] == drafts).long().cumprod(1).sum(1)


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

    def slots(self, batch: "ScheduleBatch", width: int, starts: torch.Tensor | None = None) -> torch.Tensor:
        """Where the KV of ``width`` tokens of each request lies, from ``starts`` on: int64 [requests, width].

        ``starts`` are positions, int64 [requests]; None for those after what each has.
        """
        starts = batch.seq_lens if starts is None else starts
        places = starts[:, None] + torch.arange(width, device=self.table.device)
        return self.table[batch.req_pool_indices[:, None], places].long()

    def extend_rows(
        self, batch: "ScheduleBatch", round_: Round, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the rows that a round reads lead to ``slots``, int64 [requests, width]; the rows, and tokens before."""
        if round_.on_full_kv:
            return batch.req_pool_indices, batch.seq_lens
        views, width = self.worker.views, slots.shape[1]
        rows, viewed = (to_device(values, slots.device) for values in (round_.rows, round_.viewed))
        places = viewed[:, None] + torch.arange(width, device=slots.device)
        self.table[rows[:, None], places] = slots.to(self.table.dtype)
        for state, row, start in zip(round_.states, round_.rows, round_.starts):
            if row != state.row:
                views.tail_written(state.row, start + width)
        return rows, viewed

    def forward(
        self, batch: "ScheduleBatch", inputs: forward.Inputs, on_full_kv: bool = True, graphs: bool = True
    ) -> LogitsProcessorOutput:
        """One forward, over rows of which none is a compressed copy's, or some are; see forward.py.

        Without ``graphs`` none is replayed, so that the forward leaves queries (query_window.py).
        """
        attention, model = self.worker.attentions.of(inputs.counts, on_full_kv), self.worker.model_runner
        if not graphs:
            attention = forward.Attention(model.attn_backend if attention is None else attention.backend)
        return forward.run(model, batch, inputs, attention)

    def sampling(
        self, batch: "ScheduleBatch", round_: Round, width: int, logprobs: bool, requests: list[int] | None = None
    ) -> Sampling:
        """How the rows of ``width`` tokens of each request are sampled; ``requests``: of some, by their places, not of all."""
        places = tuple(range(len(round_.states))) if requests is None else tuple(requests)

        def rows() -> list[Row]:
            return [Row.of(i, round_.states[i]) for i in places for _ in range(width)]

        return self._samplings.get(batch, round_.states, places, width, logprobs, rows)

    def one_by_one(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        count: int,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> list[tuple[LogitsProcessorOutput, Sampled]]:
        """``count`` tokens of each request, one after another, over the rows of the round.

        Args:
            batch: whose requests these are.
            round_: what they do.
            count: tokens of each.
            tokens: int64 [requests], the newest token of each.
            slots: int64 [requests, at least count], where their KV is written.
            starts: int64 [requests], positions of ``tokens``; None for those after what each has.
        """
        rows, viewed = self.extend_rows(batch, round_, slots)
        # Made for all steps at once: between the graphs of two steps each operation costs the device time.
        ahead = torch.arange(count, device=slots.device)[:, None]
        positions = (batch.seq_lens if starts is None else starts) + ahead
        lengths = viewed + ahead + 1
        slots, viewed_cpu = slots[:, :count].T.contiguous(), torch.tensor(round_.viewed)
        sampling = self.sampling(batch, round_, 1, bool(round_.answering) and batch.return_logprob)
        graphs, done = not self._leave_queries(round_), []
        for index in range(count):
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
                output = self.forward(batch, inputs, round_.on_full_kv, graphs)
            sampled = sampling.draw(output.next_token_logits, inputs.positions)
            tokens = sampled.tokens
            done.append((output, sampled))
        return done

    def _leave_queries(self, round_: Round) -> bool:
        """Whether steps are how a request gets queries for its first copy, as no verification is."""
        lacking = (round_.states[i].row for i in round_.answering if round_.fallbacks[i] == NO_QUERIES)
        return any(self.worker.queries.open_to(row) for row in lacking)

    def draft(
        self, batch: "ScheduleBatch", round_: Round, bonus: torch.Tensor, slots: torch.Tensor
    ) -> Drafted:
        """The drafts of a round, one by one; arguments as :meth:`one_by_one`'s."""
        steps = self.one_by_one(batch, round_, round_.drafts, bonus, slots)
        return Drafted(torch.stack([sampled.tokens for _, sampled in steps], dim=1))


def _to_record(round_: Round, index: int) -> tuple[Recorded, ...]:
    """The queries of a step that gives answers; those of requests that are never drafted are of no use."""
    found = ((i, round_.states[i], round_.lengths[i]) for i in round_.answering)
    return tuple(Recorded(state.row, i, i + 1, length + index) for i, state, length in found if state.fallback in CURABLE)
